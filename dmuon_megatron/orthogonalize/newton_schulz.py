"""Orthogonalization by Newton-Schulz steps, in the standard and in the Gram form."""

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon_megatron.orthogonalize.backend import Backend, using
from dmuon_megatron.orthogonalize.coefficients import (
    CoefficientSet,
    Triple,
    coefficient_schedule,
    half_precision_refusal,
)
from dmuon_megatron.orthogonalize.iterate import (
    GRAM_SMALL,
    STANDARD_SMALL,
    Scales,
    gram,
    standard,
)
from dmuon_megatron.orthogonalize.normalize import normalize_into
from dmuon_megatron.orthogonalize.products import panels
from dmuon_megatron.orthogonalize.schedule import (
    HALF_DTYPES,
    Form,
    Method,
    choose_form,
    compute_dtype,
    reduced_fp32,
)
from dmuon_megatron.orthogonalize.workspace import Workspace, aligned

# Matrices orthogonalized so far, by (form, dtype of the products): ("gram", "bfloat16") -> 12.
stats: Counter[tuple[str, str]] = Counter()

# On a CPU a batch runs in parts that stay in the last-level cache. Matrices whose symmetric
# products are worth cutting into panels go one at a time.
_CPU_PART_BYTES = 4 << 20

# fp16 from this many rows on: off-diagonal elements come near fp16's subnormals (2.4 % error at
# 8192 x 28672), so X and the m x m matrices are carried times a power of two. The largest m x m
# element is Q's, the product of a over a segment (41 in any set, in three steps), times 512.
# Partial sums are larger than that and must not be rounded to fp16.
_FP16_SCALED_ROWS = 4096
_FP16_SCALES = Scales(x=2.0**8, gram=2.0**9)


@torch.no_grad()
def orthogonalize(
    x: Tensor,
    *,
    method: Method = "auto",
    coefficients: CoefficientSet | Sequence[Triple] = "quintic",
    steps: int = 5,
    dtype: torch.dtype | None = None,
    restarts: Sequence[int] | None = None,
    out: Tensor | None = None,
    workspace: Workspace | None = None,
    finite: Tensor | None = None,
    backend: str | Backend = "auto",
) -> Tensor:
    """The nearly orthogonal factor U f(S) V^T of every matrix x = U S V^T, f(S) about 1.

    Args:
        x: (..., m, n), floating point, any strides; never written.
        method: "standard" (every step multiplies X), "gram" (steps act on the m x m Gram matrix,
            X is multiplied once per restart), "auto": gram from n/m >= 1.5. The same mathematics;
            results differ by rounding. m <= 16 runs in fp32 whatever is asked.
        coefficients: name of a set, or ``steps`` rows (a, b, c) or more.
        steps: number of Newton-Schulz steps.
        dtype: of storage and products; results accumulate in fp32 at least. None: fp64 for fp64,
            else fp32 (in which torch.set_float32_matmul_precision applies).
        restarts: 0-based steps before which the Gram form multiplies X and starts afresh;
            None: every second step.
        out: same shape, dtype and device as x; may be x itself, else must not overlap it.
        workspace: scratch memory to reuse, whose max_bytes splits the batch.
        finite: bool, shape (...): set to whether the matrix was finite, without waiting for it.
        backend: who multiplies: "torch", "auto" (verified kernels where there are, else torch),
            the name of the verified backend, or a backend.

    Returns:
        ``out`` or a new contiguous tensor of x's shape and dtype. A zero matrix stays zero; a
        matrix that holds NaN or Inf becomes NaN, others of its batch are not touched by it.

    Raises:
        TypeError: x or dtype is not floating point.
        ValueError: wrong shapes, unknown names, or a combination that diverges: coefficients
            "cans" and "aol" in less than fp32, restarts too rare for the dtype.
    """
    _check(x, out, finite)
    product_dtype = compute_dtype(x.dtype, dtype)
    rows = _rows(coefficients, steps, product_dtype)
    m, n = x.shape[-2:]
    form = choose_form(m, n, steps=steps, method=method, restarts=restarts, dtype=product_dtype)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    count = math.prod(x.shape[:-2])
    if finite is not None and not x.numel():
        finite.fill_(True)
    if not x.numel():
        return result
    workspace = workspace or Workspace()

    # a batch in one dimension; reshape copies only what no view can express
    batch = x.reshape(count, m, n)
    target = _batch_view(result, count)
    direct = target is not None
    if target is None:
        target = torch.empty(batch.shape, dtype=x.dtype, device=x.device)
    buffers = _Buffers(m, n, form, target)
    part = buffers.part(count, workspace)
    with using(backend):
        peaks = [
            _run(source, into, rows, form, buffers, workspace)
            for source, into in zip(batch.split(part), target.split(part), strict=True)
        ]
    if not direct:
        result.copy_(target.view(x.shape))
    if finite is not None:
        finite.copy_(torch.cat(peaks).isfinite().view(finite.shape))
    stats[form.name, _dtype_name(form.dtype)] += count
    return result


def workspace_bytes(
    batch: int,
    m: int,
    n: int,
    *,
    method: Method = "auto",
    dtype: torch.dtype | None = None,
    input_dtype: torch.dtype = torch.float32,
    steps: int = 5,
) -> int:
    """Bytes of scratch memory for (batch, m, n) matrices at once, with a contiguous result.

    Beside it stands the result itself, which serves as one buffer where its dtype allows.
    """
    product_dtype = compute_dtype(input_dtype, dtype)
    form = choose_form(m, n, steps=steps, method=method, restarts=None, dtype=product_dtype)
    return _Buffers(m, n, form, torch.empty(0, dtype=input_dtype)).nbytes(batch)


def useful_batch(
    m: int,
    n: int,
    *,
    method: Method = "auto",
    dtype: torch.dtype | None = None,
    input_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    steps: int = 5,
) -> int | None:
    """The largest batch of (m, n) matrices that runs as one; more only costs memory.

    On a CPU 1 for large matrices, else what stays in the caches; on a GPU None, no limit.
    """
    product_dtype = compute_dtype(input_dtype, dtype)
    form = choose_form(m, n, steps=steps, method=method, restarts=None, dtype=product_dtype)
    if torch.device(device).type != "cpu":
        return None
    return _Buffers(m, n, form, torch.empty(0, dtype=input_dtype)).part(sys.maxsize, Workspace())


class _Buffers:
    """What one part of a batch keeps in the workspace, beside the result ``target``.

    The normalised input is staged in fp32 (fp64 for fp64) whatever the products' dtype; X takes
    turns between two buffers. The result, of the input's dtype, stands in for whichever it can.
    """

    def __init__(self, m: int, n: int, form: Form, target: Tensor) -> None:
        self.shape, self.side, self.form = (m, n), min(m, n), form
        wide = torch.float64 in (form.dtype, target.dtype)
        self.stage_dtype = torch.float64 if wide else torch.float32
        contiguous = target.is_contiguous()
        self.target_is_x = contiguous and target.dtype == form.dtype
        self.target_is_stage = contiguous and target.dtype == self.stage_dtype
        self.device_type = target.device.type
        self.small = GRAM_SMALL if form.gram else STANDARD_SMALL

    def nbytes(self, batch: int) -> int:
        """Workspace bytes for ``batch`` matrices."""
        elements = batch * self.shape[0] * self.shape[1]
        total = (1 if self.target_is_x else 2) * aligned(elements * self.form.dtype.itemsize)
        if self.form.dtype != self.stage_dtype and not self.target_is_stage:
            total += aligned(elements * self.stage_dtype.itemsize)
        return total + self.small * aligned(batch * self.side**2 * self.form.dtype.itemsize)

    def part(self, count: int, workspace: Workspace) -> int:
        """How many of ``count`` matrices to run at a time."""
        limit = workspace.max_bytes
        if self.device_type == "cpu":
            if panels(self.side, self.form.dtype, "cpu") > 1:
                return 1
            limit = min(limit or _CPU_PART_BYTES, _CPU_PART_BYTES)
        if limit is None or self.nbytes(count) <= limit:
            return count
        return max(1, limit // self.nbytes(1))


def _run(
    source: Tensor,
    target: Tensor,
    rows: Sequence[Triple],
    form: Form,
    buffers: _Buffers,
    workspace: Workspace,
) -> Tensor:
    """Orthogonalize (b, m, n) ``source`` into ``target``; returns each one's largest magnitude."""
    device, s = target.device, buffers.side
    workspace.reserve(buffers.nbytes(len(target)), device)
    if len(target) == 1:  # one matrix: torch's unbatched products, in panels where that pays
        target = target[0]
    shape, lead = target.shape, target.shape[:-2]
    small = [workspace.take((*lead, s, s), form.dtype, device) for _ in range(buffers.small)]
    x = workspace.take(shape, form.dtype, device)
    spare = target if buffers.target_is_x else workspace.take(shape, form.dtype, device)
    products = len(form.segments) if form.gram else len(rows)
    if products % 2 == 0:  # the last product must write into what is called spare now
        x, spare = spare, x
    if form.dtype == buffers.stage_dtype:
        stage = x
    elif buffers.target_is_stage:
        stage = target
    else:
        stage = workspace.take(shape, buffers.stage_dtype, device)

    scaled = form.dtype == torch.float16 and s >= _FP16_SCALED_ROWS
    scales = _FP16_SCALES if scaled else Scales()
    peaks = normalize_into(stage.view(source.shape), source, scale=scales.x)
    if stage is not x:
        x.copy_(stage)
    with _wide_partial_sums() if scaled else contextlib.nullcontext():
        if form.gram:
            gram(x, spare, small, rows, form.segments, scales)
        else:
            standard(x, spare, small, rows, scales)
    if not buffers.target_is_x:
        target.copy_(spare if products % 2 else x)
    return peaks


@contextlib.contextmanager
def _wide_partial_sums():
    """Keep cuBLAS from adding up the parts of an fp16 product in fp16."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_fp16_reduced_precision_reduction
    settings.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        settings.allow_fp16_reduced_precision_reduction = before


def _rows(
    coefficients: CoefficientSet | Sequence[Triple], steps: int, dtype: torch.dtype
) -> list[Triple]:
    if not isinstance(coefficients, str):
        rows = [tuple(float(value) for value in row) for row in coefficients]
        if steps < 1 or len(rows) < steps or any(len(row) != 3 for row in rows):
            raise ValueError(
                f"coefficients must hold a row (a, b, c) for each of at least one step: "
                f"{len(rows)} rows for steps={steps}"
            )
        return rows[:steps]
    rows = coefficient_schedule(coefficients, steps)
    reason = half_precision_refusal(coefficients)
    if reason and (dtype in HALF_DTYPES or (dtype == torch.float32 and reduced_fp32())):
        raise ValueError(
            f"coefficients {coefficients!r} need exact float32 products: {reason}. Use "
            "--muon-fp32-matmul-prec highest, or another --muon-coefficient-type."
        )
    return rows


def _check(x: Tensor, out: Tensor | None, finite: Tensor | None) -> None:
    if x.dim() < 2:
        raise ValueError(f"x must be (..., m, n), got shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    if out is not None and (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"out must have x's shape, dtype and device: {tuple(out.shape)} {out.dtype} "
            f"{out.device} for {tuple(x.shape)} {x.dtype} {x.device}"
        )
    if finite is not None and (finite.shape, finite.dtype) != (x.shape[:-2], torch.bool):
        raise ValueError(
            f"finite must be bool of shape {tuple(x.shape[:-2])}, got {tuple(finite.shape)} "
            f"{finite.dtype}"
        )


def _batch_view(tensor: Tensor, count: int) -> Tensor | None:
    """``tensor`` as (count, m, n) without a copy; None where its strides do not allow that."""
    try:
        return tensor.view(count, *tensor.shape[-2:])
    except RuntimeError:
        return None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

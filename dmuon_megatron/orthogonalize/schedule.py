"""Which form of Newton-Schulz runs, where it restarts, and what it costs."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch

from dmuon_megatron.orthogonalize.products import panel_bounds, panels

Method = Literal["auto", "gram", "standard"]

METHODS: tuple[str, ...] = ("auto", "gram", "standard")

# In full products the Gram form is the cheaper one from this n / m on, for any number of restarts:
# it trades, per step, one product with X for m^3 ones.
GRAM_ASPECT = 1.5
# Up to this m a matrix runs in fp32 and the standard form: it costs nothing and needs no care.
SMALL_ROWS = 16
# Steps between two restarts that stay bounded: the rounded Gram matrix acquires negative
# eigenvalues that grow by about a^2 a step. fp32 stays bounded without restarts.
_MAX_SEGMENT = {torch.bfloat16: 2, torch.float16: 3}

HALF_DTYPES = (torch.bfloat16, torch.float16)


class Form(NamedTuple):
    """What runs for one shape."""

    gram: bool
    dtype: torch.dtype  # of storage and products
    segments: tuple[int, ...]  # steps between restarts; standard: one segment of all steps

    @property
    def name(self) -> str:
        return "gram" if self.gram else "standard"


def default_restarts(steps: int) -> tuple[int, ...]:
    """Before every second step: (2, 4) for 5 steps. Safe in every dtype.

    fp32 stays bounded without, but on matrices of low rank 100 times farther from the standard
    form (1.5e-2).
    """
    return tuple(range(2, steps, 2))


def compute_dtype(input_dtype: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of storage and products: ``dtype``, by default fp64 for fp64 and else fp32."""
    if dtype is None:
        return torch.float64 if input_dtype == torch.float64 else torch.float32
    if dtype not in (torch.float64, torch.float32, *HALF_DTYPES):
        raise TypeError(f"dtype must be float64, float32, bfloat16 or float16, got {dtype}")
    return dtype


def choose_form(
    m: int,
    n: int,
    *,
    steps: int,
    method: Method,
    restarts: Sequence[int] | None,
    dtype: torch.dtype,
) -> Form:
    """The form for an m x n matrix. Raises ValueError for an unknown method or unsafe restarts."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    segments = _segments(steps, restarts, dtype)
    m, n = min(m, n), max(m, n)
    if m <= SMALL_ROWS:
        wide = torch.float32 if dtype in HALF_DTYPES else dtype
        return Form(method == "gram", wide, segments if method == "gram" else (steps,))
    if method == "gram" or (method == "auto" and n >= GRAM_ASPECT * m):
        return Form(True, dtype, segments)
    return Form(False, dtype, (steps,))


def _segments(steps: int, restarts: Sequence[int] | None, dtype: torch.dtype) -> tuple[int, ...]:
    if restarts is None:
        restarts = default_restarts(steps)
    restarts = tuple(restarts)
    if any(not 0 < i < steps for i in restarts) or list(restarts) != sorted(set(restarts)):
        raise ValueError(
            f"restarts must be rising step indices between 1 and steps - 1 = {steps - 1}, "
            f"got {restarts}"
        )
    bounds = (0, *restarts, steps)
    segments = tuple(hi - lo for lo, hi in pairwise(bounds))
    longest = _MAX_SEGMENT.get(dtype)
    if longest is None and dtype == torch.float32 and reduced_fp32():
        longest = 2  # tf32 and bf16x1 products drift as bf16's do
    if longest is not None and max(segments) > longest:
        raise ValueError(
            f"restarts={restarts} leaves {max(segments)} Gram steps without a restart; {dtype} "
            f"diverges beyond {longest}. Leave restarts at None, or compute in exact float32."
        )
    return segments


def reduced_fp32() -> bool:
    """Whether torch may multiply fp32 matrices in less, on the GPU or on the CPU.

    Asks the settings that torch 2.9 added, which follow torch.set_float32_matmul_precision too;
    where they were used, torch refuses to answer through the old function.
    """
    backends = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    settings = [getattr(backend, "fp32_precision", None) for backend in backends]
    if None in settings:
        return torch.get_float32_matmul_precision() != "highest"
    return any(setting not in ("none", "ieee") for setting in settings)


def ns_flops(
    m: int,
    n: int,
    *,
    steps: int = 5,
    method: Method = "auto",
    restarts: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> int:
    """Real FLOPs of the products that :func:`orthogonalize` runs for one m x n matrix.

    A full m x k x n product counts 2 m k n. On ``"cpu"`` symmetric products of large matrices run
    in panels and count what the panels cost; ``"cuda"`` counts full products.
    """
    form = choose_form(m, n, steps=steps, method=method, restarts=restarts, dtype=dtype)
    m, n = min(m, n), max(m, n)
    kind = torch.device(device).type
    # elements of a symmetric m x m result that are computed
    area = sum((hi - lo) * (m - lo) for lo, hi in panel_bounds(m, panels(m, form.dtype, kind)))
    if not form.gram:
        return steps * 2 * (area * n + area * m + m * m * n)
    restarted = len(form.segments)
    return 2 * (restarted * (area * n + m * m * n) + (4 * steps - 3 * restarted) * area * m)

"""Calls kernels with tensors of any shape and stride: pads, copies where needed, writes ``out``.

A kernel reads contiguous rows that start on 16-byte boundaries. What is not so is copied first,
explicitly; a size that is not a multiple of 16 bytes is padded with zeros, which change no sum.
"""

import warnings
from functools import cache

import torch
from torch import Tensor

from dmuon_megatron.kernels.config import ARCHITECTURES, HALF, Config, Op, Spec, padded

# A launch's second and third grid dimension end here (CUDA programming guide), and so a batch.
_MAX_BATCH = 65535
# Up to here the triangle's block number is small enough for the kernel's square root.
_MAX_ROWS = 1 << 16


def symmetric_matmul(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    gamma: float = 0.0,
    out: Tensor | None = None,
    config: Config | None = None,
    arch: str | None = None,
) -> Tensor:
    """D = alpha A B^T + beta C + gamma I, where the caller knows that D is symmetric.

    That is the case for A = B, and for symmetric A and B that commute; C must be symmetric too.
    Only one triangle is computed, the other is its mirror image, bit for bit.

    Args:
        a, b: (..., m, k), the same shape, dtype and device. Any strides: contiguous ones, or
            contiguous transposes, 16-byte aligned, are read in place, others are copied.
        c: (..., m, m) or None.
        alpha, beta, gamma: run-time numbers; a new value compiles nothing.
        out: (..., m, m), must not overlap a, b or c.
        config: tiling, by default the safest of the architecture.
        arch: architecture of the kernel, by default that of the device. "cpu" runs the kernel's
            text on a CPU, slowly, for tests.

    Returns:
        ``out`` or a new contiguous tensor. Sums are in fp32 and are rounded once.
        On devices and dtypes without a kernel (CPUs, GPUs other than sm_80 and sm_90, fp32) torch
        computes it, and a warning says so once for GPUs.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or ``out`` overlaps an operand.
    """
    if a.dim() < 2 or a.shape != b.shape:
        raise ValueError(f"a and b must both be (..., m, k): {tuple(a.shape)}, {tuple(b.shape)}")
    *lead, m, k = a.shape
    out = _result(out, (*lead, m, m), a)
    _check({"b": b} | ({} if c is None else {"c": c}), a, out, {"c": (*lead, m, m)})
    arch = arch or _architecture(a)
    if arch is None or m > _MAX_ROWS or not a.numel():
        return out.copy_(_torch_symmetric(a, b, c, alpha, beta, gamma))

    count = out.numel() // (m * m)
    dtype = _name(a.dtype)
    rows, length = padded(m, dtype), padded(k, dtype)
    transposed = not a.is_contiguous() and a.mT.is_contiguous() and b.mT.is_contiguous()
    shape = (count, length, rows) if transposed else (count, rows, length)
    left = _operand(a.mT if transposed else a, shape)
    right = left if b is a else _operand(b.mT if transposed else b, shape)
    target = _target(out, (count, rows, rows))
    addend = target if c is None else _operand(c, target.shape)
    spec = make_spec(
        "symmetric", arch, dtype, config, transposed=transposed, has_c=c is not None, k=length
    )
    kernel = _load(spec)
    for part in _parts(count):
        operands = (t[part] for t in (left, right, addend, target))
        kernel(*operands, float(alpha), float(beta), float(gamma))
    return _written(out, target)


def matmul_add(
    q: Tensor,
    x: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    right: bool = False,
    out: Tensor | None = None,
    config: Config | None = None,
    arch: str | None = None,
) -> Tensor:
    """Y = alpha Q X + beta X, or with ``right`` Y = alpha X Q + beta X.

    Args:
        q: (..., s, s).
        x: (..., s, n), with ``right`` (..., n, s); same dtype and device.
        alpha, beta: run-time numbers; with beta 0 X is not added.
        out: x's shape, must not overlap q or x.
        config, arch: as for :func:`symmetric_matmul`.

    Returns:
        ``out`` or a new contiguous tensor; as :func:`symmetric_matmul` otherwise.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or ``out`` overlaps an operand.
    """
    if x.dim() < 2 or q.dim() != x.dim():
        raise ValueError(f"q and x must be (..., s, s), (..., s, n): {q.shape}, {x.shape}")
    *lead, m, n = x.shape
    side = n if right else m
    out = _result(out, x.shape, x)
    _check({"q": q}, x, out, {"q": (*lead, side, side)})
    arch = arch or _architecture(x)
    if arch is None or not x.numel():
        product = (x @ q) if right else (q @ x)
        return out.copy_(product.mul_(alpha).add_(x, alpha=beta) if beta else product.mul_(alpha))

    count = x.numel() // (m * n)
    dtype = _name(x.dtype)
    height = m if right else padded(m, dtype)
    width = padded(n, dtype)
    edge = width if right else height
    operand = _operand(x, (count, height, width))
    factor = _operand(q, (count, edge, edge))
    target = _target(out, operand.shape)
    pair = (operand, factor) if right else (factor, operand)
    spec = make_spec("multiply", arch, dtype, config, has_c=beta != 0, k=edge)
    kernel = _load(spec)
    for part in _parts(count):
        operands = (t[part] for t in (*pair, operand, target))
        kernel(*operands, float(alpha), float(beta))
    return _written(out, target)


def direct(*tensors: Tensor) -> list[Tensor] | None:
    """The tensors as (batch, rows, cols), if kernels can read and write all of them in place.

    For callers that know their tensors to fit each other, and launch many small kernels: it takes
    a fraction of the host time of the functions above.
    """
    ready = []
    for tensor in tensors:
        if tensor.shape[-1] % 8 or not _readable(tensor) or tensor.dim() > 3:
            return None
        ready.append(tensor if tensor.dim() == 3 else tensor[None])
    return ready if len(ready[0]) <= _MAX_BATCH else None


def make_spec(
    op: Op,
    arch: str,
    dtype: str,
    config: Config | None = None,
    *,
    transposed: bool = False,
    has_c: bool = False,
    k: int,
) -> Spec:
    """The binary that serves a call; ``k`` is the padded length of its sum."""
    if config is None:
        from dmuon_megatron.kernels.compile import configs

        config = configs(op, arch)[0]
    return Spec(op, arch, dtype, config, transposed, has_c, k if arch == "sm_80" else None)


@cache
def device_architecture(index: int) -> str | None:
    """The architecture that kernels for CUDA device ``index`` are built for; None: torch's turn."""
    capability = torch.cuda.get_device_capability(index)
    arch = ARCHITECTURES.get(capability)
    if arch is None:
        warnings.warn(
            f"no kernels for {torch.cuda.get_device_name(index)} (sm_{capability[0]}"
            f"{capability[1]}); it runs on torch's matrix products",
            stacklevel=3,
        )
    return arch


def _architecture(tensor: Tensor) -> str | None:
    if tensor.device.type != "cuda" or _name(tensor.dtype) not in HALF:
        return None
    index = tensor.device.index
    return device_architecture(torch.cuda.current_device() if index is None else index)


def _load(spec: Spec):
    from dmuon_megatron.kernels.compile import load

    return load(spec)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parts(count: int) -> list[slice]:
    return [slice(i, min(i + _MAX_BATCH, count)) for i in range(0, count, _MAX_BATCH)]


def _operand(tensor: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """The tensor as contiguous, aligned (batch, rows, cols) of ``shape``; a copy if it is not."""
    batch, rows, cols = shape
    if tensor.shape[-2:] == (rows, cols):
        if _readable(tensor):
            return tensor.as_strided(shape, (rows * cols, cols, 1))
        return tensor.clone(memory_format=torch.contiguous_format).view(shape)
    m, n = tensor.shape[-2:]
    whole = tensor.new_zeros(shape)
    whole[:, :m, :n] = tensor.reshape(batch, m, n)
    return whole


def _target(out: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Where the kernel writes: ``out`` itself if it can, else scratch memory."""
    if out.shape[-2:] == shape[-2:] and _readable(out):
        return out.as_strided(shape, (shape[1] * shape[2], shape[2], 1))
    return out.new_empty(shape)


def _written(out: Tensor, target: Tensor) -> Tensor:
    """``out``, with what a kernel wrote into scratch memory."""
    if target.data_ptr() != out.data_ptr():
        m, n = out.shape[-2:]
        out.copy_(target[:, :m, :n].reshape(out.shape))
    return out


def _readable(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def _result(out: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"out must be {tuple(shape)}, got {tuple(out.shape)}")
    return out


def _check(others: dict[str, Tensor], first: Tensor, out: Tensor, shapes: dict) -> None:
    for name, tensor in others.items():
        if name in shapes and tuple(tensor.shape) != tuple(shapes[name]):
            raise ValueError(f"{name} must be {tuple(shapes[name])}, got {tuple(tensor.shape)}")
    for name, tensor in (others | {"out": out}).items():
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"{name} must be {first.dtype} on {first.device}, got {tensor.dtype} on "
                f"{tensor.device}"
            )
    if any(_overlap(out, tensor) for tensor in (first, *others.values())):
        raise ValueError("out must not overlap an operand: kernels read and write at once")


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the ranges of memory that two tensors span meet."""
    if not a.numel() or not b.numel():
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    return a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def _end(tensor: Tensor) -> int:
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (span + 1) * tensor.element_size()


def _torch_symmetric(a, b, c, alpha, beta, gamma) -> Tensor:
    d = (a @ b.mT).mul_(alpha)
    if c is not None:
        d.add_(c, alpha=beta)
    d.diagonal(dim1=-2, dim2=-1).add_(gamma)
    return d.tril_().add_(d.tril(-1).mT)

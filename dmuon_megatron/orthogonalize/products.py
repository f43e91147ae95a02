"""The two matrix products Newton-Schulz is made of, on torch.

Both take a batch (b, m, k) or one matrix (m, k) and write into ``out``, which must not overlap
any operand. The arithmetic is torch's for the dtype: half precision accumulates in fp32 and
rounds once on storing.
"""

from functools import cache

import torch
from torch import Tensor

# One matrix on a CPU: a symmetric product computes only the block rows right of the diagonal and
# mirrors them, 5/8 (4 panels) to 9/16 (8 panels) of the full work. Width of a panel, measured on
# Zen 4 with one thread: narrower ones cost more in calls than they save, and half precision, twice
# as fast a product with a mirror as dear, wants them wider. The time saved at 512 rows is 27 % in
# fp32 and 19 % in bf16.
_PANEL_ROWS = {torch.float64: 128, torch.float32: 128, torch.bfloat16: 192, torch.float16: 192}
_MAX_PANELS = 8


def panels(m: int, dtype: torch.dtype, device_type: str) -> int:
    """Into how many block rows a symmetric m x m product of one matrix is cut; 1 = not at all."""
    if device_type != "cpu":
        return 1
    return max(1, min(_MAX_PANELS, m // _PANEL_ROWS[dtype]))


def panel_bounds(m: int, count: int) -> list[tuple[int, int]]:
    """The block rows [lo, hi) of an m x m product in ``count`` panels."""
    step = m // count
    return [(i * step, m if i == count - 1 else (i + 1) * step) for i in range(count)]


@cache
def native_on_cpu(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies ``dtype`` itself; torch's own fallback is 30 times slower."""
    if dtype in (torch.float32, torch.float64):
        return True
    probe = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }[dtype]
    return torch.backends.mkldnn.is_available() and bool(
        getattr(torch.ops.mkldnn, probe, lambda: False)()
    )


def multiply_add(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    """out = alpha a b + beta c (without ``c``: alpha a b)."""
    if out.device.type == "cpu" and not native_on_cpu(out.dtype):
        return _by_way_of_fp32(multiply_add, out, a, b, c, alpha, beta)
    matrix = out.dim() == 2
    if c is None and alpha == 1.0:
        return torch.mm(a, b, out=out) if matrix else torch.bmm(a, b, out=out)
    if c is None:
        c, beta = out, 0.0  # with beta 0 torch does not read c
    add = torch.addmm if matrix else torch.baddbmm
    return add(c, a, b, alpha=alpha, beta=beta, out=out)


def symmetric_multiply_add(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    """As :func:`multiply_add`, where the caller knows that the result is symmetric."""
    m = out.shape[-1]
    count = panels(m, out.dtype, out.device.type) if out.dim() == 2 else 1
    if count == 1:
        return multiply_add(out, a, b, c, alpha=alpha, beta=beta)
    if not native_on_cpu(out.dtype):
        return _by_way_of_fp32(symmetric_multiply_add, out, a, b, c, alpha, beta)
    for lo, hi in panel_bounds(m, count):
        block = None if c is None else c[lo:hi, lo:]
        multiply_add(out[lo:hi, lo:], a[lo:hi], b[:, lo:], block, alpha=alpha, beta=beta)
        # by way of a contiguous copy, which halves torch's time for the transposition
        out[hi:, lo:hi].copy_(out[lo:hi, hi:].contiguous().mT)
    return out


def _by_way_of_fp32(product, out, a, b, c, alpha, beta) -> Tensor:
    """The arithmetic of a native half product: exact operands, fp32 sums, one rounding."""
    wide = torch.empty_like(out, dtype=torch.float32)
    product(wide, a.float(), b.float(), None if c is None else c.float(), alpha=alpha, beta=beta)
    return out.copy_(wide)

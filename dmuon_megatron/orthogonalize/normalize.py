"""Division by the Frobenius norm, for inputs of any magnitude."""

import torch
from torch import Tensor

# Squares are summed in the working dtype over pieces this long and in fp64 over the pieces.
_PIECE = 1024


def normalize_into(stage: Tensor, x: Tensor, *, scale: float = 1.0) -> Tensor:
    """stage = scale x / |x|_F, per matrix of a batch.

    ``x``: (b, m, n), any float dtype and strides, only read. ``stage``: (b, m, n), contiguous,
    fp32 or fp64; may be ``x``. A zero matrix gives exactly zero. A matrix that holds a NaN or Inf
    keeps a NaN (which the first step spreads over it) and leaves the others alone.
    Returns (b,): the largest magnitude in each matrix, NaN or Inf where it is not finite.

    There is no epsilon: entries of 1e-40 count as those of 1 do, and 1e30 does not overflow,
    because a power of two first brings the largest entry to [0.5, 1) (exactly).
    """
    b, m, n = x.shape
    limits = torch.finfo(stage.dtype)
    # amax and amin carry NaN on, and are 20 times as fast as torch's infinity norm on a CPU
    peak = torch.maximum(x.amax((1, 2), keepdim=True), x.amin((1, 2), keepdim=True).neg_())
    peak = peak.to(stage.dtype)
    bounded = peak.clamp(limits.tiny, 0.5 / limits.tiny)  # keeps the power a normal number
    power = torch.frexp(bounded).mantissa.div_(bounded)  # 2^-exponent, exactly
    torch.mul(x, power, out=stage)

    flat = stage.view(b, m * n)
    whole = m * n - m * n % _PIECE
    norms = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, _PIECE)), dim=-1)
    if whole < m * n:
        rest = torch.linalg.vector_norm(flat[:, whole:], dim=-1, keepdim=True)
        norms = torch.cat([norms, rest], dim=1)
    norm = torch.linalg.vector_norm(norms, dim=-1, dtype=torch.float64)
    # tiny only ever replaces zero: of all others the largest entry is above 1e-7 by now
    norm = norm.clamp_(min=limits.tiny).div_(scale).to(stage.dtype)
    stage.div_(norm.view(b, 1, 1))
    return peak.view(b)

"""The two forms of the Newton-Schulz iteration on normalised matrices.

X is one matrix (m, n) or a batch (b, m, n), contiguous. "Small" is the shorter side s; a tall X is
multiplied from the right, so that nothing is transposed in memory. The m x m matrices commute and
are symmetric, so the side does not matter to them.

Half precision with a limited range carries X times ``x_scale`` and the s x s matrices times
``gram_scale`` (powers of two); the result comes out without them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dmuon_megatron.orthogonalize.backend import multiply_add, symmetric_multiply_add
from dmuon_megatron.orthogonalize.coefficients import Triple


class Scales(NamedTuple):
    x: float = 1.0
    gram: float = 1.0


STANDARD_SMALL = 2  # s x s buffers that each form needs
GRAM_SMALL = 4


def standard(x: Tensor, spare: Tensor, small: list[Tensor], rows: Sequence[Triple], scales: Scales):
    """X <- a X + (b A + c A^2) X with A = X X^T, for every row (a, b, c).

    ``x`` and ``spare`` take turns; the result is in ``spare`` after an odd number of rows.
    """
    gram, poly = small
    g = scales.gram
    for i, (a, b, c) in enumerate(rows):
        _gram_into(gram, x, g / scales.x**2)
        symmetric_multiply_add(poly, gram, gram, gram, alpha=c / g, beta=b)
        last = scales.x if i == len(rows) - 1 else 1.0
        _apply_into(spare, poly, x, alpha=1 / (g * last), beta=a / last)
        x, spare = spare, x


def gram(
    x: Tensor,
    spare: Tensor,
    small: list[Tensor],
    rows: Sequence[Triple],
    segments: Sequence[int],
    scales: Scales,
):
    """Per segment: R = X X^T; steps on R alone, their product gathered in Q; X <- Q X.

    A step (a, b, c) is Z = b R + c R^2, Q <- Q Z + a Q, R <- Z (R Z + a R) + a (R Z + a R).
    ``x`` and ``spare`` take turns; the result is in ``spare`` after an odd number of segments.
    """
    r, z, q, t = small
    g = scales.gram
    start = 0
    for index, length in enumerate(segments):
        last = scales.x if index == len(segments) - 1 else 1.0
        _gram_into(r, x, g / scales.x**2)
        for i, (a, b, c) in enumerate(rows[start : start + length]):
            symmetric_multiply_add(z, r, r, r, alpha=c / g, beta=b)
            if length == 1:
                break  # Q = Z + a I stays a sum, which keeps a out of Q's rounding
            if i == 0:
                q.copy_(z).diagonal(dim1=-2, dim2=-1).add_(a * g)
            else:
                symmetric_multiply_add(t, q, z, q, alpha=1 / g, beta=a)
                q, t = t, q
            if i < length - 1:
                symmetric_multiply_add(t, r, z, r, alpha=1 / g, beta=a)
                symmetric_multiply_add(r, z, t, t, alpha=1 / g, beta=a)
        if length == 1:
            _apply_into(spare, z, x, alpha=1 / (g * last), beta=a / last)
        else:
            _apply_into(spare, q, x, alpha=1 / (g * last))
        x, spare = spare, x
        start += length


def _gram_into(out: Tensor, x: Tensor, alpha: float) -> None:
    wide = x.shape[-2] <= x.shape[-1]
    symmetric_multiply_add(out, *((x, x.mT) if wide else (x.mT, x)), alpha=alpha)


def _apply_into(
    out: Tensor, q: Tensor, x: Tensor, *, alpha: float, beta: float | None = None
) -> None:
    """out = alpha q x + beta x, from the side that fits."""
    left, right = (q, x) if x.shape[-2] <= x.shape[-1] else (x, q)
    if beta is None:
        multiply_add(out, left, right, alpha=alpha)
    else:
        multiply_add(out, left, right, x, alpha=alpha, beta=beta)

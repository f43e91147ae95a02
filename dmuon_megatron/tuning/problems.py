"""The matrix products that Newton-Schulz runs for given shapes: what there is to tune."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from dmuon_megatron.kernels.config import HALF, Op
from dmuon_megatron.orthogonalize.schedule import Method, choose_form

MAX_BATCH_CLASS = 16
"""Larger batches are tuned as this one: they fill any GPU."""


class Problem(NamedTuple):
    """One kind of product: (batch) results of m x n, sums of length k.

    Attributes:
        op: "symmetric" (m = n) or "multiply".
        dtype: of operands and result.
        m, n, k: as multiplied, before any padding.
        batch: class of batch sizes, by its largest.
        transposed: "symmetric" only: the left operand lies as (k, m) in memory.
        has_c: whether a matrix is added.
    """

    op: Op
    dtype: str
    m: int
    n: int
    k: int
    batch: int
    transposed: bool = False
    has_c: bool = False

    @property
    def name(self) -> str:
        """Readable and unique."""
        flags = ("t" if self.transposed else "n") + ("c" if self.has_c else "0")
        return f"{self.op}-{flags}-{self.dtype}-{self.m}x{self.n}x{self.k}-b{self.batch}"

    @property
    def flops(self) -> int:
        """Of the full product."""
        return 2 * self.batch * self.m * self.n * self.k


def batch_class(batch: int) -> int:
    """The class that a batch is tuned in: the next power of two, up to 16."""
    return min(MAX_BATCH_CLASS, 1 << (batch - 1).bit_length())


def products(
    rows: int, cols: int, batch: int, *, dtype: torch.dtype, method: Method = "auto", steps: int = 5
) -> Counter[Problem]:
    """How often one batched Newton-Schulz runs each product; empty where no kernel serves it."""
    form = choose_form(rows, cols, steps=steps, method=method, restarts=None, dtype=dtype)
    name = str(form.dtype).removeprefix("torch.")
    if name not in HALF:
        return Counter()
    s, n, tall = min(rows, cols), max(rows, cols), rows > cols
    size = batch_class(batch)
    gram = Problem("symmetric", name, s, s, n, size, transposed=tall)
    small = Problem("symmetric", name, s, s, s, size, has_c=True)

    def apply(has_c: bool) -> Problem:
        return Problem("multiply", name, rows, cols, s, size, has_c=has_c)

    if not form.gram:
        return Counter({gram: steps, small: steps, apply(True): steps})
    counted = Counter({gram: len(form.segments)})
    for length in form.segments:
        counted[apply(length == 1)] += 1
        counted[small] += 4 * length - 3
    return counted


def ns_problems(
    shapes: Mapping[tuple[int, int], Iterable[int]],
    *,
    dtype: torch.dtype,
    method: Method = "auto",
    steps: int = 5,
) -> list[Problem]:
    """The products of a training step, the most work first.

    Args:
        shapes: (rows, cols) of the Newton-Schulz blocks -> the sizes of their batches.
        dtype: of Newton-Schulz's products, method, steps: as for ``orthogonalize``.

    Returns:
        Distinct problems; empty for dtypes without kernels.
    """
    work: Counter[Problem] = Counter()
    for (rows, cols), batches in shapes.items():
        for batch in batches:
            counted = products(rows, cols, batch, dtype=dtype, method=method, steps=steps)
            for problem, count in counted.items():
                work[problem] += count * problem.flops
    return sorted(work, key=lambda problem: (-work[problem], problem))

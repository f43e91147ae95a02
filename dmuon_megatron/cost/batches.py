"""The best way to run k equal Newton-Schulz problems on one rank: which batches, what time."""

from typing import Protocol

import numpy as np

MAX_BATCH = 32
"""Largest batch the planner considers: gains beyond it are below a percent on every device."""

WORKSPACE_BYTES = 4_000_000_000
"""Default bound on the temporary memory of one batch."""


class Cost(Protocol):
    """Anything that knows the time of a batched Newton-Schulz.

    A cost may have an attribute `noise`, the relative error between two runs that measure it
    (0.03 for measured times); plans whose predicted gain is smaller are not worth a change.
    """

    def seconds(self, rows: int, cols: int, batch: int) -> float:
        """Seconds of one Newton-Schulz over (batch, rows, cols)."""
        ...


def workspace_bytes(rows: int, cols: int, element_bytes: int = 2) -> int:
    """Temporary bytes of one problem: two copies of the matrix, four of its Gram matrix."""
    m, n = min(rows, cols), max(rows, cols)
    return element_bytes * (2 * m * n + 4 * m * m)


def batch_microseconds(
    cost: Cost,
    rows: int,
    cols: int,
    *,
    max_batch: int = MAX_BATCH,
    workspace: int = WORKSPACE_BYTES,
) -> list[int]:
    """Whole microseconds of one batch of b problems, at index b; index 0 is 0.

    The list ends at the largest batch that both limits allow (at least 1). Whole microseconds,
    at least one, so that every process that plans computes with the same numbers. Times never
    fall as the batch grows: a measured batch that is slower than a larger one is noise, and the
    planner relies on a rank not becoming slower when a matrix leaves it.
    """
    limit = max(1, min(max_batch, workspace // workspace_bytes(rows, cols)))
    times = [0]
    for batch in range(1, limit + 1):
        microseconds = int(cost.seconds(rows, cols, batch) * 1e6 + 0.5)
        times.append(max(1, times[-1], microseconds))
    return times


class BatchTable:
    """V(k): the least time to run k equal problems on one rank, and the batches that reach it.

    An exact dynamic program over the splits of k into batches.

    Args:
        cost: Cost of one batch.
        rows: Rows of the problem; the table of (n, m) equals the one of (m, n).
        cols: Columns of the problem.
        count: Largest k.
        max_batch: Largest batch.
        workspace: Bound in bytes on one batch's temporary memory; one problem always fits.

    Attributes:
        microseconds: int64 array of length count + 1, V(0) = 0.
        batch_microseconds: Microseconds of one batch of b problems, at index b.
    """

    def __init__(
        self,
        cost: Cost,
        rows: int,
        cols: int,
        count: int,
        *,
        max_batch: int = MAX_BATCH,
        workspace: int = WORKSPACE_BYTES,
    ) -> None:
        m, n = min(rows, cols), max(rows, cols)
        limit = min(max_batch, max(count, 1))
        batches = batch_microseconds(cost, m, n, max_batch=limit, workspace=workspace)
        self.batch_microseconds = batches
        # Largest batch first, so that among equal times the split with the fewest launches wins.
        falling = np.array(batches[:0:-1], dtype=np.int64)
        largest = len(falling)
        value = np.zeros(count + 1, dtype=np.int64)
        choice = np.zeros(count + 1, dtype=np.int64)
        for k in range(1, count + 1):
            top = min(k, largest)
            totals = value[k - top : k] + falling[largest - top :]
            best = int(totals.argmin())
            value[k] = totals[best]
            choice[k] = top - best
        self.microseconds = value
        self._choice = choice

    def split(self, count: int) -> list[int]:
        """Batch sizes, largest first, that run `count` problems in V(count)."""
        sizes = []
        while count:
            sizes.append(int(self._choice[count]))
            count -= sizes[-1]
        return sorted(sizes, reverse=True)

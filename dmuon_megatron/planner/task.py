"""What the planner is asked: matrices and the workers that may own them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

STATE_BYTES = 8
"""Persistent optimizer bytes of one element at its owner: fp32 main weight and fp32 momentum."""


@dataclass(frozen=True)
class MatrixTask:
    """One matrix that needs an owner.

    Attributes:
        name: Unique name; ties in the planner are broken by it.
        rows: Rows of the whole matrix.
        cols: Columns of the whole matrix.
        bucket: Communication bucket, numbered in forward order: a lower bucket is used earlier by
            the forward pass, so its update should be ready earlier.
        blocks: (rows, cols) of each Newton-Schulz problem of the matrix, for instance the Q, K and
            V parts of a fused QKV weight. Default: the whole matrix.

    Raises:
        ValueError: A size is not positive, or the blocks do not cover the matrix.
    """

    name: str
    rows: int
    cols: int
    bucket: int = 0
    blocks: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        blocks = ((self.rows, self.cols),) if self.blocks is None else self.blocks
        blocks = tuple((int(rows), int(cols)) for rows, cols in blocks)
        object.__setattr__(self, "blocks", blocks)
        if min(self.rows, self.cols, *(size for block in blocks for size in block)) < 1:
            raise ValueError(
                f"matrix {self.name!r}: sizes must be positive, got {self.rows} x {self.cols} "
                f"with blocks {blocks}"
            )
        if sum(rows * cols for rows, cols in blocks) != self.numel:
            raise ValueError(
                f"matrix {self.name!r}: blocks {blocks} do not cover its "
                f"{self.rows} x {self.cols} elements"
            )

    @property
    def numel(self) -> int:
        """Elements of the matrix."""
        return self.rows * self.cols

    @property
    def state_bytes(self) -> int:
        """Persistent optimizer bytes that its owner holds."""
        return STATE_BYTES * self.numel


@dataclass(frozen=True)
class Worker:
    """One rank that can own matrices.

    Attributes:
        load: Seconds of work that it has already, for instance of another plan.
        memory: Bound in bytes on the optimizer state it may own; None: the planner's own bound.
        node: Index of the machine it runs on; owned bytes are spread evenly over the nodes.

    Raises:
        ValueError: `load` or `memory` is negative.
    """

    load: float = 0.0
    memory: int | None = None
    node: int = 0

    def __post_init__(self) -> None:
        if not self.load >= 0:
            raise ValueError(f"worker load must be a number of seconds >= 0, got {self.load}")
        if self.memory is not None and self.memory < 0:
            raise ValueError(f"worker memory must be >= 0 bytes, got {self.memory}")


def as_workers(workers: int | Sequence[Worker]) -> tuple[Worker, ...]:
    """The workers as a tuple; a number stands for that many idle workers on one node.

    Raises:
        ValueError: There is no worker.
    """
    if isinstance(workers, int):
        workers = (Worker(),) * max(workers, 0)
    if not workers:
        raise ValueError("workers: at least one rank is needed to own the matrices")
    return tuple(workers)


def forward_order(tasks: Iterable[MatrixTask]) -> list[MatrixTask]:
    """Tasks by bucket, then by name with numbers compared as numbers (layer 2 before layer 10).

    Raises:
        ValueError: Two tasks share a name.
    """
    ordered = sorted(tasks, key=lambda task: (task.bucket, _natural(task.name), task.name))
    names = set()
    for task in ordered:
        if task.name in names:
            raise ValueError(f"two matrices are called {task.name!r}; names must be unique")
        names.add(task.name)
    return ordered


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that compares runs of digits as numbers."""
    return [
        (0, int(part), "") if part.isdecimal() and part.isascii() else (1, 0, part)
        for part in re.split(r"([0-9]+)", name)
        if part
    ]

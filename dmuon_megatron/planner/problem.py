"""The planning problem in whole numbers: kinds of matrices, classes of blocks, integer times.

Equal matrices are one *kind*; equal Newton-Schulz problems, whichever matrix they come from, are
one *class* (a shape and its transpose are equal). An assignment is a matrix of counts, kinds x
ranks, and a rank's time is the sum over classes of V(number of blocks of that class).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dmuon_megatron.cost.batches import BatchTable, Cost
from dmuon_megatron.planner.task import MatrixTask, Worker


@dataclass(frozen=True)
class Kind:
    """Matrices that the planner cannot tell apart.

    Attributes:
        classes: Indices of the block classes it contributes to, ascending.
        blocks: Blocks per matrix of each of those classes.
        state_bytes: Optimizer bytes of one matrix.
        alone: Microseconds of one such matrix on a rank with nothing else.
        tasks: The matrices, in forward order.
    """

    classes: tuple[int, ...]
    blocks: tuple[int, ...]
    state_bytes: int
    alone: int
    tasks: tuple[MatrixTask, ...]


class Problem:
    """Counts, tables and worker data of one planning run.

    Args:
        tasks: Matrices in forward order.
        workers: Ranks, at least one.
        cost: Cost of one batch.
        max_batch: Largest batch.
        workspace: Bound in bytes on one batch's temporary memory.
        apart: Names of matrices whose blocks share no batch with those of the others.

    Attributes:
        kinds: Kinds, the most expensive first.
        tables: One :class:`BatchTable` per class.
        shapes: (m, n) of each class, m <= n.
        counts: int64 (kinds,): matrices of each kind.
        state_bytes: int64 (kinds,): optimizer bytes of one matrix of each kind.
        blocks: int64 (classes, kinds): blocks of each class in one matrix of each kind.
        values: int64 (classes, K + 1): V of each class; past a class's total it stays constant.
        kind_of: Index of the kind of each matrix by name.
        base: int64 (ranks,): microseconds of work that each rank has already.
    """

    def __init__(
        self,
        tasks: Sequence[MatrixTask],
        workers: Sequence[Worker],
        cost: Cost,
        *,
        max_batch: int,
        workspace: int,
        apart: Collection[str] = (),
    ) -> None:
        groups: dict[tuple, list[MatrixTask]] = defaultdict(list)
        totals: Counter[tuple[bool, int, int]] = Counter()
        for task in tasks:
            pool = task.name in apart
            blocks = tuple(sorted((pool, min(block), max(block)) for block in task.blocks))
            groups[blocks, task.state_bytes].append(task)
            totals.update(blocks)
        keys = sorted(totals)
        self.shapes = [(m, n) for _, m, n in keys]
        self.tables = [
            BatchTable(cost, m, n, totals[pool, m, n], max_batch=max_batch, workspace=workspace)
            for pool, m, n in keys
        ]
        longest = max(totals.values(), default=0)
        self.values = np.zeros((len(self.shapes), longest + 1), dtype=np.int64)
        for row, table in zip(self.values, self.tables, strict=True):
            known = table.microseconds
            row[: len(known)] = known
            row[len(known) :] = known[-1]

        index = {key: i for i, key in enumerate(keys)}
        kinds = []
        for (blocks, state_bytes), members in groups.items():
            amounts = Counter(index[block] for block in blocks)
            classes = tuple(sorted(amounts))
            alone = sum(int(self.values[c, amounts[c]]) for c in classes)
            per_class = tuple(amounts[c] for c in classes)
            kinds.append(Kind(classes, per_class, state_bytes, alone, tuple(members)))
        self.kinds = sorted(kinds, key=lambda k: (-k.alone, k.classes, k.blocks, k.state_bytes))

        self.workers = tuple(workers)
        self.counts = np.array([len(kind.tasks) for kind in self.kinds], dtype=np.int64)
        self.state_bytes = np.array([kind.state_bytes for kind in self.kinds], dtype=np.int64)
        self.blocks = np.zeros((len(self.shapes), len(self.kinds)), dtype=np.int64)
        for s, kind in enumerate(self.kinds):
            self.blocks[list(kind.classes), s] = kind.blocks
        self.base = np.array([int(w.load * 1e6 + 0.5) for w in workers], dtype=np.int64)

        self.kind_of = {t.name: s for s, kind in enumerate(self.kinds) for t in kind.tasks}

    @property
    def ranks(self) -> int:
        """Number of workers."""
        return len(self.workers)

    def counts_of(self, owner: Mapping[str, int]) -> np.ndarray:
        """Counts (kinds, ranks) of concrete owners, rank by matrix name."""
        assignment = np.zeros((len(self.kinds), self.ranks), dtype=np.int64)
        for name, rank in owner.items():
            assignment[self.kind_of[name], rank] += 1
        return assignment

    def block_counts(self, assignment: np.ndarray) -> np.ndarray:
        """(classes, ranks): blocks of each class on each rank, of counts (kinds, ranks)."""
        return self.blocks @ assignment

    def work(self, assignment: np.ndarray) -> np.ndarray:
        """Microseconds of each column of counts (kinds, columns), without initial loads."""
        counts = self.block_counts(assignment)
        return self.values[np.arange(len(self.shapes))[:, None], counts].sum(axis=0)

    def loads(self, assignment: np.ndarray) -> np.ndarray:
        """Microseconds of each rank under counts (kinds, ranks), initial loads included."""
        return self.base + self.work(assignment)

    def memory(self, assignment: np.ndarray) -> np.ndarray:
        """Optimizer bytes of each column of counts (kinds, columns)."""
        return self.state_bytes @ assignment

"""From counts to owners: which of the equal matrices goes to which of the ranks.

The counts fix every rank's load and memory, so three things are free, and are chosen in this order:

1. *Nodes.* Ranks with equal initial load and cap are interchangeable: their columns of counts are
   dealt so that every node owns about the same bytes.
2. *Waves.* Consecutive buckets with about the same work form a wave, updated and published
   together. Every rank should do about its share of each wave, so that the first wave, which the
   next forward waits for, is published as early as possible. Measured by the wave lag: the mean
   over the waves of (time at which the slowest rank is done with the wave) minus (the same share
   of the makespan), over the makespan.
3. *Segments.* Within a wave, as few (bucket, owner) pairs as possible: each is a reduce and a
   publish of its own, which pays latency, not bytes.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dmuon_megatron.planner.plan import Batch
from dmuon_megatron.planner.problem import Problem
from dmuon_megatron.planner.task import MatrixTask

SWAP_ROUNDS = 4
"""Rounds over a wave's matrices in the search for fewer segments."""


@dataclass(frozen=True)
class Expansion:
    """Concrete owners and batches, with the figures that the choice among equals decides."""

    owner: dict[str, int]
    batches: tuple[tuple[Batch, ...], ...]
    waves: tuple[tuple[int, ...], ...]
    segments: int
    wave_lag: float


def expand(
    problem: Problem,
    tasks: Sequence[MatrixTask],
    assignment: np.ndarray,
    caps: np.ndarray,
    wave_limit: int,
) -> Expansion:
    """Concrete owners for counts.

    Args:
        tasks: All matrices in forward order.
        assignment: Counts (kinds, ranks).
        caps: Bytes each rank may own.
        wave_limit: Largest number of waves.
    """
    assignment = spread_over_nodes(problem, assignment, caps)
    waves = split_waves(problem, tasks, wave_limit)
    owner = _deal(problem, tasks, assignment, waves)
    for wave in waves:
        members = [task for task in tasks if task.bucket in set(wave)]
        _merge_segments(members, problem.kind_of, owner)
    return describe(problem, tasks, owner, waves)


def describe(
    problem: Problem,
    tasks: Sequence[MatrixTask],
    owner: dict[str, int],
    waves: tuple[tuple[int, ...], ...],
) -> Expansion:
    """Batches, segments and wave lag of given owners."""
    wave_of = {bucket: w for w, wave in enumerate(waves) for bucket in wave}
    batches = make_batches(problem, tasks, owner, wave_of)
    segments = len({(task.bucket, owner[task.name]) for task in tasks})
    lag = _wave_lag(problem, batches, len(waves))
    return Expansion(owner, batches, waves, segments, lag)


def spread_over_nodes(problem: Problem, assignment: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """Columns permuted among interchangeable ranks so that nodes own similar bytes."""
    nodes = [worker.node for worker in problem.workers]
    if len(set(nodes)) == 1:
        return assignment
    owned: Counter[int] = Counter()
    result = assignment.copy()
    memory = problem.memory(assignment)
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in range(problem.ranks):
        groups[int(problem.base[rank]), int(caps[rank])].append(rank)
    for ranks in groups.values():
        free: dict[int, deque[int]] = defaultdict(deque)
        for rank in ranks:
            free[nodes[rank]].append(rank)
        for column in sorted(ranks, key=lambda rank: (-memory[rank], rank)):
            node = min((n for n in free if free[n]), key=lambda n: (owned[n], n))
            owned[node] += int(memory[column])
            result[:, free[node].popleft()] = assignment[:, column]
    return result


def split_waves(
    problem: Problem, tasks: Sequence[MatrixTask], limit: int
) -> tuple[tuple[int, ...], ...]:
    """At most `limit` runs of consecutive buckets with about the same work."""
    work: Counter[int] = Counter()
    for task in tasks:
        work[task.bucket] += problem.kinds[problem.kind_of[task.name]].alone
    total = sum(work.values())
    waves: dict[int, list[int]] = defaultdict(list)
    done = 0
    for bucket in sorted(work):
        # The wave in whose span the middle of the bucket's work lies.
        middle = 2 * done + work[bucket]
        waves[min(limit - 1, middle * limit // (2 * total))].append(bucket)
        done += work[bucket]
    return tuple(tuple(waves[w]) for w in sorted(waves))


def make_batches(
    problem: Problem,
    tasks: Sequence[MatrixTask],
    owner: dict[str, int],
    wave_of: dict[int, int],
) -> tuple[tuple[Batch, ...], ...]:
    """Each rank's blocks by class, in forward order, cut into the best batch sizes.

    The largest batches come last: the first wave waits for little more than it needs.
    """
    blocks: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
    index = {shape: c for c, shape in enumerate(problem.shapes)}
    for task in tasks:
        for i, block in enumerate(task.blocks):
            key = owner[task.name], index[min(block), max(block)]
            blocks[key].append((task.name, i, wave_of[task.bucket]))
    ranks: list[list[Batch]] = [[] for _ in range(problem.ranks)]
    for (rank, c), members in sorted(blocks.items()):
        start = 0
        for size in reversed(problem.tables[c].split(len(members))):
            part = members[start : start + size]
            names = tuple((name, i) for name, i, _ in part)
            ranks[rank].append(Batch(*problem.shapes[c], names, part[0][2]))
            start += size
    order = {task.name: position for position, task in enumerate(tasks)}
    return tuple(
        tuple(sorted(batches, key=lambda b: (b.wave, order[b.blocks[0][0]], b.blocks[0][1])))
        for batches in ranks
    )


def _deal(
    problem: Problem,
    tasks: Sequence[MatrixTask],
    assignment: np.ndarray,
    waves: tuple[tuple[int, ...], ...],
) -> dict[str, int]:
    """Owners bucket by bucket in forward order.

    A matrix goes to a rank that owns part of its bucket already, while that rank has not done its
    share up to the end of the wave; otherwise to the rank that is most behind its share.
    """
    kind_of = problem.kind_of
    left = assignment.copy()
    alone = np.array([kind.alone for kind in problem.kinds], dtype=np.float64)
    share = np.maximum(alone @ assignment, 1.0)
    done = np.zeros(problem.ranks)
    total = float(alone @ problem.counts)
    by_bucket: dict[int, list[MatrixTask]] = defaultdict(list)
    for task in tasks:
        by_bucket[task.bucket].append(task)
    owner = {}
    target = 0.0
    for wave in waves:
        target += sum(alone[kind_of[t.name]] for bucket in wave for t in by_bucket[bucket]) / total
        for bucket in wave:
            present: dict[int, None] = {}
            for task in sorted(by_bucket[bucket], key=lambda t: kind_of[t.name]):
                s = kind_of[task.name]
                here = [
                    rank
                    for rank in present
                    if left[s, rank] and done[rank] + alone[s] / 2 <= target * share[rank]
                ]
                if here:
                    rank = min(here, key=lambda r: (done[r] / share[r], r))
                else:
                    progress = np.where(left[s] > 0, (done + alone[s] / 2) / share, np.inf)
                    rank = int(progress.argmin())
                owner[task.name] = rank
                left[s, rank] -= 1
                done[rank] += alone[s]
                present[rank] = None
    return {task.name: owner[task.name] for task in tasks}


def _merge_segments(
    tasks: Sequence[MatrixTask], kind_of: dict[str, int], owner: dict[str, int]
) -> None:
    """Swaps equal matrices of one wave between owners while that saves segments."""
    held = Counter((task.bucket, owner[task.name]) for task in tasks)
    by_kind: dict[int, list[MatrixTask]] = defaultdict(list)
    for task in tasks:
        by_kind[kind_of[task.name]].append(task)
    for _ in range(SWAP_ROUNDS):
        improved = False
        for equal in by_kind.values():
            for first in equal:
                if held[first.bucket, owner[first.name]] > 1:
                    continue
                for second in equal:
                    if _swap_gain(held, first, second, owner) > 0:
                        _swap(held, first, second, owner)
                        improved = True
                        break
        if not improved:
            return


def _swap_gain(held: Counter, first: MatrixTask, second: MatrixTask, owner: dict[str, int]) -> int:
    """Segments saved by exchanging the owners of two matrices."""
    a, b = owner[first.name], owner[second.name]
    if a == b or first.bucket == second.bucket:
        return 0
    return (
        (held[first.bucket, a] == 1)
        + (held[second.bucket, b] == 1)
        - (held[first.bucket, b] == 0)
        - (held[second.bucket, a] == 0)
    )


def _swap(held: Counter, first: MatrixTask, second: MatrixTask, owner: dict[str, int]) -> None:
    """Exchanges the owners of two matrices and keeps the segment counts."""
    a, b = owner[first.name], owner[second.name]
    for task, before, after in ((first, a, b), (second, b, a)):
        held[task.bucket, before] -= 1
        held[task.bucket, after] += 1
        owner[task.name] = after


def _wave_lag(problem: Problem, batches: tuple[tuple[Batch, ...], ...], waves: int) -> float:
    """Mean delay of the waves behind their share of the makespan, over the makespan."""
    if not waves:
        return 0.0
    index = {shape: c for c, shape in enumerate(problem.shapes)}
    done = np.zeros((waves, problem.ranks), dtype=np.int64)
    for rank, mine in enumerate(batches):
        for batch in mine:
            table = problem.tables[index[batch.rows, batch.cols]]
            done[batch.wave, rank] += table.batch_microseconds[len(batch.blocks)]
    done = done.cumsum(axis=0)
    finished = done.max(axis=1)
    total = done[-1].sum()
    shares = done.sum(axis=1) / total
    return float((finished / finished[-1] - shares).mean())

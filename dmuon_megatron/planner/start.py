"""First assignments: marginal-cost LPT with local search, and the simple policies.

All work on counts, an int64 array (kinds, ranks), and all are deterministic: ties go to the lowest
rank, and searches stop after a number of passes, never after a time.
"""

import numpy as np

from dmuon_megatron.planner.problem import Problem

SEARCH_PASSES = 400
"""Moves or swaps that one local search may make."""

FORBIDDEN = np.iinfo(np.int64).max // 4
"""Stands for the load of a rank that must not be chosen."""


def longest_first(
    problem: Problem, caps: np.ndarray, start: np.ndarray | None = None
) -> np.ndarray | None:
    """Marginal-cost LPT: the most expensive kind first, each to the rank that ends up least loaded.

    Args:
        caps: Bytes each rank may own.
        start: Counts to fill up; default none assigned.

    Returns:
        Counts, or None if some matrix fits no rank within the caps.
    """
    shape = (len(problem.kinds), problem.ranks)
    assignment = np.zeros(shape, dtype=np.int64) if start is None else start.copy()
    blocks = problem.block_counts(assignment)
    loads = problem.loads(assignment)
    memory = problem.memory(assignment)
    for s, kind in enumerate(problem.kinds):
        missing = int(problem.counts[s] - assignment[s].sum())
        if not missing:
            continue
        classes, step = np.array(kind.classes), np.array(kind.blocks)
        have = blocks[classes]
        values = problem.values[classes]
        row = np.arange(len(classes))[:, None]
        known = values.shape[1] - 1
        after = loads + (
            values[row, np.minimum(have + step[:, None], known)] - values[row, have]
        ).sum(axis=0)
        after[memory + kind.state_bytes > caps] = FORBIDDEN
        for _ in range(missing):
            rank = int(after.argmin())
            if after[rank] >= FORBIDDEN:
                return None
            assignment[s, rank] += 1
            memory[rank] += kind.state_bytes
            loads[rank] = after[rank]
            have[:, rank] += step
            if memory[rank] + kind.state_bytes > caps[rank]:
                after[rank] = FORBIDDEN
            else:
                nxt = np.minimum(have[:, rank] + step, known)
                after[rank] += int(
                    (values[row[:, 0], nxt] - values[row[:, 0], have[:, rank]]).sum()
                )
        blocks[classes] = have
    return assignment


def local_search(
    problem: Problem, assignment: np.ndarray, caps: np.ndarray, passes: int = SEARCH_PASSES
) -> np.ndarray:
    """Moves and swaps out of the most loaded rank while its load falls.

    Each pass tries, for the most loaded rank, to give 1, 2 or all matrices of a kind to another
    rank, alone or against 1 to 3 of another kind, and makes the change after which the higher of
    the two ranks is lowest. Memory caps are kept.
    """
    assignment = assignment.copy()
    kinds = range(len(problem.kinds))
    loads = problem.loads(assignment)
    memory = problem.memory(assignment)
    blocks = problem.block_counts(assignment)
    for _ in range(passes):
        source = int(loads.argmax())
        best: tuple[int, int, np.ndarray] | None = None
        for change in _changes(problem, assignment, source, kinds):
            delta = problem.blocks @ change
            touched = np.flatnonzero(delta)
            left = _value_change(problem, blocks[touched, source], touched, -delta[touched])
            source_load = loads[source] + left
            limit = loads[source] if best is None else best[0]
            if source_load >= limit:
                continue
            bytes_moved = int(problem.state_bytes @ change)
            if memory[source] - bytes_moved > caps[source]:
                continue
            # A rank can take the change only if it holds what it has to give back.
            able = (assignment + change[:, None] >= 0).all(axis=0)
            able &= memory + bytes_moved <= caps
            able[source] = False
            targets = np.flatnonzero(able)
            if not len(targets):
                continue
            gained = _value_change(
                problem, blocks[np.ix_(touched, targets)], touched, delta[touched][:, None]
            )
            worst = np.maximum(loads[targets] + gained, source_load)
            pick = int(worst.argmin())
            if worst[pick] < limit:
                best = (int(worst[pick]), int(targets[pick]), change)
        if best is None:
            break
        _, target, change = best
        assignment[:, source] -= change
        assignment[:, target] += change
        pair = [source, target]
        loads[pair] = problem.base[pair] + problem.work(assignment[:, pair])
        memory[pair] = problem.memory(assignment[:, pair])
        blocks[:, pair] = problem.block_counts(assignment[:, pair])
    return assignment


def by_numel(problem: Problem) -> np.ndarray:
    """LPT on elements: the largest matrix first, each to the rank with the fewest elements."""
    assignment = np.zeros((len(problem.kinds), problem.ranks), dtype=np.int64)
    elements = np.zeros(problem.ranks, dtype=np.int64)
    for s in sorted(range(len(problem.kinds)), key=lambda s: -problem.state_bytes[s]):
        for _ in range(int(problem.counts[s])):
            rank = int(elements.argmin())
            assignment[s, rank] += 1
            elements[rank] += problem.state_bytes[s]
    return assignment


def _changes(problem: Problem, assignment: np.ndarray, source: int, kinds: range):
    """Counts (kinds,) that leave the source rank: positive go out, negative come in return."""
    held = assignment[:, source]
    for s in kinds:
        for out in sorted({1, 2, int(held[s])}):
            if not 0 < out <= held[s]:
                continue
            change = np.zeros(len(kinds), dtype=np.int64)
            change[s] = out
            yield change
            for t in kinds:
                if t == s:
                    continue
                for back in (1, 2, 3):
                    if held[t] + back > problem.counts[t]:
                        break
                    swap = change.copy()
                    swap[t] = -back
                    yield swap


def _value_change(
    problem: Problem, have: np.ndarray, classes: np.ndarray, delta: np.ndarray
) -> np.ndarray | int:
    """Microseconds by which V changes when `have` blocks of each class become `have + delta`.

    `have` and `delta` are (classes,) or (classes, ranks); the result has no class axis. Ranks that
    lack the blocks to give must have been removed before.
    """
    row = classes if have.ndim == 1 else classes[:, None]
    return (problem.values[row, have + delta] - problem.values[row, have]).sum(axis=0)

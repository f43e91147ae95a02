"""First assignments: marginal-cost LPT with local search, and the simple policies.

All work on counts, an int64 array (kinds, ranks), and all are deterministic: ties go to the lowest
rank, and searches stop after a number of passes, never after a time.
"""

import numpy as np

from dmuon_megatron.planner.problem import Problem

SEARCH_PASSES = 400
"""Moves or swaps that one local search may make."""

CHUNK = 1_000_000
"""Numbers that one step of the local search holds in one array."""

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
    loads = problem.loads(assignment)
    for _ in range(passes):
        source = int(loads.argmax())
        step = _best_change(problem, assignment, loads, caps, source)
        if step is None:
            break
        target, change = step
        assignment[:, source] -= change
        assignment[:, target] += change
        pair = [source, target]
        loads[pair] = problem.base[pair] + problem.work(assignment[:, pair])
    return assignment


def _best_change(
    problem: Problem, assignment: np.ndarray, loads: np.ndarray, caps: np.ndarray, source: int
) -> tuple[int, np.ndarray] | None:
    """The rank and the counts to give it after which the higher of both ranks is lowest.

    None if no change leaves both below the source's present load.
    """
    held = assignment[:, source]
    changes = _changes(problem, held)
    left = problem.base[source] + problem.work(held[:, None] - changes.T)
    moved = changes @ problem.state_bytes
    keep = (left < loads[source]) & (problem.state_bytes @ held - moved <= caps[source])
    changes, left, moved = changes[keep], left[keep], moved[keep]
    if not len(changes) or problem.ranks == 1:
        return None

    # Ranks that hold the same are tried once.
    others = np.delete(np.arange(problem.ranks), source)
    facts = np.vstack((problem.base[others], caps[others], assignment[:, others]))
    others = others[np.unique(facts, axis=1, return_index=True)[1]]
    have, free = assignment[:, others], caps[others] - problem.memory(assignment[:, others])
    blocks, delta = problem.block_counts(have), changes @ problem.blocks.T
    best: tuple[int, int, int] | None = None
    chunk = max(1, CHUNK // max(1, have.size))
    for first in range(0, len(changes), chunk):
        part = slice(first, first + chunk)
        able = (have[None] + changes[part, :, None] >= 0).all(axis=1)
        able &= moved[part, None] <= free[None]
        worst = np.broadcast_to(problem.base[others], able.shape).copy()
        for c in range(len(problem.shapes)):
            count = np.where(able, blocks[None, c] + delta[part, c, None], 0)
            worst += problem.values[c, count]
        worst = np.where(able, np.maximum(worst, left[part, None]), FORBIDDEN)
        at = int(worst.argmin())
        value = int(worst.flat[at])
        if value < loads[source] and (best is None or value < best[0]):
            row, column = divmod(at, len(others))
            best = value, first + row, int(others[column])
    return None if best is None else (best[2], changes[best[1]])


def by_numel(problem: Problem) -> np.ndarray:
    """LPT on elements: the largest matrix first, each to the rank with the fewest elements."""
    assignment = np.zeros((len(problem.kinds), problem.ranks), dtype=np.int64)
    owned = np.zeros(problem.ranks, dtype=np.int64)
    for s in _largest_first(problem):
        for _ in range(int(problem.counts[s])):
            rank = int(owned.argmin())
            assignment[s, rank] += 1
            owned[rank] += problem.state_bytes[s]
    return assignment


def best_fit(problem: Problem, caps: np.ndarray) -> np.ndarray | None:
    """The largest matrix first, each to the rank it fills up most; for tight memory caps.

    Returns:
        Counts, or None if some matrix fits no rank any more.
    """
    assignment = np.zeros((len(problem.kinds), problem.ranks), dtype=np.int64)
    room = caps.copy()
    for s in _largest_first(problem):
        for _ in range(int(problem.counts[s])):
            fitting = np.where(room >= problem.state_bytes[s], room, FORBIDDEN)
            rank = int(fitting.argmin())
            if fitting[rank] == FORBIDDEN:
                return None
            assignment[s, rank] += 1
            room[rank] -= problem.state_bytes[s]
    return assignment


def _largest_first(problem: Problem) -> list[int]:
    """Kinds by bytes of one matrix, falling."""
    return sorted(range(len(problem.kinds)), key=lambda s: -int(problem.state_bytes[s]))


def _changes(problem: Problem, held: np.ndarray) -> np.ndarray:
    """Counts (changes, kinds) that may leave a rank: positive go out, negative come in return."""
    kinds = len(held)
    changes = []
    for s in range(kinds):
        for out in sorted({1, 2, int(held[s])}):
            if not 0 < out <= held[s]:
                continue
            change = np.zeros(kinds, dtype=np.int64)
            change[s] = out
            changes.append(change)
            for t in range(kinds):
                if t == s:
                    continue
                for back in range(1, min(3, int(problem.counts[t] - held[t])) + 1):
                    swap = change.copy()
                    swap[t] = -back
                    changes.append(swap)
    return np.array(changes, dtype=np.int64).reshape(len(changes), kinds)

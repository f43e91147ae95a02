"""From a first assignment to a near-optimal one, and a bound that says how near.

1. Bisect the makespan on the linear question: below the result no assignment exists.
2. From there upward look for assignments: round the fractional one down and fill up by LPT and
   local search, else ask the whole-number question.

Work is limited by counts, never by time, so that the answer is the same on every machine. A
deadline, if the caller sets one, stops the search between two questions and is reported.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dmuon_megatron.planner import start
from dmuon_megatron.planner.patterns import make_patterns
from dmuon_megatron.planner.problem import Problem
from dmuon_megatron.planner.relaxation import Column, Fractional, Group, Relaxation, group_ranks
from dmuon_megatron.planner.solver import Solver

BISECTION_PRECISION = 2000
"""Bisection of the bound ends at this fraction of the makespan (one part in ...)."""

PROBES = 12
"""Makespans at which an assignment is looked for."""

PROBE_PRECISION = 500
"""The search ends within this fraction of the bound (one part in ...)."""

SMALL = 24
"""Up to this many matrices the search goes on until the optimum is found."""

SMALL_PROBES = 64
"""Makespans tried for a small problem."""

POLISH_PASSES = 60
"""Local-search passes after each rounding."""


@dataclass(frozen=True)
class Found:
    """Result of the search.

    Attributes:
        assignment: Counts (kinds, ranks).
        bound: Microseconds that no assignment can beat.
        finished: False: the deadline ended the search.
        explored: False: the problem has too many patterns; the assignment is the first one.
    """

    assignment: np.ndarray
    bound: int
    finished: bool = True
    explored: bool = True


def lower_bound(
    problem: Problem, bound: int, makespan: int, caps: np.ndarray, solver: Solver
) -> int:
    """The best bound that the linear question gives.

    Args:
        bound: Known lower bound, microseconds.
        makespan: A makespan that can be reached.
        caps: Bytes each rank may own.
        solver: Solver of the linear question.

    Raises:
        SolverFault: The solver failed.
    """
    groups = group_ranks(problem, caps)
    patterns = make_patterns(problem, makespan - groups[0].base, int(caps.max()))
    if patterns is None:
        return bound
    relaxation = Relaxation(problem, groups, patterns, solver)
    return _bisected(relaxation, bound, makespan, lambda: False)


def _bisected(relaxation: Relaxation, low: int, high: int, late: Callable[[], bool]) -> int:
    """Least makespan between two that the linear question does not exclude, nearly."""
    probe = low
    while low < high and not late():
        if relaxation.fractional(probe).excluded:
            low = probe + 1
        else:
            high = probe
        if high - low <= high // BISECTION_PRECISION:
            break
        probe = (low + high) // 2
    return low


def is_small(problem: Problem) -> bool:
    """Whether the search runs until the optimum is found."""
    return int(problem.counts.sum()) <= SMALL


def improve(
    problem: Problem,
    assignment: np.ndarray,
    bound: int,
    caps: np.ndarray,
    solver: Solver,
    deadline: float | None = None,
) -> Found:
    """A better assignment than the given one if the search finds any.

    Args:
        assignment: Valid counts within the caps.
        bound: Known lower bound, microseconds.
        caps: Bytes each rank may own.
        solver: Solver of the linear and whole-number questions.
        deadline: `time.monotonic()` at which to stop, or None.

    Raises:
        SolverFault: The solver failed.
    """
    best, best_time = assignment, int(problem.loads(assignment).max())
    groups = group_ranks(problem, caps)
    patterns = make_patterns(problem, best_time - groups[0].base, int(caps.max()))
    if patterns is None:
        return Found(best, bound, explored=False)
    relaxation = Relaxation(problem, groups, patterns, solver)
    relaxation.add_patterns(assignment)

    def late() -> bool:
        return deadline is not None and time.monotonic() > deadline

    bound = _bisected(relaxation, bound, best_time, late)
    small = is_small(problem)
    low = bound
    probe = low + low // 1000
    for _ in range(SMALL_PROBES if small else PROBES):
        if best_time <= low or late():
            break
        if not small and best_time - low <= best_time // PROBE_PRECISION:
            break
        probe = min(probe, best_time - 1)
        fractional = relaxation.fractional(probe)
        if fractional.excluded:
            bound = max(bound, probe + 1)
        else:
            candidate = _complete(problem, groups, caps, _round_down(groups, fractional))
            if candidate is None or problem.loads(candidate).max() > probe:
                whole = relaxation.whole(probe, fractional)
                if whole.excluded:
                    bound = max(bound, probe + 1)
                if whole.columns is not None:
                    other = _complete(problem, groups, caps, whole.columns)
                    candidate = _better(problem, candidate, other)
            if candidate is not None:
                relaxation.add_patterns(candidate)
                reached = int(problem.loads(candidate).max())
                if reached < best_time:
                    best, best_time = candidate, reached
        if best_time > probe:
            low = probe + 1
        probe = low + (best_time - low) * 7 // 20
    return Found(best, bound, finished=not late())


def _better(
    problem: Problem, first: np.ndarray | None, second: np.ndarray | None
) -> np.ndarray | None:
    """The assignment with the lower makespan."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second, key=lambda assignment: int(problem.loads(assignment).max()))


def _round_down(groups: list[Group], fractional: Fractional) -> tuple[Column, ...]:
    """One column per whole rank of the fractional answer, then those of the largest remainders."""
    values = fractional.values
    whole = np.floor(values + 1e-6)
    remainder = values - whole
    free = np.array([len(group.ranks) for group in groups])
    used = [0] * len(groups)
    chosen: list[Column] = []
    for column, number in zip(fractional.columns, whole, strict=True):
        take = min(int(number), int(free[column[0]]) - used[column[0]])
        used[column[0]] += take
        chosen += [column] * take
    for j in np.argsort(-remainder, kind="stable"):
        g = fractional.columns[j][0]
        if remainder[j] < 0.5:
            break
        if used[g] < free[g]:
            used[g] += 1
            chosen.append(fractional.columns[j])
    return tuple(chosen)


def _complete(
    problem: Problem, groups: list[Group], caps: np.ndarray, columns: tuple[Column, ...]
) -> np.ndarray | None:
    """An assignment from columns: ranks chosen, surplus dropped, the missing placed, polished."""
    assignment = np.zeros((len(problem.kinds), problem.ranks), dtype=np.int64)
    for g, group in enumerate(groups):
        patterns = np.array([p for h, p in columns if h == g], dtype=np.int64)
        if not len(patterns):
            continue
        # The most work goes to the ranks with the least initial load.
        order = np.argsort(-problem.work(patterns.T), kind="stable")
        ranks = list(group.ranks[: len(order)])
        assignment[:, ranks] = patterns[order].T
    for s in range(len(problem.kinds)):
        surplus = int(assignment[s].sum() - problem.counts[s])
        for _ in range(surplus):
            loads = np.where(assignment[s] > 0, problem.loads(assignment), -1)
            assignment[s, int(loads.argmax())] -= 1
    if (problem.memory(assignment) > caps).any():
        return None
    completed = start.longest_first(problem, caps, assignment)
    if completed is None:
        return None
    return start.local_search(problem, completed, caps, POLISH_PASSES)

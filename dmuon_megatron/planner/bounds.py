"""Lower bounds on the makespan that need no solver."""

import numpy as np

from dmuon_megatron.planner.problem import Problem


def simple_bound(problem: Problem) -> int:
    """Microseconds that no assignment can beat.

    The largest of: a rank's initial load; each kind alone on the idlest rank; and the level to
    which the least conceivable work, every block at its class's best rate, fills the ranks.
    """
    base = np.sort(problem.base)
    if problem.ranks == 1:
        return int(problem.loads(problem.counts[:, None])[0])
    bound = int(base[-1])
    if problem.kinds:
        bound = max(bound, int(base[0]) + problem.kinds[0].alone)
    return max(bound, _fill_level(base, least_work(problem)))


def least_work(problem: Problem) -> int:
    """Microseconds of all blocks together, each at the best rate its class can reach."""
    totals = problem.blocks @ problem.counts
    work = 0
    for table, total in zip(problem.tables, totals, strict=True):
        sizes = np.arange(1, total + 1)
        work += int((table.microseconds[1 : total + 1] * total // sizes).min())
    return work


def _fill_level(base: np.ndarray, work: int) -> int:
    """Least whole T with sum of max(0, T - base) >= work; `base` ascending."""
    heights = np.cumsum(base)
    for used in range(1, len(base) + 1):
        level = -(-(work + int(heights[used - 1])) // used)
        if used == len(base) or level <= base[used]:
            return level
    raise AssertionError("unreachable: the loop returns at the last rank")

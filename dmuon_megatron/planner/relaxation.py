"""Can all matrices be done within a time? The linear and the whole-number question.

With patterns as columns: y_gp ranks of group g use pattern p.

    minimise z   subject to   sum_gp a_sp y_gp >= N_s     for every kind s
                              D_g z - sum_p y_gp >= 0     for every group g of like ranks

The time is out of reach if z > 1. Patterns are generated as the prices (duals) of the kinds ask
for them. Any prices pi >= 0 give the bound z >= pi N / sum_g D_g v_g, v_g the value of the best
pattern, so a bound does not rest on the solver being right.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dmuon_megatron.planner.patterns import ListedPatterns, Patterns, Priced
from dmuon_megatron.planner.problem import Problem
from dmuon_megatron.planner.solver import LinearModel, Solver, checked

ROUNDS = 300
"""Rounds of column generation at one makespan."""

MARGIN = 1e-6
"""A makespan counts as out of reach only if the bound on z exceeds 1 by this."""

MAX_GROUPS = 6
"""Groups of like ranks; more different initial loads than this are merged."""

MAXIMAL_COLUMNS = 2000
"""Maximal patterns that are all offered to the whole-number problem; more are left out."""

NODES = 50
"""Branch-and-bound nodes of one whole-number problem on some of the patterns."""

COMPLETE_NODES = 500
"""The same on all maximal patterns, where the end of the search is a proof."""

Column = tuple[int, tuple[int, ...]]
"""A group and a pattern."""


@dataclass(frozen=True)
class Group:
    """Ranks that the relaxation does not tell apart.

    Attributes:
        ranks: Their numbers, the least loaded first.
        base: Least initial load among them, microseconds.
        cap: Most bytes that one of them may own.
    """

    ranks: tuple[int, ...]
    base: int
    cap: int


def group_ranks(problem: Problem, caps: np.ndarray) -> list[Group]:
    """Groups by initial load and cap, at most :data:`MAX_GROUPS`.

    A merged group stands for its ranks with the least load and the widest cap among them, so that
    bounds remain bounds.
    """
    order = sorted(range(problem.ranks), key=lambda r: (int(problem.base[r]), int(caps[r]), r))
    groups: dict[tuple[int, int], list[int]] = {}
    for rank in order:
        groups.setdefault((int(problem.base[rank]), int(caps[rank])), []).append(rank)
    if len(groups) <= MAX_GROUPS:
        parts = list(groups.values())
    else:
        cuts = [len(order) * i // MAX_GROUPS for i in range(MAX_GROUPS + 1)]
        parts = [order[a:b] for a, b in pairwise(cuts) if b > a]
    return [
        Group(tuple(part), int(problem.base[part].min()), int(caps[part].max())) for part in parts
    ]


@dataclass(frozen=True)
class Fractional:
    """Answer of the linear question.

    Attributes:
        excluded: True: no assignment reaches the makespan.
        reached: True: a fractional assignment does.
        columns: Columns in use.
        values: (columns,) ranks per column, fractional.
    """

    excluded: bool
    reached: bool
    columns: tuple[Column, ...] = ()
    values: np.ndarray | None = None


@dataclass(frozen=True)
class Whole:
    """Answer of the whole-number question.

    Attributes:
        columns: One per rank in use, that cover as much as was found; None: nothing.
        excluded: True: no assignment reaches the makespan, by the solver's proof over all patterns.
    """

    columns: tuple[Column, ...] | None
    excluded: bool


class Relaxation:
    """Linear and whole-number questions about one problem, with a common pool of columns.

    Args:
        problem: The problem.
        groups: Ranks in groups.
        patterns: How patterns are priced; made for the largest makespan that will be asked about.
        solver: Solver for both questions.
    """

    def __init__(
        self, problem: Problem, groups: list[Group], patterns: Patterns, solver: Solver
    ) -> None:
        self._problem = problem
        self._groups = groups
        self._patterns = patterns
        self._solver = solver
        self._pool: dict[tuple[int, ...], int] = {}
        self._sizes = np.array([len(group.ranks) for group in groups], dtype=np.float64)

    def add_patterns(self, assignment: np.ndarray) -> None:
        """Puts the columns of an assignment, counts (kinds, ranks), into the pool."""
        unique = np.unique(assignment, axis=1)
        times = self._problem.work(unique)
        for pattern, time in zip(unique.T.tolist(), times.tolist(), strict=True):
            self._pool[tuple(pattern)] = time

    def fractional(self, makespan: int) -> Fractional:
        """The linear question by column generation.

        Raises:
            SolverFault: The solver failed.
        """
        problem = self._problem
        columns = self._known_columns(makespan)
        covered = np.zeros(len(problem.kinds), dtype=bool)
        for _, pattern in columns:
            covered |= np.array(pattern) > 0
        if not covered.all():
            return Fractional(excluded=True, reached=False)
        present = set(columns)
        for _ in range(ROUNDS):
            solution = checked(self._solver, self._linear_model(columns))
            values, z = solution.values[:-1], float(solution.values[-1])
            if z <= 1 + 1e-9:
                return Fractional(False, True, tuple(columns), values)
            prices = np.maximum(solution.duals[: len(problem.kinds)], 0.0)
            rents = np.maximum(solution.duals[len(problem.kinds) :], 0.0)
            answers = self._price(prices, rents, makespan)
            if all(answer.excluded for answer in answers):
                return Fractional(excluded=True, reached=False)
            new = [
                (g, answer.pattern)
                for g, answer in enumerate(answers)
                if answer.pattern is not None and (g, answer.pattern) not in present
            ]
            if not new:
                break
            columns += new
            present.update(new)
            self.add_patterns(np.array([pattern for _, pattern in new]).T)
        return Fractional(False, False, tuple(columns), values)

    def whole(self, makespan: int, fractional: Fractional) -> Whole:
        """The whole-number question.

        Raises:
            SolverFault: The solver failed.
        """
        problem = self._problem
        columns = dict.fromkeys(fractional.columns)
        complete = isinstance(self._patterns, ListedPatterns)
        if complete:
            for g, group in enumerate(self._groups):
                all_maximal = self._patterns.maximal(problem, makespan - group.base, group.cap)
                if len(all_maximal) > MAXIMAL_COLUMNS:
                    complete = False
                    break
                columns |= dict.fromkeys((g, tuple(p)) for p in all_maximal.tolist())
        ordered = list(columns)
        kinds, number = len(problem.kinds), len(ordered)
        rows = np.zeros((kinds + len(self._groups), number + kinds))
        for j, (g, pattern) in enumerate(ordered):
            rows[:kinds, j] = pattern
            rows[kinds + g, j] = -1.0
        rows[:kinds, number:] = np.eye(kinds)
        # A missing matrix costs its time, so that what is found leaves little for LPT to place.
        shortage = np.array([kind.alone for kind in problem.kinds], dtype=np.float64)
        cost = np.concatenate((np.zeros(number), shortage / max(1.0, shortage.max())))
        model = LinearModel(
            cost=cost,
            rows=rows,
            lower=np.concatenate((problem.counts, -self._sizes)).astype(np.float64),
            whole=np.arange(number + kinds) < number,
        )
        nodes = COMPLETE_NODES if complete else NODES
        solution = checked(self._solver, model, nodes=nodes, target=1e-7)
        if solution.values is None:
            return Whole(None, excluded=False)
        missing = float(model.cost @ solution.values)
        # The least that can be missing is one matrix of the cheapest kind.
        proven = complete and solution.status == "optimal" and missing > cost[number:].min() / 2
        used = solution.values[:number].round().astype(int)
        chosen = tuple(c for c, n in zip(ordered, used, strict=True) for _ in range(n))
        return Whole(chosen, excluded=proven)

    def _known_columns(self, makespan: int) -> list[Column]:
        """Pool columns within the limits, and every kind alone as often as it fits."""
        problem = self._problem
        columns: dict[Column, None] = {}
        for g, group in enumerate(self._groups):
            limit = makespan - group.base
            for pattern, time in self._pool.items():
                if time <= limit and problem.state_bytes @ np.array(pattern) <= group.cap:
                    columns[g, pattern] = None
            for s in range(len(problem.kinds)):
                number = self._most_alone(s, limit, group.cap)
                if number:
                    pattern = [0] * len(problem.kinds)
                    pattern[s] = number
                    columns[g, tuple(pattern)] = None
        return list(columns)

    def _most_alone(self, s: int, time: int, memory: int) -> int:
        """Matrices of one kind that fit one rank."""
        problem = self._problem
        kind = problem.kinds[s]
        if kind.alone > time:
            return 0
        numbers = np.arange(problem.counts[s] + 1)
        times = sum(
            problem.values[c, numbers * b] for c, b in zip(kind.classes, kind.blocks, strict=True)
        )
        return min(int(np.searchsorted(times, time, side="right")) - 1, memory // kind.state_bytes)

    def _linear_model(self, columns: list[Column]) -> LinearModel:
        """The linear program of the module's head over some columns; z is the last variable."""
        problem = self._problem
        kinds, number = len(problem.kinds), len(columns)
        rows = np.zeros((kinds + len(self._groups), number + 1))
        rows[:kinds, :number] = np.array([pattern for _, pattern in columns]).T
        rows[kinds + np.array([g for g, _ in columns]), np.arange(number)] = -1.0
        rows[kinds:, number] = self._sizes
        lower = np.zeros(len(rows))
        lower[:kinds] = problem.counts
        cost = np.zeros(number + 1)
        cost[number] = 1.0
        return LinearModel(cost, rows, lower, np.zeros(number + 1, dtype=bool))

    def _price(self, prices: np.ndarray, rents: np.ndarray, makespan: int) -> list[Priced]:
        """Of each group: a pattern worth more than its part of what would exclude the makespan.

        If no group has one, sum_g D_g v_g < pi N, and the bound on z exceeds 1.
        """
        demand = float(prices @ self._problem.counts)
        supply = float(self._sizes @ rents)
        scale = demand / supply / (1 + MARGIN) if supply > 0 else 0.0
        return [
            self._patterns.price(prices, makespan - group.base, group.cap, scale * rent)
            for group, rent in zip(self._groups, rents.tolist(), strict=True)
        ]

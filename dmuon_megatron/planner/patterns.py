"""Patterns: what one rank may own within a time and a memory limit.

A pattern is a vector of counts, one per kind. The relaxation needs, for prices of the kinds, the
most valuable pattern within the limits. With few patterns they are listed once and the best is
looked up; otherwise it is found by dynamic programming over a grid of time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dmuon_megatron.planner.problem import Problem

LISTED = 100_000
"""Most patterns that are listed; beyond it they are searched."""

CELLS = 8192
"""Cells of the time grid: with makespans up to this many microseconds the search is exact."""

COARSE_CELLS = 2048
"""Cells of the time grid where memory has a price; the bound does not need more."""

GRIDS = 8
"""Grids that are kept."""

MULTIPLIER_STEPS = 10
"""Bisections of the price of memory when the most valuable pattern breaks the memory limit."""

MEMORY_CELLS = 512
"""Cells of memory in which partial patterns are merged."""

EXTENSIONS = 2_000_000
"""Most partial patterns times options of a group that are looked at in one step."""

TRACED = 20
"""Most complete patterns that are checked against the exact limits."""


@dataclass(frozen=True)
class PatternList:
    """All counts of some kinds within limits, in order of their time.

    Attributes:
        kinds: Indices of the kinds.
        counts: int64 (patterns, kinds).
        time: int64 (patterns,) microseconds, ascending.
        memory: int64 (patterns,) bytes.
    """

    kinds: tuple[int, ...]
    counts: np.ndarray
    time: np.ndarray
    memory: np.ndarray


def list_patterns(
    problem: Problem, kinds: Sequence[int], time: int, memory: int, most: int
) -> PatternList | None:
    """Every pattern of the given kinds within the limits, or None if there are more than `most`."""
    kinds = tuple(kinds)
    counts = np.zeros((1, len(problem.kinds)), dtype=np.int64)
    for s in kinds:
        grown = [counts]
        wave = counts
        for _ in range(int(problem.counts[s])):
            wave = wave.copy()
            wave[:, s] += 1
            fits = (problem.work(wave.T) <= time) & (problem.memory(wave.T) <= memory)
            wave = wave[fits]
            if not len(wave):
                break
            grown.append(wave)
            if sum(map(len, grown)) > most:
                return None
        counts = np.concatenate(grown)
    times = problem.work(counts.T)
    order = np.argsort(times, kind="stable")
    counts = counts[order]
    return PatternList(kinds, counts[:, kinds], times[order], problem.memory(counts.T))


@dataclass(frozen=True)
class Priced:
    """Answer to: is there a pattern within the limits worth more than a threshold?

    Attributes:
        pattern: Counts of every kind of such a pattern; None: none was found.
        excluded: True: there is none.
    """

    pattern: tuple[int, ...] | None
    excluded: bool


class ListedPatterns:
    """Pricing by looking through the list of all patterns: exact."""

    def __init__(self, patterns: PatternList) -> None:
        self._patterns = patterns

    def price(self, prices: np.ndarray, time: int, memory: int, threshold: float) -> Priced:
        """A pattern within the limits worth more than the threshold, for prices >= 0."""
        patterns = self._patterns
        last = int(np.searchsorted(patterns.time, time, side="right"))
        value = patterns.counts[:last] @ prices
        value[patterns.memory[:last] > memory] = -1.0
        if value.max(initial=0.0) <= threshold:
            return Priced(None, excluded=True)
        return Priced(tuple(patterns.counts[int(value.argmax())].tolist()), excluded=False)

    def maximal(self, problem: Problem, time: int, memory: int) -> np.ndarray:
        """Patterns within the limits to which nothing can be added, (patterns, kinds)."""
        patterns = self._patterns
        last = int(np.searchsorted(patterns.time, time, side="right"))
        counts = patterns.counts[:last][patterns.memory[:last] <= memory]
        keep = np.ones(len(counts), dtype=bool)
        for s in range(counts.shape[1]):
            full = counts[:, s] >= problem.counts[s]
            more = counts.copy()
            more[:, s] += ~full
            fits = (problem.work(more.T) <= time) & (problem.memory(more.T) <= memory)
            keep &= full | ~fits
        return counts[keep]


class SearchedPatterns:
    """Pricing by a multiple-choice knapsack over groups of kinds that share block classes.

    Groups add up in time, so a table over a grid of time gives the best combination. Times are
    rounded up on the grid to find a pattern and down to exclude one; with whole microseconds as
    cells both are exact. If the best one breaks the memory limit, memory gets a price too, which
    bounds the value from above, and if that leaves the question open, partial patterns are
    extended group by group as long as that bound is above the threshold.
    """

    def __init__(self, problem: Problem, groups: Sequence[PatternList]) -> None:
        self._problem = problem
        self._groups = groups
        self._bytes = problem.state_bytes.astype(np.float64)
        self._grids: dict[tuple, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}

    @classmethod
    def of(cls, problem: Problem, time: int, memory: int) -> "SearchedPatterns | None":
        """The groups of a problem, or None if one of them has too many patterns."""
        groups = []
        for kinds in _sharing(problem):
            patterns = list_patterns(problem, kinds, time, memory, LISTED)
            if patterns is None:
                return None
            groups.append(patterns)
        return cls(problem, groups)

    def price(self, prices: np.ndarray, time: int, memory: int, threshold: float) -> Priced:
        """A pattern within the limits worth more than the threshold, for prices >= 0."""
        if time < 1:
            return Priced(None, excluded=True)
        exact = time <= CELLS
        tables = self._tables(prices, time, memory, CELLS, down=False)
        pattern = self._best(tables)
        found = self._worth_more(pattern, prices, time, memory, threshold)
        if found is not None:
            return Priced(found, excluded=False)
        if not exact:
            tables = self._tables(prices, time, memory, CELLS, down=True)
        if tables.value <= threshold:
            return Priced(None, excluded=True)
        if self._bytes @ pattern <= memory:
            return Priced(None, excluded=False)

        low, high = 0.0, float((prices / self._bytes).max())
        least, multiplier = np.inf, 0.0
        for _ in range(MULTIPLIER_STEPS):
            middle = (low + high) / 2
            reduced = prices - middle * self._bytes
            tables = self._tables(reduced, time, memory, COARSE_CELLS, down=True)
            bound = tables.value + middle * memory
            if bound <= threshold:
                return Priced(None, excluded=True)
            if bound < least:
                least, multiplier = bound, middle
            pattern = self._best(tables)
            found = self._worth_more(pattern, prices, time, memory, threshold)
            if found is not None:
                return Priced(found, excluded=False)
            if self._bytes @ pattern <= memory:
                high = middle
            else:
                low = middle
        return self._extend(prices, multiplier, time, memory, threshold)

    def _tables(
        self, prices: np.ndarray, time: int, memory: int, cells: int, *, down: bool
    ) -> "_Tables":
        """Best values of the groups from each one on, by cells of time that are left."""
        cells = min(time, cells)
        values = [np.zeros(cells + 1)]
        options = []
        scratch = np.empty(cells + 1)
        grid = self._grid(time, memory, cells, down)
        for group, (fitting, cell, starts) in zip(reversed(self._groups), grid, strict=True):
            worth = group.counts[fitting] @ prices[list(group.kinds)]
            rising = _front(worth, starts)
            front = fitting[rising]
            cell, worth = cell[rising], worth[rising]
            below = values[-1]
            best = below.copy()
            for start, value in zip(cell.tolist(), worth.tolist(), strict=True):
                reach = cells + 1 - start
                np.add(below[:reach], value, out=scratch[:reach])
                np.maximum(best[start:], scratch[:reach], out=best[start:])
            values.append(best)
            options.append((front, cell, worth))
        return _Tables(values[::-1], options[::-1])

    def _grid(
        self, time: int, memory: int, cells: int, down: bool
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Of each group, the last first: options within the limits, their cells, where cells begin.

        The prices change from call to call, the limits hardly: the last grids are kept.
        """
        key = time, memory, cells, down
        if key not in self._grids:
            if len(self._grids) >= GRIDS:
                self._grids.clear()
            grid = []
            for group in reversed(self._groups):
                last = int(np.searchsorted(group.time, time, side="right"))
                fitting = np.flatnonzero(group.memory[:last] <= memory)
                scaled = group.time[fitting] * cells
                cell = scaled // time if down else -(-scaled // time)
                grid.append((fitting, cell, np.flatnonzero(np.diff(cell, prepend=-1))))
            self._grids[key] = grid
        return self._grids[key]

    def _best(self, tables: "_Tables") -> np.ndarray:
        """Counts of the best combination."""
        pattern = np.zeros(len(self._problem.kinds), dtype=np.int64)
        left = len(tables.values[0]) - 1
        for group, (front, cell, worth), below in zip(
            self._groups, tables.options, tables.values[1:], strict=True
        ):
            fitting = int(np.searchsorted(cell, left, side="right"))
            at = int((below[left - cell[:fitting]] + worth[:fitting]).argmax())
            pattern[list(group.kinds)] = group.counts[front[at]]
            left -= int(cell[at])
        return pattern

    def _worth_more(
        self, pattern: np.ndarray, prices: np.ndarray, time: int, memory: int, threshold: float
    ) -> tuple[int, ...] | None:
        """The pattern, made to fit the limits and filled up, if it is worth more than that."""
        problem, pattern = self._problem, pattern.copy()
        density = prices / self._bytes
        for s in np.argsort(density, kind="stable"):
            surplus = self._bytes @ pattern - memory
            if surplus <= 0:
                break
            pattern[s] -= min(int(pattern[s]), int(-(-surplus // self._bytes[s])))
        if problem.work(pattern[:, None])[0] > time:
            return None
        for s in np.argsort(-density, kind="stable"):
            while pattern[s] < problem.counts[s]:
                pattern[s] += 1
                if self._bytes @ pattern > memory or problem.work(pattern[:, None])[0] > time:
                    pattern[s] -= 1
                    break
        return tuple(pattern.tolist()) if prices @ pattern > threshold else None

    def _extend(
        self, prices: np.ndarray, multiplier: float, time: int, memory: int, threshold: float
    ) -> Priced:
        """Extends partial patterns group by group, dropping those that cannot pass the threshold.

        What the groups still to come can add is bounded by their table under the price of memory.
        Partial patterns in one cell of time and memory are merged into one with the least time and
        bytes and the greatest value of them, which can only hide that there is none. If there are
        too many, the least valuable are dropped, and that there is none is no longer certain.
        """
        reduced = prices - multiplier * self._bytes
        tables = self._tables(reduced, time, memory, COARSE_CELLS, down=True)
        cells = len(tables.values[0]) - 1
        used = np.zeros(1, dtype=np.int64)
        held = np.zeros(1, dtype=np.int64)
        value = np.zeros(1)
        origins: list[tuple[np.ndarray, np.ndarray]] = []
        complete = True
        for group, after in zip(self._groups, tables.values[1:], strict=True):
            last = int(np.searchsorted(group.time, time, side="right"))
            worth = group.counts[:last] @ prices[list(group.kinds)]
            room = max(1, EXTENSIONS // last)
            if len(used) > room:
                complete = False
                kept = np.sort(np.argsort(-value, kind="stable")[:room])
                used, held, value = used[kept], held[kept], value[kept]
                parent, option = origins[-1]
                origins[-1] = parent[kept], option[kept]
            new_used = used[:, None] + group.time[:last]
            new_held = held[:, None] + group.memory[:last]
            new_value = value[:, None] + worth
            left = np.maximum(time - new_used, 0) * cells // time
            bound = new_value + after[left] + multiplier * (memory - new_held)
            parent, option = np.nonzero(
                (new_used <= time) & (new_held <= memory) & (bound > threshold)
            )
            if not len(parent):
                return Priced(None, excluded=complete)
            at = parent, option
            used, held, value, chosen = _merge(
                new_used[at], new_held[at], new_value[at], time, memory
            )
            parent, option = parent[chosen], option[chosen]
            origins.append((parent, option))
        if value.max() <= threshold:
            return Priced(None, excluded=complete)
        for label in np.argsort(-value, kind="stable")[:TRACED]:
            pattern = np.zeros(len(prices), dtype=np.int64)
            for group, (parent, option) in zip(
                reversed(self._groups), reversed(origins), strict=True
            ):
                pattern[list(group.kinds)] = group.counts[option[label]]
                label = parent[label]
            found = self._worth_more(pattern, prices, time, memory, threshold)
            if found is not None:
                return Priced(found, excluded=False)
        return Priced(None, excluded=False)


@dataclass(frozen=True)
class _Tables:
    """Dynamic program over the groups, the last group first.

    Attributes:
        values: (groups + 1) arrays by cells left: best value of the groups from that one on.
        options: Of each group: options worth considering, the cells and the worth of each.
    """

    values: list[np.ndarray]
    options: list[tuple[np.ndarray, np.ndarray, np.ndarray]]

    @property
    def value(self) -> float:
        """Best value of all groups."""
        return float(self.values[0][-1])


Patterns = ListedPatterns | SearchedPatterns


def make_patterns(problem: Problem, time: int, memory: int) -> Patterns | None:
    """The way to price patterns within limits; None if the problem is too large for both ways."""
    listed = list_patterns(problem, range(len(problem.kinds)), time, memory, LISTED)
    if listed is not None:
        return ListedPatterns(listed)
    return SearchedPatterns.of(problem, time, memory)


def _sharing(problem: Problem) -> list[list[int]]:
    """Kinds grouped so that no class occurs in two groups."""
    groups: list[tuple[set[int], list[int]]] = []
    for s, kind in enumerate(problem.kinds):
        classes, members = set(kind.classes), [s]
        apart = []
        for group in groups:
            if group[0] & classes:
                classes |= group[0]
                members = group[1] + members
            else:
                apart.append(group)
        groups = [*apart, (classes, members)]
    return sorted(sorted(members) for _, members in groups)


def _front(worth: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Indices of the options that are worth more than every one of the same or an earlier cell.

    Options are in order of their cells; `starts` has the first of each cell.
    """
    best = np.maximum.reduceat(worth, starts)
    highest = np.maximum.accumulate(best)
    rising = np.flatnonzero(np.diff(highest, prepend=-np.inf) > 0)
    if len(starts) == len(worth):
        return rising
    ends = np.append(starts[1:], len(worth))
    return np.array(
        [starts[i] + int(worth[starts[i] : ends[i]].argmax()) for i in rising], dtype=np.int64
    )


def _merge(
    used: np.ndarray, held: np.ndarray, value: np.ndarray, time: int, memory: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Partial patterns with one left per cell of time and memory.

    Returns:
        Least time, least bytes and greatest value of each cell, and the index of the pattern that
        has that value.
    """
    cell = used * COARSE_CELLS // time * (MEMORY_CELLS + 1) + held * MEMORY_CELLS // memory
    order = np.lexsort((-value, cell))
    starts = np.flatnonzero(np.diff(cell[order], prepend=-1))
    chosen = order[starts]
    return (
        np.minimum.reduceat(used[order], starts),
        np.minimum.reduceat(held[order], starts),
        value[chosen],
        chosen,
    )

"""Models with experts: dense matrices for all ranks, experts for the ranks that share them.

Every expert-parallel rank has experts of its own, owned by its expert-data-parallel ranks; a dense
matrix may be owned by any data-parallel rank. What counts is a rank's time for both together:
large batches of dense matrices on few ranks are no loss if experts fill up the others.

1. Deal the dense matrices to the expert-parallel ranks' groups, with about the same work for each.
2. Plan each group's dense and expert matrices together over its ranks; equal groups once.
3. Choose among equal dense matrices over all groups, and among experts in each.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from dmuon_megatron.cost.batches import MAX_BATCH, WORKSPACE_BYTES, Cost
from dmuon_megatron.planner import start
from dmuon_megatron.planner.bounds import simple_bound
from dmuon_megatron.planner.expand import expand
from dmuon_megatron.planner.memory import memory_caps
from dmuon_megatron.planner.owners import CLOSE_ENOUGH, Choice, choose, guarded, make_plan
from dmuon_megatron.planner.plan import OwnerPlan
from dmuon_megatron.planner.problem import Problem
from dmuon_megatron.planner.search import lower_bound
from dmuon_megatron.planner.solver import HighsSolver, Solver
from dmuon_megatron.planner.task import MatrixTask, Worker, forward_order

GROUP_PARTS = 500
"""A group too far from the bound is planned again, to within one part in this many."""

Share = tuple[int, ...]
"""Matrices of each dense kind that a group has."""


@dataclass(frozen=True)
class ExpertPlan:
    """Plans of a model with experts.

    Attributes:
        dense: Plan of the dense matrices over all data-parallel ranks; its loads are theirs alone.
        experts: One plan per expert-parallel rank. Owner r of plan e is data-parallel rank
            `expert_ranks(ranks, ep, e)[r]`; its loads include the dense ones.
        lower_bound: Seconds that no plan of both can beat.
    """

    dense: OwnerPlan
    experts: tuple[OwnerPlan, ...]
    lower_bound: float

    @property
    def makespan(self) -> float:
        """Predicted seconds of the most loaded rank, dense and experts together."""
        return max(plan.makespan for plan in self.experts)

    @property
    def gap(self) -> float:
        """Relative distance of the makespan to the lower bound."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def solve_seconds(self) -> float:
        """Time that planning took."""
        return self.dense.solve_seconds


def expert_ranks(ranks: int, ep: int, index: int) -> range:
    """Data-parallel ranks that share the experts of expert-parallel rank `index`.

    Megatron numbers expert-parallel ranks inside data-parallel ones: every `ep`-th rank.

    Raises:
        ValueError: `ranks` is not divisible by `ep`.
    """
    if ep < 1 or ranks % ep:
        raise ValueError(f"{ranks} data-parallel ranks cannot be divided by ep={ep}")
    return range(index, ranks, ep)


def plan_with_experts(
    dense: Iterable[MatrixTask],
    experts: Iterable[MatrixTask],
    ranks: int,
    ep: int,
    cost: Cost,
    *,
    memory_limit: float | None = 1.1,
    max_batch: int = MAX_BATCH,
    workspace: int = WORKSPACE_BYTES,
    waves: int = 4,
    budget: float | None = None,
    solver: Solver | None = None,
) -> ExpertPlan:
    """Owners of the dense matrices and of every expert-parallel rank's experts, by "milp".

    Args:
        dense: Matrices that all data-parallel ranks have.
        experts: Expert matrices of one expert-parallel rank; the others have equal ones.
        ranks: Data-parallel size.
        ep: Expert-parallel size.
        cost: Time of one batched Newton-Schulz.
        memory_limit: As for :func:`plan_owners`, on dense and expert bytes together; so the rest.

    Raises:
        ValueError: `ranks` is not divisible by `ep`, or as :func:`plan_owners`.
    """
    began = time.perf_counter()
    size = len(expert_ranks(ranks, ep, 0))
    limits = {"max_batch": max_batch, "workspace": workspace}
    search = {"policy": "milp", "budget": budget, "solver": solver}
    dense, experts = forward_order(dense), forward_order(experts)
    problem = Problem(dense, (Worker(),) * ranks, cost, **limits)
    shares = _dealt(problem, dense, ep, cost, limits)

    names = {task.name for task in experts}
    if names & {task.name for task in dense}:
        raise ValueError("a dense matrix and an expert matrix have the same name")
    groups = [tuple(shares[:, index].tolist()) for index in range(ep)]
    joint: dict[Share, Problem] = {}
    chosen: dict[Share, Choice] = {}
    for share in dict.fromkeys(groups):
        members = [
            task for kind, n in zip(problem.kinds, share, strict=True) for task in kind.tasks[:n]
        ]
        joint[share] = Problem(
            [*members, *experts], (Worker(),) * size, cost, **limits, apart=names
        )
        caps = memory_caps(joint[share], memory_limit)
        chosen[share] = choose(joint[share], caps, cost, **search)

    def makespan(share: Share) -> int:
        return int(joint[share].loads(chosen[share].assignment).max())

    slowest = max(map(makespan, chosen))
    bound = _bound(dense, experts, ranks, ep, cost, slowest, memory_limit, limits, search)
    for share in chosen:
        if makespan(share) > bound + bound // CLOSE_ENOUGH:
            caps = memory_caps(joint[share], memory_limit)
            chosen[share] = choose(joint[share], caps, cost, **search, close_enough=GROUP_PARTS)

    assignment = np.zeros((len(problem.kinds), ranks), dtype=np.int64)
    for index, share in enumerate(groups):
        mine = list(expert_ranks(ranks, ep, index))
        assignment[:, mine] = _part(joint[share], chosen[share], problem)
    caps = np.full(ranks, max(int(choice.caps.max()) for choice in chosen.values()))
    finish = {
        "policy": "milp",
        "memory_cap": None if memory_limit is None else int(caps[0]),
        "seconds": 0.0,
    }
    methods = {choice.method for choice in chosen.values()}
    dense_choice = Choice(
        assignment,
        simple_bound(problem),
        caps,
        "patterns" if "patterns" in methods else "lpt",
        tuple(dict.fromkeys(note for choice in chosen.values() for note in choice.notes)),
    )
    expansion = expand(problem, dense, assignment, caps, waves)
    dense_plan = make_plan(problem, dense_choice, expansion, **finish)
    plans = []
    for index, share in enumerate(groups):
        loads = [dense_plan.loads[rank] for rank in expert_ranks(ranks, ep, index)]
        own = Problem(experts, [Worker(load=load) for load in loads], cost, **limits)
        choice = replace(chosen[share], assignment=_part(joint[share], chosen[share], own))
        expansion = expand(own, experts, choice.assignment, choice.caps, waves)
        plans.append(make_plan(own, choice, expansion, **finish))
    seconds = time.perf_counter() - began
    return ExpertPlan(replace(dense_plan, solve_seconds=seconds), tuple(plans), bound / 1e6)


def _bound(
    dense: list[MatrixTask],
    experts: list[MatrixTask],
    ranks: int,
    ep: int,
    cost: Cost,
    makespan: int,
    memory_limit: float | None,
    limits: dict[str, int],
    search: dict,
) -> int:
    """Microseconds that no plan can beat, were experts allowed on any rank.

    The linear question is asked only if the simple bound is not near the makespan reached.
    """
    anywhere = [replace(t, name=f"{t.name}@{i}") for t in experts for i in range(ep)]
    apart = {task.name for task in anywhere}
    relaxed = Problem([*dense, *anywhere], (Worker(),) * ranks, cost, **limits, apart=apart)
    bound = simple_bound(relaxed)
    if makespan <= bound + bound // CLOSE_ENOUGH:
        return bound
    caps = memory_caps(relaxed, memory_limit)
    solver = search["solver"] or HighsSolver()
    return guarded(
        lambda: lower_bound(relaxed, bound, makespan, caps, solver), bound, search["budget"]
    )[0]


def _dealt(
    problem: Problem, dense: list[MatrixTask], ep: int, cost: Cost, limits: dict[str, int]
) -> np.ndarray:
    """Matrices of each dense kind for each expert-parallel group, (kinds, ep).

    Every group gets its whole part of each kind; what remains goes where the work is least, and
    moves and swaps level the work further.
    """
    even = problem.counts // ep
    rest = [
        task for kind, n in zip(problem.kinds, even, strict=True) for task in kind.tasks[n * ep :]
    ]
    groups = Problem(rest, (Worker(),) * ep, cost, **limits)
    unbounded = np.full(ep, sum(task.state_bytes for task in dense))
    extra = start.longest_first(groups, unbounded)
    shares = np.repeat(even[:, None], ep, axis=1)
    for s, kind in enumerate(groups.kinds):
        shares[problem.kind_of[kind.tasks[0].name]] += extra[s]
    everything = Problem(dense, (Worker(),) * ep, cost, **limits)
    return start.local_search(everything, shares, unbounded)


def _part(joint: Problem, choice: Choice, problem: Problem) -> np.ndarray:
    """The choice's counts of the kinds of another problem; kinds it lacks have none."""
    counts = np.zeros((len(problem.kinds), joint.ranks), dtype=np.int64)
    for s, kind in enumerate(problem.kinds):
        known = joint.kind_of.get(kind.tasks[0].name)
        if known is not None:
            counts[s] = choice.assignment[known]
    return counts

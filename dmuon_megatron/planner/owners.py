"""Planning: tasks, workers and a cost in, an owner for every matrix out."""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from dmuon_megatron.cost.batches import MAX_BATCH, WORKSPACE_BYTES, Cost
from dmuon_megatron.planner import start
from dmuon_megatron.planner.bounds import simple_bound
from dmuon_megatron.planner.expand import Expansion, describe, expand, split_waves
from dmuon_megatron.planner.memory import memory_caps, relaxed
from dmuon_megatron.planner.plan import OwnerPlan
from dmuon_megatron.planner.problem import Problem
from dmuon_megatron.planner.search import Found, improve, is_small
from dmuon_megatron.planner.solver import HighsSolver, Solver, SolverFault, run_apart
from dmuon_megatron.planner.task import MatrixTask, Worker, as_workers, forward_order

Policy = Literal["milp", "lpt", "numel", "round-robin"]

CLOSE_ENOUGH = 100
"""A first assignment within this fraction of the simple bound (one part in ...) is kept."""

MEMORY_PRICE = 0.04
"""How much longer the slowest rank may take for the sake of the default memory bound.

Even memory usually costs next to nothing. With few matrices a rank it can cost half of the time."""

WIDER_LIMITS = (1.25, 1.5, 2.0, 3.0, None)
"""Bounds to try, in order, where one is too dear; None: no bound."""

HANG_SECONDS = 120.0
"""Without a budget, a search that has not come back after this long is given up."""

GRACE_SECONDS = 5.0
"""The same after the end of a budget."""


class PlannerWarning(UserWarning):
    """The plan is valid, but not what was asked for."""


def plan_owners(
    tasks: Iterable[MatrixTask],
    workers: int | Sequence[Worker],
    cost: Cost,
    *,
    policy: Policy = "milp",
    memory_limit: float | None = 1.1,
    max_batch: int = MAX_BATCH,
    workspace: int = WORKSPACE_BYTES,
    waves: int = 4,
    budget: float | None = None,
    solver: Solver | None = None,
) -> OwnerPlan:
    """Chooses the owner of every matrix.

    Without a budget the answer depends on the arguments only: not on the order of the tasks, the
    process, its hash seed, or the machine's speed.

    Args:
        tasks: The matrices, in any order.
        workers: The ranks, or their number.
        cost: Time of one batched Newton-Schulz. Its attribute `noise`, if it has one, is the
            relative gain that a better plan must promise to be taken.
        policy: "lpt" places the most expensive matrix first, each where the resulting load is
            least, batching included, and improves that by moves and swaps; "milp" starts there
            and goes on to a nearly optimal plan with HiGHS; "numel" places the largest matrix
            first, without looking at time; "round-robin" deals in forward order.
        memory_limit: Bound on a rank's optimizer state as a multiple of the average; the largest
            matrix always fits. None: no bound. "numel" and "round-robin" ignore bounds. A bound
            that would cost more than MEMORY_PRICE of the time is widened, and a note says so.
        max_batch: Largest Newton-Schulz batch.
        workspace: Bound in bytes on the temporary memory of one batch.
        waves: Largest number of waves the buckets are grouped into.
        budget: Seconds after which the search for a better plan ends with the best so far. The
            plan may then differ from run to run: let one rank plan and send the others the result.
        solver: Solver of linear and whole-number programs; default HiGHS.

    Raises:
        ValueError: No worker, two tasks of one name, a matrix larger than every worker's memory,
            an unknown policy, or a limit out of range.

    Warns:
        PlannerWarning: The solver failed; the plan is the one of "lpt".
    """
    began = time.perf_counter()
    _check(policy, max_batch, workspace, waves, budget)
    ordered = forward_order(tasks)
    problem = Problem(ordered, as_workers(workers), cost, max_batch=max_batch, workspace=workspace)
    caps = memory_caps(problem, memory_limit)
    dear = ()
    if policy in ("milp", "lpt") and memory_limit is not None:
        caps, dear = _affordable(problem, caps, memory_limit)
    if policy == "round-robin":
        owner = {task.name: i % problem.ranks for i, task in enumerate(ordered)}
        choice = Choice(problem.counts_of(owner), simple_bound(problem), caps, policy)
        expansion = describe(problem, ordered, owner, split_waves(problem, ordered, waves))
    else:
        choice = choose(problem, caps, cost, policy=policy, budget=budget, solver=solver)
        expansion = expand(problem, ordered, choice.assignment, choice.caps, waves)
    bounded = policy in ("milp", "lpt") and (
        memory_limit is not None or any(w.memory is not None for w in problem.workers)
    )
    return make_plan(
        problem,
        replace(choice, notes=dear + choice.notes),
        expansion,
        policy=policy,
        memory_cap=int(choice.caps.max()) if bounded else None,
        seconds=time.perf_counter() - began,
    )


def _affordable(
    problem: Problem, caps: np.ndarray, limit: float
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The caps, or the first wider ones that cost little time, with a note that says so.

    Judged by the quick first assignments.
    """

    def makespan(caps: np.ndarray) -> int:
        return int(problem.loads(_first_assignment(problem, caps)[0]).max(initial=0))

    best = makespan(memory_caps(problem, None))
    asked = makespan(caps)
    if asked <= (1 + MEMORY_PRICE) * best:
        return caps, ()
    for wider in WIDER_LIMITS:
        if wider is not None and wider <= limit:
            continue
        caps = memory_caps(problem, wider)
        if makespan(caps) <= (1 + MEMORY_PRICE) * best:
            break
    bound = "without a bound" if wider is None else f"up to {wider} times the average"
    return caps, (
        f"optimizer state is balanced {bound}, since {limit} times the average would make the "
        f"slowest rank {asked / best - 1:.0%} slower",
    )


@dataclass(frozen=True)
class Choice:
    """Counts that a policy chose.

    Attributes:
        assignment: Counts (kinds, ranks).
        bound: Microseconds that no assignment can beat.
        caps: Bytes each rank was allowed to own.
        method: What produced the assignment.
        notes: What the user should know.
    """

    assignment: np.ndarray
    bound: int
    caps: np.ndarray
    method: str
    notes: tuple[str, ...] = ()


def choose(
    problem: Problem,
    caps: np.ndarray,
    cost: Cost,
    *,
    policy: Policy,
    budget: float | None = None,
    solver: Solver | None = None,
    close_enough: int = CLOSE_ENOUGH,
) -> Choice:
    """Counts by the policies "milp", "lpt" and "numel"; arguments as for :func:`plan_owners`.

    `close_enough`: a first assignment within one part in this many of the bound is kept.
    """
    bound = simple_bound(problem)
    if policy == "numel":
        return Choice(start.by_numel(problem), bound, caps, policy)
    assignment, caps, notes = _first_assignment(problem, caps)
    if policy == "lpt" or _close_enough(problem, assignment, bound, close_enough):
        return Choice(assignment, bound, caps, "lpt", notes)
    found, more = _search(problem, assignment, bound, caps, solver, budget)
    reached, before = (int(problem.loads(a).max()) for a in (found.assignment, assignment))
    if reached < before * (1 - getattr(cost, "noise", 0.0)):
        return Choice(found.assignment, found.bound, caps, "patterns", notes + more)
    return Choice(assignment, found.bound, caps, "lpt", notes + more)


def make_plan(
    problem: Problem,
    choice: Choice,
    expansion: Expansion,
    *,
    policy: str,
    memory_cap: int | None,
    seconds: float,
) -> OwnerPlan:
    """The plan of a choice and its expansion."""
    assignment = problem.counts_of(expansion.owner)
    return OwnerPlan(
        owner=expansion.owner,
        loads=tuple(int(load) / 1e6 for load in problem.loads(assignment)),
        lower_bound=choice.bound / 1e6,
        memory=tuple(int(size) for size in problem.memory(assignment)),
        batches=expansion.batches,
        waves=expansion.waves,
        policy=policy,
        method=choice.method,
        segments=expansion.segments,
        wave_lag=expansion.wave_lag,
        memory_cap=memory_cap,
        notes=choice.notes,
        solve_seconds=seconds,
    )


def _check(policy: str, max_batch: int, workspace: int, waves: int, budget: float | None) -> None:
    """Raises ValueError for an argument out of range."""
    if policy not in get_args(Policy):
        raise ValueError(f"policy {policy!r} is unknown; choose from {', '.join(get_args(Policy))}")
    for name, value in (("max_batch", max_batch), ("workspace", workspace), ("waves", waves)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if budget is not None and not budget > 0:
        raise ValueError(f"budget must be a number of seconds above 0, got {budget}")


def _first_assignment(
    problem: Problem, caps: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """LPT and local search under the caps, or under the least widening that lets all fit.

    Returns:
        Counts, the caps used, and notes: one if they were widened.
    """
    asked = caps
    assignment = start.longest_first(problem, caps)
    if assignment is None:
        assignment = start.best_fit(problem, caps)
    while assignment is None:
        caps = relaxed(caps)
        assignment = start.longest_first(problem, caps)
    notes = ()
    if caps is not asked:
        notes = (
            f"memory cap relaxed from {asked.max() / 2**30:.2f} to {caps.max() / 2**30:.2f} GiB a "
            "rank: "
            "the matrices do not fit otherwise",
        )
    return start.local_search(problem, assignment, caps), caps, notes


def _close_enough(problem: Problem, assignment: np.ndarray, bound: int, parts: int) -> bool:
    """Whether a search could not gain anything worth it; small problems are solved to the end."""
    makespan = int(problem.loads(assignment).max())
    slack = 0 if is_small(problem) else bound // parts
    return makespan <= bound + slack


def _search(
    problem: Problem,
    assignment: np.ndarray,
    bound: int,
    caps: np.ndarray,
    solver: Solver | None,
    budget: float | None,
) -> tuple[Found, tuple[str, ...]]:
    """The pattern search, guarded: whatever happens to the solver, there is a valid result.

    Returns:
        What was found, and notes for the user.
    """
    deadline = None if budget is None else time.monotonic() + budget
    solver = HighsSolver() if solver is None else solver
    found, notes = guarded(
        lambda: improve(problem, assignment, bound, caps, solver, deadline),
        Found(assignment, bound),
        budget,
    )
    if not found.explored:
        notes += ("too many ways to fill a rank for the pattern search: owners by LPT",)
    if not found.finished:
        notes += (f"search ended by the budget of {budget:g} s",)
    return found, notes


def guarded[T](
    function: Callable[[], T], otherwise: T, budget: float | None
) -> tuple[T, tuple[str, ...]]:
    """A function's result, or the other one and a note if the solver fails in it.

    Warns:
        PlannerWarning: The solver failed.
    """
    patience = HANG_SECONDS if budget is None else budget + GRACE_SECONDS
    try:
        return run_apart(function, patience), ()
    except SolverFault as fault:
        note = f"owners by LPT, since the solver failed: {fault}"
        warnings.warn(note, PlannerWarning, stacklevel=5)
        return otherwise, (note,)

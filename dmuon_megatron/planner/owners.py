"""Planning: tasks, workers and a cost in, an owner for every matrix out."""

import time
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import numpy as np

from dmuon_megatron.cost.batches import MAX_BATCH, WORKSPACE_BYTES, Cost
from dmuon_megatron.planner import start
from dmuon_megatron.planner.bounds import simple_bound
from dmuon_megatron.planner.expand import describe, expand, split_waves
from dmuon_megatron.planner.memory import memory_caps, relaxed
from dmuon_megatron.planner.plan import OwnerPlan
from dmuon_megatron.planner.problem import Problem
from dmuon_megatron.planner.task import MatrixTask, Worker, as_workers, forward_order

Policy = Literal["lpt", "numel", "round-robin"]


def plan_owners(
    tasks: Iterable[MatrixTask],
    workers: int | Sequence[Worker],
    cost: Cost,
    *,
    policy: Policy = "lpt",
    memory_limit: float | None = 1.1,
    max_batch: int = MAX_BATCH,
    workspace: int = WORKSPACE_BYTES,
    waves: int = 4,
) -> OwnerPlan:
    """Chooses the owner of every matrix.

    The answer depends on the arguments only: not on the order of the tasks, the process, its hash
    seed, or the machine's speed.

    Args:
        tasks: The matrices, in any order.
        workers: The ranks, or their number.
        cost: Time of one batched Newton-Schulz.
        policy: "lpt" places the most expensive matrix first, each where the resulting load is
            least, batching included, and improves that by moves and swaps; "numel" does the
            former by elements, without looking at time; "round-robin" deals in forward order.
        memory_limit: Bound on a rank's optimizer state as a multiple of the average; the largest
            matrix always fits. None: no bound. "numel" and "round-robin" ignore bounds.
        max_batch: Largest Newton-Schulz batch.
        workspace: Bound in bytes on the temporary memory of one batch.
        waves: Largest number of waves the buckets are grouped into.

    Raises:
        ValueError: No worker, two tasks of one name, a matrix larger than every worker's memory,
            an unknown policy, or a limit out of range.
    """
    began = time.perf_counter()
    if policy not in get_args(Policy):
        raise ValueError(f"policy {policy!r} is unknown; choose from {', '.join(get_args(Policy))}")
    for name, value in (("max_batch", max_batch), ("workspace", workspace), ("waves", waves)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    ordered = forward_order(tasks)
    problem = Problem(ordered, as_workers(workers), cost, max_batch=max_batch, workspace=workspace)

    caps = memory_caps(problem, memory_limit)
    notes: list[str] = []
    if policy == "round-robin":
        owner = {task.name: i % problem.ranks for i, task in enumerate(ordered)}
        kind_of = {task.name: s for s, kind in enumerate(problem.kinds) for task in kind.tasks}
        assignment = np.zeros((len(problem.kinds), problem.ranks), dtype=np.int64)
        for name, rank in owner.items():
            assignment[kind_of[name], rank] += 1
        expansion = describe(problem, ordered, owner, split_waves(problem, ordered, kind_of, waves))
    else:
        if policy == "numel":
            assignment = start.by_numel(problem)
        else:
            assignment, caps, notes = _start_within(problem, caps)
            assignment = start.local_search(problem, assignment, caps)
        expansion = expand(problem, ordered, assignment, caps, waves)

    loads = _owner_loads(problem, expansion.owner)
    memory = [0] * problem.ranks
    for task in ordered:
        memory[expansion.owner[task.name]] += task.state_bytes
    bounded = policy == "lpt" and (
        memory_limit is not None or any(w.memory is not None for w in problem.workers)
    )
    return OwnerPlan(
        owner=expansion.owner,
        loads=tuple(load / 1e6 for load in loads),
        lower_bound=simple_bound(problem) / 1e6,
        memory=tuple(memory),
        batches=expansion.batches,
        waves=expansion.waves,
        policy=policy,
        method=policy,
        segments=expansion.segments,
        wave_lag=expansion.wave_lag,
        memory_cap=int(caps.max()) if bounded else None,
        notes=tuple(notes),
        solve_seconds=time.perf_counter() - began,
    )


def _start_within(problem: Problem, caps: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """LPT under the caps, or under the least widening of them that lets every matrix fit.

    Returns:
        Counts, the caps used, and a note if they were widened.
    """
    asked = caps
    while (assignment := start.longest_first(problem, caps)) is None:
        caps = relaxed(caps)
    if caps is asked:
        return assignment, caps, []
    note = (
        f"memory cap relaxed from {int(asked.max())} to {int(caps.max())} bytes a rank: "
        "the matrices do not fit otherwise"
    )
    return assignment, caps, [note]


def _owner_loads(problem: Problem, owner: dict[str, int]) -> list[int]:
    """Microseconds of each rank."""
    assignment = np.zeros((len(problem.kinds), problem.ranks), dtype=np.int64)
    for s, kind in enumerate(problem.kinds):
        for task in kind.tasks:
            assignment[s, owner[task.name]] += 1
    return [int(load) for load in problem.loads(assignment)]

"""Simple ways to choose owners, and what they cost, to compare plans with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dmuon_megatron.cost.batches import MAX_BATCH, WORKSPACE_BYTES, Cost
from dmuon_megatron.planner.layer_wise import default_bucket_size, layer_wise_layout
from dmuon_megatron.planner.owners import plan_owners
from dmuon_megatron.planner.problem import Problem
from dmuon_megatron.planner.task import MatrixTask, Worker

MEGATRON = "Megatron LayerWise"
MEGATRON_BATCHED = "same owners, batched"
LPT = "LPT by cost, swaps"
NUMEL = "LPT by elements"
PING_PONG = "ping-pong"
ROUND_ROBIN = "round robin"


@dataclass(frozen=True)
class Baseline:
    """One way to choose owners.

    Attributes:
        name: What it is called in tables.
        loads: Seconds of each rank.
        padding: Padding in the buffer over the elements of the matrices; None: not of this kind.
        buckets: Buckets of the buffer; None: not of this kind.
    """

    name: str
    loads: tuple[float, ...]
    padding: float | None = None
    buckets: int | None = None

    @property
    def makespan(self) -> float:
        """Seconds of the most loaded rank."""
        return max(self.loads)


def megatron_layout(
    tasks: Sequence[MatrixTask],
    ranks: int,
    cost: Cost,
    *,
    numels: Sequence[int] | None = None,
    bucket_size: int | None = None,
    max_batch: int = MAX_BATCH,
    workspace: int = WORKSPACE_BYTES,
) -> list[Baseline]:
    """Megatron's layout, one matrix at a time as it does, and with the batches it could have.

    Args:
        tasks: Matrices in forward order.
        ranks: Data-parallel size.
        cost: Time of one batched Newton-Schulz.
        numels: Elements of each in the buffer, if only a shard of it is there; default all.
        bucket_size: Elements of Megatron's buckets; default Megatron's own.
    """
    size = default_bucket_size(ranks) if bucket_size is None else bucket_size
    layout = layer_wise_layout(numels or [task.numel for task in tasks], ranks, size)
    owner = {task.name: rank for task, rank in zip(tasks, layout.owner, strict=True)}
    padding = layout.padding / max(1, layout.elements - layout.padding)
    return [
        Baseline(
            name,
            owner_loads(tasks, owner, ranks, cost, max_batch=largest, workspace=workspace),
            padding,
            len(layout.buckets),
        )
        for name, largest in ((MEGATRON, 1), (MEGATRON_BATCHED, max_batch))
    ]


def simple_policies(
    tasks: Sequence[MatrixTask],
    ranks: int,
    cost: Cost,
    *,
    memory_limit: float | None = None,
    max_batch: int = MAX_BATCH,
    workspace: int = WORKSPACE_BYTES,
) -> list[Baseline]:
    """LPT by cost and by elements, round robin and ping-pong, all in the best batches."""
    limits = {"max_batch": max_batch, "workspace": workspace}
    result = []
    for name, policy in ((LPT, "lpt"), (NUMEL, "numel"), (ROUND_ROBIN, "round-robin")):
        plan = plan_owners(tasks, ranks, cost, policy=policy, memory_limit=memory_limit, **limits)
        result.append(Baseline(name, plan.loads))
    owner = _ping_pong(tasks, ranks)
    return [*result, Baseline(PING_PONG, owner_loads(tasks, owner, ranks, cost, **limits))]


def owner_loads(
    tasks: Sequence[MatrixTask],
    owner: Mapping[str, int],
    ranks: int,
    cost: Cost,
    *,
    max_batch: int = MAX_BATCH,
    workspace: int = WORKSPACE_BYTES,
) -> tuple[float, ...]:
    """Seconds of each rank under given owners, in the best batches of at most `max_batch`."""
    problem = Problem(tasks, (Worker(),) * ranks, cost, max_batch=max_batch, workspace=workspace)
    return tuple(int(load) / 1e6 for load in problem.loads(problem.counts_of(owner)))


def _ping_pong(tasks: Sequence[MatrixTask], ranks: int) -> dict[str, int]:
    """Smallest matrix first, dealt to the ranks forth and back."""
    turn = [*range(ranks), *reversed(range(ranks))]
    ordered = sorted(tasks, key=lambda task: task.numel)
    return {task.name: turn[i % len(turn)] for i, task in enumerate(ordered)}

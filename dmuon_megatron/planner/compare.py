"""A plan of a whole model, stage by stage, beside what other layouts would cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dmuon_megatron.cost.batches import Cost
from dmuon_megatron.planner.baselines import Baseline, megatron_layout, simple_policies
from dmuon_megatron.planner.experts import ExpertPlan, expert_ranks, plan_with_experts
from dmuon_megatron.planner.owners import Policy, plan_owners
from dmuon_megatron.planner.plan import OwnerPlan
from dmuon_megatron.planner.task import MatrixTask


@dataclass(frozen=True)
class Stage:
    """Matrices of one pipeline stage.

    Attributes:
        name: How the stage is called in tables.
        dense: Matrices outside the experts, in forward order.
        experts: Expert matrices of one expert-parallel rank.
        copies: Ranks among which Megatron's layout repeats the update of a dense matrix, or
            splits the matrix: its tensor-parallel size if `dense` are whole matrices.
        numels: Elements of each dense matrix in one rank's buffer; None: all of them.
    """

    name: str
    dense: Sequence[MatrixTask]
    experts: Sequence[MatrixTask] = ()
    copies: int = 1
    numels: Sequence[int] | None = None


@dataclass(frozen=True)
class StagePlan:
    """Plan of a stage and the layouts it is compared with.

    Attributes:
        stage: The stage.
        ranks: Ranks that plan it.
        plan: Owners of the dense matrices, or of dense and experts.
        others: Other layouts; empty if none were asked for.
    """

    stage: Stage
    ranks: int
    plan: OwnerPlan | ExpertPlan
    others: tuple[Baseline, ...]

    @property
    def loads(self) -> tuple[float, ...]:
        """Seconds of each rank, experts included."""
        if isinstance(self.plan, OwnerPlan):
            return self.plan.loads
        loads = [0.0] * self.ranks
        for index, part in enumerate(self.plan.experts):
            for load, rank in zip(
                part.loads, expert_ranks(self.ranks, len(self.plan.experts), index), strict=True
            ):
                loads[rank] = load
        return tuple(loads)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about the plan."""
        return self.plan.notes if isinstance(self.plan, OwnerPlan) else self.plan.dense.notes


def plan_stage(
    stage: Stage,
    ranks: int,
    ep: int,
    cost: Cost,
    *,
    policy: Policy = "milp",
    memory_limit: float | None = 1.1,
    compare: bool = False,
    bucket_size: int | None = None,
    tell: Callable[[str], None] = lambda doing: None,
    **limits,
) -> StagePlan:
    """Plans a stage.

    Args:
        stage: Its matrices.
        ranks: Ranks that may own dense matrices.
        ep: Expert-parallel size.
        cost: Time of one batched Newton-Schulz.
        policy: As for :func:`plan_owners`; stages with experts know "milp" only.
        memory_limit: As for :func:`plan_owners`.
        compare: Whether to work out other layouts too.
        bucket_size: Elements of Megatron's buckets; default Megatron's own.
        tell: Called with what is being done.
        limits: `max_batch` and `workspace`.

    Raises:
        ValueError: As :func:`plan_owners`, or a policy that experts do not know.
    """
    tell(f"{stage.name}: owners for {len(stage.dense) + len(stage.experts)} matrices")
    if stage.experts:
        if policy != "milp":
            raise ValueError(f'policy {policy!r} does not know experts; use "milp"')
        plan = plan_with_experts(
            stage.dense, stage.experts, ranks, ep, cost, memory_limit=memory_limit, **limits
        )
    else:
        plan = plan_owners(
            stage.dense, ranks, cost, policy=policy, memory_limit=memory_limit, **limits
        )
    others: tuple[Baseline, ...] = ()
    if compare:
        tell(f"{stage.name}: other layouts")
        others = tuple(_others(stage, ranks, ep, cost, bucket_size, memory_limit, limits))
    return StagePlan(stage, ranks, plan, others)


def _others(
    stage: Stage,
    ranks: int,
    ep: int,
    cost: Cost,
    bucket_size: int | None,
    memory_limit: float | None,
    limits: dict[str, int],
) -> list[Baseline]:
    """Other layouts; with experts, each with its own layout of them on top."""

    def layouts(tasks, numels, copies, count):
        megatron = megatron_layout(
            tasks, count // copies, cost, numels=numels, bucket_size=bucket_size, **limits
        )
        megatron = [
            replace(one, loads=tuple(load for load in one.loads for _ in range(copies)))
            for one in megatron
        ]
        simple = simple_policies(tasks, count, cost, memory_limit=memory_limit, **limits)
        return megatron + simple

    dense = layouts(stage.dense, stage.numels, stage.copies, ranks)
    if not stage.experts:
        return dense
    experts = layouts(stage.experts, None, 1, ranks // ep)
    return [
        replace(
            below,
            loads=tuple(load + above.loads[rank // ep] for rank, load in enumerate(below.loads)),
        )
        for below, above in zip(dense, experts, strict=True)
    ]

"""Who owns which matrix of a pipeline stage: decided by one rank, the same on all.

The plan comes before the first buffer, since buffers are laid out by owner. The first rank of the
group measures what it needs to know of its device, plans, and sends the plan to the others.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dmuon_megatron.config import DMuonConfig
from dmuon_megatron.cost import AnalyticCost, Cost, MeasuredCost, measurements, nearest_preset
from dmuon_megatron.matrices import Matrix
from dmuon_megatron.planner import MatrixTask, OwnerPlan, plan_owners

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ownership:
    """What is decided before the first buffer exists, shared by all model chunks of a stage.

    Attributes:
        config: the settings that the plan was made with.
        matrices: per model chunk, in forward order.
        plan: matrix name to data-parallel rank.
        cost: what the planner took for the time of a batch, in words.
        makespan_by_numel: predicted seconds of the slowest rank, had matrices been balanced by
            size, as optimizers do that look at memory only.
    """

    config: DMuonConfig
    matrices: list[list[Matrix]]
    plan: OwnerPlan
    cost: str
    makespan_by_numel: float


def decide_ownership(
    config: DMuonConfig,
    matrices: list[list[Matrix]],
    bucket_of: Mapping[torch.nn.Parameter, int],
    common: object,
    group: dist.ProcessGroup,
) -> Ownership:
    """Plan on the first rank of the group and agree on the plan. Every rank of it must call this.

    Args:
        config: policy and budgets.
        matrices: per model chunk, in forward order.
        bucket_of: bucket of each matrix's parameter, numbered in forward order.
        common: whatever else the ranks must have in common; compared by its repr.
        group: the ranks among which owners are chosen.

    Raises:
        RuntimeError: on every rank, if planning failed, or if ranks see different models.
    """
    tasks = [
        MatrixTask(m.name, m.rows, m.cols, bucket_of[m.param], tuple(b.shape for b in m.blocks))
        for chunk in matrices
        for m in chunk
    ]
    seen: list = [None] * group.size()
    dist.all_gather_object(seen, _digest(config, tasks, common), group=group)
    if len(set(seen)) > 1:
        raise RuntimeError(
            "data-parallel ranks have different models or DMuon settings, so they cannot share an "
            f"owner plan (matrices by rank: {seen}). Start every rank with the same arguments."
        )
    answer: list = [None]
    if group.rank() == 0:
        device = next(m.param.device for chunk in matrices for m in chunk)
        answer = [_plan_or_error(config, tasks, device, group.size())]
    dist.broadcast_object_list(answer, dist.get_global_rank(group, 0), group=group)
    if isinstance(answer[0], str):
        raise RuntimeError(f"planning the owners of the matrices failed: {answer[0]}")
    return Ownership(config, matrices, *answer[0])


def _plan_or_error(
    config: DMuonConfig, tasks: Sequence[MatrixTask], device: torch.device, ranks: int
) -> tuple[OwnerPlan, str, float] | str:
    """The plan, the cost in words and the makespan by size; or what went wrong, for all ranks."""
    try:
        cost, words = _cost(config, tasks, device)
        # Fewer waves are joined from these, so that their number changes no owner and no batch.
        settings = {"workspace": config.workspace_mb * 2**20, "waves": max(4, config.waves)}
        plan = plan_owners(
            tasks,
            ranks,
            cost,
            policy=config.owner_policy,
            budget=config.plan_budget,
            **settings,
        )
        by_numel = plan_owners(tasks, ranks, cost, policy="numel", **settings)
    except Exception as error:
        logger.exception("planning the owners of the matrices failed")
        return f"{type(error).__name__}: {error}"
    return plan, words, by_numel.makespan


def _cost(
    config: DMuonConfig, tasks: Sequence[MatrixTask], device: torch.device
) -> tuple[Cost, str]:
    """Times of Newton-Schulz batches, measured if there is a budget, and in words what they are."""
    if not config.profile_budget:
        cuda = device.type == "cuda"
        name = nearest_preset(torch.cuda.get_device_name(device) if cuda else "CPU")
        return AnalyticCost(name, steps=config.ns_steps), f"the analytic cost model {name}"
    cost = MeasuredCost(
        device,
        method=config.ns_method,
        dtype=torch.bfloat16 if config.matmul_precision == "medium" else torch.float32,
        steps=config.ns_steps,
    )
    shapes = Counter(block for task in tasks for block in task.blocks)
    requests = measurements(shapes, workspace=config.workspace_mb * 2**20)
    missing = len(cost.missing(requests))
    if missing:
        logger.info("timing Newton-Schulz for %d shapes and batches", missing)
    left = len(cost.measure(requests, config.profile_budget))
    return cost, f"{len(requests) - left} of {len(requests)} times measured on this device"


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]

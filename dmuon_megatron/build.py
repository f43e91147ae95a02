"""Builds DMuon's optimizer: the two calls that code without megatron.training makes.

chunks = wrap_with_ddp(chunks, ddp_config)           # in place of DistributedDataParallel
optimizer = get_dmuon_optimizer(config, chunks)      # in place of get_megatron_optimizer
"""

import copy
import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer import (
    DistributedOptimizer,
    OptimizerConfig,
    _get_megatron_optimizer_based_on_param_groups,
    _get_param_groups,
    get_standard_config_overrides,
)
from megatron.core.optimizer.grad_scaler import ConstantGradScaler
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_pg_rank

from dmuon_megatron.config import refuse_unsupported
from dmuon_megatron.data_parallel import OwnerDataParallel, wrap_with_ddp
from dmuon_megatron.matrices import is_matrix
from dmuon_megatron.muon import Recipe, scale_factor
from dmuon_megatron.optimizer import DMuonChainedOptimizer, DMuonDistributedOptimizer, Muon
from dmuon_megatron.orthogonalize import coefficient_schedule
from dmuon_megatron.orthogonalize.coefficients import half_precision_refusal
from dmuon_megatron.report import print_report

__all__ = ["get_dmuon_optimizer", "wrap_with_ddp"]


def recipe_from_config(config: OptimizerConfig, method: str) -> Recipe:
    """Muon's update as Megatron's ``--muon-*`` flags define it.

    Args:
        config: Megatron's optimizer config.
        method: form of the Newton-Schulz iteration.

    Raises:
        ValueError: a value that does not exist, naming its flag.
    """
    for flag, value in (
        ("--lr", config.lr),
        ("--weight-decay", config.weight_decay),
        ("--clip-grad", config.clip_grad),
        ("--muon-extra-scale-factor", config.muon_extra_scale_factor),
    ):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{flag} must be finite, got {value}")
    precision = config.muon_fp32_matmul_prec
    if precision not in ("medium", "high", "highest"):
        raise ValueError(f"--muon-fp32-matmul-prec must be medium or high, got {precision!r}")
    if config.muon_num_ns_steps < 1:
        raise ValueError(f"--muon-num-ns-steps must be at least 1, got {config.muon_num_ns_steps}")
    if not 0 <= config.muon_momentum < 1:
        raise ValueError(f"--muon-momentum must be in [0, 1), got {config.muon_momentum}")
    try:
        coefficient_schedule(config.muon_coefficient_type, config.muon_num_ns_steps)
    except ValueError as error:
        raise ValueError(f"--muon-coefficient-type: {error}") from None
    # The iteration refuses it too, but in the first step, and on owners only.
    diverges = half_precision_refusal(config.muon_coefficient_type)
    if diverges and precision != "highest":
        raise ValueError(
            f"--muon-coefficient-type {config.muon_coefficient_type} does not go with "
            f"--muon-fp32-matmul-prec {precision}: {diverges}. Choose another coefficient set."
        )
    scale_factor(1, 1, config.muon_scale_mode)
    return Recipe(
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        coefficients=config.muon_coefficient_type,
        steps=config.muon_num_ns_steps,
        scale_mode=config.muon_scale_mode,
        extra_scale=config.muon_extra_scale_factor,
        # emerging-optimizers' reading of "medium": the iteration runs in bf16
        dtype=torch.bfloat16 if precision == "medium" else torch.float32,
        precision=precision,
        method=method,
    )


def get_dmuon_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[OwnerDataParallel],
    config_overrides: dict | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
) -> DMuonChainedOptimizer:
    """The optimizer of a model that ``wrap_with_ddp`` wrapped.

    Args:
        config: Megatron's optimizer config: lr, weight decay, clipping, ``muon_*`` and ``adam_*``.
            ``use_distributed_optimizer`` may be either.
        model_chunks: the wrapped model chunks of this rank.
        config_overrides: per-parameter overrides, as for Megatron's get_megatron_optimizer.
        use_gloo_process_groups: as there.
        pg_collection: process groups; Megatron's global ones if None.

    Raises:
        ValueError: a setting that DMuon does not serve.
        RuntimeError: ranks with different settings; on every rank.
        TypeError: model chunks that were not wrapped by ``wrap_with_ddp``.
    """
    model_chunks = list(model_chunks)
    if not all(isinstance(chunk, OwnerDataParallel) for chunk in model_chunks):
        raise TypeError(
            "DMuon's optimizer needs model chunks wrapped by dmuon_megatron.wrap_with_ddp, got "
            + ", ".join(sorted({type(chunk).__name__ for chunk in model_chunks}))
            + ". With megatron.training call dmuon_megatron.install() before the model is built."
        )
    refuse_unsupported(config)
    ownership = model_chunks[0].ownership
    settings = ownership.config
    if settings.split_qkv != config.muon_split_qkv:
        raise ValueError(
            f"DMuonConfig has split_qkv={settings.split_qkv}, by which the owners were planned, "
            f"but OptimizerConfig has muon_split_qkv={config.muon_split_qkv}: give both the same"
        )
    # Megatron wants one config object for all children; the caller's stays as it is.
    config = copy.copy(config)
    config.use_distributed_optimizer = True
    recipe = mistake = None
    try:
        recipe = recipe_from_config(config, settings.ns_method)
    except ValueError as error:
        mistake = str(error)

    if config_overrides is None:
        config_overrides = get_standard_config_overrides(config)
    rest = ParamKey(predicate=ParamPredicate("not_a_matrix", lambda param: not is_matrix(param)))
    groups = _get_param_groups(
        model_chunks, config, {**config_overrides, rest: {"optimizer": "adam"}}
    )
    process_groups = ProcessGroupCollection.setup_process_groups_for_optimizer(
        pg_collection, model_chunks, use_gloo_process_groups and pg_collection is None
    )
    numbers = {"lr": config.lr, "weight_decay": config.weight_decay, "clip_grad": config.clip_grad}
    _agree(
        numbers | (dataclasses.asdict(recipe) if recipe else {}),
        mistake,
        process_groups["intra_dp_cp_group"],
    )
    buffers = {
        kind: {
            i: [b for b in chunk.buffers if hasattr(b, "segments") == (kind == "muon")]
            for i, chunk in enumerate(model_chunks)
        }
        for kind in ("muon", "adam")
    }
    shared = {
        "data_parallel_group": process_groups["intra_dp_cp_group"],
        "data_parallel_group_gloo": process_groups["intra_dp_cp_group_gloo"],
        "data_parallel_group_idx": get_pg_rank(process_groups["mp_group"]),
        "distributed_optimizer_instance_id": 0,
    }

    muon_groups = [g for g in groups if g.get("optimizer") != "adam"]
    muon = DMuonDistributedOptimizer(
        Muon(muon_groups, lr=config.lr, weight_decay=config.weight_decay),
        config,
        ConstantGradScaler(config.loss_scale) if config.loss_scale else None,
        _state_exists,
        model_chunks=model_chunks,
        per_model_buffers=buffers["muon"],
        recipe=recipe,
        workspace_bytes=settings.workspace_mb * 2**20,
        **shared,
    )
    muon.grad_stats_parallel_group = process_groups["intra_dist_opt_group"]

    # Megatron's builder goes by the optimizer's name, and its chain by the config's identity.
    adam: DistributedOptimizer = _get_megatron_optimizer_based_on_param_groups(
        config=dataclasses.replace(config, optimizer="adam"),
        model_chunks=model_chunks,
        param_groups=[g for g in groups if g.get("optimizer") == "adam"],
        per_model_buffers=buffers["adam"],
        model_parallel_group=process_groups["mp_group"],
        intra_dist_opt_group=process_groups["intra_dist_opt_group"],
        pg_collection=pg_collection,
        **shared,
    )
    adam.config = config
    muon.tp_group, muon.expert_tp_group = adam.tp_group, adam.expert_tp_group
    print_report(model_chunks, muon, [adam])
    return DMuonChainedOptimizer(muon, [adam])


def _agree(settings: dict, mistake: str | None, group: dist.ProcessGroup) -> None:
    """Raise on every rank unless all have the same settings, and none a mistake in them.

    Replicas would stay equal all the same, and every matrix follow the settings of its owner.
    """
    seen: list = [None] * group.size()
    dist.all_gather_object(seen, (settings, mistake), group=group)
    mistakes = [(rank, text) for rank, (_, text) in enumerate(seen) if text]
    if mistakes:
        where = "" if len(mistakes) == len(seen) else f" (data-parallel rank {mistakes[0][0]})"
        raise ValueError(mistakes[0][1] + where)
    seen = [theirs for theirs, _ in seen]
    differing = [name for name in settings if any(s[name] != seen[0][name] for s in seen)]
    if differing:
        raise RuntimeError(
            "data-parallel ranks have different settings: "
            + "; ".join(f"{n}, by rank: {', '.join(str(s[n]) for s in seen)}" for n in differing)
            + ". Start every rank with the same arguments."
        )


def _state_exists(optimizer, config=None) -> None:
    """Momentum is there from construction; Megatron asks for a function that makes it."""

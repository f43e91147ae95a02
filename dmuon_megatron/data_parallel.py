"""Megatron's DDP with owners: plans who owns what, then lays the buffers out accordingly."""

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from dmuon_megatron.config import DMuonConfig, refuse_unsupported
from dmuon_megatron.layout import OwnerParamLayout, assign_buckets, owner_layout
from dmuon_megatron.matrices import find_matrices, is_matrix
from dmuon_megatron.ownership import Ownership, decide_ownership
from dmuon_megatron.transport.bucket_group import build_bucket_groups


class OwnerDataParallel(DistributedDataParallel):
    """Megatron's DDP whose matrix buffers have one segment per owner in each bucket.

    Attributes:
        ownership: the stage's plan.
        names: parameter to its name in the model.
        grads_reduced: whether the owners have reduced gradients that no step has used.
    """

    def __init__(self, ddp_config, module, layout: FullParamLayout, ownership: Ownership, pg):
        super().__init__(
            config=get_model_config(module),
            ddp_config=ddp_config,
            module=module,
            pg_collection=pg,
            full_param_layout=layout,
        )
        self.ownership = ownership
        self.grads_reduced = False
        self.names = {param: name for name, param in module.named_parameters()}
        segments = {
            id(one.param_index_map): one.segments
            for one in layout.layouts.values()
            if isinstance(one, OwnerParamLayout)
        }
        position = {param: i for i, param in enumerate(self.names)}
        for buffer in self.buffers:
            if id(buffer.param_index_map) in segments:
                buffer.segments = segments[id(buffer.param_index_map)]
        self.bucket_groups = build_bucket_groups(self.buffers, position.__getitem__)
        self.param_to_bucket_group = {
            param: group for group in self.bucket_groups for param in group.params
        }

    def finish_grad_sync(self, *args, **kwargs):
        super().finish_grad_sync(*args, **kwargs)
        self.grads_reduced = True

    def params_without_grad(self) -> list[str]:
        """Names of the parameters that got no gradient on this rank in the present step."""
        return [self.names[p] for group in self.bucket_groups for p in group.params_without_grad]

    def settle(self, params: Iterable[torch.nn.Parameter] | None = None) -> None:
        """Wait for weights that are still being published. Sends nothing, so any rank may call it.

        Args:
            params: wait for these parameters' buckets only; None: for all.
        """
        if params is None:
            groups = self.bucket_groups
        else:
            groups = {self.param_to_bucket_group[p]: None for p in params}
        for group in groups:
            group.settle()

    # Whoever reads or replaces all weights does so when they have arrived.

    def state_dict(self, *args, **kwargs):
        self.settle()
        return super().state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, *args, **kwargs):
        self.settle()
        return super().state_dict_for_save_checkpoint(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        self.settle()
        return super().load_state_dict(*args, **kwargs)


def resolve_bucket_size(
    config: DMuonConfig, ddp_config: DistributedDataParallelConfig, numel: int, dp_size: int
) -> int:
    """Elements per bucket, the same with overlap on and off.

    Megatron puts everything into one bucket when --overlap-grad-reduce is off. DMuon does not: the
    layout, and with it the order of every sum, must not depend on overlap.

    Args:
        numel: elements of all model chunks on this rank.
        dp_size: data-parallel size.
    """
    buckets = config.num_buckets or ddp_config.num_buckets
    if buckets:
        return max(1, numel // buckets)
    # Megatron's default, see DistributedDataParallel.__init__.
    return config.bucket_size or ddp_config.bucket_size or max(40_000_000, 1_000_000 * dp_size)


def wrap_with_ddp(
    model_chunks: Sequence[torch.nn.Module],
    ddp_config: DistributedDataParallelConfig,
    dmuon_config: DMuonConfig | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[OwnerDataParallel]:
    """Plan the owners of a pipeline stage's matrices and wrap its model chunks in DDP.

    Takes the place of Megatron's DDP wrapping for a run with DMuon; ``get_dmuon_optimizer`` takes
    the result.

    Args:
        model_chunks: Megatron models on this rank, in mixed precision already.
        ddp_config: is set to ``use_distributed_optimizer``.
        dmuon_config: defaults if None.
        pg_collection: process groups; Megatron's global ones if None.

    Raises:
        ValueError: a setting that DMuon does not serve, or a model without any matrix.
        RuntimeError: ranks with different models, or a plan that failed; on every rank.
    """
    config = dmuon_config or DMuonConfig()
    pg = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    refuse_unsupported(ddp_config, *map(get_model_config, model_chunks))
    ddp_config.use_distributed_optimizer = True
    group = pg.dp_cp
    numel = sum(p.numel() for chunk in model_chunks for p in chunk.parameters())
    given = ddp_config.bucket_size
    bucket_size = resolve_bucket_size(config, ddp_config, numel, group.size())

    matrices = find_matrices(model_chunks, split_qkv=config.split_qkv)
    if not any(matrices):
        raise ValueError(
            "--optimizer dmuon found no matrix to update: no trainable 2-D weight besides "
            "embeddings and output layer. Unfreeze some, or train with --optimizer adam."
        )
    for chunk in model_chunks:
        for param in chunk.parameters():
            # Megatron gives parameters with this mark buffers of their own.
            param.is_managed_by_layer_wise_optimizer = is_matrix(param)

    keyed = [
        group_params_for_buffers(
            [p for p in chunk.parameters() if p.requires_grad], ddp_config.grad_reduce_in_fp32
        )
        for chunk in model_chunks
    ]
    buckets = [
        {
            key: assign_buckets(params, bucket_size)
            for key, (params, _) in groups.items()
            if key.is_managed_by_layer_wise_optimizer
        }
        for groups in keyed
    ]
    bucket_of = _number_in_forward_order(model_chunks, buckets)
    # Buckets of all parameters, Adam's too, must be the same on every rank.
    common = (
        [
            (name, tuple(p.shape), p.dtype)
            for chunk in model_chunks
            for name, p in chunk.named_parameters()
            if p.requires_grad
        ],
        bucket_size,
        dataclasses.asdict(ddp_config),
    )
    ownership = decide_ownership(config, matrices, bucket_of, common, group)
    owner = {m.param: ownership.plan.owner[m.name] for chunk in matrices for m in chunk}

    wrapped = []
    # Megatron makes its DDP on a side stream, where a CUDA graph may later capture backward.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for chunk, groups, matrix_buckets in zip(model_chunks, keyed, buckets, strict=True):
            layouts = {
                key: owner_layout(matrix_buckets[key], owner, group.size(), indices)
                if key in matrix_buckets
                else DistributedOptimizer._compute_per_buffer_param_layout(
                    params, bucket_size, group.size(), ddp_config, indices
                )
                for key, (params, indices) in groups.items()
            }
            layout = FullParamLayout(layouts)
            wrapped.append(OwnerDataParallel(ddp_config, chunk, layout, ownership, pg))
    torch.cuda.current_stream().wait_stream(stream)
    ddp_config.bucket_size = given  # Megatron sets it to None where overlap is off
    return wrapped


def _number_in_forward_order(model_chunks, buckets) -> dict[torch.nn.Parameter, int]:
    """The bucket of each matrix, numbered by when the forward pass first needs one of them."""
    position = {}
    for chunk in model_chunks:
        for param in chunk.parameters():
            position.setdefault(param, len(position))
    every = [b for chunk in buckets for of_buffer in chunk.values() for b in of_buffer]
    every.sort(key=lambda bucket: min(position[p] for p in bucket))
    return {param: number for number, bucket in enumerate(every) for param in bucket}

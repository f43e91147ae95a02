"""From a plan to Megatron's buffers: buckets in which every owner has one contiguous segment.

Megatron lays parameters out in contiguous buffers, cut into buckets in the order in which the
backward pass finishes them, and shards every bucket equally over the data-parallel ranks. Here a
bucket's matrices are ordered by owner instead, so that each owner's matrices are one range of it:
whole matrices, any sizes, no padding between owners.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from megatron.core.optimizer.param_layout import (
    PerBufferParamLayout,
    pad_param_start,
    pad_to_divisor,
)


class Segment(NamedTuple):
    """One owner's range inside a bucket: [start, end) in elements from the bucket's start."""

    owner: int
    start: int
    end: int


@dataclass
class OwnerParamLayout(PerBufferParamLayout):
    """Megatron's layout of one buffer, and the owners' segments in each of its buckets."""

    segments: list[list[Segment]] = field(default_factory=list)


def assign_buckets(
    params: Sequence[torch.nn.Parameter], bucket_size: int | None
) -> list[list[torch.nn.Parameter]]:
    """Cut parameters into buckets, in backward order, each closed once it is full.

    Args:
        params: in forward order.
        bucket_size: elements after which a bucket is full; None puts everything into one.
    """
    buckets: list[list[torch.nn.Parameter]] = []
    held = math.inf
    for param in reversed(params):
        if held >= (bucket_size or math.inf) or not buckets:
            buckets.append([])
            held = 0
        buckets[-1].append(param)
        held += param.numel()
    return buckets


def owner_layout(
    buckets: Sequence[Sequence[torch.nn.Parameter]],
    owner: Mapping[torch.nn.Parameter, int],
    world_size: int,
    param_indices: list[int],
) -> OwnerParamLayout:
    """Lay a buffer out so that every owner has one contiguous segment in each bucket.

    Args:
        buckets: parameters per bucket, in backward order.
        owner: data-parallel rank that owns each parameter.
        world_size: data-parallel size. Bucket ends are padded to a multiple of lcm(world_size, 128)
            because Megatron's DDP asks for it; the padding is never communicated.
        param_indices: Megatron's index of each parameter among those of its dtype.
    """
    layout = OwnerParamLayout(param_indices=param_indices, num_optimizer_shards=world_size)
    start = 0
    for number, params in enumerate(buckets):
        segments, end = [], start
        for rank in range(world_size):
            mine = [p for p in params if owner[p] == rank]
            if not mine:
                continue
            first = end = pad_param_start(end)
            for param in mine:
                begin = pad_param_start(end)
                end = begin + param.numel()
                layout.param_index_map[param] = (begin, end, number)
            segments.append(Segment(rank, first - start, end - start))
        layout.segments.append(segments)
        layout.per_bucket_numel_unpadded.append(end - start)
        padded_end = pad_to_divisor(end, math.lcm(world_size, 128))
        layout.bucket_indices.append((start, padded_end))
        start = padded_end
    return layout

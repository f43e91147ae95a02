"""Where Megatron-LM's layer-wise distributed optimizer puts matrices, to compare with.

Its rules (megatron-core 0.19): buckets are filled from the last matrix to the first. A bucket is
closed once it holds the bucket size and, so that a large matrix does not leave most shards empty,
nine tenths of `ranks` times its largest matrix. Inside a bucket the largest matrix goes first, each
to the shard that holds the fewest elements; all shards are padded to the longest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Elements to which Megatron aligns the start of every matrix."""

FILL = 0.9
"""Part of the padded bucket that Megatron wants filled before it closes it."""


def default_bucket_size(ranks: int) -> int:
    """Elements of a bucket unless --ddp-bucket-size says otherwise, with overlap on."""
    return max(40_000_000, 1_000_000 * ranks)


@dataclass(frozen=True)
class LayerWiseLayout:
    """Megatron's layout.

    Attributes:
        owner: Rank of each matrix, in the order given.
        buckets: Indices of the matrices of each bucket, the last layers' bucket first.
        elements: Elements of the buffer, padding included.
        padding: Elements that are padding.
    """

    owner: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]
    elements: int
    padding: int


def layer_wise_layout(
    numels: Sequence[int],
    ranks: int,
    bucket_size: int | None,
    *,
    pad_for_high_busbw: bool = False,
) -> LayerWiseLayout:
    """Megatron's owner of every matrix.

    Args:
        numels: Elements of the matrices in forward order.
        ranks: Data-parallel size.
        bucket_size: Elements of a bucket; None: one bucket.
        pad_for_high_busbw: Megatron's --pad-buckets-for-high-nccl-busbw.
    """
    bucket_alignment = math.lcm(ranks, 128, 2**16 if pad_for_high_busbw else 1)
    shard_alignment = math.lcm(ALIGNMENT, bucket_alignment // ranks)
    owner = [0] * len(numels)
    buckets: list[tuple[int, ...]] = []
    elements = 0
    bucket: list[int] = []

    def close() -> None:
        nonlocal elements
        if not bucket:
            return
        ends = [0] * ranks
        for i in sorted(bucket, key=lambda i: -numels[i]):
            rank = ends.index(min(ends))
            ends[rank] = _aligned(ends[rank], ALIGNMENT) + numels[i]
            owner[i] = rank
        elements += ranks * _aligned(max(ends), shard_alignment)
        buckets.append(tuple(bucket))
        bucket.clear()

    for i in reversed(range(len(numels))):
        bucket.append(i)
        if bucket_size is not None:
            largest = max(numels[j] for j in bucket)
            wanted = max(bucket_size, int(ranks * largest * FILL))
            if sum(numels[j] for j in bucket) >= wanted:
                close()
    close()
    return LayerWiseLayout(tuple(owner), tuple(buckets), elements, elements - sum(numels))


def _aligned(position: int, alignment: int) -> int:
    """The least multiple of the alignment that is not below the position."""
    return -(-position // alignment) * alignment

"""The *reduce* transport: every segment of a bucket to its owner, and back from it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dmuon_megatron.layout import Segment


class Pending:
    """Collectives in flight. ``wait`` returns when all of them are done (on CUDA: are ordered
    before the current stream's next work)."""

    def __init__(self, works: Sequence):
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


def reduce_to_owners(
    flat: torch.Tensor,
    segments: Sequence[Segment],
    group: dist.ProcessGroup,
    op: dist.ReduceOp,
    async_op: bool,
) -> Pending:
    """Reduce each segment to its owner, in place.

    Args:
        flat: the bucket's gradients, 1-D. On an owner its segment holds the result; everything else
            is undefined afterwards.
        segments: one per owner, the same on every rank of the group.
        group: data-parallel group; owners are ranks in it.
        op: SUM or AVG.
        async_op: return at once; the result is there after ``wait``.
    """
    if group.size() == 1:
        return Pending([])
    return Pending(
        [
            dist.reduce(
                flat[segment.start : segment.end],
                dist.get_global_rank(group, segment.owner),
                op=op,
                group=group,
                async_op=async_op,
            )
            for segment in segments
        ]
    )


def publish_from_owners(
    flat: torch.Tensor, segments: Sequence[Segment], group: dist.ProcessGroup, async_op: bool
) -> Pending:
    """Send each owner's segment to every other rank, in place.

    Args:
        flat: the bucket's weights, 1-D. Each owner's segment holds its new weights.
        segments, group, async_op: as in ``reduce_to_owners``.
    """
    if group.size() == 1:
        return Pending([])
    return Pending(
        [
            dist.broadcast(
                flat[segment.start : segment.end],
                dist.get_global_rank(group, segment.owner),
                group=group,
                async_op=async_op,
            )
            for segment in segments
        ]
    )

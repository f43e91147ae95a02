"""Megatron's bucket groups, with owners: when a bucket's gradients leave and its weights return.

Two kinds stand side by side in one model chunk: ``OrderedBucketGroup`` for Adam's buckets, which
Megatron reduce-scatters and all-gathers as ever, and ``OwnerBucketGroup`` for the buckets of
matrices. Both share communicators, so both launch in one order on every rank.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from dmuon_megatron.layout import Segment
from dmuon_megatron.transport.reduce import publish_from_owners, reduce_to_owners


class LaunchOrder:
    """Launches the reduces and publishes of a model chunk in fixed orders.

    Collectives on one communicator must be launched in the same order by every rank, but gradients
    may complete in another order on some rank, or not at all. A bucket that is ready early waits
    for its predecessors.
    """

    def __init__(self, groups: Sequence["OrderedBucketGroup"]):
        self._groups = list(groups)
        for group in self._groups:
            group.order = self

    def launch_ready(self, force_all_reduce: bool) -> None:
        """Launch, in order, every group that is ready, up to the first that is not."""
        for group in self._groups:
            if group.reduce_launched:
                continue
            if not group.grads_ready:
                return
            group.launch_reduce(force_all_reduce)

    def finished(self) -> None:
        """A group has its reduced gradients; once all have, the next step may launch again."""
        if all(group.reduce_finished for group in self._groups):
            for group in self._groups:
                group.reduce_launched = group.reduce_finished = False

    def launch_through(self, last: "OrderedBucketGroup", force_all_reduce: bool) -> None:
        """Launch, in order, every group up to ``last``, ready or not."""
        for group in self._groups:
            if not group.reduce_launched:
                group.launch_reduce(force_all_reduce)
            if group is last:
                return

    def publish_all(self) -> None:
        """Start sending, in forward order, the weights of every group that has not sent them."""
        for group in reversed(self._groups):
            group.start_param_sync()


class OrderedBucketGroup(_ParamAndGradBucketGroup):
    """A bucket group that launches in order, publishes once, and reports missing gradients."""

    order: LaunchOrder

    def __init__(self, buckets, ddp_config, group: dist.ProcessGroup):
        super().__init__(buckets, ddp_config, group, group.size())
        self.grads_ready = False
        self.reduce_launched = False
        self.reduce_finished = False
        self.params_without_grad: list[torch.nn.Parameter] = []

    # Gradients

    def reset(self) -> None:
        super().reset()
        self.grads_ready = self.reduce_launched = self.reduce_finished = False
        self.params_without_grad = []

    def register_grad_ready(self, param, force_all_reduce: bool | None = False) -> None:
        if not self.is_last_microbatch:
            return
        counts = self.per_param_grad_ready_counts
        counts[param] = counts.get(param, 0) + 1
        # In the first step nobody knows yet how often each gradient will be added to.
        if not self.is_first_batch and counts == self.golden_per_param_grad_ready_counts:
            self.grads_ready = True
            self.order.launch_ready(bool(force_all_reduce))

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        self.order.launch_through(self, bool(force_all_reduce))

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Wait for the reduced gradients, launching the reduce if nobody has.

        A rank that lacks a gradient takes part all the same, so that nobody hangs, and remembers
        the parameter: the optimizer's step stops on every rank, before it updates anything.
        """
        self.param_gather_dispatched = False
        if self.grad_reduce_finished:
            return
        self.start_grad_sync(force_all_reduce)
        if self.ddp_config.overlap_grad_reduce:
            self.params_without_grad = [
                p
                for bucket in self.buckets
                for p in bucket.params_list
                if p not in self.per_param_grad_ready_counts
            ]
            self.grad_reduce_finished = True
        if self.grad_reduce_handle is not None:
            self.grad_reduce_handle.wait()
            self.grad_reduce_handle = None
        self._copy_back_extra_main_grads()
        self.reduce_finished = True
        self.order.finished()

    def launch_reduce(self, force_all_reduce: bool) -> None:
        """Start reducing this group's gradients. Called by the launch order only."""
        self.reduce_launched = True
        super().start_grad_sync(force_all_reduce)

    # Weights

    def publish(self) -> None:
        """Send weights that have just been written, whatever was sent before."""
        self.settle()
        self.param_gather_dispatched = False
        self.start_param_sync()
        if not self.ddp_config.overlap_param_gather:
            self._post_param_sync()

    def settle(self) -> None:
        """Wait for a publish that is still in flight, e.g. before its buffer is written again."""
        if self.param_gather_handle is not None:
            self.param_gather_handle.wait()
            self.param_gather_handle = None
            self._post_param_sync()

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Send this group's weights unless that is done already; with force_sync, also wait."""
        if not self.param_gather_dispatched:
            self.settle()
            self.launch_publish()
            self.param_gather_dispatched = True
        if force_sync:
            self.settle()

    def launch_publish(self) -> None:
        """Start sending this group's weights; synchronous without --overlap-param-gather."""
        super().start_param_sync()

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Wait for this group's weights before the forward pass reads them.

        A step that was skipped has sent none. Then all groups send now, since the next ones that
        this forward pass needs may be others than on another rank.
        """
        if not self.param_gather_dispatched:
            self.order.publish_all()
        self.settle()


class OwnerBucketGroup(OrderedBucketGroup):
    """A bucket of matrices: reduced to their owners, published from them."""

    def __init__(self, bucket, ddp_config, group: dist.ProcessGroup, segments: Sequence[Segment]):
        super().__init__([bucket], ddp_config, group)
        self.group = group
        self.segments = segments

    def launch_reduce(self, force_all_reduce: bool) -> None:
        self.reduce_launched = True
        (bucket,) = self.buckets
        # A replayed CUDA graph accumulates into the bucket without autograd's ordering.
        for event in {getattr(p, "_cudagraph_wgrad_ready_event", None) for p in bucket.params_list}:
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
        for param in bucket.params_with_extra_main_grads:
            param.main_grad_copy_in_grad_buffer.copy_(param.main_grad)
        config = self.ddp_config
        if config.check_for_nan_in_grad or config.check_for_large_grads:
            self.check_grads(config.check_for_nan_in_grad, config.check_for_large_grads)
        op = dist.ReduceOp.AVG if config.average_in_collective else dist.ReduceOp.SUM
        with torch.no_grad():
            if bucket.gradient_scaling_factor != 1.0:
                bucket.grad_data.mul_(bucket.gradient_scaling_factor)
            if force_all_reduce:
                dist.all_reduce(bucket.grad_data, op=op, group=self.group)
                return
            handle = reduce_to_owners(
                bucket.grad_data, self.segments, self.group, op, config.overlap_grad_reduce
            )
        self.grad_reduce_handle = handle

    def launch_publish(self) -> None:
        (bucket,) = self.buckets
        overlap = self.ddp_config.overlap_param_gather
        with torch.no_grad():
            pending = publish_from_owners(bucket.param_data, self.segments, self.group, overlap)
        self.param_gather_handle = pending if overlap else None


def build_bucket_groups(
    buffers: Sequence,
    forward_index: Callable[[torch.nn.Parameter], int],
) -> list[OrderedBucketGroup]:
    """One group per bucket, in the order in which the backward pass completes them.

    No group mixes matrices with Adam's parameters. The order is that of the earliest parameter of
    each bucket, last first: its gradient arrives last, and its weight is needed first.

    Args:
        buffers: DDP's buffers. Those of matrices carry ``segments``, a list per bucket.
        forward_index: position of a parameter in the model.
    """
    groups = []
    for buffer in buffers:
        segments = getattr(buffer, "segments", None)
        for number, bucket in enumerate(buffer.buckets):
            args = (buffer.ddp_config, buffer.data_parallel_group)
            if segments is None:
                groups.append(OrderedBucketGroup([bucket], *args))
            else:
                groups.append(OwnerBucketGroup(bucket, *args, segments[number]))
    groups.sort(key=lambda g: min(map(forward_index, g.params)), reverse=True)
    LaunchOrder(groups)
    return groups

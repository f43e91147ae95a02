"""Collectives that are as late as a GPU may make them.

On the CPU an asynchronous collective is often done before anybody waits, so a missing or late wait
goes unseen.  Under ``late()`` what such a collective delivers stays NaN until its handle's
``wait()``, and touching what it still works on is an error::

    with late() as log:
        train(...)
    assert log.deferred == log.waited > 0

A rank that is not the destination of a ``reduce`` finds NaN for good: what the buffer holds there
is undefined.
"""

import contextlib
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

# Where Megatron has bound these functions to names of its own.
MEGATRON_ALIASES = {
    "_coalescing_manager": "_coalescing_manager",
    "dist_all_gather_func": "all_gather_into_tensor",
    "dist_reduce_scatter_func": "reduce_scatter_tensor",
}

NAMES = (
    "reduce",
    "broadcast",
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "_coalescing_manager",
)


@dataclass
class LateLog:
    """What happened under ``late()``, on this rank.

    Attributes:
        counts: asynchronous collectives issued, by name.
        pending: those whose handle nobody has waited on yet.
        deferred, waited: number of issued ones, and of those that were waited on.
    """

    counts: Counter = field(default_factory=Counter)
    pending: list = field(default_factory=list)

    @property
    def deferred(self) -> int:
        return self.counts.total()

    @property
    def waited(self) -> int:
        return self.deferred - len(self.pending)


class _Pending:
    """One collective in flight: it works on copies, and the caller's tensors show NaN meanwhile.

    Args:
        name: the collective's.
        given: the caller's tensor that it reads, to see that nobody writes to it before the wait.
        output: the caller's tensor that it delivers to.
        result: the copy that it really delivers to.
        ready: the part of ``output`` that is valid from the start, or None.
        delivers: whether this rank gets a result; if not ``output`` stays NaN.
    """

    def __init__(self, log, name, given, output, result, ready=None, delivers=True):
        self.log, self.name = log, name
        self.output, self.result, self.delivers = output, result, delivers
        self.given = given
        kept = None if ready is None else ready.clone()
        with torch.no_grad():
            if output is not None:
                output.data.fill_(float("nan"))
            if ready is not None:
                ready.data.copy_(kept)
        self.seen = [(tensor, tensor.clone()) for tensor in (given, output) if tensor is not None]
        log.counts[name] += 1
        log.pending.append(self)

    def finish(self):
        for tensor, before in self.seen:
            if not torch.equal(tensor.view(torch.uint8), before.view(torch.uint8)):
                raise AssertionError(
                    f"a buffer {tuple(tensor.shape)} was written to while {self.name} worked on it"
                )
        if self.delivers and self.output is not None:
            with torch.no_grad():
                self.output.data.copy_(self.result)
        self.log.pending.remove(self)


class LateWork:
    """The handle of one collective, or of several that were coalesced."""

    def __init__(self, work=None, pending=()):
        self.work, self.pending = work, list(pending)

    def wait(self, timeout=None):
        if self.work is not None:
            self.work.wait()
        for one in self.pending:
            one.finish()
        self.pending = []
        return True

    def is_completed(self):
        return not self.pending


@contextlib.contextmanager
def late():
    """Make torch.distributed's asynchronous collectives late on this rank; yields a LateLog.

    It covers reduce, broadcast, all_reduce, all_gather_into_tensor, reduce_scatter_tensor and
    all_to_all_single of floating-point tensors, called with ``async_op=True`` as attributes of
    ``torch.distributed``, and the same inside an asynchronous ``_coalescing_manager``; and the
    names that Megatron's buffers have bound them to.
    """
    import megatron.core.distributed.param_and_grad_buffer as buffers

    log = LateLog()
    layer = _LateCollectives(log)
    before = layer.real
    bound = {alias: getattr(buffers, alias) for alias in MEGATRON_ALIASES}
    try:
        for name in before:
            setattr(dist, name, getattr(layer, name))
        for alias, name in MEGATRON_ALIASES.items():
            setattr(buffers, alias, getattr(layer, name))
        yield log
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
        for alias, function in bound.items():
            setattr(buffers, alias, function)


class _LateCollectives:
    """The late versions, under the names of the functions they stand for."""

    def __init__(self, log):
        self._log = log
        self.real = {name: getattr(dist, name) for name in NAMES}
        self._coalescing = None  # the pending ones of the manager that is open

    def reduce(self, tensor, dst=None, op=dist.ReduceOp.SUM, group=None, async_op=False, **kwargs):
        mine = self._is_me(dst, kwargs.get("group_dst"), group)
        real = self.real["reduce"]
        if not tensor.is_floating_point():
            return real(tensor, dst, op, group, async_op, **kwargs)
        if not async_op:
            real(tensor, dst, op, group, **kwargs)
            if not mine:
                tensor.data.fill_(float("nan"))
            return None
        copy = tensor.detach().clone()
        work = real(copy, dst, op, group, True, **kwargs)
        return self._issued("reduce", work, None, tensor, copy, delivers=mine)

    def broadcast(self, tensor, src=None, group=None, async_op=False, **kwargs):
        real = self.real["broadcast"]
        if not async_op or not tensor.is_floating_point():
            return real(tensor, src, group, async_op, **kwargs)
        copy = tensor.detach().clone()
        work = real(copy, src, group, True, **kwargs)
        if self._is_me(src, kwargs.get("group_src"), group):
            return self._issued("broadcast", work, tensor, None, copy)
        return self._issued("broadcast", work, None, tensor, copy)

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        real = self.real["all_reduce"]
        if not self._is_late(async_op) or not tensor.is_floating_point():
            return real(tensor, op, group, async_op)
        copy = tensor.detach().clone()
        return self._issued("all_reduce", real(copy, op, group, True), None, tensor, copy)

    def all_gather_into_tensor(self, output_tensor, input_tensor, group=None, async_op=False):
        real = self.real["all_gather_into_tensor"]
        if not self._is_late(async_op) or not output_tensor.is_floating_point():
            return real(output_tensor, input_tensor, group, async_op)
        result, given = torch.empty_like(output_tensor), input_tensor.detach().clone()
        work = real(result, given, group, True)
        # A shard gathered in place is valid from the start.
        ready = input_tensor if _shares_memory(input_tensor, output_tensor) else None
        return self._issued(
            "all_gather_into_tensor", work, input_tensor, output_tensor, result, ready
        )

    def reduce_scatter_tensor(
        self, output, input, op=dist.ReduceOp.SUM, group=None, async_op=False
    ):
        real = self.real["reduce_scatter_tensor"]
        if not self._is_late(async_op) or not output.is_floating_point():
            return real(output, input, op, group, async_op)
        result, given = torch.empty_like(output), input.detach().clone()
        work = real(result, given, op, group, True)
        return self._issued("reduce_scatter_tensor", work, input, output, result)

    def all_to_all_single(
        self,
        output,
        input,
        output_split_sizes=None,
        input_split_sizes=None,
        group=None,
        async_op=False,
    ):
        real = self.real["all_to_all_single"]
        splits = (output_split_sizes, input_split_sizes)
        if not async_op or not output.is_floating_point():
            return real(output, input, *splits, group, async_op)
        result, given = torch.empty_like(output), input.detach().clone()
        work = real(result, given, *splits, group, True)
        return self._issued("all_to_all_single", work, input, output, result)

    @contextlib.contextmanager
    def _coalescing_manager(self, group=None, device=None, async_ops=False):
        real = self.real["_coalescing_manager"]
        if not async_ops:
            with real(group, device, False) as manager:
                yield manager
            return
        handle = LateWork()
        self._coalescing = handle.pending
        try:
            with real(group, device, True) as handle.work:
                yield handle
        finally:
            self._coalescing = None

    def _is_late(self, async_op) -> bool:
        """Within an asynchronous manager a call is late whatever its own ``async_op`` says."""
        return async_op or self._coalescing is not None

    def _issued(self, name, work, given, output, result, ready=None, delivers=True):
        pending = _Pending(self._log, name, given, output, result, ready, delivers)
        if self._coalescing is not None:
            self._coalescing.append(pending)
            return None
        return LateWork(work, [pending])

    @staticmethod
    def _is_me(rank, group_rank, group) -> bool:
        if group_rank is not None:
            return dist.get_rank(group) == group_rank
        return dist.get_rank() == rank


def _shares_memory(part: torch.Tensor, whole: torch.Tensor) -> bool:
    start, end = whole.data_ptr(), whole.data_ptr() + whole.numel() * whole.element_size()
    return start <= part.data_ptr() < end

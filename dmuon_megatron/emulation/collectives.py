"""What NCCL does and gloo refuses."""

import torch
import torch.distributed as dist


class _Unpad:
    """The handle of a padded all_gather: the outputs are filled when it is waited on."""

    def __init__(self, work, outputs, padded):
        self._work, self._outputs, self._padded = work, outputs, padded

    @torch.no_grad()
    def wait(self, timeout=None):
        if self._work is None:
            return True
        self._work.wait()
        for output, padded in zip(self._outputs, self._padded, strict=True):
            output.copy_(padded[: output.numel()].view_as(output))
        self._work = None
        return True

    def is_completed(self):
        return self._work is None or self._work.is_completed()


def _barrier_without_devices(barrier):
    """Before torch 2.14 gloo refuses device_ids, which Megatron passes."""

    def call(group=None, async_op=False, device_ids=None):
        return barrier(group, async_op)

    return call


def _all_gather_of_unequal_sizes(all_gather):
    """gloo wants equal sizes; Megatron's layer-wise optimizer gathers whatever each rank owns."""

    def call(tensor_list, tensor, group=None, async_op=False):
        longest = max(output.numel() for output in tensor_list)
        if all(output.numel() == longest for output in tensor_list):
            return all_gather(tensor_list, tensor, group, async_op)
        mine = tensor.new_zeros(longest)
        mine[: tensor.numel()] = tensor.detach().flatten()
        padded = [torch.empty_like(mine) for _ in tensor_list]
        work = _Unpad(all_gather(padded, mine, group, async_op=True), tensor_list, padded)
        if async_op:
            return work
        work.wait()
        return None

    return call


def install() -> None:
    """Replace the functions of torch.distributed that gloo cannot serve, for good."""
    dist.barrier = _barrier_without_devices(dist.barrier)
    dist.all_gather = _all_gather_of_unequal_sizes(dist.all_gather)

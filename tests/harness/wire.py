"""Counts what collectives send: calls and elements by operation, on this rank."""

import contextlib
from collections import Counter
from dataclasses import dataclass, field

import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer


@dataclass
class Wire:
    """Attributes:
    calls, elements: by name of the function in torch.distributed; elements of its first tensor.
    """

    calls: Counter = field(default_factory=Counter)
    elements: Counter = field(default_factory=Counter)


# Where Megatron has bound these functions to names of its own.
ALIASES = {
    "all_gather_into_tensor": "dist_all_gather_func",
    "reduce_scatter_tensor": "dist_reduce_scatter_func",
}


@contextlib.contextmanager
def record_wire():
    """Record reduces, broadcasts and Megatron's two bucket collectives until the block ends."""
    wire = Wire()

    def counted(name, function):
        def call(tensor, *args, **kwargs):
            wire.calls[name] += 1
            wire.elements[name] += tensor.numel()
            return function(tensor, *args, **kwargs)

        return call

    with contextlib.ExitStack() as undo:
        for name in ("reduce", "broadcast", *ALIASES):
            for module, attribute in (
                (dist, name),
                (param_and_grad_buffer, ALIASES.get(name)),
            ):
                if attribute is not None:
                    original = getattr(module, attribute)
                    undo.callback(setattr, module, attribute, original)
                    setattr(module, attribute, counted(name, original))
        yield wire

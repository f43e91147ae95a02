"""Gradients of the test's own choice: put into a real backward pass, and followed by the reference.

def gradient(name, shape, step, rank):
    return noise(name, shape, step, rank)

run, initial = train_injected(Tiny(), gradient, steps=2)
expected = follow(initial, means(initial, gradient, steps=2, ranks=2), Tiny(), Rules())
"""

import contextlib
import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.harness import loop
from tests.harness.dmuon import train_dmuon
from tests.harness.reference import adamw_, clip_, muon_, qkv_blocks
from tests.harness.tiny import plain_name
from tests.harness.types import Rules, Run, Tiny

Gradient = Callable[[str, tuple, int, int], torch.Tensor | None]


def noise(name: str, shape: tuple, *numbers: int) -> torch.Tensor:
    """Standard normal numbers that depend on the name and the numbers only."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr((name, numbers)).encode()))
    return torch.randn(tuple(shape), generator=generator)


def train_injected(
    tiny: Tiny,
    gradient: Gradient,
    *,
    after_build: Callable | None = None,
    before_backward: Callable | None = None,
    **kwargs,
) -> tuple[Run, dict]:
    """``train_dmuon`` whose backward passes bring these gradients, and the initial weights.

    Args:
        gradient: called as ``gradient(name, shape, step, rank)`` in the backward pass of every
            microbatch; None keeps the real gradient. The gradient of the global batch is the mean
            over the ranks of what their microbatches add up to.
        kwargs: further arguments of ``train_dmuon``.
    """
    step = -1
    initial = {}

    def attach(run: Run) -> None:
        for name, param in named(run):
            initial[name] = param.detach().clone()
            if param.requires_grad:
                param.register_hook(_replacement(name))
        if after_build:
            after_build(run)

    def _replacement(name):
        def replace(grad):
            chosen = gradient(name, tuple(grad.shape), step, dist.get_rank())
            return None if chosen is None else chosen.to(grad.dtype)

        return replace

    def count(run: Run) -> None:
        nonlocal step
        step += 1
        if before_backward:
            before_backward(run)

    run = train_dmuon(tiny, after_build=attach, before_backward=count, **kwargs)
    return run, initial


def means(initial: dict, gradient: Gradient, *, steps: int, ranks: int) -> list[dict]:
    """The global batch's gradients of each step that ``gradient`` amounts to, one microbatch."""
    return [
        {
            name: sum(gradient(name, tuple(w.shape), step, rank) for rank in range(ranks)) / ranks
            for name, w in initial.items()
        }
        for step in range(steps)
    ]


def follow(initial: dict, grads: list[dict], tiny: Tiny, rules: Rules) -> list[dict]:
    """The reference's weights after each step with these gradients.

    Args:
        initial: fp32 weights by name.
        grads: per step, the global batch's gradients by name. Weights without one are frozen.
    """
    weights = {name: weight.clone() for name, weight in initial.items()}
    state: dict = {name: {} for name in initial}
    snapshots = []
    for of_step in grads:
        of_step = {name: grad.clone() for name, grad in of_step.items()}
        clip_(of_step, rules.clip)
        for name, grad in of_step.items():
            weight = weights[name]
            if is_matrix_name(name, weight):
                muon_(weight, grad, state[name], rules, qkv_blocks(tiny, name, weight))
            else:
                decay = 0.0 if weight.ndim == 1 else rules.weight_decay
                adamw_(weight, grad, state[name], rules, decay)
        snapshots.append({name: weight.clone() for name, weight in weights.items()})
    return snapshots


def is_matrix_name(name: str, weight: torch.Tensor) -> bool:
    """Whether Muon updates the weight of this name."""
    return weight.ndim == 2 and "embedding" not in name and "output_layer" not in name


def named(run: Run) -> list[tuple[str, torch.nn.Parameter]]:
    """The model's parameters with their plain names."""
    return [(plain_name(name), param) for name, param in run.model.named_parameters()]


def momenta(run: Run) -> dict[str, torch.Tensor]:
    """Copies of this rank's momenta, by matrix name."""
    state = run.optimizer.muon.optimizer.state
    return {
        plain_name(o.matrix.name): state[o.main]["momentum_buffer"]
        .view(o.matrix.param.shape)
        .clone()
        for o in run.optimizer.muon.owned
    }


@contextlib.contextmanager
def changed_model(change: Callable[[torch.nn.Module], None]):
    """Within it, runs build their model and then call ``change`` on it, before it gets its DDP."""
    build = loop.build_model

    def build_and_change(*args):
        model = build(*args)
        change(model)
        return model

    loop.build_model = build_and_change
    try:
        yield
    finally:
        loop.build_model = build


def freeze_all_but(keep: Callable[[str, torch.nn.Parameter], bool]):
    """A change that freezes every parameter that ``keep(name, parameter)`` does not keep."""

    def freeze(model: torch.nn.Module) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_(keep(plain_name(name), param))

    return freeze

"""Muon's update as pure functions: blocks, batches, momentum, decay."""

import pytest
import torch

from dmuon_megatron.muon import (
    Block,
    Problem,
    Recipe,
    apply_,
    batch_size,
    momentum_,
    orthogonalize_batch,
    scale_factor,
)
from dmuon_megatron.orthogonalize import Workspace, orthogonalize


def test_a_block_takes_its_rows_from_every_group():
    matrix = torch.arange(12.0).repeat(3, 1).T.contiguous()  # row i holds i
    block = Block(groups=2, start=1, rows=2, cols=3)
    assert block.shape == (4, 3)
    assert block.view(matrix.view(-1))[..., 0].tolist() == [[1, 2], [7, 8]]


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_averages_and_nesterov_looks_ahead(nesterov):
    start, grad = torch.randn(5), torch.randn(5)
    momentum, gradient = start.clone(), grad.clone()
    (direction,) = momentum_([momentum], [gradient], 0.9, nesterov)
    average = 0.9 * start + 0.1 * grad
    torch.testing.assert_close(momentum, average)
    torch.testing.assert_close(direction, 0.1 * grad + 0.9 * average if nesterov else average)


def test_the_batch_writes_the_scaled_factor_of_each_block_and_nothing_else():
    recipe = Recipe(scale_mode="shape_scaling", extra_scale=0.5)
    fused = torch.randn(2 * 6, 8)  # two groups of 3 + 2 + 1 rows
    tall = torch.randn(8, 6)
    first = Block(2, 0, 3, 8)
    whole = Block(1, 0, 8, 6)
    batch = [Problem(0, first), Problem(1, whole)]
    outputs = [torch.full((2 * 6, 8), 7.0), torch.empty(8, 6)]
    orthogonalize_batch(batch, [fused, tall], outputs, recipe, Workspace())
    rows = torch.tensor([0, 1, 2, 6, 7, 8])
    torch.testing.assert_close(outputs[0][rows], 0.5 * orthogonalize(fused[rows]))
    others = torch.tensor([3, 4, 5, 9, 10, 11])
    assert (outputs[0][others] == 7).all()
    expected = 0.5 * (8 / 6) ** 0.5 * orthogonalize(tall)
    torch.testing.assert_close(outputs[1], expected)


def test_the_matmul_precision_is_the_recipes_during_the_iteration_and_the_users_after(monkeypatch):
    from dmuon_megatron import muon

    seen = []
    monkeypatch.setattr(
        muon, "orthogonalize", lambda *_, **__: seen.append(torch.get_float32_matmul_precision())
    )
    before = torch.get_float32_matmul_precision()
    x = torch.eye(2)
    orthogonalize_batch(
        [Problem(0, Block(1, 0, 2, 2))], [x], [x.clone()], Recipe(precision="high"), Workspace()
    )
    assert seen == ["high"]
    assert torch.get_float32_matmul_precision() == before


def test_decay_is_decoupled_from_the_update():
    weight, update = torch.ones(3), torch.full((3,), 2.0)
    apply_([weight], [update], lr=0.1, weight_decay=0.5)
    torch.testing.assert_close(weight, torch.full((3,), 1 * (1 - 0.05) - 0.2))


@pytest.mark.parametrize(
    ("mode", "expected"), [("spectral", 6.0), ("unit_rms_norm", 1.5), ("shape_scaling", 1.5)]
)
def test_scale_factors(mode, expected):
    assert scale_factor(36, 16, mode) == expected
    assert scale_factor(16, 36, "shape_scaling") == 1


def test_an_unknown_scale_mode_names_its_flag():
    with pytest.raises(ValueError, match="--muon-scale-mode"):
        scale_factor(1, 1, "cubic")


def test_a_batch_fits_the_memory_and_holds_at_least_one_problem():
    slot = 4 * 64 * 128
    cpu = torch.device("cpu")
    assert 1 < batch_size(64, 128, Recipe(), 10 * slot, cpu) < 10
    assert batch_size(64, 128, Recipe(), 1, cpu) == 1


@pytest.mark.parametrize("shape", [(4, 8), (8, 4)])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_problem_alone_and_one_in_a_batch_get_the_same_factor(shape, in_place):
    block, recipe = Block(1, 0, *shape), Recipe()
    x = torch.randn(2, *shape)
    expected = [orthogonalize(one) * 8**0.5 for one in x]
    outputs = list(x) if in_place else list(torch.empty_like(x))
    alone, together = ([[Problem(0, block)]], [[Problem(0, block), Problem(1, block)]])
    for batches in (alone, together):
        inputs = list(x.clone())
        results = inputs if in_place else outputs
        orthogonalize_batch(batches[0], inputs, results, recipe, Workspace())
        for result, problem in zip(results, batches[0], strict=False):
            torch.testing.assert_close(result, expected[problem.matrix])

"""Shapes, settings and sequences of calls at the edge of what DMuon serves."""

import pytest
import torch

from dmuon_megatron.muon import Block, Problem, Recipe, orthogonalize_batch
from dmuon_megatron.orthogonalize import Workspace, orthogonalize


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("in_place", [True, False])
def test_some_rows_of_one_group_are_a_problem_of_their_own(start, in_place):
    # Multi-query attention: Q, K and V are each one range of rows, and Q may run alone.
    matrix = torch.randn(5, 8)
    inputs = [matrix.clone().flatten()]
    outputs = inputs if in_place else [torch.full((40,), 7.0)]
    others = outputs[0].clone().view(5, 8)
    recipe = Recipe(scale_mode="shape_scaling", extra_scale=0.5)
    orthogonalize_batch([Problem(0, Block(1, start, 2, 8))], inputs, outputs, recipe, Workspace())
    written = outputs[0].view(5, 8)
    rows = slice(start, start + 2)
    torch.testing.assert_close(written[rows], 0.5 * orthogonalize(matrix[rows]))
    others[rows] = written[rows]
    assert torch.equal(written, others)

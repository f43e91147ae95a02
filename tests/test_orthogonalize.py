"""Newton-Schulz on torch: right for every kind of matrix, in every form and dtype."""

import torch

from dmuon_megatron.orthogonalize import orthogonalize


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_gram_equals_standard_in_fp64():
    x = torch.randn(3, 48, 160, dtype=torch.float64)
    difference = relative(orthogonalize(x, method="gram"), orthogonalize(x, method="standard"))
    assert difference < 1e-9

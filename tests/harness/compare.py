"""Comparing weights by name."""

from itertools import pairwise

import torch


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative Frobenius error, in double precision; 0 when both are zero, nan if value is."""
    difference = (value.double() - expected.double()).norm().item()
    return difference / (expected.double().norm().item() or 1.0)


def relative_errors(weights: dict, expected: dict) -> dict[str, float]:
    """Relative error of each weight, worst first.

    Raises:
        AssertionError: the names differ.
    """
    assert weights.keys() == expected.keys(), sorted(weights.keys() ^ expected.keys())
    errors = {name: relative_error(weights[name], expected[name]) for name in expected}
    return dict(sorted(errors.items(), key=lambda item: -item[1]))


def assert_close(weights: dict, expected: dict, tolerance: float) -> None:
    """Every weight within a relative Frobenius error of ``tolerance``; nan fails."""
    wrong = {
        name: error
        for name, error in relative_errors(weights, expected).items()
        if not error <= tolerance
    }
    assert not wrong, f"off by more than {tolerance}: {wrong}"


def assert_same(weights: dict, expected: dict) -> None:
    """Every weight bitwise equal; nan equals itself in place."""
    assert weights.keys() == expected.keys(), sorted(weights.keys() ^ expected.keys())
    wrong = [
        name
        for name in expected
        if not torch.equal(
            weights[name].contiguous().view(torch.uint8),
            expected[name].contiguous().view(torch.uint8),
        )
    ]
    assert not wrong, f"not the same bits: {wrong}"


def updates(snapshots: list[dict], initial: dict | None = None) -> list[dict]:
    """What each step changed: differences of consecutive snapshots, from ``initial`` if given."""
    before = ([initial] if initial is not None else []) + snapshots
    return [
        {name: new[name].double() - old[name].double() for name in new}
        for old, new in pairwise(before)
    ]

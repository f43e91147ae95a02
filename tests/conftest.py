"""Settings of the whole test suite."""

import pytest
import torch

# Asked before any test module is imported: one that emulates CUDA would change the answer.
HAS_CUDA = torch.cuda.is_available()


def pytest_collection_modifyitems(items):
    """Skips tests marked `gpu` where there is no CUDA device."""
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)

"""Settings of the whole test suite."""

import os
import shutil
import tempfile

import pytest
import torch

# Asked before any test module is imported: one that emulates CUDA would change the answer.
HAS_CUDA = torch.cuda.is_available()


def pytest_configure(config):
    """Gives the tests, and the processes they start, a store of their own for measured times."""
    if "DMUON_CACHE_DIR" not in os.environ:
        config.stash[STORE] = os.environ["DMUON_CACHE_DIR"] = tempfile.mkdtemp(prefix="dmuon-test-")


def pytest_unconfigure(config):
    if STORE in config.stash:
        shutil.rmtree(config.stash[STORE], ignore_errors=True)


STORE = pytest.StashKey[str]()


def pytest_collection_modifyitems(items):
    """Skips tests marked `gpu` where there is no CUDA device."""
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)

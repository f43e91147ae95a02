"""Distributed Muon for Megatron-LM: ``--optimizer dmuon``.

Nothing is imported here but names: the planner, the cost models and the Newton-Schulz iteration
work without Megatron, and everything that needs Megatron is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_EXPORTS = {
    "DMuonConfig": "dmuon_megatron.config",
    "get_dmuon_optimizer": "dmuon_megatron.build",
    "install": "dmuon_megatron.patches",
    "wrap_with_ddp": "dmuon_megatron.build",
}
__all__ = ["DMuonConfig", "get_dmuon_optimizer", "install", "wrap_with_ddp"]

if TYPE_CHECKING:
    from dmuon_megatron.build import get_dmuon_optimizer, wrap_with_ddp
    from dmuon_megatron.config import DMuonConfig
    from dmuon_megatron.patches import install


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

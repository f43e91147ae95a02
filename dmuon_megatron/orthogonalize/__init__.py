"""Newton-Schulz orthogonalization on torch: tensors and numbers only, no communication."""

from dmuon_megatron.orthogonalize.coefficients import COEFFICIENT_SETS, coefficient_schedule
from dmuon_megatron.orthogonalize.newton_schulz import (
    orthogonalize,
    stats,
    useful_batch,
    workspace_bytes,
)
from dmuon_megatron.orthogonalize.schedule import METHODS, default_restarts, ns_flops
from dmuon_megatron.orthogonalize.workspace import Workspace

__all__ = [
    "COEFFICIENT_SETS",
    "METHODS",
    "Workspace",
    "coefficient_schedule",
    "default_restarts",
    "ns_flops",
    "orthogonalize",
    "stats",
    "useful_batch",
    "workspace_bytes",
]

"""What Newton-Schulz costs: analytic and measured models, and the best way to batch.

A cost is any object with ``seconds(rows, cols, batch)``: the time, in seconds, of one batched
Newton-Schulz over `batch` matrices of one shape. Nothing here imports torch at import;
:class:`MeasuredCost` is loaded when it is first asked for, since it times on a device.
"""

from typing import TYPE_CHECKING

from dmuon_megatron.cost.analytic import DEVICES, AnalyticCost, Device, nearest_preset
from dmuon_megatron.cost.batches import BatchTable, Cost, batch_microseconds, workspace_bytes

if TYPE_CHECKING:
    from dmuon_megatron.cost.measured import MeasuredCost, measurements

__all__ = [
    "DEVICES",
    "AnalyticCost",
    "BatchTable",
    "Cost",
    "Device",
    "MeasuredCost",
    "batch_microseconds",
    "measurements",
    "nearest_preset",
    "workspace_bytes",
]


def __getattr__(name: str):
    if name in ("MeasuredCost", "measurements"):
        from dmuon_megatron.cost import measured

        return getattr(measured, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What Newton-Schulz costs: analytic and measured models, and the best way to batch.

A cost is any object with ``seconds(rows, cols, batch)``: the time, in seconds, of one batched
Newton-Schulz over `batch` matrices of one shape. Nothing here imports torch at import;
:class:`MeasuredCost` is loaded on first use, since it needs a device to time.
"""

from dmuon_megatron.cost.analytic import DEVICES, AnalyticCost, Device
from dmuon_megatron.cost.batches import BatchTable, Cost, batch_microseconds, workspace_bytes

__all__ = [
    "DEVICES",
    "AnalyticCost",
    "BatchTable",
    "Cost",
    "Device",
    "batch_microseconds",
    "workspace_bytes",
]

"""A model of Newton-Schulz time from a device's figures, for planning without the device."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

TILE = 128
"""Rows and columns of the output tile of one thread block, the usual size of a tensor-core GEMM."""

TILE_OVERHEAD = 192
"""Prologue and epilogue of one tile, in units of the reduction dimension (elements)."""


@dataclass(frozen=True)
class Device:
    """What the model knows of a device.

    Attributes:
        name: Preset name.
        flops: Sustained half-precision GEMM rate in FLOP/s (fp32 on CPU).
        units: Streaming multiprocessors; tiles run in waves of this many.
        bandwidth: Sustained memory bandwidth in bytes/s.
        launch: Seconds to launch one kernel.
        element_bytes: Bytes of one element of the working dtype.
    """

    name: str
    flops: float
    units: int
    bandwidth: float
    launch: float = 8e-6
    element_bytes: int = 2


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        # Sustained, not peak: two thirds of the dense half-precision peak and about 0.78 of the
        # memory bandwidth that the vendors' data sheets state.
        Device("A800", flops=240e12, units=108, bandwidth=1.5e12),
        Device("H100", flops=650e12, units=132, bandwidth=2.6e12),
        Device("H200", flops=650e12, units=132, bandwidth=3.7e12),
        Device("B200", flops=1450e12, units=148, bandwidth=6.2e12),
        # One core of a server CPU in fp32 with AVX2; tiles do not run side by side.
        Device("CPU", flops=60e9, units=1, bandwidth=8e9, launch=5e-6, element_bytes=4),
    )
}


# What the names of devices contain, the longer marks first where one holds another.
_MARKS = {
    "B200": ("B200", "B300"),
    "H200": ("H200", "GH200"),
    "H100": ("H100", "H800", "H20"),
    "A800": ("A100", "A800"),
    "CPU": ("CPU",),
}


def nearest_preset(device_name: str) -> str:
    """The preset nearest to a device, by the name that torch gives it; "H100" if none is near."""
    name = device_name.upper()
    for preset, marks in _MARKS.items():
        if any(mark in name for mark in marks):
            return preset
    return "H100"


@dataclass(frozen=True)
class AnalyticCost:
    """Newton-Schulz time modelled from a device's GEMM rate, bandwidth and launch time.

    One batch costs `12` kernel launches, the Gram product of an m x n matrix (half of its tiles,
    since it is symmetric), `13` symmetric m x m products for five steps, the product with the
    m x n matrix, and ten passes of `m n` bytes for the norm, casts and stacking. A GEMM takes
    whole waves of tiles, or the time to move its operands if that is longer.

    Attributes:
        device: A preset's name (a key of :data:`DEVICES`) or a :class:`Device`.
        steps: Newton-Schulz steps.
        scale: Factor on every time; :meth:`calibrated` sets it.

    Raises:
        ValueError: The name is no preset, or `steps` is below one.
    """

    device: str | Device = "H100"
    steps: int = 5
    scale: float = 1.0

    noise = 0.0
    """Relative error between two runs of the same cost: none, it is a formula."""

    def __post_init__(self) -> None:
        if isinstance(self.device, str):
            if self.device not in DEVICES:
                raise ValueError(
                    f"device {self.device!r} is unknown; choose from {', '.join(DEVICES)}"
                )
            object.__setattr__(self, "device", DEVICES[self.device])
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    def seconds(self, rows: int, cols: int, batch: int = 1) -> float:
        """Time in seconds of one batched Newton-Schulz over (batch, rows, cols).

        Raises:
            ValueError: A size is below one.
        """
        if min(rows, cols, batch) < 1:
            raise ValueError(f"sizes must be positive, got rows={rows} cols={cols} batch={batch}")
        device = self.device
        m, n = min(rows, cols), max(rows, cols)
        # 2.6 symmetric products a step: the last step of a segment updates no Gram matrix.
        symmetric = 2.6 * self.steps
        launches = 2 + 2 * self.steps
        time = (
            launches * device.launch
            + self._gemm(batch, m, m, n, half=True)
            + symmetric * self._gemm(batch, m, m, m, half=True)
            + self._gemm(batch, m, n, m)
            + 5 * device.element_bytes * batch * m * n / device.bandwidth
        )
        return self.scale * time

    def calibrated(self, measured: Mapping[tuple[int, int, int], float]) -> "AnalyticCost":
        """This model scaled to measurements.

        Args:
            measured: Seconds by (rows, cols, batch). Empty: the model stays as it is.
        """
        if not measured:
            return self
        base = replace(self, scale=1.0)
        ratios = [seconds / base.seconds(*key) for key, seconds in sorted(measured.items())]
        return replace(self, scale=median(ratios))

    def _gemm(self, batch: int, m: int, n: int, k: int, half: bool = False) -> float:
        """Seconds of a batched (m, k) x (k, n) product; `half`: one triangle of tiles only."""
        device = self.device
        tile_rows, tile_cols = -(-m // TILE), -(-n // TILE)
        tiles = batch * (tile_rows * (tile_rows + 1) // 2 if half else tile_rows * tile_cols)
        waves = math.ceil(tiles / device.units)
        compute = waves * 2 * TILE * TILE * (k + TILE_OVERHEAD) * device.units / device.flops
        traffic = batch * (m * k + k * n + m * n) * device.element_bytes / device.bandwidth
        return max(compute, traffic)

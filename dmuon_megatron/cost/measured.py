"""Newton-Schulz times measured on the present device, with a model for what was not measured."""

import contextlib
import hashlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dmuon_megatron.cost.analytic import AnalyticCost, nearest_preset
from dmuon_megatron.cost.batches import MAX_BATCH, WORKSPACE_BYTES, workspace_bytes
from dmuon_megatron.store import Store, locked

Request = tuple[int, int, int]
"""Short side, long side and batch of one measurement."""

WARM_UP = 2
"""Runs before timing: allocations, kernel selection and clocks settle in the first."""

REPEATS = 5
"""Timed runs; their median counts."""

KIND = "cost"
"""Kind of the store's entries."""


def measurements(
    shapes: Mapping[tuple[int, int], int],
    *,
    max_batch: int = MAX_BATCH,
    workspace: int = WORKSPACE_BYTES,
) -> list[Request]:
    """What a plan may ask about: every shape at batches 1, 2, 4, ... and its largest.

    Args:
        shapes: Number of Newton-Schulz blocks by (rows, cols).
        max_batch: Largest batch.
        workspace: Bound in bytes on one batch's temporary memory.

    Returns:
        Requests, single problems first, then by batch: an early end of the budget leaves every
        shape with its most important times.
    """
    totals: dict[tuple[int, int], int] = {}
    for (rows, cols), count in shapes.items():
        key = min(rows, cols), max(rows, cols)
        totals[key] = totals.get(key, 0) + count
    requests = set()
    for (m, n), count in totals.items():
        largest = max(1, min(max_batch, count, workspace // workspace_bytes(m, n)))
        batch = 1
        while batch < largest:
            requests.add((m, n, batch))
            batch *= 2
        requests.add((m, n, largest))
    return sorted(requests, key=lambda r: (r[2], r[0] * r[1], r))


class MeasuredCost:
    """A cost from measurements; between them it interpolates, beyond them it models.

    :meth:`measure` times requests on the device and keeps the results in the store.
    :meth:`merge` takes the results of other ranks: ranks that merged the same tables hold the same
    numbers, and plan alike.

    Args:
        device: Device to time on.
        method: Method passed on to :func:`dmuon_megatron.orthogonalize.orthogonalize`.
        dtype: Dtype of the products; None as there.
        steps: Newton-Schulz steps.
        store: Where results are kept; default the user's cache directory.
        run: What to time: takes a (batch, m, n) tensor on the device. Default: orthogonalize.

    Attributes:
        key: What the measurements hold for: device, versions, method, dtype, steps.
        model: Analytic cost, calibrated by the measurements, for shapes without any.
    """

    noise = 0.03
    """Relative error between two measurements; smaller gains are not worth another plan."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        method: str = "auto",
        dtype: torch.dtype | None = None,
        steps: int = 5,
        store: Store | None = None,
        run: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.key = device_key(self.device) | {
            "method": method,
            "dtype": str(dtype),
            "steps": steps,
        }
        self._store = Store() if store is None else store
        self._run = run or _orthogonalizer(method, dtype, steps)
        name = "CPU" if self.device.type == "cpu" else self.key["device"]
        self._base = AnalyticCost(nearest_preset(name), steps=steps)
        self._times: dict[Request, int] = {}
        self.merge(self._stored())

    def seconds(self, rows: int, cols: int, batch: int = 1) -> float:
        """Seconds of one batched Newton-Schulz, a whole number of microseconds.

        A batch between two measured ones of its shape is interpolated, one beyond them is scaled
        by the model, and so is a shape that was never measured.
        """
        m, n = min(rows, cols), max(rows, cols)
        known = self._batches.get((m, n))
        modelled = self.model.seconds(m, n, batch)
        if known is None:
            return max(1, round(modelled * 1e6)) / 1e6
        below = max((b for b in known if b <= batch), default=None)
        above = min((b for b in known if b >= batch), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            ratio = modelled / self.model.seconds(m, n, nearest)
            microseconds = known[nearest] * ratio
        elif below == above:
            microseconds = known[below]
        else:
            part = (batch - below) / (above - below)
            microseconds = known[below] + part * (known[above] - known[below])
        return max(1, round(microseconds)) / 1e6

    def missing(self, requests: Iterable[Request]) -> list[Request]:
        """The requests that have not been measured."""
        return [request for request in requests if request not in self._times]

    def table(self) -> dict[Request, int]:
        """Microseconds by request: what ranks exchange and then :meth:`merge`."""
        return dict(self._times)

    def merge(self, *tables: Mapping[Request, int]) -> None:
        """Takes over other tables. Where several know a request the lowest time counts.

        Other work on the device only makes a measurement longer, so the lowest is the truest; and
        it does not depend on the order of the tables.
        """
        for table in tables:
            for request, microseconds in table.items():
                known = self._times.get(request)
                if known is None or microseconds < known:
                    self._times[request] = microseconds
        self._batches: dict[tuple[int, int], dict[int, int]] = {}
        for (m, n, batch), microseconds in sorted(self._times.items()):
            self._batches.setdefault((m, n), {})[batch] = microseconds
        self.model = self._base.calibrated(
            {request: microseconds / 1e6 for request, microseconds in self._times.items()}
        )

    def measure(
        self,
        requests: Sequence[Request],
        budget: float,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Request]:
        """Times what is missing, within a budget, and keeps it in the store.

        Processes of one machine that share the device measure one after another, and the later
        ones find what the first has stored. A request that the model says would overrun what is
        left of the budget is skipped; the budget can be overrun by one measurement at most.

        Args:
            requests: What to measure, the most important first.
            budget: Seconds for all of it, waiting for others included.
            progress: Called with the number of requests done and their total.

        Returns:
            The requests that remain unmeasured.
        """
        deadline = time.monotonic() + budget
        if not self.missing(requests):
            return []
        with _device_lock(self.key, self.device, budget):
            self.merge(self._stored())
            missing = self.missing(requests)
            new: dict[Request, int] = {}
            for done, request in enumerate(missing):
                expected = self.seconds(*request) * (WARM_UP + REPEATS)
                # Until something has been measured the model may be wrong by any factor.
                if self._times and expected > deadline - time.monotonic():
                    continue
                if time.monotonic() > deadline:
                    break
                new[request] = self._time(*request)
                self.merge({request: new[request]})
                if progress is not None:
                    progress(done + 1, len(missing))
            if new:
                names = {"x".join(map(str, request)): t for request, t in new.items()}
                self._store.update(KIND, self.key, names)
        return self.missing(requests)

    def _stored(self) -> dict[Request, int]:
        """Valid entries of the store."""
        table = {}
        for name, microseconds in self._store.load(KIND, self.key).items():
            sizes = name.split("x")
            if len(sizes) == 3 and all(s.isdecimal() for s in sizes) and type(microseconds) is int:
                m, n, batch = map(int, sizes)
                if min(m, batch, microseconds) >= 1:
                    table[m, n, batch] = microseconds
        return table

    def _time(self, m: int, n: int, batch: int) -> int:
        """Median microseconds of one batch."""
        generator = torch.Generator(device=self.device).manual_seed(0)
        x = torch.randn(batch, m, n, device=self.device, generator=generator)
        with torch.no_grad():
            for _ in range(WARM_UP):
                self._run(x)
            timer = _cuda_seconds if self.device.type == "cuda" else _cpu_seconds
            seconds = [timer(self._run, x) for _ in range(REPEATS)]
        return max(1, round(statistics.median(seconds) * 1e6))


def device_key(device: torch.device) -> dict[str, Any]:
    """What measurements on a device depend on: its name and the versions of what runs there."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    else:
        name, capability = _cpu_name(), ""
    return {
        "device": name,
        "capability": capability,
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "tilelang": _version("tilelang"),
        "dmuon": _version("dmuon-megatron"),
    }


def _orthogonalizer(
    method: str, dtype: torch.dtype | None, steps: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product's own Newton-Schulz."""
    from dmuon_megatron.orthogonalize import orthogonalize

    return lambda x: orthogonalize(x, method=method, dtype=dtype, steps=steps)


def _cpu_name() -> str:
    """Model name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    """Installed version of a package, empty if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cpu_seconds(run: Callable[[torch.Tensor], Any], x: torch.Tensor) -> float:
    began = time.perf_counter()
    run(x)
    return time.perf_counter() - began


def _cuda_seconds(run: Callable[[torch.Tensor], Any], x: torch.Tensor) -> float:
    """Device time between two events, so that the host's delays do not count."""
    with torch.cuda.device(x.device):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run(x)
        last.record()
        last.synchronize()
    return first.elapsed_time(last) / 1e3


def _device_lock(
    key: Mapping[str, Any], device: torch.device, seconds: float
) -> contextlib.AbstractContextManager[None]:
    """Holds off other processes of this machine that would time on the same device."""
    identity = dict(key)
    if device.type == "cuda":
        identity["uuid"] = str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"dmuon-measure-{os.getuid()}-{digest}.lock"
    return locked(path, seconds)

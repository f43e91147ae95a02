"""Times kernels against torch on the present device, and keeps the results in the store."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dmuon_megatron.cost.measured import device_key
from dmuon_megatron.kernels.config import HALF, Config, Spec
from dmuon_megatron.orthogonalize import products
from dmuon_megatron.store import Store, locked
from dmuon_megatron.tuning.problems import Problem
from dmuon_megatron.tuning.verify import Product, fault, operands

KIND = "kernels"
"""Kind of the store's entries."""

TORCH = "torch"
"""Name of the candidate that is always there: torch's own product."""

MARGIN = 0.97
"""A kernel must take at most this part of torch's time: less is within the timing's noise."""

_GROUPS, _GROUP_SECONDS = 5, 4e-3

Builder = Callable[[], Product]
"""Makes a candidate ready, compiling it if need be; raises RuntimeError if it cannot."""


@dataclass(frozen=True)
class Prepared:
    """What one rank found and all ranks adopt. Can be pickled.

    Attributes:
        choices: the tiling of each problem that a kernel serves faster than torch.
        arch: architecture of the kernels; None: torch alone.
        missing: problems with candidates that the budget left untried.
        faults: candidates that failed, as "problem/candidate: reason".
    """

    choices: Mapping[Problem, Config] = field(default_factory=dict)
    arch: str | None = None
    missing: int = 0
    faults: Sequence[str] = ()

    @property
    def specs(self) -> list[Spec]:
        """The binaries of the choices."""
        from dmuon_megatron.tuning.adopt import spec_of

        specs = (spec_of(p, c, self.arch) for p, c in self.choices.items())
        return list(dict.fromkeys(specs))


class Tuner:
    """Measurements of candidates by problem, on one device.

    Args:
        device: to time on.
        key: what the measurements hold for.
        candidates: builders by name for a problem, the most promising or safest first; torch's
            product is added to them and always comes first.
        store: where results are kept.
        seconds: times a call; by default with CUDA events, host time included.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        device: torch.device | str,
        key: Mapping[str, Any],
        candidates: Callable[[Problem], Mapping[str, Builder]],
        *,
        store: Store | None = None,
        seconds: Callable[[Callable[[], object]], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device = torch.device(device)
        self.key = dict(key)
        self._candidates = candidates
        self._store = Store() if store is None else store
        self._seconds = seconds or (lambda call: call_seconds(call, self.device))
        self._clock = clock
        self._unbuilt: dict[str, str] = {}
        self.results: dict[str, float | str] = self._store.load(KIND, self.key)
        """Microseconds, or the fault that keeps it from being used, by "problem/candidate"."""

    def missing(self, problems: Iterable[Problem]) -> list[tuple[Problem, str]]:
        """What has not been tried, in the order of trying: every problem gets torch, then its
        first kernel, before any gets a second one."""
        columns: dict[int, list[tuple[Problem, str]]] = {}
        for problem in problems:
            for rank, name in enumerate((TORCH, *self._candidates(problem))):
                entry = f"{problem.name}/{name}"
                if entry not in self.results and entry not in self._unbuilt:
                    columns.setdefault(rank, []).append((problem, name))
        return [item for _, column in sorted(columns.items()) for item in column]

    def measure(
        self,
        problems: Sequence[Problem],
        budget: float,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> None:
        """Verifies and times what is missing, until the budget is over.

        Processes of one machine do so one after another: timings under load would be kept for
        ever. The budget can be overrun by one candidate.

        Args:
            problems: the most important first.
            budget: seconds; 0: nothing is compiled or timed.
            progress: called with the number done, their total, and what comes next.
        """
        deadline = self._clock() + budget
        if budget <= 0 or not self.missing(problems):
            return
        with locked(_lock_path(self.device), budget):
            self.results |= self._store.load(KIND, self.key)
            missing = self.missing(problems)
            for done, (problem, name) in enumerate(missing):
                if self._clock() >= deadline:
                    break
                entry = f"{problem.name}/{name}"
                if progress is not None:
                    progress(done, len(missing), entry)
                result = self._try(problem, name)
                if result is not None:
                    self.results |= self._store.update(KIND, self.key, {entry: result})

    def choice(self, problem: Problem) -> str:
        """The fastest candidate that is right; torch unless a kernel clearly beats it."""
        times = {
            name: self.results.get(f"{problem.name}/{name}")
            for name in (TORCH, *self._candidates(problem))
        }
        times = {n: t for n, t in times.items() if isinstance(t, (int, float)) and t > 0}
        if TORCH not in times:
            return TORCH
        best = min(times, key=lambda name: (times[name], name))
        return best if times[best] <= MARGIN * times[TORCH] else TORCH

    def faults(self, problems: Iterable[Problem]) -> list[str]:
        """Candidates that were wrong or could not be built, with the reason."""
        entries = [f"{p.name}/{name}" for p in problems for name in self._candidates(p)]
        found = {e: self.results.get(e, self._unbuilt.get(e)) for e in entries}
        return [f"{e}: {reason}" for e, reason in found.items() if isinstance(reason, str)]

    def _try(self, problem: Problem, name: str) -> float | str | None:
        """Microseconds or a fault; None if it cannot be built here, which is not for the store."""
        if name == TORCH:
            product = torch_product(problem)
        else:
            try:
                product = self._candidates(problem)[name]()
            except RuntimeError as error:
                self._unbuilt[f"{problem.name}/{name}"] = str(error)
                return None
            if wrong := fault(product, problem, self.device):
                return wrong
        out, a, b, c = operands(problem, self.device)
        return round(1e6 * self._seconds(lambda: product(out, a, b, c, 0.5, 0.5)), 2)


def prepare(
    problems: Sequence[Problem],
    budget: float,
    *,
    device: torch.device | str,
    store: Store | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Prepared:
    """Chooses kernels for this device: from the store, and within the budget by trying.

    Args:
        problems: of :func:`ns_problems`.
        budget: seconds for compiling and timing (``--dmuon-tune-budget``); 0: only what the store
            has is used.
        device: this rank's; CPUs and GPUs without kernels run on torch.
        store: by default the user's cache directory; compiled kernels are kept beside it.

    Raises:
        ValueError: the budget is negative.
    """
    if not budget >= 0:
        raise ValueError(f"--dmuon-tune-budget must be a number of seconds, 0 = never: {budget}")
    device = torch.device(device)
    problems = [problem for problem in problems if problem.dtype in HALF]
    if device.type != "cuda" or not problems:
        return Prepared()
    from dmuon_megatron.kernels.launch import device_architecture

    index = torch.cuda.current_device() if device.index is None else device.index
    arch = device_architecture(index)
    if arch is None:
        return Prepared()
    tuner = kernel_tuner(device, arch, store)
    tuner.measure(problems, budget, progress)
    chosen = {problem: tuner.choice(problem) for problem in problems}
    tilings = _tilings(arch)
    return Prepared(
        choices={p: tilings[p.op][name] for p, name in chosen.items() if name != TORCH},
        arch=arch,
        missing=len({problem for problem, _ in tuner.missing(problems)}),
        faults=tuner.faults(problems),
    )


def kernel_tuner(device: torch.device, arch: str, store: Store | None = None) -> Tuner:
    """A tuner of the TileLang kernels; keeps binaries in the store's directory."""
    from dmuon_megatron.kernels.compile import load, source_digest
    from dmuon_megatron.tuning.adopt import TileLangBackend, spec_of

    store = Store() if store is None else store
    keep_binaries(store)
    tilings = _tilings(arch)

    def candidates(problem: Problem) -> dict[str, Builder]:
        def builder(config: Config) -> Builder:
            def build() -> Product:
                load(spec_of(problem, config, arch))
                backend = TileLangBackend({problem: config}, arch)
                return backend.symmetric if problem.op == "symmetric" else backend.multiply

            return build

        return {name: builder(config) for name, config in tilings[problem.op].items()}

    key = device_key(device) | {"arch": arch, "kernels": source_digest()}
    return Tuner(device, key, candidates, store=store)


def keep_binaries(store: Store | None = None) -> Path:
    """Has compiled kernels kept in the store's directory; returns where.

    Every rank calls it before :func:`unpack` and :func:`adopt`.
    """
    from dmuon_megatron.kernels.compile import use_cache

    directory = (Store() if store is None else store).directory / "kernels"
    use_cache(directory)
    return directory


def torch_product(problem: Problem) -> Product:
    """The product as Newton-Schulz runs it on torch."""
    if problem.op == "symmetric":
        function = products.symmetric_multiply_add
    else:
        function = products.multiply_add
    return lambda out, a, b, c, alpha, beta: function(out, a, b, c, alpha=alpha, beta=beta)


def call_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call among others like it, so that a slow host counts, too."""

    def group(count: int) -> float:
        if device.type != "cuda":
            began = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - began) / count
        with torch.cuda.device(device):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(count):
                call()
            last.record()
            last.synchronize()
        return first.elapsed_time(last) / 1e3 / count

    group(2)  # allocations, clocks, torch's own choice of a kernel
    count = max(1, min(1000, int(_GROUP_SECONDS / max(group(2), 1e-7))))
    return statistics.median(group(count) for _ in range(_GROUPS))


def _tilings(arch: str) -> dict[str, dict[str, Config]]:
    from dmuon_megatron.kernels.compile import MODULES, configs

    return {op: {config.name: config for config in configs(op, arch)} for op in MODULES}


def _lock_path(device: torch.device) -> Path:
    """A file for each device of this machine."""
    name = "cpu"
    if device.type == "cuda":
        name = str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
    return Path(tempfile.gettempdir()) / f"dmuon-tune-{name.replace(':', '-')}.lock"

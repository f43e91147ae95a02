"""Checks every compiled kernel on this GPU, then Newton-Schulz on them, then times both.

    python examples/gpu_check.py --build sm_90a --cache gpu-cache    # where nvcc is; no GPU
    python examples/gpu_check.py --cache gpu-cache --json gpu_check.json
    python examples/gpu_check.py --rehearse       # the same way on a CPU, small, nothing timed

On the GPU nothing is compiled: what is not in the cache is counted and left out. Ends with status
1 if anything is wrong.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from dmuon_megatron.cli.tune import build
from dmuon_megatron.cost.measured import device_key
from dmuon_megatron.kernels.compile import configs, is_built, load
from dmuon_megatron.kernels.config import HALF, Spec
from dmuon_megatron.kernels.launch import device_architecture
from dmuon_megatron.orthogonalize import backend, orthogonalize
from dmuon_megatron.store import Store
from dmuon_megatron.tuning import Problem, TileLangBackend, ns_problems
from dmuon_megatron.tuning.adopt import spec_of
from dmuon_megatron.tuning.tuner import call_seconds, keep_binaries, torch_product
from dmuon_megatron.tuning.verify import fault, operands

# m x k of the correctness checks: ragged against every tile, then several bands of tiles
CHECKED = [(200, 1032), (1160, 2056)]
SIDES = [512, 1024, 2048, 4096, 8192]
# Newton-Schulz blocks of Qwen2.5-7B and Llama-3-70B
BLOCKS = [
    (512, 3584),
    (3584, 3584),
    (18944, 3584),
    (3584, 18944),
    (1024, 8192),
    (8192, 8192),
    (28672, 8192),
    (8192, 28672),
]
BATCHED = (16, 1024, 1024)
RUNS = 20
ZOO_SIDE = 512


class Check:
    """One run of the script: what it found, and the time it has left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rehearsal = options.rehearse
        self.deadline = time.monotonic() + options.seconds
        self.device = torch.device("cpu" if self.rehearsal else "cuda:0")
        self.arch = "cpu" if self.rehearsal else device_architecture(0)
        self.dtypes = HALF[:1] if self.rehearsal else HALF
        self.console = Console(width=110)
        self.faults: list[str] = []
        self.skipped: list[str] = []
        self.figures: dict = {}

    def out_of_time(self, what: str) -> bool:
        if time.monotonic() < self.deadline:
            return False
        self.skipped.append(f"{what}: out of time")
        return True

    def ready(self, spec: Spec) -> bool:
        """Whether a kernel can be had without a compiler; a rehearsal compiles for the CPU."""
        return self.rehearsal or is_built(spec)

    def products(self, problem: Problem) -> Iterator[tuple[str, Spec, TileLangBackend]]:
        """The kernels for a problem that can be had here."""
        tilings = configs(problem.op, self.arch)
        for config in tilings[:1] if self.rehearsal else tilings:
            spec = spec_of(problem, config, self.arch)
            if not self.ready(spec):
                if spec.name not in self.skipped:
                    self.skipped.append(spec.name)
                continue
            yield config.name, spec, TileLangBackend({problem: config}, self.arch)


def method_of(kernels: TileLangBackend, problem: Problem):
    return kernels.symmetric if problem.op == "symmetric" else kernels.multiply


def variants(dtype: str, m: int, k: int, batch: int) -> list[Problem]:
    """Every kind of product that Newton-Schulz has."""
    square = Problem("symmetric", dtype, m, m, m, batch, has_c=True)
    gram = Problem("symmetric", dtype, m, m, k, batch)
    wide = Problem("multiply", dtype, m, k, m, batch)
    return [
        square,
        gram,
        gram._replace(transposed=True),
        wide,
        wide._replace(has_c=True),
        wide._replace(m=k, n=m, has_c=True),
    ]


def check_kernels(check: Check) -> None:
    """Every kernel against fp64, exact on whole numbers, with the same bits in 20 runs."""
    passed = 0
    for dtype in check.dtypes:
        for m, k in [(40, 72)] if check.rehearsal else CHECKED:
            for problem in variants(dtype, m, k, batch=2):
                if check.out_of_time(f"kernels, {problem.name}"):
                    continue
                for name, spec, kernels in check.products(problem):
                    try:
                        load(spec)
                    except RuntimeError as error:
                        check.faults.append(str(error))
                        continue
                    wrong = fault(
                        method_of(kernels, problem),
                        problem,
                        check.device,
                        runs=2 if check.rehearsal else RUNS,
                        exact=torch.float64,
                    )
                    if wrong:
                        check.faults.append(f"{problem.name}/{name}: {wrong}")
                    else:
                        passed += 1
    check.figures["kernel_checks_passed"] = passed
    check.console.print(f"kernels: {passed} checks passed, {len(check.faults)} failed")
    if not passed:
        check.faults.append("no kernel could be checked: is --cache the folder that was filled?")


def backend_for(check: Check, problems: list[Problem], timed: bool) -> TileLangBackend:
    """The first, or fastest, kernel for each problem; problems that torch wins stay with it."""
    chosen = {}
    for problem in problems:
        best = None
        if timed:
            best = seconds_of(torch_product(problem), problem, check)
        for name, _, kernels in check.products(problem):
            config = next(c for c in configs(problem.op, check.arch) if c.name == name)
            product = method_of(kernels, problem)
            if fault(product, problem, check.device):
                check.faults.append(f"{problem.name}/{name} is wrong")
                continue
            if not timed:
                chosen[problem] = config
                break
            seconds = seconds_of(product, problem, check)
            if seconds < best:
                best, chosen[problem] = seconds, config
    return TileLangBackend(chosen, check.arch)


def seconds_of(product, problem: Problem, check: Check) -> float:
    out, a, b, c = operands(problem, check.device)
    return call_seconds(lambda: product(out, a, b, c, 0.5, 0.5), check.device)


def matrices(check: Check) -> dict[str, torch.Tensor]:
    """Kinds of matrix that separate a right Newton-Schulz from a wrong one."""
    s = 48 if check.rehearsal else ZOO_SIDE
    generator = torch.Generator(check.device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=check.device)

    square = normal(s, s)
    spread = torch.linalg.qr(normal(s, s))[0] * torch.logspace(0, -6, s, device=check.device)
    return {
        "gaussian wide": normal(s, 4 * s),
        "gaussian tall": normal(4 * s, s),
        "gaussian square": square,
        "duplicated rows": square[: s // 2].repeat(2, 1),
        "low rank": normal(s, 8) @ normal(8, 2 * s),
        "condition 1e6": spread @ torch.linalg.qr(normal(s, s))[0],
    }


def check_newton_schulz(check: Check) -> None:
    """Newton-Schulz on the kernels against fp64, and against the standard form on torch.

    Bounds (measured worst in brackets, on CPUs): Gaussian with aspect 4 fp16 6e-3 (2e-3), bf16 3e-2
    (1e-2); square Gaussian fp16 1e-2 (3.8e-3); error over the standard form's in the same dtype 8
    (5.5); largest singular value 1.2 (1.15).
    """
    table = Table("matrix", "dtype", "error", "standard form", "largest sv", "on kernels")
    rows = []
    for name, x in matrices(check).items():
        exact = orthogonalize(x.double(), backend="torch")
        for dtype in (getattr(torch, name) for name in check.dtypes):
            if check.out_of_time(f"Newton-Schulz, {name}"):
                continue
            problems = ns_problems({tuple(x.shape): [1]}, dtype=dtype)
            kernels = backend_for(check, problems, timed=False)
            backend.calls.clear()
            mine = orthogonalize(x, dtype=dtype, backend=kernels)
            used = sum(n for (who, _), n in backend.calls.items() if who == "tilelang")
            part = used / sum(backend.calls.values())
            standard = orthogonalize(x, method="standard", dtype=dtype, backend="torch")
            errors = [((y.double() - exact).norm() / exact.norm()).item() for y in (mine, standard)]
            largest = torch.linalg.matrix_norm(mine.double(), 2).item()
            limit = 8 * errors[1]
            if name == "gaussian square" and dtype == torch.float16:
                limit = min(limit, 1e-2)
            elif name in ("gaussian wide", "gaussian tall"):
                limit = min(limit, 6e-3 if dtype == torch.float16 else 3e-2)
            if not errors[0] <= limit or not largest <= 1.2:
                check.faults.append(
                    f"Newton-Schulz, {name}, {dtype}: error {errors[0]:.1e} (limit {limit:.1e}), "
                    f"largest singular value {largest:.2f}"
                )
            rows.append(
                {
                    "matrix": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "error": errors[0],
                    "standard_error": errors[1],
                    "largest_singular_value": largest,
                    "on_kernels": part,
                }
            )
            figures = (f"{errors[0]:.1e}", f"{errors[1]:.1e}", f"{largest:.2f}", f"{part:.0%}")
            table.add_row(name, rows[-1]["dtype"], *figures)
    check.figures["newton_schulz"] = rows
    check.console.print(table)


def time_products(check: Check) -> None:
    """The symmetric kernel against torch's full product, in bf16."""
    table = Table("alpha A A + beta C", "torch us", "best us", "/ torch", "tiling", "TFLOP/s, half")
    rows = []
    for side in SIDES:
        if check.out_of_time(f"products of {side}"):
            continue
        problem = Problem("symmetric", "bfloat16", side, side, side, 1, has_c=True)
        times = {"torch": seconds_of(torch_product(problem), problem, check)}
        for name, _, kernels in check.products(problem):
            if not fault(method_of(kernels, problem), problem, check.device):
                times[name] = seconds_of(method_of(kernels, problem), problem, check)
        best = min(times, key=times.get)
        rows.append({"side": side, "seconds": times})
        table.add_row(
            str(side),
            f"{1e6 * times['torch']:.1f}",
            f"{1e6 * times[best]:.1f}",
            f"{times[best] / times['torch']:.2f}",
            best,
            f"{problem.flops / 2 / times[best] / 1e12:.0f}",
        )
    check.figures["symmetric_products"] = rows
    check.console.print(table)


def time_newton_schulz(check: Check) -> None:
    """orthogonalize on kernels and on torch, against the standard form on torch; bf16, 5 steps."""
    table = Table("Newton-Schulz", "standard, torch ms", "auto, torch ms", "auto, kernels ms", "/")
    rows = []
    for shape in [*BLOCKS, BATCHED, BATCHED[1:]]:
        if check.out_of_time(f"Newton-Schulz of {shape}"):
            continue
        x = torch.randn(shape, device=check.device)
        batch = shape[0] if len(shape) == 3 else 1
        problems = ns_problems({shape[-2:]: [batch]}, dtype=torch.bfloat16)
        kernels = backend_for(check, problems, timed=True)
        times = {}
        for name, options in {
            "standard_torch": {"method": "standard", "backend": "torch"},
            "auto_torch": {"backend": "torch"},
            "auto_kernels": {"backend": kernels},
        }.items():
            call = partial(orthogonalize, x, dtype=torch.bfloat16, **options)
            times[name] = call_seconds(call, check.device)
        rows.append({"shape": list(shape), "seconds": times})
        label = "x".join(map(str, shape))
        milliseconds = [f"{1e3 * seconds:.3f}" for seconds in times.values()]
        ratio = times["auto_kernels"] / times["standard_torch"]
        table.add_row(label, *milliseconds, f"{ratio:.2f}")
    check.figures["newton_schulz_times"] = rows
    check.console.print(table)
    by_shape = {tuple(row["shape"]): row["seconds"]["auto_kernels"] for row in rows}
    if BATCHED in by_shape and BATCHED[1:] in by_shape:
        gain = BATCHED[0] * by_shape[BATCHED[1:]] / by_shape[BATCHED]
        check.figures["gain_of_batching_16"] = gain
        check.console.print(f"16 of 1024 x 1024 in one batch: {gain:.2f} times as fast as singly")


def needed(arch: str) -> list[Spec]:
    """Every kernel that the check on a GPU of ``arch`` asks for."""
    problems = [
        problem for dtype in HALF for m, k in CHECKED for problem in variants(dtype, m, k, batch=2)
    ]
    s = ZOO_SIDE
    zoo = {shape: [1] for shape in [(s, s), (s, 4 * s), (4 * s, s), (s, 2 * s)]}
    for name in HALF:
        problems += ns_problems(zoo, dtype=getattr(torch, name))
    blocks = {shape: [1] for shape in BLOCKS} | {BATCHED[1:]: [1, BATCHED[0]]}
    problems += ns_problems(blocks, dtype=torch.bfloat16)
    problems += [Problem("symmetric", HALF[0], side, side, side, 1, has_c=True) for side in SIDES]
    return list(dict.fromkeys(spec_of(p, c, arch) for p in problems for c in configs(p.op, arch)))


def build_all(arch: str, directory: Path, jobs: int) -> int:
    """Compiles them, in processes of their own: TileLang compiles in one thread of each."""
    specs, failed = needed(arch), 0
    began = time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(build, spec, directory, True, False) for spec in specs]
        for done, future in enumerate(as_completed(futures), 1):
            row = future.result()
            print(f"{done}/{len(specs)} {row['kernel']} {row['seconds']} s", flush=True)
            for fault_ in row["faults"]:
                failed += 1
                print(f"FAULT {fault_}")
    print(f"{len(specs)} kernels in {directory}, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", help="folder with compiled kernels; default the store's")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--seconds", type=float, default=300, help="stop starting things after it")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, small, without timings")
    parser.add_argument("--build", metavar="ARCH", choices=("sm_80", "sm_90a"), help="only compile")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    options = parser.parse_args()
    if options.build:
        return build_all(options.build, keep_binaries(Store(options.cache)), options.jobs)
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("there is no GPU here; --rehearse goes the same way on a CPU")
    check = Check(options)
    if check.arch is None:
        print("there are no kernels for this GPU; it runs on torch", file=sys.stderr)
        return 1
    if not options.rehearse:
        keep_binaries(Store(options.cache))
    key = device_key(check.device)
    check.console.print(f"{key['device']}, {check.arch}, torch {key['torch']}", highlight=False)

    began = time.monotonic()
    check_kernels(check)
    check_newton_schulz(check)
    if not options.rehearse:
        time_products(check)
        time_newton_schulz(check)
    check.figures |= {
        "device": key,
        "arch": check.arch,
        "rehearsal": options.rehearse,
        "faults": check.faults,
        "skipped": check.skipped,
        "seconds": round(time.monotonic() - began, 1),
    }
    for line in check.faults:
        check.console.print(f"FAULT {line}", highlight=False, markup=False)
    if check.skipped:
        check.console.print(f"not checked, not in the cache or no time: {len(check.skipped)}")
    if options.json:
        options.json.write_text(json.dumps(check.figures, indent=1) + "\n")
    return 1 if check.faults else 0


if __name__ == "__main__":
    sys.exit(main())

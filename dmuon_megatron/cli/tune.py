"""`dmuon-megatron tune`: chooses kernels for this GPU, or compiles them where there is none."""

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dmuon_megatron.kernels.config import HALF, SHARED_BYTES, Spec
from dmuon_megatron.planner.catalogue import CATALOGUE, find_model
from dmuon_megatron.planner.shapes import read_shapes
from dmuon_megatron.planner.task import MatrixTask

DESCRIPTION = """\
Times every kernel that is right on this GPU against torch's own matrix products, for the shapes of
a model, and keeps the results where training finds them. With --aot it needs no GPU: it compiles
what a GPU of --arch would try, so that the directory can be shipped with a cluster's image."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "tune",
        help="choose the GPU's kernels for a model's shapes, or compile them ahead",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="NAME", help=f"one of {', '.join(CATALOGUE)}")
    source.add_argument(
        "--shapes", metavar="FILE", help="a file with lines name, rows, cols, count; or *.json"
    )
    parser.add_argument(
        "--no-split",
        action="store_true",
        help="fused weights whole instead of Q, K, V and gate, up apart",
    )
    parser.add_argument(
        "--batches",
        default="1,4,16",
        metavar="N,N,...",
        help="batch sizes to tune for; others run the nearest one's kernel (default 1,4,16)",
    )
    parser.add_argument("--dtype", choices=HALF, default="bfloat16", help="of the products")
    parser.add_argument(
        "--method", choices=("auto", "gram", "standard"), default="auto", help="(default auto)"
    )
    parser.add_argument("--steps", type=int, default=5, help="Newton-Schulz steps (default 5)")
    parser.add_argument(
        "--budget", type=float, default=1800, metavar="S", help="seconds for it (default 1800)"
    )
    parser.add_argument(
        "--arch", choices=tuple(SHARED_BYTES), help="for --aot and --check: GPU architecture"
    )
    parser.add_argument("--aot", action="store_true", help="compile only; needs nvcc, no GPU")
    parser.add_argument(
        "--check",
        action="store_true",
        help="compile only, and fail if a kernel spills, needs too much shared memory, or lacks "
        "tensor core or asynchronous copy instructions; needs nvcc, no GPU",
    )
    parser.add_argument(
        "--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes that compile"
    )
    parser.add_argument(
        "--cache", metavar="DIR", help="instead of DMUON_CACHE_DIR or the user's cache directory"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Tunes or compiles; 1 if a kernel is unfit or could not be compiled.

    Raises:
        ValueError: An argument is wrong, or something that it needs is not there.
    """
    # here, so that the command's help and its other parts need no torch
    import torch

    from dmuon_megatron.store import Store
    from dmuon_megatron.tuning import ns_problems

    if options.jobs < 1 or options.steps < 1 or not options.budget >= 0:
        raise ValueError("--jobs and --steps must be at least 1, --budget at least 0")
    batches = _batches(options.batches)
    shapes = _shapes(options)
    problems = ns_problems(
        dict.fromkeys(shapes, batches),
        dtype=getattr(torch, options.dtype),
        method=options.method,
        steps=options.steps,
    )
    if not problems:
        raise ValueError("none of these shapes has kernels: up to 16 rows run in fp32 on torch")
    store = Store(options.cache)
    if options.aot or options.check:
        if options.arch is None:
            raise ValueError(f"--aot and --check need --arch: {' or '.join(SHARED_BYTES)}")
        return _compile(problems, options, store)
    if options.arch is not None:
        raise ValueError("--arch is for --aot and --check; without them this GPU is tuned")
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU here; --aot --arch sm_90a compiles for one")
    return _tune(problems, options, store)


def _shapes(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Distinct (rows, cols) of the Newton-Schulz blocks."""
    split = not options.no_split
    tasks: Iterable[MatrixTask]
    if options.shapes:
        tasks = read_shapes(options.shapes)
    else:
        model = find_model(options.model)
        tasks = [*model.dense_tasks(split=split), *model.expert_tasks(split=split)]
    return sorted({block for task in tasks for block in task.blocks})


def _batches(text: str) -> list[int]:
    try:
        batches = [int(part) for part in text.split(",")]
    except ValueError:
        batches = []
    if not batches or min(batches) < 1:
        raise ValueError(f"--batches must be whole numbers with commas between, got {text!r}")
    return batches


def _compile(problems: list, options: argparse.Namespace, store: Any) -> int:
    """Compiles every candidate of the problems, and looks at the binaries if asked to."""
    from dmuon_megatron.kernels.compile import configs
    from dmuon_megatron.kernels.inspection import nvcc
    from dmuon_megatron.tuning.adopt import spec_of
    from dmuon_megatron.tuning.tuner import keep_binaries

    try:
        nvcc()
    except RuntimeError as error:
        raise ValueError(f"--aot and --check: {error}") from error
    arch = options.arch
    specs = list(dict.fromkeys(spec_of(p, c, arch) for p in problems for c in configs(p.op, arch)))
    directory = keep_binaries(store)
    rows = []
    with _progress() as progress:
        line = progress.add_task("compiling", total=len(specs))
        for row in _built(specs, options, directory):
            rows.append(row)
            progress.update(line, advance=1, description=row["kernel"])
    rows.sort(key=lambda row: row["kernel"])
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        _show_binaries(rows, f"{len(rows)} kernels for {arch} in {directory}")
    return 1 if any(row["faults"] for row in rows) else 0


def _built(
    specs: list[Spec], options: argparse.Namespace, directory: Path
) -> Iterator[dict[str, Any]]:
    """Results as they come; TileLang compiles in one thread of a process only."""
    count = min(options.jobs, len(specs))
    if count == 1:
        yield from (build(spec, directory, options.aot, options.check) for spec in specs)
        return
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(build, s, directory, options.aot, options.check) for s in specs]
        for future in as_completed(futures):
            yield future.result()


def build(spec: Spec, directory: Path, aot: bool, check: bool) -> dict[str, Any]:
    """Compiles one kernel into ``directory`` and, or, inspects it; runs in a process of its own.

    Returns:
        JSON values: the kernel's name, seconds, faults, and what the inspection found.
    """
    from dmuon_megatron.kernels.compile import load, use_cache
    from dmuon_megatron.kernels.inspection import EXPECTED, inspect

    use_cache(directory)
    row: dict[str, Any] = {"kernel": spec.name, "faults": []}
    began = time.perf_counter()
    try:
        if aot:
            load(spec)
            row["compile_seconds"] = round(time.perf_counter() - began, 1)
        if check:
            found = inspect(spec)
            row |= found._asdict() | {"faults": found.faults(spec.arch)}
            if found.instructions is not None:
                row["instructions"] = {i: found.instructions[i] for i in EXPECTED[spec.arch]}
    except RuntimeError as error:
        row["faults"] = [str(error)]
    row["seconds"] = round(time.perf_counter() - began, 1)
    return row


def _tune(problems: list, options: argparse.Namespace, store: Any) -> int:
    """Times the candidates on this GPU."""
    import torch

    from dmuon_megatron.kernels.launch import device_architecture
    from dmuon_megatron.tuning.tuner import TORCH, kernel_tuner

    device = torch.device("cuda", torch.cuda.current_device())
    arch = device_architecture(device.index)
    if arch is None:
        raise ValueError("there are no kernels for this GPU; it runs on torch")
    tuner = kernel_tuner(device, arch, store)
    with _progress() as progress:
        line = progress.add_task("tuning", total=None)
        tuner.measure(
            problems,
            options.budget,
            lambda done, total, name: progress.update(
                line, completed=done, total=total, description=name
            ),
        )
    rows = []
    for problem in problems:
        choice = tuner.choice(problem)
        rows.append(
            {
                "problem": problem.name,
                "choice": choice,
                "microseconds": tuner.results.get(f"{problem.name}/{choice}"),
                "torch_microseconds": tuner.results.get(f"{problem.name}/{TORCH}"),
            }
        )
    faults, missing = tuner.faults(problems), tuner.missing(problems)
    if options.json:
        figures = {"device": tuner.key, "problems": rows, "faults": faults, "missing": len(missing)}
        print(json.dumps(figures, indent=1))
        return 0
    _show_choices(rows, tuner.key["device"])
    console = Console()
    for fault in faults:
        console.print(f"not used: {fault}", highlight=False, markup=False, soft_wrap=True)
    if missing:
        console.print(f"{len(missing)} candidates untried: raise --budget, or run it again")
    return 0


def _show_binaries(rows: list[dict[str, Any]], title: str) -> None:
    table = _table(title, "kernel", "s", "regs", "spills", "shared KiB")
    for row in rows:
        table.add_row(
            row["kernel"],
            f"{row['seconds']:.0f}",
            str(row.get("registers", "-")),
            str(row.get("spill_bytes", "-")),
            f"{row['shared_bytes'] / 1024:.0f}" if "shared_bytes" in row else "-",
        )
    console = Console()
    console.print(table)
    for row in rows:
        for fault in row["faults"]:
            console.print(
                f"{row['kernel']}: {fault}", highlight=False, markup=False, soft_wrap=True
            )


def _show_choices(rows: list[dict[str, Any]], device: str) -> None:
    table = _table(device, "product", "us", "torch us", "/ torch", "choice")
    for row in rows:
        mine, torch_time = row["microseconds"], row["torch_microseconds"]
        table.add_row(
            row["problem"],
            f"{mine:.1f}" if mine else "-",
            f"{torch_time:.1f}" if torch_time else "-",
            f"{mine / torch_time:.2f}" if mine and torch_time else "-",
            row["choice"],
        )
    Console().print(table)


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def _progress() -> Progress:
    return Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=True,
    )

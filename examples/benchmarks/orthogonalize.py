"""Times orthogonalization side by side: both forms, emerging-optimizers' and torch's own.

    python examples/benchmarks/orthogonalize.py                   # on the GPU where there is one
    python examples/benchmarks/orthogonalize.py --dtype float32 --shapes 512x512 16x128x512
    python examples/benchmarks/orthogonalize.py --check --json orthogonalize.json

All contenders take turns in one process, on matrices (rows x columns) or batches (batch x rows x
columns) of them. A ratio is the median over the turns, so that what else runs on the machine
matters little. On a CPU with one thread the thread's own time counts, else the wall clock.
emerging-optimizers and torch.optim.Muon (always bf16, five equal steps) know no batches, or leave
them to their caller: they run matrix by matrix, as in their optimizers' steps.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from dmuon_megatron.orthogonalize import Workspace, coefficient_schedule, ns_flops, orthogonalize

# A GPT of hidden size 512: q, k, v and projection, k and v with grouped queries, fc1 with and
# without SwiGLU's halves apart, fc2; then longer ones
SHAPES = ["512x512", "16x128x512", "1536x512", "2048x512", "4096x512", "512x2048", "512x5632"]
STEPS = 5


def bar(m: int, n: int) -> float:
    """What auto may take of the standard form's time in fp32 on a CPU."""
    aspect = max(m, n) / min(m, n)
    if aspect >= 10:
        return 0.75
    if aspect >= 4:
        return 0.9
    return 1.02


def contenders(x: torch.Tensor, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    workspace, out = Workspace(), torch.empty_like(x)
    matrices = x.flatten(0, -3) if x.dim() > 2 else x[None]

    def ours(method: str) -> Callable[[], object]:
        return lambda: orthogonalize(x, method=method, dtype=dtype, workspace=workspace, out=out)

    runs = {method: ours(method) for method in ("auto", "standard", "gram")}
    if importlib.util.find_spec("emerging_optimizers"):
        from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

        # it computes in bf16 when torch's fp32 matmul precision is medium, as Megatron sets it
        precision = "medium" if dtype == torch.bfloat16 else "highest"

        def emerging() -> None:
            torch.set_float32_matmul_precision(precision)
            for matrix in matrices:
                newton_schulz(matrix, STEPS, "quintic")
            torch.set_float32_matmul_precision("highest")

        runs["emerging"] = emerging
    if dtype == torch.bfloat16:
        from torch.optim._muon import _zeropower_via_newtonschulz

        row = coefficient_schedule("simple", 1)[0]

        def torchs() -> None:
            for matrix in matrices:
                _zeropower_via_newtonschulz(matrix, row, STEPS, 1e-7)

        runs["torch"] = torchs
    return runs


def timed(run: Callable[[], object], clock: Callable[[], float], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def measure(shape: str, dtype: torch.dtype, args: argparse.Namespace) -> dict:
    sizes = [int(size) for size in shape.split("x")]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sizes, generator=generator).to(args.device)
    clock = time.thread_time if args.device == "cpu" and args.threads == 1 else time.perf_counter
    runs = contenders(x, dtype)
    seconds = {name: [] for name in runs}
    for turn in range(args.turns + 1):
        for name, run in runs.items():
            elapsed = timed(run, clock, args.device)
            if turn:  # the first warms up
                seconds[name].append(elapsed)
    *batch, m, n = sizes
    flops = ns_flops(m, n, dtype=dtype, device=args.device) * (batch[0] if batch else 1)
    auto, standard = seconds["auto"], seconds["standard"]
    return {
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "auto_over": {
            name: statistics.median(a / b for a, b in zip(auto, values, strict=True))
            for name, values in seconds.items()
            if name != "auto"
        },
        "standard_over_emerging": (
            statistics.median(s / e for s, e in zip(standard, seconds["emerging"], strict=True))
            if "emerging" in seconds
            else None
        ),
        "auto_flops_per_second": flops / statistics.median(auto),
        "bar": bar(m, n) if (args.device, dtype) == ("cpu", torch.float32) else None,
    }


def show(rows: list[dict], console: Console) -> None:
    table = Table(title="Orthogonalization: milliseconds, and auto's time over the others'")
    table.add_column("matrices")
    table.add_column("dtype")
    names = ["auto", "standard", "gram", "emerging", "torch"]
    for name in names:
        table.add_column(f"{name} ms", justify="right")
    for name in names[1:]:
        table.add_column(f"auto / {name}", justify="right")
    table.add_column("auto GFLOP/s", justify="right")
    for row in rows:
        table.add_row(
            row["shape"],
            row["dtype"],
            *(f"{row['seconds'][n] * 1e3:.2f}" if n in row["seconds"] else "-" for n in names),
            *(f"{row['auto_over'][n]:.2f}" if n in row["auto_over"] else "-" for n in names[1:]),
            f"{row['auto_flops_per_second'] / 1e9:.0f}",
        )
    console.print(table)
    if not importlib.util.find_spec("emerging_optimizers"):
        console.print("emerging-optimizers is not installed: pip install 'dmuon-megatron[bench]'")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="[BxB]MxN")
    parser.add_argument(
        "--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--turns", type=int, default=7, help="timed turns (default: 7)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--check", action="store_true", help="fail where auto misses its bar")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    console = Console(width=None if sys.stdout.isatty() else 140)
    rows = []
    with console.status("measuring") as status:
        for dtype in args.dtype:
            for shape in args.shapes:
                status.update(f"measuring {shape} in {dtype}")
                rows.append(measure(shape, getattr(torch, dtype), args))
    show(rows, console)
    missed = [row for row in rows if row["bar"] and row["auto_over"]["standard"] > row["bar"]]
    for row in missed:
        console.print(
            f"{row['shape']} {row['dtype']}: auto takes {row['auto_over']['standard']:.2f} of the "
            f"standard form's time, more than {row['bar']}"
        )
    if args.json:
        report = {
            "device": args.device,
            "machine": torch.cuda.get_device_name() if args.device == "cuda" else cpu_name(),
            "threads": args.threads,
            "torch": torch.__version__,
            "rows": rows,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if args.check and missed else 0


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())

"""Owner plans of well-known models against Megatron's LayerWise layout, on an analytic device.

    python examples/benchmarks/plan.py                     # all models, 8 to 1024 ranks
    python examples/benchmarks/plan.py --models Qwen2.5-7B --device A800 --json plan.json

Both sides use the same cost of one Newton-Schulz, so what is compared is who does what, and in
which batches. Megatron runs one matrix at a time; "owners" are its owners with our batches. Sizes
go up to as many ranks as there are matrices: beyond it the largest matrix alone is the bound.
"""

import argparse
import json
import math
import statistics
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dmuon_megatron.cost import DEVICES, AnalyticCost
from dmuon_megatron.planner.baselines import MEGATRON, MEGATRON_BATCHED
from dmuon_megatron.planner.catalogue import CATALOGUE
from dmuon_megatron.planner.compare import Stage, plan_stage

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
EXPERT_PARALLEL = {"Qwen3-30B-A3B": 8, "DeepSeek-V3": 32}


def cases(models, split):
    """(model, stage, ranks, ep) of every row."""
    for name in models:
        model = CATALOGUE[name]
        ep = EXPERT_PARALLEL.get(name, 1)
        dense = model.dense_tasks(split=split)
        experts = model.expert_tasks(ep=ep, split=split)
        for ranks in RANKS:
            if ep <= ranks <= len(dense) + ep * len(experts):
                yield name, Stage(name, dense, experts), ranks, ep


def measure(name, stage, ranks, ep, cost, memory_limit):
    """Figures of one row; times in seconds."""
    result = plan_stage(stage, ranks, ep, cost, memory_limit=memory_limit, compare=True)
    by_name = {other.name: other for other in result.others}
    megatron = by_name[MEGATRON]
    return {
        "model": name,
        "ranks": ranks,
        "matrices": len(stage.dense) + ep * len(stage.experts),
        "makespan": result.plan.makespan,
        "bound": result.plan.lower_bound,
        "gap": result.plan.gap,
        "megatron": megatron.makespan,
        "megatron_batched": by_name[MEGATRON_BATCHED].makespan,
        "ratio": megatron.makespan / result.plan.makespan,
        "saved": megatron.makespan - result.plan.makespan,
        "padding": megatron.padding,
        "solve": result.plan.solve_seconds,
        "notes": list(result.notes),
    }


def show(rows, device):
    """The table and the figures under it."""
    table = Table(title=f"Newton-Schulz of the slowest rank, {device}", box=box.SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    for heading in (
        "ranks",
        "plan ms",
        "/ bound",
        "Megatron ms",
        "owners ms",
        "ratio",
        "saved ms",
        "pad %",
        "solve s",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    last = None
    for row in rows:
        table.add_row(
            row["model"] if row["model"] != last else "",
            str(row["ranks"]) + ("*" if row["notes"] else ""),
            f"{1e3 * row['makespan']:#.4g}",
            f"{1 + row['gap']:.4f}",
            f"{1e3 * row['megatron']:#.4g}",
            f"{1e3 * row['megatron_batched']:#.4g}",
            f"{row['ratio']:.2f}",
            f"{1e3 * row['saved']:#.3g}",
            f"{row['padding']:.0%}".rstrip("%"),
            f"{row['solve']:.2f}",
        )
        last = row["model"]
    console = Console(width=110)
    console.print(table)
    for note in sorted({note for row in rows for note in row["notes"]}):
        console.print(f"* {note}", highlight=False)
    solves = [row["solve"] for row in rows]
    console.print(
        f"Megatron / plan, geometric mean: {geometric_mean(rows):.2f} over all, "
        f"{geometric_mean(few_ranks(rows)):.2f} where ranks <= matrices / 4",
        highlight=False,
    )
    console.print(
        f"solve time: median {statistics.median(solves):.2f} s, worst {max(solves):.2f} s; "
        f"largest gap {max(row['gap'] for row in rows):.2%}",
        highlight=False,
    )


def few_ranks(rows):
    """Rows with at least four matrices a rank."""
    return [row for row in rows if row["ranks"] <= row["matrices"] / 4]


def geometric_mean(rows):
    """Geometric mean of Megatron's time over the plan's."""
    return math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows)) if rows else math.nan


def draw(rows, path, device):
    """Ratio over ranks, one line a model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        axes.plot([r["ranks"] for r in mine], [r["ratio"] for r in mine], marker="o", label=name)
    axes.axhline(1.0, color="0.5", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
    axes.set_xlabel("data-parallel ranks")
    axes.set_ylabel("Megatron LayerWise / plan")
    axes.set_title(f"Newton-Schulz time of the slowest rank, {device}")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(CATALOGUE), default=list(CATALOGUE))
    parser.add_argument("--device", choices=list(DEVICES), default="H100")
    parser.add_argument("--split", action="store_true", help="Q, K, V and gate, up apart")
    parser.add_argument("--memory-limit", type=float, default=1.1, help="0: none (default 1.1)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", metavar="FILE.png", default="plan.png", help="default plan.png")
    options = parser.parse_args()
    cost = AnalyticCost(options.device)
    rows = [
        measure(*case, cost, options.memory_limit or None)
        for case in track(
            list(cases(options.models, options.split)),
            description="planning",
            console=Console(stderr=True),
            transient=True,
        )
    ]
    show(rows, options.device)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    try:
        draw(rows, options.plot, options.device)
    except ImportError:
        print('no picture: it needs matplotlib (pip install "dmuon-megatron[plot]")')


if __name__ == "__main__":
    main()

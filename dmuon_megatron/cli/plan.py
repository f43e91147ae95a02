"""`dmuon-megatron plan`: who would own what, and how long a step's Newton-Schulz would take."""

import argparse
import json
from pathlib import Path
from typing import Any, get_args

from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from dmuon_megatron.cost import DEVICES, AnalyticCost
from dmuon_megatron.planner import Policy
from dmuon_megatron.planner.baselines import MEGATRON
from dmuon_megatron.planner.catalogue import CATALOGUE, find_model
from dmuon_megatron.planner.compare import Stage, StagePlan, plan_stage
from dmuon_megatron.planner.experts import ExpertPlan
from dmuon_megatron.planner.report import milliseconds, size
from dmuon_megatron.planner.shapes import read_checkpoint, read_shapes

DESCRIPTION = """\
Plans owners without GPUs and without Megatron: which data-parallel rank stores and updates which
matrix, and how long the slowest rank's Newton-Schulz takes, by an analytic model of the device.
With --pp every stage is planned; the slowest one counts."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "plan",
        help="plan owners for a model, and compare with other layouts",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="NAME", help=f"one of {', '.join(CATALOGUE)}")
    source.add_argument(
        "--shapes", metavar="FILE", help="a file with lines name, rows, cols, count; or *.json"
    )
    source.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="a checkpoint of Megatron's (torch_dist), of which only the tensors' shapes are read",
    )
    parser.add_argument("--dp", type=int, required=True, help="data-parallel size")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size (default 1)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages (default 1)")
    parser.add_argument(
        "--ep",
        type=int,
        default=1,
        help="expert-parallel size (default 1); experts are not split over tensor-parallel ranks",
    )
    parser.add_argument(
        "--tp-mode",
        choices=("home", "blockwise"),
        default="home",
        help="home: one tensor-parallel rank updates the whole matrix, exactly; "
        "blockwise: every rank its own shard, another update (default home)",
    )
    parser.add_argument(
        "--device", choices=tuple(DEVICES), default="H100", help="device model (default H100)"
    )
    parser.add_argument("--policy", choices=get_args(Policy), default="milp")
    parser.add_argument(
        "--memory-limit",
        type=float,
        default=1.1,
        metavar="X",
        help="most optimizer state of a rank over the average; 0: no limit (default 1.1)",
    )
    parser.add_argument(
        "--workspace-mb", type=int, default=1024, help="scratch memory of one batch (default 1024)"
    )
    parser.add_argument(
        "--no-split",
        action="store_true",
        help="orthogonalize fused QKV weights whole (--muon-no-split-qkv) instead of Q, K, V apart",
    )
    parser.add_argument(
        "--split-gate-up",
        action="store_true",
        help="gate and up of SwiGLU weights apart, too; --optimizer dmuon takes them as one",
    )
    parser.add_argument(
        "--compare", action="store_true", help="add Megatron's LayerWise layout and simple policies"
    )
    parser.add_argument(
        "--bucket-size",
        type=int,
        metavar="ELEMENTS",
        help="Megatron's bucket size for --compare (default Megatron's own)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the loads of the ranks")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plans and prints.

    Raises:
        ValueError: An argument is wrong.
    """
    for flag in ("dp", "tp", "pp", "ep", "workspace_mb"):
        if getattr(options, flag) < 1:
            name = flag.replace("_", "-")
            raise ValueError(f"--{name} must be at least 1, got {getattr(options, flag)}")
    stages = _stages(options)
    ranks = options.dp * (options.tp if options.tp_mode == "home" else 1)
    if any(stage.experts for stage in stages) and ranks % options.ep:
        raise ValueError(f"--ep {options.ep} does not divide the {ranks} ranks of a stage")
    cost = AnalyticCost(options.device)
    errors = Console(stderr=True)
    results = []
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
    ) as progress:
        line = progress.add_task("planning", total=None)
        for stage in stages:
            results.append(
                plan_stage(
                    stage,
                    ranks,
                    options.ep,
                    cost,
                    policy=options.policy,
                    memory_limit=options.memory_limit or None,
                    compare=options.compare,
                    bucket_size=options.bucket_size,
                    workspace=options.workspace_mb * 2**20,
                    tell=lambda doing: progress.update(line, description=doing),
                )
            )
    if options.plot:
        from dmuon_megatron.cli.plot import plot_loads

        plot_loads(max(results, key=lambda r: r.plan.makespan), options.plot)
    if options.json:
        print(json.dumps([_figures(result) for result in results], indent=1))
    else:
        _show(results, options)
    return 0


def _stages(options: argparse.Namespace) -> list[Stage]:
    """Matrices of every pipeline stage; stages with equal matrices are there once.

    Raises:
        ValueError: The model is unknown, the file is wrong, or a size does not divide.
    """
    for flag, path, read in (
        ("--shapes", options.shapes, read_shapes),
        ("--checkpoint", options.checkpoint, read_checkpoint),
    ):
        if path:
            if (options.tp, options.pp, options.ep) != (1, 1, 1):
                raise ValueError(f"{flag} is planned as one stage: --tp, --pp, --ep must be 1")
            return [Stage(Path(path).name, read(path))]
    model = find_model(options.model)
    blocks = {"split": not options.no_split, "gate_up": options.split_gate_up}
    home = options.tp_mode == "home"
    if model.has_experts and options.tp > 1 and not home:
        raise ValueError("--tp-mode blockwise is not planned for models with experts; use home")
    if options.ep > 1 and not model.has_experts:
        raise ValueError(f"--ep {options.ep}: {model.name} has no experts")
    stages: dict[tuple, Stage] = {}
    for index in range(options.pp):
        part = model.stage(options.pp, index)
        shards = part.dense_tasks(tp=options.tp, **blocks)
        dense = part.dense_tasks(**blocks) if home else shards
        experts = part.expert_tasks(ep=options.ep, **blocks)
        shapes = tuple(sorted((t.rows, t.cols, t.blocks) for t in [*dense, *experts]))
        stages.setdefault(
            shapes,
            Stage(
                model.name if options.pp == 1 else f"{model.name} stage {index}",
                dense,
                experts,
                copies=options.tp if home else 1,
                numels=[task.numel for task in shards],
            ),
        )
    return list(stages.values())


def _show(results: list[StagePlan], options: argparse.Namespace) -> None:
    """Tables for people."""
    console = Console()
    for result in results:
        plan = result.plan
        summary = (plan.dense if isinstance(plan, ExpertPlan) else plan).summary()
        table = Table(
            title=f"{result.stage.name}: {len(result.stage.dense) + len(result.stage.experts)} "
            f"matrices, {result.ranks} ranks, {options.device}",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        table.add_column("layout", no_wrap=True)
        headings = ("slowest ms", "/ bound", "/ plan", "max/mean", "padding", "buckets")
        for heading in headings:
            table.add_column(heading, justify="right")
        mean = sum(result.loads) / result.ranks
        table.add_row(
            f"dmuon ({options.policy})",
            f"{1e3 * plan.makespan:#.4g}",
            f"{1 + plan.gap:.4f}",
            "1.00",
            f"{plan.makespan / mean if mean else 1.0:.3f}",
            "0%",
            "-",
            style="bold",
        )
        for other in result.others:
            mean = sum(other.loads) / result.ranks
            table.add_row(
                other.name,
                f"{1e3 * other.makespan:#.4g}",
                f"{other.makespan / plan.lower_bound:.4f}" if plan.lower_bound else "-",
                f"{other.makespan / plan.makespan:.2f}" if plan.makespan else "-",
                f"{other.makespan / mean if mean else 1.0:.3f}",
                "-" if other.padding is None else f"{other.padding:.0%}",
                "-" if other.buckets is None else str(other.buckets),
            )
        console.print(table)
        console.print(
            f"lower bound {milliseconds(plan.lower_bound)}, gap {plan.gap:.2%}; "
            f"solved in {plan.solve_seconds:.2f} s; "
            f"state per rank {size(summary['memory_min_bytes'])} to "
            f"{size(summary['memory_max_bytes'])}; "
            f"{summary['segments_per_bucket']:.2f} segments per bucket; "
            f"fingerprint {summary['fingerprint'][:16]}",
            highlight=False,
        )
        if result.others and result.stage.copies > 1:
            console.print(
                f"note: Megatron's times are of the same update: all {result.stage.copies} "
                "tensor-parallel ranks repeat it (--muon-tp-mode duplicated)",
                highlight=False,
            )
        for note in result.notes:
            console.print(f"note: {note}", highlight=False)
    if len(results) > 1:
        slowest = max(results, key=lambda result: result.plan.makespan)
        console.print(f"slowest stage: {slowest.stage.name}", highlight=False)


def _figures(result: StagePlan) -> dict[str, Any]:
    """The same for machines; times in seconds."""
    plan = result.plan
    dense = plan.dense if isinstance(plan, ExpertPlan) else plan
    figures = {
        "stage": result.stage.name,
        "ranks": result.ranks,
        "makespan_seconds": plan.makespan,
        "lower_bound_seconds": plan.lower_bound,
        "gap": plan.gap,
        "solve_seconds": plan.solve_seconds,
        "loads_seconds": result.loads,
        "dense": dense.summary(),
        "owner": dict(dense.owner),
        "notes": list(result.notes),
    }
    if isinstance(plan, ExpertPlan):
        figures["experts"] = [part.summary() for part in plan.experts]
    if result.others:
        figures["compare"] = [
            {
                "layout": other.name,
                "makespan_seconds": other.makespan,
                "padding": other.padding,
                "buckets": other.buckets,
            }
            for other in result.others
        ]
        megatron = next(o for o in result.others if o.name == MEGATRON)
        if plan.makespan:
            figures["ratio_megatron_over_dmuon"] = megatron.makespan / plan.makespan
    return figures

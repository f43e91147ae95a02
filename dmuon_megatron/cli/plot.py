"""Pictures of plans; needs matplotlib (the extra `plot`)."""

from dmuon_megatron.planner.baselines import MEGATRON
from dmuon_megatron.planner.compare import StagePlan

BARS = 64
"""Up to this many ranks each has a bar; more become a sorted curve."""


def plot_loads(result: StagePlan, path: str) -> None:
    """Draws the load of every rank with the lower bound, and Megatron's if it was compared.

    Raises:
        ValueError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError('--plot needs matplotlib: pip install "dmuon-megatron[plot]"') from error
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    mine = [1e3 * load for load in result.loads]
    megatron = next((other for other in result.others if other.name == MEGATRON), None)
    theirs = [1e3 * load for load in megatron.loads] if megatron else []
    ranks = range(result.ranks)
    if result.ranks <= BARS:
        if theirs:
            axes.bar(ranks, theirs, width=0.9, color="0.8", label=MEGATRON)
        axes.bar(ranks, mine, width=0.6, color="tab:blue", label="dmuon")
        axes.set_xlabel("rank")
    else:
        if theirs:
            axes.plot(ranks, sorted(theirs, reverse=True), color="0.5", label=MEGATRON)
        axes.plot(ranks, sorted(mine, reverse=True), color="tab:blue", label="dmuon")
        axes.set_xlabel("ranks, by falling load")
    bound = 1e3 * result.plan.lower_bound
    axes.axhline(bound, color="tab:red", linestyle="--", label=f"lower bound {bound:.4g} ms")
    axes.set_ylabel("Newton-Schulz per step (ms)")
    axes.set_title(f"{result.stage.name}, {result.ranks} ranks")
    axes.set_ylim(bottom=0)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {path}: cannot be written: {error}") from error

"""Plans as tables for people."""

from rich.table import Table

from dmuon_megatron.planner.plan import OwnerPlan


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds with four significant digits."""
    return f"{seconds * 1e3:#.4g} ms".replace(". ", " ")


def size(count: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def plan_table(plan: OwnerPlan) -> Table:
    """One row a figure: what is owned, how balanced, how far from the bound."""
    figures = plan.summary()
    table = Table(title="Owner plan", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows = {
        "policy": plan.policy if plan.policy == plan.method else f"{plan.policy} ({plan.method})",
        "matrices / blocks": f"{figures['matrices']} / {figures['blocks']}",
        "ranks": f"{figures['ranks']} ({len(set(plan.owner.values()))} own a matrix)",
        "batches": f"{figures['batches']}",
        "predicted time, slowest rank": milliseconds(plan.makespan),
        "mean of ranks": f"{milliseconds(figures['mean_load_seconds'])} "
        f"(max/mean {plan.balance:.3f})",
        "lower bound": f"{milliseconds(plan.lower_bound)} (gap {plan.gap:.2%})",
        "state per rank": f"{size(figures['memory_min_bytes'])} to "
        f"{size(figures['memory_max_bytes'])}",
        "memory cap": "none" if plan.memory_cap is None else size(plan.memory_cap),
        "segments per bucket": f"{figures['segments_per_bucket']:.2f} over {plan.buckets} buckets",
        "wave lag": f"{plan.wave_lag:.1%} of the slowest rank, {len(plan.waves)} waves",
        "solved in": f"{plan.solve_seconds:.2f} s",
        "fingerprint": plan.fingerprint[:16],
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for note in plan.notes:
        table.add_row("note", note)
    return table

"""What a run with DMuon tells at start-up: who owns what, and what it costs."""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from dmuon_megatron.data_parallel import OwnerDataParallel
from dmuon_megatron.matrices import is_matrix

PRINTED_OWNERS = 16


def print_report(model_chunks: Sequence[OwnerDataParallel], muon, rest: Sequence) -> None:
    """Print the plan on the first rank. Every rank of the data-parallel group must call it.

    Args:
        model_chunks: the wrapped model chunks.
        muon: the matrices' DMuonDistributedOptimizer.
        rest: Megatron's optimizers of everything else.
    """
    group = muon.data_parallel_group
    states: list = [None] * group.size()
    dist.all_gather_object(states, state_bytes(muon, rest), group=group)
    if dist.get_rank() != 0:
        return
    ownership = model_chunks[0].ownership
    plan = ownership.plan
    matrices = [m for chunk in ownership.matrices for m in chunk]

    table = Table(title=f"DMuon: {len(matrices)} matrices on {group.size()} owners")
    for heading in ("owner", "matrices", "blocks", "elements", "predicted ms", "state MiB"):
        table.add_column(heading, justify="right")
    for rank in range(group.size())[:PRINTED_OWNERS]:
        mine = [m for m in matrices if plan.owner[m.name] == rank]
        table.add_row(str(rank), *_sums(mine), _ms(plan.loads[rank]), _mib(states[rank]))
    if group.size() > PRINTED_OWNERS:
        table.add_row(f"+{group.size() - PRINTED_OWNERS}", *5 * ["..."])
    table.add_section()
    table.add_row(
        "all",
        *_sums(matrices),
        f"max {_ms(max(plan.loads))}",
        f"{_mib(min(states))} - {_mib(max(states))}",
    )
    console = Console(width=110, soft_wrap=True, highlight=False)
    console.print(table)
    sent = sum(s.end - s.start for s in _segments(model_chunks))
    padding = sent - sum(m.param.numel() for m in matrices)
    largest = max((b for wave in muon.waves for b in wave.batches), key=len, default=[])
    settings = ownership.config
    saved = 1 - plan.makespan / ownership.makespan_by_numel if ownership.makespan_by_numel else 0
    console.print(
        f"DMuon: owners by {settings.owner_policy} from {ownership.cost}, in "
        f"{plan.solve_seconds:.2f} s: Newton-Schulz of the slowest, alone on its device, "
        f"{_ms(plan.makespan)} ms, {plan.balance:.3f} x the mean, at most {100 * plan.gap:.2f} % "
        f"above the optimum, {100 * saved:.0f} % less than balanced by size; segments: "
        f"{plan.segments} in buckets: {plan.buckets}"
    )
    console.print(
        f"DMuon: padding on the wire: {padding:,} elements; Newton-Schulz workspace: at most "
        f"{settings.workspace_mb:,} MiB, largest batch on rank 0: {len(largest)}"
    )
    for note in plan.notes:
        console.print(f"DMuon: {note}")
    console.print(_adam_line(model_chunks))


def state_bytes(muon, rest: Sequence) -> int:
    """Bytes of fp32 main weights, momentum and Adam's moments on this rank.

    An fp32 model's weights are their own main weights; Adam makes its moments at its first step.
    """
    total = sum(4 * o.main.numel() * (1 + (o.weight.dtype != o.main.dtype)) for o in muon.owned)
    for optimizer in rest:
        for main in optimizer.get_parameters():
            total += 2 * 4 * main.numel()
        if not optimizer.is_stub_optimizer:
            for mains in optimizer.shard_fp32_from_float16_groups:
                total += sum(4 * main.numel() for main in mains)
    return total


def _sums(matrices) -> tuple[str, str, str]:
    return (
        str(len(matrices)),
        str(sum(len(m.blocks) for m in matrices)),
        f"{sum(m.param.numel() for m in matrices):,}",
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def _segments(model_chunks) -> Iterator:
    for chunk in model_chunks:
        for buffer in chunk.buffers:
            for of_bucket in getattr(buffer, "segments", ()):
                yield from of_bucket


def _adam_line(model_chunks: Sequence[torch.nn.Module]) -> str:
    counts, elements = Counter(), 0
    for chunk in model_chunks:
        for param in chunk.parameters():
            if param.requires_grad and not is_matrix(param):
                table = getattr(param, "is_embedding_or_output_parameter", False)
                counts[
                    "embeddings and output layer" if table else f"{param.dim()}-dimensional"
                ] += 1
                elements += param.numel()
    reasons = ", ".join(f"{n} {why}" for why, n in counts.items()) or "none"
    return f"DMuon: Adam updates {counts.total()} parameters with {elements:,} elements: {reasons}"

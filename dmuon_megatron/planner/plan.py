"""The result of planning."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Batch:
    """Blocks of one shape that one rank orthogonalizes together.

    Attributes:
        rows: Short side of the problems.
        cols: Long side; blocks with rows > cols enter transposed.
        blocks: (matrix name, index of the block in the task's `blocks`), in forward order.
        wave: First wave that needs one of the blocks; batches of a rank run in this order.
    """

    rows: int
    cols: int
    blocks: tuple[tuple[str, int], ...]
    wave: int


@dataclass(frozen=True)
class OwnerPlan:
    """Who owns which matrix, and what that will cost.

    Attributes:
        owner: Rank by matrix name, in forward order.
        loads: Predicted seconds of each rank, initial loads included.
        lower_bound: Seconds that no assignment can beat (under the memory caps used).
        memory: Optimizer state bytes of each rank.
        batches: Newton-Schulz batches of each rank, in the order in which they should run.
        waves: Buckets of each wave, in forward order.
        policy: Policy that was asked for.
        method: What produced the assignment: "lpt", "patterns", "numel" or "round-robin".
        segments: (bucket, owner) pairs: ranges that are reduced and published one by one.
        wave_lag: Mean over the waves of how much later than its share of the makespan the slowest
            rank is done with the wave, as a fraction of the makespan.
        memory_cap: Bytes that a rank was allowed to own at most; None: no bound.
        notes: What the user should know, such as a relaxed memory cap or a solver fault.
        solve_seconds: Time that planning took; no part of the fingerprint.
    """

    owner: Mapping[str, int]
    loads: tuple[float, ...]
    lower_bound: float
    memory: tuple[int, ...]
    batches: tuple[tuple[Batch, ...], ...]
    waves: tuple[tuple[int, ...], ...]
    policy: str
    method: str
    segments: int
    wave_lag: float
    memory_cap: int | None
    notes: tuple[str, ...] = ()
    solve_seconds: float = field(default=0.0, compare=False)

    @property
    def makespan(self) -> float:
        """Predicted seconds of the most loaded rank."""
        return max(self.loads)

    @property
    def gap(self) -> float:
        """Relative distance of the makespan to the lower bound; 0.0 is optimal."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def balance(self) -> float:
        """Highest load over the mean load; 1.0 is perfect."""
        mean = sum(self.loads) / len(self.loads)
        return self.makespan / mean if mean else 1.0

    @property
    def buckets(self) -> int:
        """Buckets that hold at least one matrix."""
        return sum(len(wave) for wave in self.waves)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what ranks must agree on: owners, batches and waves."""
        agreed = {
            "ranks": len(self.loads),
            "owner": sorted(self.owner.items()),
            "batches": [[asdict(batch) for batch in rank] for rank in self.batches],
            "waves": self.waves,
        }
        text = json.dumps(agreed, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def summary(self) -> dict[str, Any]:
        """Figures of the plan by name: seconds, bytes and counts, ready for JSON."""
        per_bucket = self.segments / self.buckets if self.buckets else 0.0
        return {
            "policy": self.policy,
            "method": self.method,
            "ranks": len(self.loads),
            "matrices": len(self.owner),
            "blocks": sum(len(b.blocks) for rank in self.batches for b in rank),
            "batches": sum(len(rank) for rank in self.batches),
            "makespan_seconds": self.makespan,
            "lower_bound_seconds": self.lower_bound,
            "gap": self.gap,
            "mean_load_seconds": sum(self.loads) / len(self.loads),
            "min_load_seconds": min(self.loads),
            "balance": self.balance,
            "memory_max_bytes": max(self.memory),
            "memory_min_bytes": min(self.memory),
            "memory_cap_bytes": self.memory_cap,
            "buckets": self.buckets,
            "segments": self.segments,
            "segments_per_bucket": per_bucket,
            "waves": len(self.waves),
            "wave_lag": self.wave_lag,
            "solve_seconds": self.solve_seconds,
            "fingerprint": self.fingerprint,
            "notes": list(self.notes),
        }

    def report(self) -> "Table":
        """The plan's figures as a table for a rich console."""
        from dmuon_megatron.planner.report import plan_table

        return plan_table(self)

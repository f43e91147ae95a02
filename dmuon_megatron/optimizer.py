"""The optimizer step: momentum, Newton-Schulz and update of the owned matrices, wave by wave.

One step, after the backward pass has reduced the gradients to their owners:

    gradients of the owned matrices -> finite on all ranks? -> global norm, clip
    momentum of all
    per wave:  gather inputs -> Newton-Schulz, in batches -> give results back
               -> decay and update in fp32 -> cast into the param buffer -> publish, asynchronous

``DMuonChainedOptimizer`` drives it: the matrices here, everything else by Megatron's own
``DistributedOptimizer`` with Adam.
"""

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range
from megatron.core.utils import log_single_rank

from dmuon_megatron.data_parallel import OwnerDataParallel
from dmuon_megatron.matrices import Matrix
from dmuon_megatron.muon import (
    Problem,
    Recipe,
    apply_,
    batch_size,
    momentum_,
    orthogonalize_batch,
)
from dmuon_megatron.orthogonalize import Workspace
from dmuon_megatron.planner import OwnerPlan
from dmuon_megatron.transport.bucket_group import OrderedBucketGroup, OwnerBucketGroup

logger = logging.getLogger(__name__)

NOT_SAVED = (
    "DMuon's optimizer state cannot be saved or loaded yet. Save and load the weights alone: "
    "pass --no-save-optim and --no-load-optim."
)


class Muon(torch.optim.Optimizer):
    """Holds the matrices' parameter groups and momentum; DMuonDistributedOptimizer steps it."""

    sealed = False

    def __init__(self, param_groups: list[dict], lr: float, weight_decay: float):
        super().__init__(param_groups, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict) -> None:
        if self.sealed:
            raise RuntimeError(
                "parameters cannot be added to a DMuon optimizer: owners are fixed when the model "
                "is wrapped in DDP. Build the changed model anew, wrap it and build its optimizer."
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable | None = None):
        raise RuntimeError("step the DMuonDistributedOptimizer around this optimizer instead")


@dataclass(frozen=True, eq=False)
class OwnedMatrix:
    """A matrix that this rank owns.

    Attributes:
        matrix: the model's parameter and its blocks.
        main: fp32 main weight, flat, all of the matrix.
        group: index of its parameter group.
        weight: its place in the param buffer, flat, in the model's dtype. In an fp32 model this is
            the main weight itself.
    """

    matrix: Matrix
    main: torch.Tensor
    group: int
    weight: torch.Tensor


@dataclass(frozen=True)
class Wave:
    """Buckets that are published together, once their matrices are updated.

    Attributes:
        bucket_groups: what to publish, in forward order. The same on every rank.
        owned: this rank's matrices in them.
        batches: Newton-Schulz problems to solve before them; matrix numbers count all that this
            rank owns. A batch may hold problems of later waves: batches are as large as pays, and
            run when the first of their problems is needed.
    """

    bucket_groups: list[OwnerBucketGroup]
    owned: list[OwnedMatrix]
    batches: list[list[Problem]]


def make_waves(
    plan: OwnerPlan,
    count: int,
    bucket_groups: Sequence[OwnerBucketGroup],
    owned: Sequence[OwnedMatrix],
    rank: int,
    most: Callable[[int, int], int],
) -> list[Wave]:
    """This rank's part of the plan, in at most ``count`` waves.

    Args:
        plan: owners, batches and waves. Batches and their order are the plan's, however many waves
            are asked for: these change when weights are published, and nothing else.
        count: most waves; neighbours among the plan's are joined.
        bucket_groups: groups of the plan's buckets, in forward order.
        owned: this rank's matrices.
        rank: this rank among the owners.
        most: (m, n) -> largest batch of such problems, m <= n.
    """
    number = {o.matrix.name: i for i, o in enumerate(owned)}
    waves = []
    bounds = [len(plan.waves) * i // count for i in range(count + 1)]
    for first, last in itertools.pairwise(bounds):
        if first == last:
            continue
        groups = [bucket_groups[bucket] for wave in plan.waves[first:last] for bucket in wave]
        params = {param for group in groups for param in group.params}
        batches = []
        for batch in plan.batches[rank]:
            if first <= batch.wave < last:
                problems = [
                    Problem(number[name], owned[number[name]].matrix.blocks[block])
                    for name, block in batch.blocks
                ]
                size = most(batch.rows, batch.cols)
                batches += [problems[i : i + size] for i in range(0, len(problems), size)]
        waves.append(Wave(groups, [o for o in owned if o.matrix.param in params], batches))
    return waves


class StoredAtHome:
    """Brings Newton-Schulz inputs to the ranks that compute, and results to those that store.

    Here both are the owner, so there is nothing to bring. A transport with flat shards does the
    same two calls with collectives in them.
    """

    def gather(self, wave: Wave, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the problems of a wave's batches read, by matrix number."""
        return inputs

    def give_back(self, wave: Wave, results: list[torch.Tensor]) -> None:
        """Bring the results of a wave's batches, by matrix number, to where they are stored."""


class DMuonDistributedOptimizer(DistributedOptimizer):
    """Megatron's DistributedOptimizer for matrices that are whole on their owner.

    The buffer layout keeps every matrix inside its owner's segment, so Megatron's own bookkeeping
    (main weights, gradients, norms) sees whole matrices. Only the update itself is new.

    Args:
        optimizer: Muon with the parameter groups of the matrices, model parameters inside.
        recipe: the update.
        workspace_bytes: bound for one batch of Newton-Schulz problems.
        args, kwargs: as for DistributedOptimizer.
    """

    def __init__(self, optimizer: Muon, *args, recipe: Recipe, workspace_bytes: int, **kwargs):
        super().__init__(optimizer, *args, **kwargs)
        self.optimizer.sealed = True
        self.recipe = recipe
        self.workspace = Workspace()
        self.exchange = StoredAtHome()
        # A matrix has state from the start: its owner can always be told by it.
        for group in self.optimizer.param_groups:
            for main in group["params"]:
                self.optimizer.state[main]["momentum_buffer"] = torch.zeros_like(main)
        self._members = self._group_members()
        self.owned = self._find_owned()
        ownership = self.model_chunks[0].ownership
        self.waves = make_waves(
            ownership.plan,
            ownership.config.waves,
            bucket_groups_of(self.model_chunks, OwnerBucketGroup),
            self.owned,
            self.data_parallel_group.rank(),
            lambda m, n: batch_size(m, n, recipe, workspace_bytes, self.owned[0].main.device),
        )

    @classmethod
    def _build_model_gbuf_range(cls, param_and_grad_buffer, bucket_index: int) -> dict:
        """This rank's range of a bucket: its segment, where Megatron has an equal shard."""
        rank = param_and_grad_buffer.data_parallel_group.rank()
        offset = param_and_grad_buffer.buckets[bucket_index].offset
        start = end = 0
        for segment in param_and_grad_buffer.segments[bucket_index]:
            if segment.owner == rank:
                start, end = segment.start, segment.end
        mine = Range(start + offset, end + offset)
        index_map = param_and_grad_buffer.param_index_map
        return {"param_map": cls._build_model_gbuf_param_range_map(index_map, mine, offset)}

    @property
    def optimizer_state_keys(self) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def _find_owned(self) -> list[OwnedMatrix]:
        ownership = self.model_chunks[0].ownership
        matrices = {m.param: m for chunk in ownership.matrices for m in chunk}
        owned = []
        for group, param, main in main_params(self):
            if main.numel() != param.numel():
                raise RuntimeError(f"{matrices[param].name} is not whole on its owner")
            owned.append(OwnedMatrix(matrices[param], main, group, param.detach().view(-1)))
        return owned

    def _group_members(self) -> list[set[int]]:
        return [{id(main) for main in group["params"]} for group in self.param_groups]

    def groups_changed(self) -> bool:
        """Whether parameters were added to, taken out of or moved between the groups."""
        return self._group_members() != self._members

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[torch.Tensor]:
        """Megatron's, made NaN where this rank must stop all, so that all ranks hear of it."""
        grads = super().get_grads_for_grad_norm(grad_norm_group)
        if self.groups_changed() or any(c.params_without_grad() for c in self.model_chunks):
            grads.append(torch.full((1,), math.nan, device="cuda"))
        return grads

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update the owned matrices wave by wave, publishing each wave before the next.

        The fp32 gradients of the owned matrices are consumed: afterwards they hold the update.
        """
        grads = [o.main.grad for o in self.owned]
        # Looked up each time: Megatron puts other tensors there when it offloads and restores.
        momenta = [self.optimizer.state[o.main]["momentum_buffer"] for o in self.owned]
        with timed(self.config, "optimizer-inner-step"):
            inputs = momentum_(momenta, grads, self.recipe.momentum, self.recipe.nesterov)
        for wave in self.waves:
            with timed(self.config, "optimizer-inner-step"):
                at_home = self.exchange.gather(wave, inputs)
                for batch in wave.batches:
                    orthogonalize_batch(batch, at_home, grads, self.recipe, self.workspace)
                self.exchange.give_back(wave, grads)
                self._apply(wave)
            with timed(self.config, "optimizer-copy-main-to-model-params"):
                cast = [o for o in wave.owned if o.weight.dtype != o.main.dtype]
                if cast:
                    torch._foreach_copy_([o.weight for o in cast], [o.main for o in cast])
            for group in wave.bucket_groups:
                group.publish()
        return True

    def _apply(self, wave: Wave) -> None:
        """Decay and update the main weights of a wave; the updates stand in their gradients."""
        for index, group in enumerate(self.param_groups):
            members = [o.main for o in wave.owned if o.group == index]
            apply_(
                members,
                [main.grad for main in members],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
            )


class DMuonChainedOptimizer(ChainedOptimizer):
    """Muon for the matrices and Adam for the rest, as one optimizer.

    The children are the same, in the same order, on every rank. One check for finite gradients
    serves them all, and every bucket is published once a step, by this class.
    """

    def __init__(self, muon: DMuonDistributedOptimizer, rest: Sequence[DistributedOptimizer]):
        super().__init__([muon, *rest])
        self.muon = muon
        self.rest = list(rest)
        for child in self.rest:
            child._defer_param_sync = True  # Megatron's own switch: somebody else publishes
            child.grad_scaler = muon.grad_scaler
        self._grad_norm = 0.0

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Bring gradients to the main weights; True if any of them, anywhere, is not finite.

        Raises:
            RuntimeError: on every rank, if on any a parameter got no gradient (with overlap), or
                parameter groups are not those that the optimizer was built with.
        """
        found_inf = super().prepare_grads()
        self._grad_norm = super().get_grad_norm()
        by_group = self._compute_grad_norms_by_group().values()
        if all(math.isfinite(norm) for norm in (self._grad_norm, *by_group)):
            return found_inf
        self._explain_non_finite()
        return True

    def get_grad_norm(self):
        return self._grad_norm

    def step(self):
        """One step, as ChainedOptimizer's.

        Raises:
            RuntimeError: on every rank, as ``prepare_grads``, or without reduced gradients.
        """
        if not all(chunk.grads_reduced for chunk in self.model_chunks):
            raise RuntimeError(
                "no gradients have been reduced since the last optimizer.step(): call Megatron's "
                "finalize_model_grads(model_chunks) after the backward pass. (DMuon's step leaves "
                "updates where gradients were, so a second step on them would be wrong.)"
            )
        for chunk in self.model_chunks:
            chunk.grads_reduced = False
        successful, grad_norm, num_zeros = super().step()
        return successful, self._grad_norm if grad_norm is None else grad_norm, num_zeros

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        for group in bucket_groups_of(self.model_chunks, OrderedBucketGroup):
            group.settle()
        successful = True
        for child in self.rest:
            successful &= child.step_with_ready_grads()
        for group in bucket_groups_of(self.model_chunks, OrderedBucketGroup):
            if not isinstance(group, OwnerBucketGroup):
                group.publish()
        return successful & self.muon.step_with_ready_grads()

    def _explain_non_finite(self) -> None:
        """Stop if any rank must, else say which gradients are not finite. All ranks call it."""
        missing = [name for chunk in self.model_chunks for name in chunk.params_without_grad()]
        names = {param: name for chunk in self.model_chunks for param, name in chunk.names.items()}
        bad = [
            names[param]
            for child in self.chained_optimizers
            if not child.is_stub_optimizer
            for _, param, main in main_params(child)
            if main.grad is not None and not main.grad.isfinite().all()
        ]
        group = self.get_grad_stats_parallel_group()
        reports = [None] * group.size()
        mine = (dist.get_rank(), missing, bad, self.muon.groups_changed())
        dist.all_gather_object(reports, mine, group=group)
        changed = [rank for rank, _, _, is_changed in reports if is_changed]
        if changed:
            raise RuntimeError(
                "the parameter groups of a DMuon optimizer were changed after it was built (on "
                f"rank {', '.join(map(str, changed))}): owners are fixed when the model is wrapped "
                "in DDP. Build the changed model anew, wrap it and build its optimizer."
            )
        if any(missing for _, missing, _, _ in reports):
            raise RuntimeError(
                "with --overlap-grad-reduce every trainable parameter must get a gradient in the "
                "last microbatch of a step, but these got none: "
                + "; ".join(f"rank {r}: {shorten(names)}" for r, names, *_ in reports if names)
                + ". Freeze them (requires_grad=False) before the model is wrapped in DDP, or drop "
                "--overlap-grad-reduce, and a missing gradient counts as zero."
            )
        where = "; ".join(f"rank {r}: {shorten(names)}" for r, _, names, _ in reports if names)
        log_single_rank(
            logger,
            logging.WARNING,
            "gradients are not finite, so this step is skipped on every rank "
            f"({where or 'each is, but their norm overflows'})",
        )

    def state_dict(self):
        raise RuntimeError(NOT_SAVED)

    def load_state_dict(self, state_dict):
        raise RuntimeError(NOT_SAVED)

    def sharded_state_dict(self, *args, **kwargs):
        raise RuntimeError(NOT_SAVED)

    def save_parameter_state(self, filename: str):
        raise RuntimeError(NOT_SAVED)

    def load_parameter_state(self, filename: str, **kwargs):
        raise RuntimeError(NOT_SAVED)


def main_params(
    optimizer: DistributedOptimizer,
) -> Iterator[tuple[int, torch.nn.Parameter, torch.Tensor]]:
    """(group index, model parameter, main parameter) of everything this rank stores."""
    for index, (halves, half_mains, fulls, full_mains) in enumerate(
        zip(
            optimizer.model_float16_groups,
            optimizer.shard_fp32_from_float16_groups,
            optimizer.model_fp32_groups,
            optimizer.shard_fp32_groups,
            strict=True,
        )
    ):
        for param, main in zip(halves + fulls, half_mains + full_mains, strict=True):
            yield index, param, main


def bucket_groups_of(
    model_chunks: Sequence[OwnerDataParallel], kind: type[OrderedBucketGroup]
) -> list[OrderedBucketGroup]:
    """The model chunks' bucket groups of a kind, in forward order."""
    return [
        group
        for chunk in model_chunks
        for group in reversed(chunk.bucket_groups)
        if isinstance(group, kind)
    ]


def shorten(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@contextlib.contextmanager
def timed(config, name: str):
    """Megatron's timer of this name around a block, where the run has timers."""
    if config.timers is None:
        yield
        return
    config.timers(name, log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers(name).stop()

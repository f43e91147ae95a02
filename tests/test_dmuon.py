"""DMuon on real Megatron: the same weights as one process, on any number of ranks."""

import functools

import pytest
import torch
import torch.distributed as dist

from dmuon_megatron.orthogonalize import stats
from tests.harness.compare import assert_close, assert_same, relative_errors, updates
from tests.harness.dmuon import train_dmuon
from tests.harness.late import late
from tests.harness.ranks import run_ranks
from tests.harness.reference import train_reference
from tests.harness.tiny import Tiny, build_model
from tests.harness.wire import record_wire

STEPS = 5
# Divides by 4 microbatches on 1, 2, 3 and 4 ranks.
BATCH = 48
LLAMA = Tiny()  # grouped queries, SwiGLU, untied embeddings


@functools.cache
def reference():
    (result,) = run_ranks(_reference, 1)
    return result


def _reference():
    initial = {name: p.detach().clone() for name, p in _initial().items()}
    return train_reference(LLAMA, steps=STEPS, global_batch_size=BATCH), initial


def _initial():
    from tests.harness.tiny import start_megatron

    start_megatron()
    return dict(build_model(LLAMA).named_parameters())


def _train(tiny=LLAMA, **kwargs):
    """One rank's run, and what it owns, orthogonalized and sent."""
    clean = []

    def gradients_are_zero(run):
        clean.append(all(not b.grad_data.any() for b in run.model.buffers))

    stats.clear()
    with record_wire() as wire:
        run = train_dmuon(
            tiny,
            global_batch_size=BATCH,
            snapshots=True,
            before_backward=gradients_are_zero,
            **{"steps": STEPS, **kwargs},
        )
    muon = run.optimizer.muon
    own = {
        "owned": [o.matrix.name for o in muon.owned],
        "stateful": len(muon.optimizer.state),
        "plan": run.model.ownership.plan.owner,
        "blocks": sum(len(m.blocks) for m in run.model.ownership.matrices[0]),
        "numel": sum(m.param.numel() for m in run.model.ownership.matrices[0]),
        "buckets": [len(g.segments) for g in run.model.bucket_groups if hasattr(g, "segments")],
        "ns": stats.total(),
        "wire": wire,
        "clean": clean,
    }
    return run.portable(), own


@functools.cache
def trained(world_size: int, **kwargs):
    return run_ranks(_train, world_size, **kwargs)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_weights_equal_the_one_process_reference(world_size, microbatches):
    expected, initial = reference()
    results = trained(world_size, num_microbatches=microbatches)
    for run, _ in results:
        # Replicas agree bitwise after every publish.
        for mine, first in zip(run.snapshots, results[0][0].snapshots, strict=True):
            assert_same(mine, first)
        assert run.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
        assert run.num_zeros == expected.num_zeros
    run, _ = results[0]
    # Seen over all sizes: 3.4e-6 for the weights and 6.9e-6 for the updates, from sums that are
    # split differently, and that Newton-Schulz amplifies.
    assert_close(run.weights, expected.weights, 1e-5)
    for mine, theirs in zip(
        updates(run.snapshots, initial), updates(expected.snapshots, initial), strict=True
    ):
        assert_close(mine, theirs, 1e-4)
    assert max(relative_errors(run.weights, initial).values()) > 0.1  # they did move


@pytest.mark.parametrize("world_size", [2, 4])
def test_overlap_changes_no_bit(world_size):
    (with_overlap, _), *_ = trained(world_size, num_microbatches=4)
    (without, _), *_ = trained(world_size, num_microbatches=4, overlap=False)
    for mine, theirs in zip(with_overlap.snapshots, without.snapshots, strict=True):
        assert_same(mine, theirs)
    assert with_overlap.losses == without.losses


def _waves(waves):
    """A run, and in which order Newton-Schulz and publishing began in its last step."""
    from dmuon_megatron import DMuonConfig, optimizer
    from dmuon_megatron.transport import bucket_group

    log = []

    def logged(module, name, word):
        original = getattr(module, name)
        setattr(module, name, lambda *a, **k: log.append(word) or original(*a, **k))

    logged(optimizer, "orthogonalize_batch", "compute")
    logged(bucket_group, "publish_from_owners", "publish")
    run = train_dmuon(
        Tiny(layers=4),
        steps=3,
        dmuon=DMuonConfig(waves=waves, profile_budget=0),
        before_step=lambda run: log.clear(),
    )
    parts = [
        (len(wave.bucket_groups), len(wave.owned), sum(len(b) for b in wave.batches))
        for wave in run.optimizer.muon.waves
    ]
    blocks = sum(len(o.matrix.blocks) for o in run.optimizer.muon.owned)
    return run.portable(), log, parts, blocks


def test_waves_change_when_weights_are_published_and_no_bit_of_them():
    by_count = {waves: run_ranks(_waves, 2, waves) for waves in (1, 2, 4)}
    one, *_ = by_count[1]
    for waves, results in by_count.items():
        for run, log, parts, blocks in results:
            assert_same(run.weights, one[0].weights)
            assert run.losses == one[0].losses
            assert len(parts) == waves
            assert sum(solved for _, _, solved in parts) == blocks
            # The first weights leave before the last are computed, where there are waves.
            last_computed = len(log) - 1 - log[::-1].index("compute")
            assert (log.index("publish") < last_computed) == (waves > 1)
    groups = [[g for g, _, _ in parts] for _, _, parts, _ in by_count[4]]
    assert groups[0] == groups[1]  # the same on every rank


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_matrix_has_state_on_its_owner_only_and_every_block_runs_once_a_step(world_size):
    results = trained(world_size, num_microbatches=4)
    plan = results[0][1]["plan"]
    for rank, (_, own) in enumerate(results):
        assert own["plan"] == plan
        assert sorted(own["owned"]) == sorted(n for n, owner in plan.items() if owner == rank)
        assert own["stateful"] == len(own["owned"])
    assert sum(own["ns"] for _, own in results) == results[0][1]["blocks"] * STEPS


@pytest.mark.parametrize("overlap", [True, False])
def test_each_bucket_is_reduced_and_published_once_a_step_with_exactly_the_matrices_bytes(overlap):
    results = trained(2, num_microbatches=4, overlap=overlap)
    for _, own in results:
        segments = sum(own["buckets"])
        for op in ("reduce", "broadcast"):
            assert own["wire"].calls[op] == segments * STEPS
            assert own["wire"].elements[op] == own["numel"] * STEPS
        # Adam's single bucket
        assert own["wire"].calls["reduce_scatter_tensor"] == STEPS
        assert own["wire"].calls["all_gather_into_tensor"] == STEPS


def _train_late(**kwargs):
    with late() as log:
        run, _ = _train(num_microbatches=4, **kwargs)
    return run, log.deferred, log.waited


def test_no_result_is_read_before_it_is_waited_for():
    (plain, _), *_ = trained(2, num_microbatches=4)
    for run, deferred, waited in run_ranks(_train_late, 2):
        assert deferred == waited > 0
        for mine, theirs in zip(run.snapshots, plain.snapshots, strict=True):
            assert_same(mine, theirs)


def _train_late_without_a_wait(which):
    from dmuon_megatron.transport import bucket_group

    original = getattr(bucket_group, which)

    class Forgotten:
        def wait(self):
            pass

    def forgetful(*args, **kwargs):
        original(*args, **kwargs)
        return Forgotten()

    setattr(bucket_group, which, forgetful)
    with late():
        run = train_dmuon(LLAMA, steps=2, global_batch_size=BATCH)
    return run.losses, run.grad_norms


@pytest.mark.parametrize("which", ["reduce_to_owners", "publish_from_owners"])
def test_a_missing_wait_would_be_noticed(which):
    for losses, norms in run_ranks(_train_late_without_a_wait, 2, which):
        assert any(value != value for value in losses + norms)


def test_gradients_are_zero_when_backward_starts_also_after_an_evaluation():
    (plain, _), *_ = trained(2, num_microbatches=4)
    for run, own in trained(2, num_microbatches=4, eval_every=1):
        assert own["clean"] == [True] * STEPS
        assert len(run.eval_losses) == STEPS
        # Evaluation in between changes nothing and sees the new weights.
        assert_same(run.weights, plain.weights)
        assert run.eval_losses[:-1] == pytest.approx(run.losses[1:], rel=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"muon_nesterov": True},
        {"muon_split_qkv": False},
        {"muon_scale_mode": "unit_rms_norm", "muon_extra_scale_factor": 0.2},
        {"muon_coefficient_type": "simple", "muon_num_ns_steps": 3, "muon_momentum": 0.5},
    ],
    ids=lambda s: next(iter(s)),
)
def test_muon_flags_mean_what_the_reference_says(settings):
    (expected,) = run_ranks(_flags_reference, 1, settings)
    for run in run_ranks(_flags, 2, settings):
        assert_close(run.weights, expected.weights, 1e-5)


def _flags(settings):
    from dmuon_megatron import DMuonConfig

    split = settings.get("muon_split_qkv", True)
    return train_dmuon(
        LLAMA, steps=2, optimizer=settings, dmuon=DMuonConfig(split_qkv=split, profile_budget=0)
    ).portable()


def _flags_reference(settings):
    from tests.harness.reference import Rules

    names = {
        "muon_nesterov": "nesterov",
        "muon_split_qkv": "split_qkv",
        "muon_scale_mode": "scale_mode",
        "muon_extra_scale_factor": "extra_scale",
        "muon_momentum": "momentum",
    }
    rules = {names[k]: v for k, v in settings.items() if k in names}
    if "muon_coefficient_type" in settings:
        rules["coefficients"] = ((3.4445, -4.7750, 2.0315),) * 3  # 3 steps of "simple"
    return train_reference(LLAMA, steps=2, rules=Rules(**rules))


def _variant(tiny, ddp):
    return train_dmuon(tiny, steps=STEPS, global_batch_size=BATCH, ddp=ddp).portable()


def test_averaging_in_the_collective_gives_the_same_weights():
    expected, _ = reference()
    for run in run_ranks(_variant, 3, LLAMA, {"average_in_collective": True}):
        assert_close(run.weights, expected.weights, 1e-5)


@pytest.mark.parametrize("grads_in_fp32", [True, False])
def test_bf16_models_follow_the_fp32_reference(grads_in_fp32):
    expected, _ = reference()
    for run in run_ranks(_variant, 2, LLAMA_BF16, {"grad_reduce_in_fp32": grads_in_fp32}):
        assert run.losses == pytest.approx(expected.losses, rel=5e-3)
        assert {w.dtype for w in run.weights.values()} == {torch.bfloat16}
        assert_close(run.weights, expected.weights, 5e-2)


def _persistent_bytes(optimizer):
    """Bytes of buffers and optimizer state after a step, on this rank."""
    from tests.harness.loop import train

    if optimizer == "dmuon":
        run = train_dmuon(LLAMA_BF16, steps=1)
    else:
        run = train(LLAMA_BF16, steps=1)
    tensors = [t for b in run.model.buffers for t in (b.param_data, b.grad_data)]
    for child in run.optimizer.chained_optimizers:
        for main, state in child.optimizer.state.items():
            tensors += [main, *(t for t in state.values() if torch.is_tensor(t))]
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


LLAMA_BF16 = Tiny(bf16=True)


def test_buffers_and_states_take_no_more_memory_than_adamws():
    def largest(optimizer):
        return max(run_ranks(_persistent_bytes, 2, optimizer))

    assert largest("dmuon") <= largest("adam")


def _forward_order_everywhere():
    run = train_dmuon(LLAMA, steps=1)
    names = [[run.model.names[p] for p in g.params] for g in run.model.bucket_groups]
    mixed = [
        g
        for g in run.model.bucket_groups
        if len({p.is_managed_by_layer_wise_optimizer for p in g.params}) > 1
    ]
    return [sorted(n) for n in names], len(mixed), dist.get_rank()


def test_no_bucket_group_mixes_matrices_with_adams_parameters():
    results = run_ranks(_forward_order_everywhere, 2)
    assert results[0][0] == results[1][0]
    assert all(mixed == 0 for _, mixed, _ in results)

"""Faults on the way from gradient to update that users of distributed Muon have met."""

import dataclasses
import math
import types

import pytest
import torch
import torch.distributed as dist

from dmuon_megatron.orthogonalize import stats
from tests.harness.compare import assert_close, assert_same, relative_error, updates
from tests.harness.ranks import run_ranks, run_ranks_expecting_error
from tests.harness.types import Rules, Tiny

TINY = Tiny()
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
FC2 = "decoder.layers.1.mlp.linear_fc2.weight"
PROJ = "decoder.layers.0.self_attention.linear_proj.weight"
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


def different(name, shape, step, rank):
    """Gradients that differ from rank to rank."""
    from tests.harness.gradients import noise

    return 0.01 * (rank + noise(name, shape, step, rank))


def small(name, shape, step, rank):
    """Gradients with a global norm of about 0.3, which no clipping to 1 touches."""
    return 0.1 * different(name, shape, step, rank)


# ---- Gradients of all ranks reach the owner, once a step ----


def _different_gradients_on_every_rank():
    from tests.harness.gradients import follow, means, train_injected

    run, initial = train_injected(TINY, different, steps=2, snapshots=True)
    grads = means(initial, different, steps=2, ranks=dist.get_world_size())
    return run.snapshots, initial, follow(initial, grads, TINY, Rules()), _cut_by_even_shards(run)


def _cut_by_even_shards(run):
    """How many matrices would lie on two ranks, were buckets cut evenly as Megatron does."""
    cut = 0
    for buffer in run.model.buffers:
        for bucket in buffer.buckets if hasattr(buffer, "segments") else []:
            shard = bucket.grad_data.numel() // dist.get_world_size()
            for first, end in bucket.param_to_index.values():
                cut += first // shard != (end - 1) // shard
    return cut


def test_every_update_comes_from_the_mean_over_all_ranks():
    # A public report: matrices across a shard boundary were updated from partly local gradients.
    results = run_ranks(_different_gradients_on_every_rank, 4)
    for snapshots, initial, expected, cut in results:
        assert cut > 0
        assert_close(snapshots[-1], expected[-1], 1e-5)
        for mine, theirs in zip(
            updates(snapshots, initial), updates(expected, initial), strict=True
        ):
            assert_close(mine, theirs, 1e-4)
        assert_same(snapshots[-1], results[0][0][-1])


def _accumulate():
    from tests.harness.dmuon import train_dmuon

    results = []
    for count in (1, 4):
        stats.clear()
        run = train_dmuon(TINY, steps=3, global_batch_size=8, num_microbatches=count)
        results.append((run.weights, stats.total()))
    blocks = sum(len(m.blocks) for m in run.model.ownership.matrices[0])
    return results, blocks


def test_accumulating_over_microbatches_changes_neither_weights_nor_the_number_of_updates():
    # A public report: momentum and Newton-Schulz ran once per microbatch.
    ranks = run_ranks(_accumulate, 2)
    for ((once, _), (accumulated, _)), _ in ranks:
        assert_close(accumulated, once, 1e-5)
    for count in (0, 1):
        assert sum(results[count][1] for results, _ in ranks) == ranks[0][1] * 3


def _newton_schulz_runs():
    from tests.harness.dmuon import train_dmuon

    runs = {}
    for name, tiny, ddp in (
        ("fp32", TINY, {}),
        ("bf16", Tiny(bf16=True), {}),
        ("bf16 gradients", Tiny(bf16=True), {"grad_reduce_in_fp32": False}),
    ):
        stats.clear()
        run = train_dmuon(tiny, steps=2, ddp=ddp)
        blocks = sum(len(m.blocks) for m in run.model.ownership.matrices[0])
        runs[name] = stats.total(), blocks, run.losses
    return runs


@pytest.mark.parametrize("world_size", [1, 2])
def test_muon_really_runs_for_every_block_whatever_the_precision(world_size):
    # A public report: wrapped parameters were flat, so Newton-Schulz was never reached.
    ranks = run_ranks(_newton_schulz_runs, world_size)
    for name in ranks[0]:
        assert sum(runs[name][0] for runs in ranks) == ranks[0][name][1] * 2, name
        assert ranks[0][name][1] == 12 and ranks[0][name][2][1] < ranks[0][name][2][0], name


# ---- Clipping ----


def _clip():
    """One step's weights, initial weights and momenta by (hidden size, size of gradient, clip)."""
    from tests.harness.gradients import momenta, train_injected

    results = {}
    for hidden in (64, 256):
        tiny = dataclasses.replace(TINY, hidden=hidden, layers=1)
        for size, gradient in (("small", small), ("large", lambda *of: 1e3 * small(*of))):
            for clip in (0.0, 1.0):
                run, initial = train_injected(
                    tiny, gradient, steps=1, optimizer={"clip_grad": clip, "weight_decay": 0.0}
                )
                results[hidden, size, clip] = run.weights, initial, momenta(run), run.grad_norms[0]
    return results


def test_clipping_acts_on_the_gradient_before_momentum_and_leaves_updates_their_size():
    # Public reports: the update was clipped instead, which divided it by a factor that grows with
    # the width.
    for results in run_ranks(_clip, 2):
        for hidden in (64, 256):
            free, _, _, norm = results[hidden, "small", 0.0]
            clipped, _, _, _ = results[hidden, "small", 1.0]
            assert 0 < norm < 1
            assert_same(clipped, free)

            free, initial, momenta, norm = results[hidden, "large", 0.0]
            clipped, _, clipped_momenta, _ = results[hidden, "large", 1.0]
            assert norm > 10
            assert_close({name: m * norm for name, m in clipped_momenta.items()}, momenta, 1e-5)
            for name, weight in initial.items():
                if "linear" not in name:
                    continue
                update = (free[name] - weight).norm().item()
                assert (clipped[name] - weight).norm().item() == pytest.approx(update, rel=1e-2)
                # lr sqrt(max side) sqrt(rank), and Newton-Schulz is within 30% of orthogonal
                size = 1e-2 * math.sqrt(weight.numel())
                assert 0.7 * size < update < 1.3 * size, name


def _explode(precision):
    from tests.harness.gradients import follow, means, train_injected

    def one_explodes(name, *of):
        return (1e11 if name == FC1 else 1.0) * different(name, *of)

    settings = {"muon_fp32_matmul_prec": precision}
    calm, initial = train_injected(
        TINY, different, steps=1, optimizer={"clip_grad": 0.0, **settings}
    )
    run, _ = train_injected(TINY, one_explodes, steps=1, optimizer=settings)
    grads = means(initial, one_explodes, steps=1, ranks=dist.get_world_size())
    return initial, calm.weights, run.weights, follow(initial, grads, TINY, Rules())[-1]


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_one_exploding_gradient_leaves_the_other_updates_their_size(precision):
    # A public report: the clipped gradients of all others fell below the eps of the normalisation.
    for initial, calm, weights, expected in run_ranks(_explode, 2, precision):
        for name, weight in initial.items():
            if "linear" in name:
                decayed = (1 - 1e-2 * 0.1) * weight
                update = (calm[name] - decayed).norm().item()
                assert (weights[name] - decayed).norm().item() == pytest.approx(update, rel=1e-2)
        # Adam's gradients are clipped as ever.
        adams = {n: w for n, w in weights.items() if "linear" not in n}
        assert_close(adams, {n: expected[n] for n in adams}, 1e-5)
        assert_close(weights, expected, 1e-5 if precision == "highest" else 1e-2)


# ---- Blocks of a fused QKV weight ----


def _quiet_keys_and_values(gate):
    """One step whose K and V gradients are far smaller than Q's; the update by part, and what it
    should be."""
    from tests.harness import loop
    from tests.harness.gradients import means, noise, train_injected
    from tests.harness.reference import newton_schulz

    head = TINY.hidden // TINY.heads
    query = TINY.heads // TINY.groups * head
    sizes = [query, *([query] if gate else []), head, head]

    def gradient(name, shape, step, rank):
        grad = 0.01 * noise(name, shape, step, rank)
        if "linear_qkv" in name:
            by_group = grad.view(TINY.groups, sum(sizes), -1)
            by_group[:, -2 * head :] *= 0.1
        return grad

    original = loop.transformer_config

    def with_gate(tiny):
        return dataclasses.replace(original(tiny), attention_output_gate=gate)

    loop.transformer_config = with_gate
    run, initial = train_injected(TINY, gradient, steps=1, optimizer={"weight_decay": 0.0})
    (grads,) = means(initial, gradient, steps=1, ranks=dist.get_world_size())

    def parts(matrix):
        by_group = matrix.view(TINY.groups, sum(sizes), -1)
        return [part.flatten(0, 1) for part in by_group.split(sizes, dim=1)]

    pairs = []
    for update, part in zip(parts(initial[QKV] - run.weights[QKV]), parts(grads[QKV]), strict=True):
        scale = max(part.shape) ** 0.5
        pairs.append((update / 1e-2, scale * newton_schulz(part, Rules().coefficients)))
    return pairs


@pytest.mark.parametrize("gate", [False, True])
def test_queries_keys_and_values_of_all_groups_are_matrices_of_their_own(gate):
    # Public reports: rows were sliced as if all queries came first; a gate was taken for keys.
    for pairs in run_ranks(_quiet_keys_and_values, 2, gate):
        assert len(pairs) == (4 if gate else 3)
        for update, expected in pairs:
            assert relative_error(update, expected) < 1e-4


def test_qkv_rows_that_do_not_divide_are_an_error_that_says_what_to_do():
    from dmuon_megatron.matrices import find_matrices

    model = torch.nn.Module()
    model.linear_qkv = torch.nn.Linear(8, 60, bias=False)
    model.config = types.SimpleNamespace(
        num_attention_heads=4, num_query_groups=2, kv_channels=8, attention_output_gate=False
    )
    with pytest.raises(ValueError, match=r"linear_qkv\.weight has 60 rows.*--muon-no-split-qkv"):
        find_matrices([model], split_qkv=True)
    ((matrix,),) = find_matrices([model], split_qkv=False)
    assert [b.shape for b in matrix.blocks] == [(60, 8)]


# ---- Momentum ----


def _momenta_without_learning():
    """Momenta after three steps with a learning rate of 0, and the averages they should be."""
    from tests.harness.gradients import momenta, named, train_injected

    results = []
    for tiny, precision, nesterov in (
        (TINY, "highest", False),
        (TINY, "highest", True),
        (Tiny(bf16=True), "medium", False),
        (Tiny(bf16=True), "medium", True),
    ):
        averages = {}

        def average(run, averages=averages):
            mine = momenta(run)
            for name, param in named(run):
                if name in mine:
                    before = averages.setdefault(name, torch.zeros(param.shape))
                    before.lerp_(param.main_grad.float(), 1 - 0.95)

        run, initial = train_injected(
            tiny,
            different,
            steps=3,
            before_step=average,
            optimizer={
                "lr": 0.0,
                "min_lr": 0.0,
                "clip_grad": 0.0,
                "muon_nesterov": nesterov,
                "muon_fp32_matmul_prec": precision,
            },
        )
        results.append((momenta(run), averages, run.weights, initial))
    return results


def test_momentum_is_the_average_of_the_gradients_and_newton_schulz_never_writes_to_it():
    # A public report: Newton-Schulz normalised the momentum buffer in place.
    for results in run_ranks(_momenta_without_learning, 2):
        for momenta, averages, weights, initial in results:
            assert momenta
            assert_same(momenta, averages)
            assert_same(weights, initial)


def _accumulate_256_and_1():
    from tests.harness.gradients import momenta, train_injected

    microbatches = {}

    def gradient(name, shape, step, rank):
        microbatches[name] = microbatches.get(name, 0) + 1
        return torch.full(shape, 256.0 if microbatches[name] == 1 else 1.0)

    run, _ = train_injected(
        Tiny(bf16=True),
        gradient,
        steps=1,
        num_microbatches=2,
        optimizer={"clip_grad": 0.0, "lr": 0.0, "min_lr": 0.0},
    )
    return momenta(run)


def test_bf16_gradients_are_accumulated_in_fp32_before_they_reach_momentum():
    # A public report: with bf16 parameters 256 + 1 was 256, as it is in bf16.
    for momenta in run_ranks(_accumulate_256_and_1, 2):
        for momentum in momenta.values():
            expected = torch.zeros_like(momentum).lerp(torch.full_like(momentum, 257), 1 - 0.95)
            assert torch.equal(momentum, expected)


# ---- Missing gradients ----


def _without_gradient(missing, layers="decoder.layers.0.mlp.linear_fc1"):
    """after_build and before_backward of a run in which a layer's weight gets no gradient.

    Args:
        missing: of (step, rank), whether it gets none.
    """
    step = -1

    def detach(run):
        layer = run.model.module.get_submodule(layers)
        forward = layer.forward

        def forward_without(*args, **kwargs):
            if missing(step, dist.get_rank()):
                kwargs["weight"] = layer.weight.detach()
            return forward(*args, **kwargs)

        layer.forward = forward_without

    def count(run):
        nonlocal step
        step += 1

    return {"after_build": detach, "before_backward": count}


def _missing_without_overlap(on_rank):
    from tests.harness.gradients import follow, means, train_injected

    def missing(step, rank):
        return step == 1 and (on_rank is None or rank == on_rank)

    def counted(name, shape, step, rank):
        grad = different(name, shape, step, rank)
        return 0 * grad if name == FC1 and missing(step, rank) else grad

    run, initial = train_injected(
        TINY, different, steps=2, overlap=False, **_without_gradient(missing)
    )
    grads = means(initial, counted, steps=2, ranks=2)
    return run.weights, follow(initial, grads, TINY, Rules())[-1]


@pytest.mark.parametrize("on_rank", [0, 1, None])
def test_without_overlap_a_missing_gradient_counts_as_zero(on_rank):
    # Public reports: ranks hung, or a parameter was left out of momentum and decay.
    results = run_ranks(_missing_without_overlap, 2, on_rank, timeout=60)
    for weights, expected in results:
        assert_close(weights, expected, 1e-5)
        assert_same(weights, results[0][0])


def _missing_with_overlap(first_step, on_ranks, layer):
    from tests.harness.dmuon import train_dmuon

    def missing(step, rank):
        return step >= first_step and rank in on_ranks

    train_dmuon(TINY, steps=first_step + 1, **_without_gradient(missing, layer))


@pytest.mark.parametrize(
    ("first_step", "on_ranks", "layer"),
    [
        (0, (1,), "decoder.layers.0.mlp.linear_fc1"),
        (1, (1,), "decoder.layers.0.mlp.linear_fc1"),
        (2, (0, 1), "decoder.layers.1.mlp.linear_fc1"),
        (1, (0,), "output_layer"),
    ],
)
def test_with_overlap_a_missing_gradient_stops_all_ranks_with_one_error(
    first_step, on_ranks, layer
):
    messages = run_ranks_expecting_error(
        _missing_with_overlap, 2, first_step, on_ranks, layer, error=RuntimeError, timeout=60
    )
    assert messages[0] == messages[1]
    for rank in (0, 1):
        assert (f"rank {rank}: " in messages[0]) == (rank in on_ranks)
    assert f"{layer}.weight" in messages[0] and "--overlap-grad-reduce" in messages[0]
    assert messages[0].count(".weight") == len(on_ranks)


def _frozen():
    from tests.harness.gradients import (
        changed_model,
        follow,
        freeze_all_but,
        means,
        train_injected,
    )

    frozen = (FC1, QKV, "embedding.word_embeddings.weight", "decoder.final_layernorm.weight")
    with changed_model(freeze_all_but(lambda name, _: name not in frozen)):
        run, initial = train_injected(TINY, different, steps=3)
    grads = means(initial, different, steps=3, ranks=2)
    trained = [{n: g for n, g in step.items() if n not in frozen} for step in grads]
    return run.weights, initial, follow(initial, trained, TINY, Rules())[-1], frozen


def test_frozen_parameters_stay_as_they_are_and_nothing_waits_for_them():
    for weights, initial, expected, frozen in run_ranks(_frozen, 2, timeout=60):
        assert_close(weights, expected, 1e-5)
        assert_same({n: weights[n] for n in frozen}, {n: initial[n] for n in frozen})


# One token on each rank, so that two of the four experts get none.
IDLE_EXPERTS = Tiny(layers=1, experts=4, top_k=2, sequence=1)


def _idle_experts(reference):
    if reference:
        from tests.harness.reference import train_reference

        return train_reference(IDLE_EXPERTS, steps=3, global_batch_size=2).weights
    from tests.harness.dmuon import train_dmuon

    run = train_dmuon(IDLE_EXPERTS, steps=3, global_batch_size=2, ddp={"bucket_size": 5_000})
    return run.weights


def test_experts_without_tokens_hang_nobody_and_get_zero_gradients():
    (expected,) = run_ranks(_idle_experts, 1, True)
    results = run_ranks(_idle_experts, 2, False, timeout=60)
    for weights in results:
        assert_close(weights, expected, 1e-5)
        assert_same(weights, results[0])


# ---- Zeros, NaN and infinity ----


def _zeros(precision):
    from tests.harness.gradients import follow, means, noise, train_injected

    def gradient(name, shape, step, rank):
        if name == FC1:
            return torch.zeros(shape)
        grad = different(name, shape, step, rank)
        if name == FC2:
            grad[3] = 0
        if name == PROJ:  # rank 1
            grad = 0.01 * noise(name, (shape[0], 1), step) @ noise(name, (1, shape[1]), step)
        if name == QKV:
            grad.view(2, 64, -1)[:, 32:48] = 0  # all keys
        return grad

    run, initial = train_injected(
        TINY, gradient, steps=2, optimizer={"muon_fp32_matmul_prec": precision}
    )
    grads = means(initial, gradient, steps=2, ranks=2)
    return run.weights, initial, follow(initial, grads, TINY, Rules())[-1]


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_a_zero_gradient_is_a_zero_update_and_never_nan(precision):
    # A public report: normalising an all-zero gradient gave NaN.
    decay = 1 - 1e-2 * 0.1
    for weights, initial, expected in run_ranks(_zeros, 2, precision):
        torch.testing.assert_close(weights[FC1], initial[FC1] * decay * decay, rtol=0, atol=0)
        keys = weights[QKV].view(2, 64, -1)[:, 32:48]
        before = initial[QKV].view(2, 64, -1)[:, 32:48]
        torch.testing.assert_close(keys, before * decay * decay, rtol=0, atol=0)
        assert all(weight.isfinite().all() for weight in weights.values())
        assert_close(weights, expected, 1e-5 if precision == "highest" else 5e-2)


BAD_GRADIENTS = {
    "NaN in a matrix": (FC1, math.nan),
    "infinity in a matrix": (QKV, -math.inf),
    "NaN in an embedding": ("embedding.word_embeddings.weight", math.nan),
    "infinity in a norm": ("decoder.final_layernorm.weight", math.inf),
    "finite, with a norm that is not": (FC2, 1e25),
}


def _bad_gradients(overlap, loss_scale):
    """Bad gradients on rank 1 only, in the second of three steps, and a run without that step."""
    from tests.harness.gradients import momenta, train_injected

    scale = loss_scale or 1.0
    settings = {"overlap": overlap, "optimizer": {"loss_scale": loss_scale}}

    def good(name, shape, step, rank):
        return scale * different(name, shape, min(step, 1), rank)

    plain, _ = train_injected(TINY, good, steps=2, snapshots=True, **settings)
    results = []
    for where, value in BAD_GRADIENTS.values():
        kept = []

        def gradient(name, shape, step, rank, where=where, value=value):
            grad = scale * different(name, shape, min(step, 1), rank)
            if (name, step, rank) == (where, 1, 1):
                grad.view(-1)[-1] = value
            return grad

        def keep(run, kept=kept):
            kept.append(momenta(run))

        run, _ = train_injected(
            TINY, gradient, steps=3, snapshots=True, after_step=keep, **settings
        )
        results.append((run.snapshots, run.grad_norms, run.num_zeros, kept))
    return results, plain.snapshots


@pytest.mark.parametrize(("overlap", "loss_scale"), [(True, None), (False, 128.0)])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(overlap, loss_scale):
    # Public reports: ranks disagreed on success, or called an infinite norm "clipped".
    ranks = run_ranks(_bad_gradients, 2, overlap, loss_scale, timeout=60)
    for results, plain in ranks:
        for case, (snapshots, norms, zeros, momenta) in zip(BAD_GRADIENTS, results, strict=True):
            assert not math.isfinite(norms[1]), case
            assert zeros[1] is None, case
            assert_same(snapshots[1], snapshots[0])
            assert_same(momenta[1], momenta[0])
            # The next step is as if the bad one had never been.
            assert_same(snapshots[2], plain[1])
    for mine, theirs in zip(ranks[0][0], ranks[1][0], strict=True):
        assert_same(mine[0][2], theirs[0][2])


# ---- Zeroing ----


def _same_step_three_times(set_to_none):
    from tests.harness.gradients import named, train_injected

    seen, cleared = [], []

    def look(run):
        seen.append({name: p.main_grad.clone() for name, p in named(run)})

    def after_step(run):
        run.model.zero_grad_buffer()
        run.optimizer.zero_grad(set_to_none)
        cleared.append(
            all(
                main.grad is None if set_to_none else main.grad is None or not main.grad.any()
                for child in run.optimizer.chained_optimizers
                for main in child.get_parameters()
            )
        )

    train_injected(
        TINY,
        lambda name, shape, step, rank: different(name, shape, 0, rank),
        steps=3,
        before_step=look,
        after_step=after_step,
        optimizer={"lr": 0.0, "min_lr": 0.0},
    )
    return seen, cleared


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroing_reaches_matrices_and_the_rest(set_to_none):
    # A public report: the Adam half was never zeroed, so its gradients added up for ever.
    for seen, cleared in run_ranks(_same_step_three_times, 2, set_to_none):
        assert cleared == [True] * 3
        assert_same(seen[1], seen[0])
        assert_same(seen[2], seen[0])

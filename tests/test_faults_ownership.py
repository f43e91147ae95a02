"""Faults of who owns what that users of distributed Muon have met."""

import pytest
import torch
import torch.distributed as dist

from tests.harness.compare import assert_close, assert_same
from tests.harness.ranks import run_ranks, run_ranks_expecting_error
from tests.harness.types import Rules, Tiny


def different(name, shape, step, rank):
    """Gradients that differ from rank to rank."""
    from tests.harness.gradients import noise

    return 0.01 * (rank + noise(name, shape, step, rank))


# ---- More ranks than matrices, and as many, and one fewer ----


def _count_matrices(counts, freeze_rest, overlap, loss_scale):
    """Per number of matrices: what this rank owns, and the weights beside the reference's."""
    from tests.harness.gradients import (
        changed_model,
        follow,
        freeze_all_but,
        is_matrix_name,
        means,
        named,
        train_injected,
    )

    ranks, scale = dist.get_world_size(), loss_scale or 1.0
    results = []
    for count in counts:
        tiny = Tiny(layers=2)
        left = [count]

        def keep(name, param, left=left):
            if not is_matrix_name(name, param):
                return not freeze_rest
            left[0] -= 1
            return left[0] >= 0

        trained, lrs = set(), []

        def look(run, trained=trained, lrs=lrs):
            trained.update(name for name, param in named(run) if param.requires_grad)
            lrs.append([(g["lr"], g["weight_decay"]) for g in run.optimizer.param_groups])

        with changed_model(freeze_all_but(keep)):
            run, initial = train_injected(
                tiny,
                lambda *of: scale * different(*of),
                steps=2,
                overlap=overlap,
                after_step=look,
                optimizer={"loss_scale": loss_scale},
            )
        grads = means(initial, different, steps=2, ranks=ranks)
        grads = [{n: g for n, g in step.items() if n in trained} for step in grads]
        expected = follow(initial, grads, tiny, Rules())[-1]
        results.append((len(run.optimizer.muon.owned), run.weights, expected, lrs, run.grad_norms))
    return results


@pytest.mark.parametrize(
    ("counts", "freeze_rest", "overlap", "loss_scale"),
    [
        ((1, 3, 4, 5), False, True, None),
        ((1, 3), False, False, None),
        ((1, 4), True, True, None),
        ((1,), True, False, 64.0),
    ],
)
def test_any_number_of_matrices_trains_on_four_ranks(counts, freeze_rest, overlap, loss_scale):
    # Public reports: too few matrices crashed one rank and stranded the others.
    ranks = run_ranks(_count_matrices, 4, counts, freeze_rest, overlap, loss_scale, timeout=60)
    for number, count in enumerate(counts):
        owned = [results[number][0] for results in ranks]
        assert sum(owned) == count
        assert min(owned) == (0 if count < 4 else 1)
        first = ranks[0][number]
        for _, weights, expected, lrs, norms in (results[number] for results in ranks):
            assert_close(weights, expected, 1e-5)
            assert_same(weights, first[1])
            # A rank without a matrix keeps its groups' settings.
            assert lrs == first[3] and lrs[-1]
            assert norms == first[4]


def test_two_matrices_train_on_three_ranks_and_one_on_two():
    for world_size, count in ((3, 2), (2, 1)):
        ranks = run_ranks(_count_matrices, world_size, (count,), False, True, None, timeout=60)
        assert sorted(results[0][0] for results in ranks) == [0] + [1] * count
        for ((_, weights, expected, _, _),) in ranks:
            assert_close(weights, expected, 1e-5)


# ---- Groups and plans ----


def _groups_of_their_own():
    """Weights of a run in which fc2 has a learning rate of 0 and proj no weight decay."""
    from megatron.core.optimizer import get_standard_config_overrides
    from megatron.core.optimizer.optimizer_config import ParamKey

    from dmuon_megatron import get_dmuon_optimizer
    from tests.harness import dmuon
    from tests.harness.gradients import follow, means, train_injected

    def build(config, chunks):
        overrides = get_standard_config_overrides(config)
        overrides[ParamKey(name="*linear_fc2.weight")] = {"max_lr": 0.0, "min_lr": 0.0}
        overrides[ParamKey(name="*linear_proj.weight")] = {"wd_mult": 0.0}
        return get_dmuon_optimizer(config, chunks, overrides)

    dmuon.dmuon_optimizer = build
    tiny = Tiny(layers=1)
    run, initial = train_injected(tiny, different, steps=2)
    grads = means(initial, different, steps=2, ranks=dist.get_world_size())
    expected = follow(initial, grads, tiny, Rules())[-1]
    plain = follow(initial, grads, tiny, Rules(weight_decay=0.0))[-1]
    for name in initial:
        if name.endswith("linear_fc2.weight"):
            expected[name] = initial[name]
        if name.endswith("linear_proj.weight"):
            expected[name] = plain[name]
    return run.weights, expected


def test_matrices_keep_the_learning_rate_and_decay_of_their_group_wherever_they_live():
    # A public report: one learning rate overwrote those of all groups.
    results = run_ranks(_groups_of_their_own, 3)
    for weights, expected in results:
        assert_close(weights, expected, 1e-5)
        assert_same(weights, results[0][0])


def _different_models():
    from tests.harness.dmuon import train_dmuon
    from tests.harness.gradients import changed_model, freeze_all_but

    frozen = f"decoder.layers.{dist.get_rank()}.mlp.linear_fc1.weight"
    with changed_model(freeze_all_but(lambda name, _: name != frozen)):
        train_dmuon(Tiny(), steps=1)


def test_ranks_with_different_models_stop_with_one_error():
    # A public report: ranks that chose owners by themselves chose different ones.
    messages = run_ranks_expecting_error(_different_models, 2, error=RuntimeError, timeout=60)
    assert messages[0] == messages[1] and "different" in messages[0]
    assert "owner plan" in messages[0]


# ---- Ownership is fixed ----


def _change_groups(how, on_rank):
    from tests.harness.dmuon import train_dmuon

    def change(run):
        inner = run.optimizer.muon.optimizer
        first = inner.param_groups[0]
        if how == "add":
            inner.add_param_group({"params": [torch.nn.Parameter(torch.zeros(4))]})
        if dist.get_rank() == on_rank:
            if how == "remove":
                first["params"].pop()
            if how == "replace":
                first["params"][0] = torch.nn.Parameter(torch.zeros(4))
            if how == "move":
                inner.param_groups.append({**first, "lr": 1.0, "params": [first["params"].pop()]})

    train_dmuon(Tiny(), steps=1, before_step=change)


def test_adding_parameters_to_the_built_optimizer_is_an_error_on_every_rank():
    # A public report: moving a parameter after construction crashed, or silently skipped it.
    for message in run_ranks_expecting_error(_change_groups, 2, "add", 0, error=RuntimeError):
        assert "cannot be added" in message and "anew" in message


@pytest.mark.parametrize("how", ["remove", "replace", "move"])
def test_changing_parameter_groups_on_one_rank_stops_all_ranks_with_one_error(how):
    messages = run_ranks_expecting_error(_change_groups, 2, how, 1, error=RuntimeError, timeout=60)
    assert messages[0] == messages[1]
    assert "parameter groups" in messages[0] and "on rank 1" in messages[0]


def _both_settings():
    from tests.harness.dmuon import train_dmuon

    return [
        train_dmuon(
            Tiny(),
            steps=2,
            ddp={"use_distributed_optimizer": in_ddp},
            optimizer={"use_distributed_optimizer": in_optimizer},
        ).weights
        for in_ddp, in_optimizer in ((True, True), (True, False), (False, True), (False, False))
    ]


def test_use_distributed_optimizer_may_be_set_or_not():
    # A public report: a flag of that name was refused, while frameworks force it.
    for expected, *others in run_ranks(_both_settings, 2):
        for weights in others:
            assert_same(weights, expected)

"""Shapes, settings and sequences of calls at the edge of what DMuon serves."""

import pytest
import torch
import torch.distributed as dist

from dmuon_megatron.config import DMuonConfig
from dmuon_megatron.cost import AnalyticCost
from dmuon_megatron.muon import Block, Problem, Recipe, orthogonalize_batch
from dmuon_megatron.orthogonalize import Workspace, orthogonalize
from dmuon_megatron.planner import MatrixTask, plan_owners
from tests.harness.compare import assert_same
from tests.harness.ranks import run_ranks, run_ranks_expecting_error
from tests.harness.types import Tiny


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("in_place", [True, False])
def test_some_rows_of_one_group_are_a_problem_of_their_own(start, in_place):
    # Multi-query attention: Q, K and V are each one range of rows, and Q may run alone.
    matrix = torch.randn(5, 8)
    inputs = [matrix.clone().flatten()]
    outputs = inputs if in_place else [torch.full((40,), 7.0)]
    others = outputs[0].clone().view(5, 8)
    recipe = Recipe(scale_mode="shape_scaling", extra_scale=0.5)
    orthogonalize_batch([Problem(0, Block(1, start, 2, 8))], inputs, outputs, recipe, Workspace())
    written = outputs[0].view(5, 8)
    rows = slice(start, start + 2)
    torch.testing.assert_close(written[rows], 0.5 * orthogonalize(matrix[rows]))
    others[rows] = written[rows]
    assert torch.equal(written, others)


class InAnyOrder(torch.nn.Module):
    """Layers called in another order by every rank and in every step."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layers = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(6))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        generator = torch.Generator().manual_seed(10 * self.calls + dist.get_rank())
        for number in torch.randperm(len(self.layers), generator=generator):
            x = torch.tanh(self.layers[number](x))
        return x


def _skip_steps(overlap):
    from dmuon_megatron import wrap_with_ddp
    from tests.harness.dmuon import UNTIMED, dmuon_config, dmuon_optimizer
    from tests.harness.loop import ddp_config
    from tests.harness.tiny import start_megatron, transformer_config

    start_megatron()
    ddp = ddp_config(overlap=overlap, bucket_size=150)
    (model,) = wrap_with_ddp([InAnyOrder(transformer_config(Tiny()))], ddp, UNTIMED)
    optimizer = dmuon_optimizer(dmuon_config(Tiny(), overlap=overlap), [model])
    successes = []
    for step in range(4):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(torch.ones(1, 12)).sum()
        (loss * (float("nan") if step == 1 else 1.0)).backward()
        model.finish_grad_sync()
        successes.append(optimizer.step()[0])
    model.settle()
    return successes, {name: p.detach().clone() for name, p in model.named_parameters()}


def test_after_a_skipped_step_ranks_may_need_the_weights_in_different_orders():
    results = run_ranks(_skip_steps, 3, True, timeout=60)
    (_, expected), *_ = run_ranks(_skip_steps, 3, False)
    for successes, weights in results:
        assert successes == [True, False, True, True]
        assert_same(weights, expected)


@pytest.mark.parametrize("budget", [1e20, 1e300])
def test_a_budget_of_ages_is_as_good_as_any(budget):
    tasks = [MatrixTask(f"m{i}", 64 + i, 128) for i in range(5)]
    expected = plan_owners(tasks, 2, AnalyticCost("CPU"), budget=20.0)
    assert plan_owners(tasks, 2, AnalyticCost("CPU"), budget=budget).owner == expected.owner


def test_a_number_of_newton_schulz_steps_that_makes_no_sense_is_refused_by_its_flag():
    for steps in (0, -1, None, 2.5):
        with pytest.raises(ValueError, match="--muon-num-ns-steps"):
            DMuonConfig(ns_steps=steps)


def _first_chunk_without_matrices():
    from dmuon_megatron import wrap_with_ddp
    from tests.harness.dmuon import UNTIMED
    from tests.harness.loop import ddp_config
    from tests.harness.tiny import start_megatron, transformer_config

    start_megatron()
    chunks = [torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)]
    for chunk in chunks:
        chunk.config = transformer_config(Tiny())
    return [sorted(c.ownership.plan.owner) for c in wrap_with_ddp(chunks, ddp_config(), UNTIMED)]


def test_the_first_model_chunk_may_have_no_matrix():
    results = run_ranks(_first_chunk_without_matrices, 2, timeout=60)
    assert results == [[["chunk1.weight"]] * 2] * 2


def _settings_by_rank(name, values):
    from tests.harness.dmuon import train_dmuon

    train_dmuon(Tiny(layers=1), steps=1, optimizer={name: values[dist.get_rank()]})


@pytest.mark.parametrize(
    ("name", "values"),
    [("muon_momentum", (0.95, 0.9)), ("muon_scale_mode", ("spectral", "shape_scaling"))]
    + [(name, (0.1, 0.2)) for name in ("lr", "weight_decay", "clip_grad")],
)
def test_ranks_with_different_settings_stop_with_one_error(name, values):
    messages = run_ranks_expecting_error(
        _settings_by_rank, 2, name, values, error=RuntimeError, timeout=60
    )
    assert messages[0] == messages[1]
    assert f"{name.removeprefix('muon_')}, by rank: {values[0]}, {values[1]}." in messages[0]


def _sequence(broken):
    from tests.harness.dmuon import train_dmuon

    def step_again(run):
        run.optimizer.step()

    def forget(run):
        run.model.grads_reduced = False  # as without finalize_model_grads

    hooks = {"after_step": step_again} if broken == "twice" else {"before_step": forget}
    train_dmuon(Tiny(layers=1), steps=1, **hooks)


@pytest.mark.parametrize("broken", ["twice", "without finalize_model_grads"])
def test_a_step_without_newly_reduced_gradients_is_refused(broken):
    for message in run_ranks_expecting_error(_sequence, 2, broken, error=RuntimeError, timeout=60):
        assert "no gradients have been reduced" in message and "finalize_model_grads" in message


def _different_on_one_rank(what):
    from tests.harness.dmuon import train_dmuon
    from tests.harness.gradients import changed_model

    def freeze(model):
        if dist.get_rank() == 1:
            model.embedding.word_embeddings.weight.requires_grad_(False)

    if what == "frozen":
        with changed_model(freeze):
            train_dmuon(Tiny(layers=1), steps=1)
    else:
        momentum = 1.5 if dist.get_rank() == 1 else 0.9
        train_dmuon(Tiny(layers=1), steps=1, optimizer={"muon_momentum": momentum})


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [("frozen", RuntimeError, "different models"), ("momentum", ValueError, "rank 1")],
)
def test_what_is_wrong_on_one_rank_stops_all(what, error, says):
    for message in run_ranks_expecting_error(
        _different_on_one_rank, 2, what, error=error, timeout=60
    ):
        assert says in message

"""The test harness itself: ranks that fail are reported, late collectives are late, and stock
Megatron agrees with the plain reference."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness.compare import assert_close, assert_same
from tests.harness.ranks import RanksFailed, run_ranks, run_ranks_expecting_error
from tests.harness.types import Rules, Tiny

# ---- ranks ----


def _sum_of_ranks(factor):
    value = torch.full((2,), dist.get_rank() * factor)
    dist.all_reduce(value)
    return dist.get_rank(), value


def test_every_rank_runs_and_results_come_in_order():
    results = run_ranks(_sum_of_ranks, 3, 2.0)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(torch.equal(value, torch.full((2,), 6.0)) for _, value in results)


def _pickled_results():
    from tests.harness.ranks import _pickled

    values = [torch.arange(6, dtype=torch.bfloat16).view(2, 3).T, torch.ones(0, 3), torch.tensor(5)]
    message = _pickled(values)
    # Megatron puts a function of its own into pickled tensors.
    assert b"megatron" not in message
    return values


def test_tensors_come_back_as_values_and_bring_no_megatron_along():
    (values,) = run_ranks(_pickled_results, 1)
    assert torch.equal(values[0], torch.arange(6, dtype=torch.bfloat16).view(2, 3).T)
    assert values[1].shape == (0, 3) and values[2].shape == () and values[2] == 5


def _raise_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("planted")
    dist.barrier()


def test_an_exception_comes_with_its_rank_and_traceback_before_what_follows_from_it():
    with pytest.raises(RanksFailed) as failure:
        run_ranks(_raise_on, 3, 1, timeout=30)
    first = failure.value.errors[0]
    assert (first.rank, first.kind, first.message) == (1, "ValueError", "planted")
    assert "in _raise_on" in str(failure.value)


def _end(how):
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(("how", "shown"), [("exit", "exit code 7"), ("kill", "SIGKILL")])
def test_a_rank_that_dies_is_reported(how, shown):
    with pytest.raises(RanksFailed) as failure:
        run_ranks(_end, 2, how, timeout=30)
    first = failure.value.errors[0]
    assert (first.rank, first.kind) == (1, "died") and shown in first.message


def _hang_on_rank_one(folder):
    (folder / str(dist.get_rank())).write_text(str(os.getpid()))
    child = subprocess.Popen(["sleep", "1000"])
    (folder / f"child {dist.get_rank()}").write_text(str(child.pid))
    while dist.get_rank() == 1:
        time.sleep(0.1)
    dist.barrier()


def test_a_hang_ends_with_the_stacks_of_all_ranks_and_no_process_left(tmp_path):
    with pytest.raises(RanksFailed) as failure:
        run_ranks(_hang_on_rank_one, 2, tmp_path, timeout=2)
    assert {error.kind for error in failure.value.errors} == {"hung"}
    stacks = {error.rank: error.details for error in failure.value.errors}
    assert "barrier" in stacks[0] and "_hang_on_rank_one" in stacks[0]
    assert "_hang_on_rank_one" in stacks[1]
    assert len(list(tmp_path.iterdir())) == 4
    for file in tmp_path.iterdir():
        assert not _is_running(int(file.read_text()))


def _wait_for_ever(folder):
    (folder / str(dist.get_rank())).write_text(str(os.getpid()))
    dist.barrier()
    while True:
        time.sleep(1)


def test_ranks_end_with_the_test_process_however_it_ends(tmp_path):
    code = (
        "import pathlib, tests.test_harness as test\n"
        f"test.run_ranks(test._wait_for_ever, 2, pathlib.Path({str(tmp_path)!r}))\n"
    )
    root = Path(__file__).parents[1]
    process = subprocess.Popen([sys.executable, "-c", code], cwd=root, stderr=subprocess.DEVNULL)
    _wait_until(lambda: len(list(tmp_path.iterdir())) == 2 or process.poll() is not None, 100)
    process.kill()
    process.wait()
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(pids) == 2
    _wait_until(lambda: not any(map(_is_running, pids)), 20)


def _wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


def _is_running(pid):
    """A killed process whose parent has gone may stay a while as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _refuse(ranks):
    if dist.get_rank() in ranks:
        raise KeyError(f"no {dist.get_rank()}")


def test_an_error_expected_on_all_ranks_must_come_from_all():
    messages = run_ranks_expecting_error(_refuse, 2, (0, 1), error=LookupError)
    assert messages == ["'no 0'", "'no 1'"]
    with pytest.raises(AssertionError, match=r"ranks \[1\] raised no"):
        run_ranks_expecting_error(_refuse, 2, (0,), error=LookupError)
    with pytest.raises(RanksFailed, match="KeyError"):
        run_ranks_expecting_error(_refuse, 2, (0, 1), error=ValueError)


# ---- the reference and the loop ----


def _reference_adam():
    from tests.harness.reference import train_reference

    return train_reference(Tiny(), steps=5, rules=Rules(muon=False))


def _stock_adam(overlap=True, **settings):
    from tests.harness.loop import ddp_config, train

    return train(Tiny(), steps=5, ddp=ddp_config(overlap=overlap), **settings).portable()


@pytest.fixture(scope="module")
def reference():
    return run_ranks(_reference_adam, 1)[0]


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 4), (2, 1), (3, 4), (4, 1)])
def test_stock_adam_equals_the_reference(reference, ranks, microbatches):
    runs = run_ranks(_stock_adam, ranks, num_microbatches=microbatches)
    for run in runs:
        assert_close(run.weights, reference.weights, 1e-5)
        assert_same(run.weights, runs[0].weights)
        assert run.losses == pytest.approx(reference.losses, rel=1e-5)
        assert run.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5)
        assert run.num_zeros == reference.num_zeros
    assert reference.losses[-1] < 0.9 * reference.losses[0]


def _reference_muon(rules):
    from tests.harness.reference import train_reference

    return train_reference(Tiny(), steps=3, rules=rules)


def _stock_muon(rules):
    from tests.harness.loop import ddp_config, optimizer_config, train

    ddp = ddp_config(overlap=False, use_distributed_optimizer=False)
    optimizer = optimizer_config(
        Tiny(),
        overlap=False,
        optimizer="muon",
        use_distributed_optimizer=False,
        muon_momentum=rules.momentum,
        muon_nesterov=rules.nesterov,
        muon_split_qkv=rules.split_qkv,
        muon_scale_mode=rules.scale_mode,
        muon_extra_scale_factor=rules.extra_scale,
        muon_fp32_matmul_prec="highest",
    )
    return train(Tiny(), steps=3, ddp=ddp, optimizer=optimizer).portable()


@pytest.mark.parametrize(
    "rules",
    [Rules(), Rules(nesterov=True, split_qkv=False, scale_mode="unit_rms_norm", extra_scale=0.2)],
    ids=["defaults", "others"],
)
def test_stock_muon_equals_the_reference(rules):
    pytest.importorskip("emerging_optimizers", reason="Megatron's own Muon needs it")
    (expected,) = run_ranks(_reference_muon, 1, rules)
    for run in run_ranks(_stock_muon, 2, rules):
        assert_close(run.weights, expected.weights, 1e-5)
        assert run.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)


def test_looking_at_weights_and_evaluating_in_between_changes_nothing():
    plain, watched, serial = (
        run_ranks(_stock_adam, 2, **settings)[1]
        for settings in ({}, {"eval_every": 2, "snapshots": True}, {"overlap": False})
    )
    assert_same(watched.weights, plain.weights)
    assert_close(serial.weights, plain.weights, 1e-5)
    assert_same(watched.snapshots[-1], plain.weights)
    assert watched.eval_losses == pytest.approx(plain.losses[2::2], rel=1e-6)


@pytest.mark.parametrize(
    "settings",
    [{"norm": "LayerNorm", "bias": True, "tied": True}, {"experts": 4, "shared_expert": True}],
    ids=["gpt2-like", "experts"],
)
def test_other_shapes_of_the_model_train_too(settings):
    (expected,) = run_ranks(_reference_shape, 1, settings)
    for run in run_ranks(_stock_shape, 2, settings):
        assert_close(run.weights, expected.weights, 1e-5)


def _reference_shape(settings):
    from tests.harness.reference import train_reference

    return train_reference(Tiny(**settings), steps=2, rules=Rules(muon=False))


def _stock_shape(settings):
    from tests.harness.loop import train

    return train(Tiny(**settings), steps=2).portable()


# ---- late collectives ----


def _late_stock_adam():
    from tests.harness.late import late

    with late() as log:
        run = _stock_adam()
    return run, log.counts, log.deferred, log.waited


def test_late_collectives_change_nothing_where_every_wait_is_in_place():
    runs = run_ranks(_late_stock_adam, 2)
    plain = run_ranks(_stock_adam, 2)
    for (run, counts, deferred, waited), expected in zip(runs, plain, strict=True):
        assert_same(run.weights, expected.weights)
        assert counts["reduce_scatter_tensor"] > 0 and counts["all_gather_into_tensor"] > 0
        assert deferred == waited


def _stock_adam_without_a_wait(which):
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    from tests.harness.late import LateWork, late

    start = getattr(_ParamAndGradBucketGroup, which)
    handle = {"start_param_sync": "param_gather_handle", "start_grad_sync": "grad_reduce_handle"}

    def start_and_forget(self, *args, **kwargs):
        start(self, *args, **kwargs)
        if isinstance(getattr(self, handle[which]), LateWork):
            getattr(self, handle[which]).pending.clear()

    setattr(_ParamAndGradBucketGroup, which, start_and_forget)
    with late() as log:
        run = _stock_adam()
    return run.weights, log.deferred, log.waited


@pytest.mark.parametrize("which", ["start_param_sync", "start_grad_sync"])
def test_a_missing_wait_is_caught(which):
    for weights, deferred, waited in run_ranks(_stock_adam_without_a_wait, 2, which):
        assert deferred > waited
        assert any(weight.isnan().any() for weight in weights.values())


def _late_reduce_and_broadcast():
    from tests.harness.late import late

    rank = dist.get_rank()
    seen = {}
    with late() as log:
        bucket = torch.arange(6.0) + 10 * rank
        handles = [
            dist.reduce(bucket[:2], 0, async_op=True),
            dist.reduce(bucket[2:], 1, async_op=True),
        ]
        seen["reducing"] = bucket.clone()
        for handle in handles:
            handle.wait()
        seen["reduced"] = bucket.clone()
        bucket[:] = rank
        handles = [
            dist.broadcast(bucket[:2], 0, async_op=True),
            dist.broadcast(bucket[2:], 1, async_op=True),
        ]
        seen["publishing"] = bucket.clone()
        for handle in handles:
            handle.wait()
        seen["published"] = bucket.clone()
    assert log.counts == {"reduce": 2, "broadcast": 2} and not log.pending
    assert dist.reduce.__module__ != "tests.harness.late"
    return seen


def test_late_reduce_and_broadcast_deliver_where_and_when_they_should():
    nan = float("nan")
    first, second = run_ranks(_late_reduce_and_broadcast, 2)
    expected = {
        "reducing": ([nan] * 6, [nan] * 6),
        "reduced": ([10, 12] + [nan] * 4, [nan] * 2 + [14, 16, 18, 20]),
        "publishing": ([0, 0] + [nan] * 4, [nan] * 2 + [1] * 4),
        "published": ([0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]),
    }
    for stage, values in expected.items():
        for seen, value in zip((first, second), values, strict=True):
            torch.testing.assert_close(
                seen[stage], torch.tensor(value, dtype=torch.float32), equal_nan=True
            )


def _write_while_in_flight():
    from tests.harness.late import late

    with late():
        bucket = torch.ones(4)
        handle = dist.reduce(bucket, 0, async_op=True)
        bucket.zero_()
        handle.wait()


def test_writing_to_a_buffer_in_flight_is_caught():
    for message in run_ranks_expecting_error(_write_while_in_flight, 2, error=AssertionError):
        assert "written to while reduce worked on it" in message


def _late_others():
    from tests.harness.late import late

    rank = dist.get_rank()
    with late() as log:
        whole = torch.zeros(4)
        mine = whole[2 * rank : 2 * rank + 2].fill_(rank + 1)
        gather = dist.all_gather_into_tensor(whole, mine, async_op=True)
        total, received = torch.ones(2), torch.zeros(2)
        add = dist.all_reduce(total, async_op=True)
        exchange = dist.all_to_all_single(received, torch.arange(2.0) + 10 * rank, async_op=True)
        early = [tensor.clone() for tensor in (whole, total, received)]
        for handle in (exchange, gather, add):
            handle.wait()
    assert log.deferred == log.waited == 3
    assert (early[0] == rank + 1).sum() == 2 and early[0].isnan().sum() == 2
    assert early[1].isnan().all() and early[2].isnan().all()
    return whole.tolist(), total.tolist(), received.tolist()


def test_late_gather_all_reduce_and_all_to_all():
    results = run_ranks(_late_others, 2)
    assert results[0] == ([1, 1, 2, 2], [2, 2], [0, 10])
    assert results[1] == ([1, 1, 2, 2], [2, 2], [1, 11])

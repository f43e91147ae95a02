"""Measured costs: what is timed, kept, shared between ranks, and filled in."""

import multiprocessing
import time
import warnings

import pytest

torch = pytest.importorskip("torch")

from dmuon_megatron.cost import AnalyticCost, MeasuredCost, measurements  # noqa: E402
from dmuon_megatron.cost import measured as module  # noqa: E402
from dmuon_megatron.cost.measured import REPEATS, WARM_UP, device_key  # noqa: E402
from dmuon_megatron.planner import MatrixTask, plan_owners  # noqa: E402
from dmuon_megatron.store import Store  # noqa: E402


class Sleeper:
    """Stands for Newton-Schulz: takes a known time, and counts."""

    def __init__(self, seconds=0.0):
        self.seconds, self.shapes = seconds, []

    def __call__(self, x):
        self.shapes.append(tuple(x.shape))
        time.sleep(self.seconds)


def measured(tmp_path, run=None, **options):
    return MeasuredCost("cpu", store=Store(tmp_path), run=run or Sleeper(), **options)


def test_requests_are_the_batches_a_plan_can_use():
    requests = measurements({(64, 32): 3, (32, 64): 3, (128, 128): 1})
    assert requests == [(32, 64, 1), (128, 128, 1), (32, 64, 2), (32, 64, 4), (32, 64, 6)]
    assert max(batch for _, _, batch in measurements({(64, 64): 99}, max_batch=8)) == 8
    assert measurements({(64, 64): 9}, workspace=1) == [(64, 64, 1)]


def test_a_measurement_warms_up_takes_the_median_and_is_kept(tmp_path, monkeypatch):
    times = iter([0.004, 0.001, 0.0020003, 0.009, 0.002])
    assert REPEATS == 5
    monkeypatch.setattr(module, "_cpu_seconds", lambda run, x: run(x) or next(times))
    run = Sleeper()
    cost = measured(tmp_path, run)
    assert cost.measure([(8, 16, 2)], 60) == []
    assert run.shapes == [(2, 8, 16)] * (WARM_UP + REPEATS)
    assert cost.seconds(16, 8, 2) == 0.002  # the median, in whole microseconds
    later = Sleeper()
    again = measured(tmp_path, later)
    assert again.measure([(8, 16, 2)], 60) == []
    assert not later.shapes
    assert again.seconds(8, 16, 2) == cost.seconds(8, 16, 2)


def test_method_dtype_and_steps_are_measured_apart(tmp_path):
    measured(tmp_path, method="gram").measure([(8, 8, 1)], 60)
    for options in ({"method": "standard"}, {"method": "gram", "steps": 3}):
        assert measured(tmp_path, **options).missing([(8, 8, 1)])
    assert measured(tmp_path, method="gram", dtype=torch.float16).missing([(8, 8, 1)])
    assert not measured(tmp_path, method="gram").missing([(8, 8, 1)])


def test_the_key_names_device_and_versions():
    key = device_key(torch.device("cpu"))
    assert key["device"]
    assert key["torch"] == torch.__version__
    assert {"capability", "cuda", "tilelang", "threads"} <= set(key)


def test_batches_between_measured_ones_are_interpolated_and_others_modelled(tmp_path):
    cost = measured(tmp_path)
    cost.merge({(64, 64, 2): 200, (64, 64, 6): 400})
    assert cost.seconds(64, 64, 2) == 200e-6
    assert cost.seconds(64, 64, 4) == 300e-6
    model = AnalyticCost("CPU")
    ratio = model.seconds(64, 64, 12) / model.seconds(64, 64, 6)
    assert cost.seconds(64, 64, 12) == pytest.approx(400e-6 * ratio, abs=1e-6)
    ratio = model.seconds(64, 64, 1) / model.seconds(64, 64, 2)
    assert cost.seconds(64, 64, 1) == pytest.approx(200e-6 * ratio, abs=1e-6)
    # A shape that was never measured: the model, at the speed that the measurements show.
    scale = cost.seconds(512, 512, 1) / model.seconds(512, 512, 1)
    low, high = 200e-6 / model.seconds(64, 64, 2), 400e-6 / model.seconds(64, 64, 6)
    assert min(low, high) * 0.99 <= scale <= max(low, high) * 1.01


def test_ranks_that_merge_the_same_tables_in_any_order_agree(tmp_path):
    tables = [{(8, 8, 1): 30, (8, 8, 2): 50}, {(8, 8, 1): 20}, {(16, 8, 1): 70}]
    first, second = measured(tmp_path), measured(tmp_path / "other")
    first.merge(*tables)
    second.merge(*reversed(tables))
    assert first.table() == second.table()
    assert first.table()[8, 8, 1] == 20
    assert first.model == second.model
    tasks = [MatrixTask(f"m{i}", 8, 8 + i % 3) for i in range(9)]
    prints = [plan_owners(tasks, 3, cost).fingerprint for cost in (first, second)]
    assert prints[0] == prints[1]


def test_the_budget_ends_the_measuring_and_what_is_left_is_modelled(tmp_path):
    run = Sleeper(0.02)
    cost = measured(tmp_path, run)
    requests = measurements({(8, 8 * i): 1 for i in range(1, 40)})
    began = time.monotonic()
    left = cost.measure(requests, 0.5)
    assert time.monotonic() - began < 20
    assert 0 < len(left) < len(requests)
    assert cost.seconds(*left[0]) > 0


def test_a_request_that_would_overrun_the_budget_is_skipped(tmp_path):
    cost = measured(tmp_path, Sleeper(0.001))
    assert cost.measure([(8, 8, 1), (8192, 8192, 1), (8, 16, 1)], 1.0) == [(8192, 8192, 1)]


def test_progress_is_told(tmp_path):
    told = []
    measured(tmp_path).measure([(8, 8, 1), (8, 16, 1)], 60, lambda *n: told.append(n))
    assert told == [(1, 2), (2, 2)]


def test_nonsense_in_the_store_is_left_out(tmp_path):
    cost = measured(tmp_path)
    entries = {
        "8x8x1": 5,
        "8x8": 1,
        "8x8x0": 5,
        "axbxc": 5,
        "8x9x1": -4,
        "8x10x1": 1.5,
        "8x11x1": None,
    }
    Store(tmp_path).update("cost", cost.key, entries)
    assert measured(tmp_path).table() == {(8, 8, 1): 5}


def test_a_broken_store_costs_only_the_memory(tmp_path):
    cost = measured(tmp_path)
    cost.measure([(8, 8, 1)], 60)
    path = Store(tmp_path).path("cost", cost.key)
    path.write_text(path.read_text()[:20])
    with pytest.warns(UserWarning, match="damaged"):
        again = measured(tmp_path)
    assert again.missing([(8, 8, 1)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert again.measure([(8, 8, 1)], 60) == []
    assert measured(tmp_path).missing([(8, 8, 1)]) == []


def _measure_in_process(directory, queue):
    run = Sleeper(0.005)
    cost = MeasuredCost("cpu", store=Store(directory), run=run)
    cost.measure([(8, 8, 1), (8, 16, 1)], 60)
    queue.put((len(run.shapes), sorted(cost.table().items())))


def test_processes_of_one_machine_measure_each_request_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=_measure_in_process, args=(tmp_path, queue)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(60)
    assert sorted(runs for runs, _ in results) == [0, 0, 2 * (WARM_UP + REPEATS)]
    assert len({str(table) for _, table in results}) == 1


def test_the_real_newton_schulz_is_timed(tmp_path):
    cost = MeasuredCost("cpu", store=Store(tmp_path))
    assert cost.measure(measurements({(32, 64): 2}), 60) == []
    assert 1e-6 <= cost.seconds(32, 64, 1) < 1
    assert cost.noise > 0


@pytest.mark.gpu
def test_cuda_times_are_device_times(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    cost = MeasuredCost("cuda", dtype=torch.float16, store=Store(tmp_path))
    assert cost.measure(measurements({(1024, 4096): 8}), 60) == []
    assert cost.key["capability"]
    assert cost.seconds(1024, 4096, 8) < 8 * cost.seconds(1024, 4096, 1)

"""The analytic cost and the exact batch table."""

import subprocess
import sys

import pytest

from dmuon_megatron.cost import (
    DEVICES,
    AnalyticCost,
    BatchTable,
    batch_microseconds,
    nearest_preset,
)


def test_every_preset_gives_times_that_grow_with_the_work():
    for name in DEVICES:
        cost = AnalyticCost(name)
        assert 0 < cost.seconds(256, 256, 1) < cost.seconds(256, 1024, 1)
        assert cost.seconds(256, 256, 1) < cost.seconds(256, 256, 32)


def test_a_matrix_and_its_transpose_cost_the_same():
    cost = AnalyticCost("H100")
    assert cost.seconds(4096, 14336, 2) == cost.seconds(14336, 4096, 2)


def test_newer_devices_are_faster():
    times = [AnalyticCost(d).seconds(4096, 14336, 1) for d in ("CPU", "A800", "H100", "B200")]
    assert times == sorted(times, reverse=True)


def test_h100_time_of_one_large_matrix_is_the_modelled_one():
    # 37888 x 3584 on the analytic H100: the matrix that bounds Qwen2.5-7B at 256 ranks.
    assert AnalyticCost("H100").seconds(37888, 3584, 1) == pytest.approx(4.521e-3, rel=1e-3)


def test_calibration_scales_by_the_median_ratio():
    cost = AnalyticCost("H100")
    shapes = [(1024, 1024, 1), (512, 2048, 4), (4096, 4096, 1)]
    slower = cost.calibrated({key: 2 * cost.seconds(*key) for key in shapes})
    assert slower.seconds(768, 768, 2) == pytest.approx(2 * cost.seconds(768, 768, 2))
    assert cost.calibrated({}) is cost
    again = slower.calibrated({key: 3 * cost.seconds(*key) for key in shapes})
    assert again.scale == pytest.approx(3)


@pytest.mark.parametrize("sizes", [(0, 4, 1), (4, -1, 1), (4, 4, 0)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ValueError, match="positive"):
        AnalyticCost("H100").seconds(*sizes)


def test_an_unknown_device_names_the_known_ones():
    with pytest.raises(ValueError, match=r"H900.*A800.*H100"):
        AnalyticCost("H900")


class Listed:
    """A cost given by the seconds of each batch size."""

    def __init__(self, *microseconds):
        self.microseconds = microseconds

    def seconds(self, rows, cols, batch):
        return self.microseconds[batch - 1] * 1e-6


def brute_force(times, count):
    """Least total time of all splits of count into batches."""
    best = [0]
    for k in range(1, count + 1):
        best.append(min(best[k - b] + times[b] for b in range(1, min(k, len(times) - 1) + 1)))
    return best


@pytest.mark.parametrize("times", [(10, 11, 30, 31), (5, 9, 14, 14), (7, 7, 7, 7), (3, 6, 9, 12)])
def test_batch_table_is_the_optimum_over_all_splits(times):
    table = BatchTable(Listed(*times), 64, 64, 23, max_batch=4)
    assert table.microseconds.tolist() == brute_force([0, *times], 23)
    for count in range(24):
        split = table.split(count)
        assert sum(split) == count
        assert sum(times[b - 1] for b in split) == table.microseconds[count]


def test_equal_splits_choose_the_fewest_batches():
    assert BatchTable(Listed(3, 6, 9, 12), 64, 64, 8, max_batch=4).split(8) == [4, 4]


def test_noise_never_makes_a_larger_batch_cheaper():
    times = batch_microseconds(Listed(10, 20, 15, 30), 64, 64, max_batch=4)
    assert times == [0, 10, 20, 20, 30]


def test_workspace_bounds_the_batch_but_one_problem_always_fits():
    cost = AnalyticCost("H100")
    # 2 * (2 * 1024 * 1024 + 4 * 1024 * 1024) bytes = 12 MiB a problem.
    assert len(batch_microseconds(cost, 1024, 1024, workspace=40 * 2**20)) - 1 == 3
    assert len(batch_microseconds(cost, 1024, 1024, workspace=1)) - 1 == 1
    assert len(batch_microseconds(cost, 64, 64)) - 1 == 32


def test_times_are_whole_microseconds_and_at_least_one():
    assert batch_microseconds(Listed(0.01), 4, 4, max_batch=1) == [0, 1]
    assert all(type(t) is int for t in batch_microseconds(AnalyticCost("H100"), 64, 64))


def test_cost_and_planner_import_neither_torch_nor_megatron():
    code = (
        "import sys, dmuon_megatron.cost, dmuon_megatron.planner;"
        "bad = {'torch', 'megatron'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H20", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A800"),
        ("NVIDIA GB200", "B200"),
        ("cpu", "CPU"),
        ("Something New", "H100"),
    ],
)
def test_a_device_gets_the_preset_nearest_to_its_name(name, preset):
    assert nearest_preset(name) == preset

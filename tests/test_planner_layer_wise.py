"""Megatron's layout, written from its rules, against Megatron's own function."""

from types import SimpleNamespace

import pytest

from dmuon_megatron.cost import AnalyticCost
from dmuon_megatron.planner import MatrixTask
from dmuon_megatron.planner.baselines import megatron_layout, simple_policies
from dmuon_megatron.planner.catalogue import find_model
from dmuon_megatron.planner.layer_wise import default_bucket_size, layer_wise_layout
from tests.harness.ranks import run_ranks

H100 = AnalyticCost("H100")

CASES = [
    # 128 equal matrices, buckets cut mid row.
    ([2688 * 1856] * 128, 32, 100_000_000),
    ([1000, 7, 64, 65, 1000, 999, 12345], 3, 2000),
    ([512 * 512] * 3, 64, 40_000_000),
    ([5, 5, 5, 9, 9, 2], 2, None),
    ([100] * 10, 1, 250),
    ([], 4, 100),
    ([t.numel for t in find_model("Pi0-3B").dense_tasks()], 16, default_bucket_size(16)),
    ([t.numel for t in find_model("Qwen2.5-7B").dense_tasks()], 8, default_bucket_size(8)),
]


def _megatrons_layouts():
    """Megatron's own layout of every case: per parameter (start, end, bucket), and the buckets."""
    import torch
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    found = {}
    for number, (numels, ranks, bucket_size) in enumerate(CASES):
        params = [torch.nn.Parameter(torch.empty(n, device="meta")) for n in numels]
        for high_busbw in (False, True):
            layout = LayerWiseDistributedOptimizer._compute_per_buffer_param_layout(
                params,
                bucket_size,
                ranks,
                SimpleNamespace(pad_buckets_for_high_nccl_busbw=high_busbw),
            )
            found[number, high_busbw] = (
                [layout.param_index_map[param] for param in params],
                layout.bucket_indices,
            )
    return found


def test_the_layout_is_megatrons():
    (layouts,) = run_ranks(_megatrons_layouts, 1)
    for (number, high_busbw), (spans, buckets) in layouts.items():
        numels, ranks, bucket_size = CASES[number]
        ours = layer_wise_layout(numels, ranks, bucket_size, pad_for_high_busbw=high_busbw)
        assert len(ours.buckets) == len(buckets)
        elements = buckets[-1][1] if numels else 0
        assert (ours.elements, ours.padding) == (elements, elements - sum(numels))
        for i, (start, _, bucket) in enumerate(spans):
            first, last = buckets[bucket]
            assert i in ours.buckets[bucket]
            assert ours.owner[i] == (start - first) // ((last - first) // ranks)


def test_megatrons_times_and_padding_are_the_known_ones():
    # On the analytic H100, fused weights: as measured in a study of Megatron's own layout.
    known = {8: (57.86, 45.86, 7, 0.17), 16: (26.24, 21.49, 4, 0.33), 256: (4.521, 4.521, 1, 4.33)}
    for ranks, (alone, batched, buckets, padding) in known.items():
        tasks = find_model("Qwen2.5-7B").dense_tasks(split=False)
        first, second = megatron_layout(tasks, ranks, H100)
        assert first.makespan * 1e3 == pytest.approx(alone, rel=2e-3)
        assert second.makespan * 1e3 == pytest.approx(batched, rel=2e-3)
        assert first.buckets == buckets
        assert first.padding == pytest.approx(padding, abs=0.005)


def test_simple_policies_deal_as_they_say():
    tasks = [MatrixTask(f"m{i}", 64, 64 * (i + 1)) for i in range(8)]
    by_name = {one.name: one for one in simple_policies(tasks, 2, H100)}
    assert set(by_name) == {"LPT by cost, swaps", "LPT by elements", "round robin", "ping-pong"}
    best = min(one.makespan for one in by_name.values())
    assert by_name["LPT by cost, swaps"].makespan == best

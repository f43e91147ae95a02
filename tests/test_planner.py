"""Owner planning: what every policy guarantees."""

import io
import itertools
import random

import numpy as np
import pytest

from dmuon_megatron.cost import AnalyticCost, BatchTable
from dmuon_megatron.planner import MatrixTask, Worker, plan_owners

H100 = AnalyticCost("H100")
POLICIES = ["lpt", "numel", "round-robin"]


def transformer(layers, hidden=1024, ffn=2816, kv=256):
    """Matrices of a GQA SwiGLU transformer, one bucket a layer."""
    tasks = []
    for i in range(layers):
        prefix = f"decoder.layers.{i}"
        tasks += [
            MatrixTask(
                f"{prefix}.qkv",
                hidden + 2 * kv,
                hidden,
                i,
                ((hidden, hidden), (kv, hidden), (kv, hidden)),
            ),
            MatrixTask(f"{prefix}.proj", hidden, hidden, i),
            MatrixTask(f"{prefix}.fc1", 2 * ffn, hidden, i, ((ffn, hidden), (ffn, hidden))),
            MatrixTask(f"{prefix}.fc2", hidden, ffn, i),
        ]
    return tasks


def check(plan, tasks, ranks, cost=H100, base=None):
    """Every matrix once, loads and memory as recomputed from the owners and batches."""
    assert set(plan.owner) == {task.name for task in tasks}
    assert all(0 <= rank < ranks for rank in plan.owner.values())
    assert len(plan.loads) == len(plan.memory) == len(plan.batches) == ranks
    expected = {(t.name, i): b for t in tasks for i, b in enumerate(t.blocks)}
    seen = {}
    for rank, batches in enumerate(plan.batches):
        seconds = base[rank] if base else 0.0
        for batch in batches:
            seconds += round(cost.seconds(batch.rows, batch.cols, len(batch.blocks)) * 1e6) / 1e6
            for name, i in batch.blocks:
                assert plan.owner[name] == rank
                assert sorted(expected[name, i]) == [batch.rows, batch.cols]
                assert (name, i) not in seen
                seen[name, i] = rank
        assert seconds == pytest.approx(plan.loads[rank], abs=1e-9)
    assert len(seen) == len(expected)
    memory = [0] * ranks
    for task in tasks:
        memory[plan.owner[task.name]] += 8 * task.rows * task.cols
    assert tuple(memory) == plan.memory
    assert plan.makespan == max(plan.loads)
    assert plan.lower_bound <= plan.makespan + 1e-12
    assert sorted(b for wave in plan.waves for b in wave) == sorted({t.bucket for t in tasks})


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 40])
def test_every_matrix_has_one_owner_and_the_figures_are_true(policy, ranks):
    tasks = transformer(6)
    check(plan_owners(tasks, ranks, H100, policy=policy), tasks, ranks)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_matrix_is_a_valid_plan(policy):
    plan = plan_owners([], 4, H100, policy=policy)
    check(plan, [], 4)
    assert plan.makespan == plan.gap == 0.0
    assert plan.batches == ((),) * 4


@pytest.mark.parametrize("policy", POLICIES)
def test_more_ranks_than_matrices_gives_each_rank_at_most_one(policy):
    tasks = transformer(1)
    plan = plan_owners(tasks, 9, H100, policy=policy)
    check(plan, tasks, 9)
    assert len(set(plan.owner.values())) == len(tasks)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_plan_does_not_depend_on_the_order_of_the_tasks(policy):
    tasks = transformer(5)
    first = plan_owners(tasks, 3, H100, policy=policy)
    for seed in range(3):
        shuffled = random.Random(seed).sample(tasks, len(tasks))
        again = plan_owners(shuffled, 3, H100, policy=policy)
        assert again == first
        assert again.fingerprint == first.fingerprint


def test_fingerprint_tells_owners_and_ranks_apart():
    tasks = transformer(2)
    plans = [plan_owners(tasks, ranks, H100, policy="round-robin") for ranks in (2, 3, 20)]
    plans.append(plan_owners(tasks, 2, H100, policy="numel"))
    assert len({plan.fingerprint for plan in plans}) == 4


def test_lpt_beats_numel_and_round_robin():
    tasks = transformer(12)
    times = [plan_owners(tasks, 8, H100, policy=policy).makespan for policy in POLICIES]
    assert times[0] == min(times)


def test_batching_puts_equal_small_matrices_on_one_rank_when_that_is_faster():
    # Batches are all but free, launches are dear: two kinds on two ranks belong together by kind.
    class LaunchBound:
        def seconds(self, rows, cols, batch):
            return 1e-3 + 1e-6 * batch

    tasks = [
        MatrixTask(f"{kind}.{i}", rows, 64)
        for i in range(4)
        for kind, rows in (("a", 64), ("b", 96))
    ]
    plan = plan_owners(tasks, 2, LaunchBound(), memory_limit=None)
    assert plan.makespan == pytest.approx(1.004e-3)
    assert len({plan.owner[f"a.{i}"] for i in range(4)}) == 1


def test_blocks_of_different_matrices_share_batches():
    # The halves of fc1 have the shape of fc2: one class, three blocks a layer.
    tasks = [t for t in transformer(2) if "fc" in t.name]
    plan = plan_owners(tasks, 1, H100)
    table = BatchTable(H100, 1024, 2816, 6)
    assert [len(b.blocks) for b in plan.batches[0]] == table.split(6)[::-1]
    assert plan.makespan == pytest.approx(table.microseconds[6] / 1e6)


def test_batch_and_workspace_limits_are_kept():
    tasks = transformer(4)
    plan = plan_owners(tasks, 1, H100, max_batch=3)
    assert max(len(b.blocks) for b in plan.batches[0]) == 3
    alone = plan_owners(tasks, 1, H100, workspace=1)
    assert all(len(b.blocks) == 1 for b in alone.batches[0])


def test_batches_run_in_forward_order():
    tasks = transformer(12)
    plan = plan_owners(tasks, 2, H100, max_batch=4)
    assert len(plan.waves) == 4
    for batches in plan.batches:
        assert [b.wave for b in batches] == sorted(b.wave for b in batches)


def test_initial_loads_are_counted_and_levelled():
    tasks = [MatrixTask(f"m{i}", 512, 512) for i in range(6)]
    loads = [1.0, 0.0, 0.0]
    plan = plan_owners(tasks, [Worker(load=load) for load in loads], H100, memory_limit=None)
    check(plan, tasks, 3, base=loads)
    assert 0 not in plan.owner.values()
    assert plan.makespan == plan.lower_bound == 1.0


def test_worker_memory_is_a_bound():
    size = 8 * 512 * 512
    tasks = [MatrixTask(f"m{i}", 512, 512) for i in range(6)]
    workers = [Worker(memory=size), Worker(memory=5 * size)]
    plan = plan_owners(tasks, workers, H100)
    assert plan.memory == (size, 5 * size)
    assert not plan.notes


def test_average_memory_bound_is_kept():
    tasks = [MatrixTask(f"big{i}", 4096, 64) for i in range(8)]
    tasks += [MatrixTask(f"square{i}", 512, 512) for i in range(8)]
    plan = plan_owners(tasks, 4, H100, memory_limit=1.1)
    assert max(plan.memory) <= plan.memory_cap <= 1.1 * sum(plan.memory) / 4
    assert not plan.notes


def test_a_memory_bound_that_nothing_meets_is_relaxed_and_said():
    tasks = [MatrixTask(f"m{i}", 512, 512) for i in range(3)]
    plan = plan_owners(tasks, 2, H100, memory_limit=1.0)
    assert max(plan.memory) == 2 * 8 * 512 * 512 <= plan.memory_cap
    assert len(plan.notes) == 1
    assert "relaxed" in plan.notes[0]


def test_a_matrix_larger_than_every_worker_is_named():
    with pytest.raises(ValueError, match=r"'big'.*Worker.memory"):
        plan_owners([MatrixTask("big", 64, 64)], [Worker(memory=10)] * 2, H100)


def test_workers_that_are_too_small_together_are_refused():
    size = 8 * 64 * 64
    tasks = [MatrixTask(f"m{i}", 64, 64) for i in range(3)]
    with pytest.raises(ValueError, match="all workers together"):
        plan_owners(tasks, [Worker(memory=size)] * 2, H100)


def test_nodes_own_similar_bytes():
    tasks = transformer(12)
    workers = [Worker(node=rank // 4) for rank in range(8)]
    plan = plan_owners(tasks, workers, H100, memory_limit=2.0)
    check(plan, tasks, 8)
    halves = sum(plan.memory[:4]), sum(plan.memory[4:])
    flat = plan_owners(tasks, 8, H100, memory_limit=2.0)
    assert plan.makespan == flat.makespan
    assert max(halves) / min(halves) < 1.1


def test_segments_are_few_and_waves_level():
    tasks = transformer(32)
    plan = plan_owners(tasks, 4, H100)
    spread = plan_owners(tasks, 4, H100, policy="round-robin")
    assert plan.segments < spread.segments
    assert plan.segments <= 2 * plan.buckets
    assert plan.wave_lag < 0.2


def test_names_of_two_towers_and_of_two_chunks_stay_apart():
    names = ["visual.blocks.3.fc1", "decoder.layers.3.fc1", "chunk1.decoder.layers.3.fc1"]
    tasks = [MatrixTask(name, 256, 256, bucket=b) for b, name in enumerate(names)]
    plan = plan_owners(tasks, 3, H100)
    assert sorted(plan.owner) == sorted(names)
    assert sorted(plan.owner.values()) == [0, 1, 2]


@pytest.mark.parametrize("ranks", [0, -3])
def test_less_than_one_rank_is_refused(ranks):
    with pytest.raises(ValueError, match="at least one rank"):
        plan_owners(transformer(1), ranks, H100)
    with pytest.raises(ValueError, match="at least one rank"):
        plan_owners(transformer(1), [], H100)


def test_duplicate_names_are_refused():
    with pytest.raises(ValueError, match="'twin'"):
        plan_owners([MatrixTask("twin", 4, 4), MatrixTask("twin", 8, 8, bucket=3)], 2, H100)


@pytest.mark.parametrize("rows, cols, blocks", [(0, 4, None), (4, -1, None), (4, 4, ((0, 4),))])
def test_sizes_that_are_not_positive_are_refused(rows, cols, blocks):
    with pytest.raises(ValueError, match=r"'bad'.*positive"):
        MatrixTask("bad", rows, cols, blocks=blocks)


def test_blocks_that_miss_part_of_the_matrix_are_refused():
    with pytest.raises(ValueError, match=r"'m'.*cover"):
        MatrixTask("m", 8, 4, blocks=((4, 4),))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"policy": "best"}, "policy 'best'"),
        ({"memory_limit": 0.5}, "memory_limit"),
        ({"max_batch": 0}, "max_batch"),
        ({"workspace": 0}, "workspace"),
        ({"waves": 0}, "waves"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_owners(transformer(1), 2, H100, **arguments)


@pytest.mark.parametrize("arguments", [{"load": -1.0}, {"load": float("nan")}, {"memory": -1}])
def test_workers_with_impossible_figures_are_refused(arguments):
    with pytest.raises(ValueError, match="worker"):
        Worker(**arguments)


def test_local_search_leaves_no_improving_move():
    tasks = transformer(3)
    plan = plan_owners(tasks, 3, H100, memory_limit=None)
    slowest = int(np.argmax(plan.loads))
    mine = [t for t in tasks if plan.owner[t.name] == slowest]
    for task, rank in itertools.product(mine, range(3)):
        if rank == slowest:
            continue
        moved = dict(plan.owner, **{task.name: rank})
        per_rank = []
        for r in range(3):
            own = [t for t in tasks if moved[t.name] == r]
            per_rank.append(plan_owners(own, 1, H100).makespan)
        assert max(per_rank) >= plan.makespan - 1e-9


def test_report_shows_the_figures():
    rich = pytest.importorskip("rich.console")
    tasks = transformer(3)
    plan = plan_owners(tasks, 2, H100, memory_limit=1.0)
    console = rich.Console(width=120, record=True, file=io.StringIO())
    console.print(plan.report())
    text = console.export_text()
    assert "12 / 21" in text
    assert plan.fingerprint[:16] in text
    assert "lower bound" in text
    figures = plan.summary()
    assert figures["makespan_seconds"] == plan.makespan
    assert figures["segments_per_bucket"] == plan.segments / 3

"""The owner plan of a run: made once, by one rank, and the same on all."""

import os
import re

import torch.distributed as dist

from dmuon_megatron.config import DMuonConfig
from tests.harness.ranks import run_ranks
from tests.harness.types import Tiny

TINY = Tiny()


def _plan(config, sabotage=None):
    from megatron.core.process_groups_config import ProcessGroupCollection

    from dmuon_megatron import ownership
    from dmuon_megatron.data_parallel import wrap_with_ddp
    from tests.harness.loop import ddp_config
    from tests.harness.tiny import build_model, start_megatron

    planned = []
    original = ownership.plan_owners

    def plan_owners(*args, **kwargs):
        planned.append(kwargs["policy"])
        if sabotage:
            raise ValueError(sabotage)
        return original(*args, **kwargs)

    ownership.plan_owners = plan_owners
    start_megatron()
    tiny = TINY if sabotage != "another model" or dist.get_rank() == 0 else Tiny(layers=3)
    sabotage = None if sabotage == "another model" else sabotage
    try:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        (chunk,) = wrap_with_ddp([build_model(tiny)], ddp_config(), config, groups)
    except RuntimeError as error:
        return str(error), planned
    plan = chunk.ownership.plan
    buckets = {g.buckets[0].bucket_id for g in chunk.bucket_groups if hasattr(g, "segments")}
    return plan, chunk.ownership, planned, len(buckets)


def _summary(*args):
    plan, ownership, planned, buckets = _plan(*args)
    return {
        "fingerprint": plan.fingerprint,
        "owner": dict(plan.owner),
        "cost": ownership.cost,
        "planned": planned,
        "buckets": (plan.buckets, buckets),
        "makespans": (plan.makespan, ownership.makespan_by_numel),
        "first": plan.waves[0][0],
    }


def test_the_first_rank_plans_and_all_ranks_hold_its_plan():
    results = run_ranks(_summary, 3, DMuonConfig(profile_budget=0))
    assert len({r["fingerprint"] for r in results}) == 1
    assert [r["planned"] for r in results] == [["milp", "numel"], [], []]
    first = results[0]
    assert first["cost"] == "the analytic cost model CPU"
    assert first["buckets"][0] == first["buckets"][1]
    assert first["makespans"][0] <= first["makespans"][1]
    assert sorted(set(first["owner"].values())) == [0, 1, 2]


def test_a_plan_that_fails_on_the_first_rank_stops_all_ranks_with_the_reason():
    for message, _ in run_ranks(_plan, 2, DMuonConfig(profile_budget=0), "no such luck"):
        assert re.search("planning the owners.*failed: ValueError: no such luck", message)


def test_ranks_with_different_models_stop_before_anything_is_planned():
    for message, planned in run_ranks(_plan, 2, DMuonConfig(profile_budget=0), "another model"):
        assert "different models or DMuon settings" in message
        assert planned == []


def _measured(directory):
    os.environ["DMUON_CACHE_DIR"] = str(directory)
    from dmuon_megatron.cost import measured

    timed = []
    original = measured.MeasuredCost._time
    measured.MeasuredCost._time = lambda self, *r: timed.append(r) or original(self, *r)
    return _summary(DMuonConfig(profile_budget=20)), timed


def test_times_are_measured_once_by_one_rank_and_kept_for_the_next_run(tmp_path):
    cold = run_ranks(_measured, 2, tmp_path)
    assert len(cold[0][1]) > 0 and cold[1][1] == []
    assert len({summary["fingerprint"] for summary, _ in cold}) == 1
    count = len(cold[0][1])
    assert cold[0][0]["cost"] == f"{count} of {count} times measured on this device"
    warm = run_ranks(_measured, 2, tmp_path)
    assert [timed for _, timed in warm] == [[], []]
    assert warm[0][0]["fingerprint"] == cold[0][0]["fingerprint"]


def _bucket_order():
    from dmuon_megatron.data_parallel import _number_in_forward_order
    from dmuon_megatron.layout import assign_buckets
    from dmuon_megatron.matrices import find_matrices
    from tests.harness.tiny import build_model, start_megatron

    start_megatron()
    chunks = [build_model(TINY), build_model(TINY)]
    matrices = find_matrices(chunks, split_qkv=True)
    buckets = [{"one": assign_buckets([m.param for m in chunk], 20_000)} for chunk in matrices]
    number = _number_in_forward_order(chunks, buckets)
    names = [m.name for chunk in matrices for m in chunk]
    return names, [number[m.param] for chunk in matrices for m in chunk]


def test_names_and_buckets_of_model_chunks_stay_apart_and_count_in_forward_order():
    ((names, numbers),) = run_ranks(_bucket_order, 1)
    assert len(set(names)) == len(names) and names[0].startswith("chunk0.")
    assert numbers == sorted(numbers) and len(set(numbers)) == max(numbers) + 1 > 2

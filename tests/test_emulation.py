"""Megatron on the CPU: what the emulation replaces does what the real thing would do."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.harness.compare import assert_same
from tests.harness.ranks import run_ranks
from tests.harness.types import Tiny


def test_it_refuses_to_come_after_megatron():
    code = (
        "import sys, types, dmuon_megatron.emulation as emulation\n"
        "sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "emulation.install()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "came after the import of megatron.core" in done.stderr
    assert "call it first" in done.stderr


def test_importing_it_changes_nothing():
    code = (
        "import sys, dmuon_megatron.emulation as emulation\n"
        "assert not emulation.installed() and not {'torch', 'megatron'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def _devices():
    from dmuon_megatron import emulation

    before = torch.cuda.is_available
    emulation.install()  # again
    assert torch.cuda.is_available is before and emulation.installed()

    made = [
        torch.ones(2, device="cuda"),
        torch.ones(2, device=torch.cuda.current_device()),
        torch.ones(2, device=torch.device("cuda", 0), pin_memory=True),
        torch.ones(2).cuda(),
        torch.ones(2).to("cuda:0"),
        torch.nn.Linear(2, 2).cuda().weight,
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert torch.ones(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(2).is_cuda

    weight = torch.ones(2, requires_grad=True)
    in_hook = []
    weight.register_hook(lambda grad: in_hook.append(torch.zeros(1, device="cuda").device.type))
    (weight * 2).sum().backward()
    assert in_hook == ["cpu"]

    def function(x):
        return x + 1

    assert torch.compile(function) is function

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() is stream
        event = stream.record_event()
    torch.cuda.current_stream().wait_event(event)
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    assert event.query() and event.elapsed_time(stream.record_event()) >= 0
    torch.ones(1).record_stream(stream)

    state = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(7)
    first = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.get_rng_state(), state)


def test_cuda_names_mean_the_cpu():
    run_ranks(_devices, 1)


def _collectives():
    rank = dist.get_rank()
    dist.barrier(device_ids=[0])
    mine = torch.full((1, rank + 1), float(rank))
    outputs = [torch.empty(1, 1), torch.empty(1, 2)]
    dist.all_gather(outputs, mine)
    late = [torch.empty(1, 1), torch.empty(1, 2)]
    work = dist.all_gather(late, mine, async_op=True)
    work.wait()
    return [output.tolist() for output in outputs], [output.tolist() for output in late]


def test_gloo_does_what_megatron_asks_of_nccl():
    expected = [[[0.0]], [[1.0, 1.0]]]
    for outputs, late in run_ranks(_collectives, 2):
        assert outputs == late == expected


# With padding between buckets Megatron 0.19's fully_reshardable format saves the wrong slices.
ONE_BUCKET = 10_000_000


def _train_and_save(folder, format):
    from megatron.core import dist_checkpointing

    from tests.harness.loop import ddp_config, full_weights, train

    def save(run):
        if len(run.losses) == 2:
            full_weights(run)  # what is still being published would be missing
            dist_checkpointing.save(_sharded(run, format, is_loading=False), folder)

    return train(
        Tiny(), steps=4, ddp=ddp_config(bucket_size=ONE_BUCKET), after_step=save
    ).portable()


def _load_and_train(folder, format):
    from megatron.core import dist_checkpointing

    from tests.harness.loop import ddp_config, train

    def load(run):
        state = dist_checkpointing.load(_sharded(run, format, is_loading=True), folder)
        run.model.module.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])

    ddp = ddp_config(bucket_size=ONE_BUCKET)
    return train(Tiny(seed=2), steps=2, first_step=2, ddp=ddp, after_build=load).portable()


def _sharded(run, format, is_loading):
    model = run.model.module.sharded_state_dict()
    optimizer = run.optimizer.sharded_state_dict(
        model, is_loading=is_loading, metadata={"distrib_optim_sharding_type": format}
    )
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("format", ["dp_reshardable", "fully_reshardable"])
def test_stock_adam_resumes(tmp_path, format):
    plain = run_ranks(_train_and_save, 2, tmp_path, format)
    resumed = run_ranks(_load_and_train, 2, tmp_path, format)
    for expected, run in zip(plain, resumed, strict=True):
        assert_same(run.weights, expected.weights)
        assert run.losses == expected.losses[2:]

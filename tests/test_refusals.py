"""What DMuon refuses, it refuses at start-up, on every rank, naming the flag."""

import math
import types

import pytest
import torch

from dmuon_megatron.config import REFUSED, DMuonConfig, refuse_unsupported
from tests.harness.ranks import run_ranks, run_ranks_expecting_error
from tests.harness.types import Tiny

# ---- Megatron's settings ----


def _setting(refusal):
    """A value that is refused, and one that is not."""
    if refusal.limit is not None:
        return refusal.limit + 1, refusal.limit
    if refusal.value is not None:
        return refusal.value, "something else"
    return True, False


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.flag.split()[0])
def test_a_setting_that_is_not_served_is_refused_by_its_flag(refusal):
    refused, served = _setting(refusal)
    for field in refusal.fields:
        with pytest.raises(ValueError, match="--optimizer dmuon cannot run") as error:
            refuse_unsupported(types.SimpleNamespace(), types.SimpleNamespace(**{field: refused}))
        assert refusal.flag in str(error.value) and refusal.hint in str(error.value)
        for value in (served, None):
            refuse_unsupported(types.SimpleNamespace(**{field: value}))


def test_all_settings_that_stand_in_the_way_are_named_at_once():
    args = types.SimpleNamespace(tensor_model_parallel_size=2, fp16=True, qk_clip=False)
    with pytest.raises(ValueError) as error:
        refuse_unsupported(args)
    assert "--tensor-model-parallel-size 2" in str(error.value)
    assert "--fp16" in str(error.value)
    assert "--qk-clip" not in str(error.value)
    assert len({refusal.flag for refusal in REFUSED}) == len(REFUSED)  # each is named once


# Flags as typed. Those that Megatron's own validation would reject first are refused before it.
COMMAND_LINES = [
    "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size 2",
    "--num-virtual-stages-per-pipeline-rank 2",
    "--context-parallel-size 2",
    "--expert-model-parallel-size 2",
    "--expert-tensor-parallel-size 2",
    "--tensor-parallel-num-weight-shards 2",
    "--expert-tensor-parallel-num-weight-shards 2",
    "--num-distributed-optimizer-instances 2",
    "--overlap-param-gather-with-optimizer-step",
    "--fp16",
    "--use-precision-aware-optimizer",
    "--optimizer-cpu-offload",
    "--optimizer-cuda-graph",
    "--cuda-graph-impl full_iteration",
    "--fp8-param-gather",
    "--fp4-param-gather",
    "--reuse-grad-buf-for-mxfp8-param-ag",
    "--ddp-reduce-scatter-with-fp32-accumulation",
    "--use-nccl-ub",
    "--use-megatron-fsdp",
    "--use-torch-fsdp2",
    "--muon-scalar-optimizer lion",
    "--muon-fp32-matmul-prec low",
    "--qk-clip",
    "--save somewhere",
    "--load somewhere",
]


def _refuse_command_lines():
    import argparse

    import dmuon_megatron

    dmuon_megatron.install()
    from megatron.training.arguments import add_megatron_arguments, validate_args

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    messages = []
    for line in COMMAND_LINES:
        args = parser.parse_args(["--optimizer", "dmuon", *line.split()])
        try:
            validate_args(args)
        except ValueError as error:
            messages.append(str(error))
        assert args.optimizer == "dmuon"
    return messages


def test_megatrons_command_line_is_refused_flag_by_flag():
    (messages,) = run_ranks(_refuse_command_lines, 1)
    assert {r.flag.split()[0] for r in REFUSED} <= {line.split()[0] for line in COMMAND_LINES}
    for line, message in zip(COMMAND_LINES, messages, strict=True):
        assert line.split()[0] in message


def _save_state():
    from tests.harness.dmuon import train_dmuon

    optimizer = train_dmuon(Tiny(layers=1), steps=1).optimizer
    messages = []
    for call in (
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        lambda: optimizer.sharded_state_dict({}),
        lambda: optimizer.save_parameter_state("file"),
        lambda: optimizer.load_parameter_state("file"),
    ):
        with pytest.raises(RuntimeError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_saving_and_loading_optimizer_state_is_refused_by_the_flags_that_leave_it_out():
    (messages,) = run_ranks(_save_state, 1)
    for message in messages:
        assert "--no-save-optim" in message and "--no-load-optim" in message


# ---- Values ----


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"workspace_mb": 0}, "--dmuon-workspace-mb"),
        ({"workspace_mb": -1}, "--dmuon-workspace-mb"),
        ({"workspace_mb": math.nan}, "--dmuon-workspace-mb"),
        ({"workspace_mb": math.inf}, "--dmuon-workspace-mb"),
        ({"workspace_mb": None}, "--dmuon-workspace-mb"),
        ({"ns_method": "newton"}, "--dmuon-ns-method"),
        ({"owner_policy": "random"}, "--dmuon-owner-policy"),
        ({"owner_policy": None}, "--dmuon-owner-policy"),
        ({"bucket_size": 0}, "--ddp-bucket-size"),
        ({"bucket_size": math.nan}, "--ddp-bucket-size"),
        ({"num_buckets": -2}, "--ddp-num-buckets"),
        ({"num_buckets": math.inf}, "--ddp-num-buckets"),
    ],
)
def test_a_value_of_dmuons_that_makes_no_sense_is_refused_by_its_flag(settings, flag):
    with pytest.raises(ValueError, match=flag):
        DMuonConfig(**settings)


def test_settings_come_from_megatrons_arguments_and_keep_their_defaults_elsewhere():
    args = types.SimpleNamespace(
        dmuon_workspace_mb=7, muon_split_qkv=False, ddp_num_buckets=3, unrelated=1
    )
    assert DMuonConfig.from_args(args) == DMuonConfig(
        workspace_mb=7, split_qkv=False, num_buckets=3
    )


MUON_VALUES = [
    ("muon_momentum", (1.0, -0.1, math.nan), "--muon-momentum"),
    ("muon_num_ns_steps", (0, -3), "--muon-num-ns-steps"),
    ("muon_scale_mode", ("spectrum", None), "--muon-scale-mode"),
    ("muon_coefficient_type", ("cubic", "cans"), "--muon-coefficient-type"),
    ("muon_fp32_matmul_prec", ("fp32", None), "--muon-fp32-matmul-prec"),
    ("muon_extra_scale_factor", (math.nan, math.inf), "--muon-extra-scale-factor"),
    ("lr", (math.nan, -math.inf), "--lr"),
    ("weight_decay", (math.nan, math.inf), "--weight-decay"),
    ("clip_grad", (math.nan, math.inf), "--clip-grad"),
    ("muon_split_qkv", (False,), "split_qkv"),
]


def _muon_values():
    from tests.harness.dmuon import dmuon_config, dmuon_optimizer, train_dmuon

    tiny = Tiny(layers=1)
    chunk = train_dmuon(tiny, steps=0).model
    messages = []
    for name, values, _ in MUON_VALUES:
        for value in values:
            config = dmuon_config(tiny, muon_fp32_matmul_prec="medium")
            setattr(config, name, value)
            with pytest.raises(ValueError) as error:
                dmuon_optimizer(config, [chunk])
            messages.append(str(error.value))
    return messages


def test_a_value_of_muons_that_makes_no_sense_is_refused_by_its_flag():
    # A public report: unknown settings were ignored.
    (messages,) = run_ranks(_muon_values, 1)
    flags = [flag for _, values, flag in MUON_VALUES for _ in values]
    for flag, message in zip(flags, messages, strict=True):
        assert flag in message


# ---- Models ----


def _no_matrix():
    from tests.harness.dmuon import train_dmuon
    from tests.harness.gradients import changed_model, freeze_all_but, is_matrix_name

    with changed_model(freeze_all_but(lambda name, param: not is_matrix_name(name, param))):
        train_dmuon(Tiny(layers=1), steps=1)


def test_a_model_without_any_matrix_to_train_is_an_error_on_every_rank():
    # A public report: everything went to Adam, and nobody noticed.
    for message in run_ranks_expecting_error(_no_matrix, 2, error=ValueError, timeout=60):
        assert "no matrix" in message and "--optimizer adam" in message


def _wrong_chunks(stock):
    from tests.harness.dmuon import dmuon_config, dmuon_optimizer
    from tests.harness.loop import ddp_config, stock_ddp
    from tests.harness.tiny import build_model, start_megatron, transformer_config

    start_megatron()
    tiny = Tiny(layers=1)
    config = transformer_config(tiny)
    model = build_model(tiny, config)
    if stock:
        model = stock_ddp(config, ddp_config(), model)
    dmuon_optimizer(dmuon_config(tiny), [model])


@pytest.mark.parametrize(
    ("stock", "name"), [(True, "DistributedDataParallel"), (False, "GPTModel")]
)
def test_model_chunks_that_were_not_wrapped_by_dmuon_are_an_error_that_says_what_to_do(stock, name):
    for message in run_ranks_expecting_error(_wrong_chunks, 2, stock, error=TypeError, timeout=60):
        assert name in message and "wrap_with_ddp" in message and "install()" in message


def _unsupported_in_configs():
    from tests.harness.dmuon import train_dmuon

    messages = []
    for settings in (
        {"ddp": {"nccl_ub": True}},
        {"optimizer": {"optimizer_cpu_offload": True}},
        {"optimizer": {"muon_scalar_optimizer": "lion"}},
    ):
        with pytest.raises(ValueError) as error:
            train_dmuon(Tiny(layers=1), steps=1, **settings)
        messages.append(str(error.value))
    return messages


def test_configurations_made_without_a_command_line_are_refused_too():
    for messages in run_ranks(_unsupported_in_configs, 2):
        flags = ("--use-nccl-ub", "--optimizer-cpu-offload", "--muon-scalar-optimizer lion")
        for flag, message in zip(flags, messages, strict=True):
            assert flag in message


def test_only_hidden_weights_of_two_dimensions_are_matrices():
    from dmuon_megatron.matrices import is_matrix

    assert is_matrix(torch.nn.Parameter(torch.zeros(4, 1)))
    for shape in ((), (4,), (2, 2, 2), (1, 2, 3, 4)):
        assert not is_matrix(torch.nn.Parameter(torch.zeros(shape)))
    table = torch.nn.Parameter(torch.zeros(4, 4))
    table.is_embedding_or_output_parameter = True
    assert not is_matrix(table)

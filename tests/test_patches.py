"""What `install` does to Megatron, and what it leaves alone."""

import shlex
import sys
import types

import pytest

import dmuon_megatron
from dmuon_megatron.patches import arguments, seams
from tests.harness.dmuon import train_dmuon
from tests.harness.loop import ddp_config, optimizer_config, train
from tests.harness.ranks import run_ranks
from tests.harness.tiny import Tiny

CPU = shlex.split("""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 4
    --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127
    --distributed-backend gloo --transformer-impl local --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-rope-fusion --no-masked-softmax-fusion
""")
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]


def _parse(flags, install=True):
    """Megatron's arguments after validation, as a dict, and the configuration for DMuon."""
    if install:
        dmuon_megatron.install()
    from megatron.training import arguments as megatron_arguments

    sys.argv = ["pretrain.py", *CPU, *flags]
    args = megatron_arguments.parse_args()
    megatron_arguments.validate_args(args)
    return {k: str(v) for k, v in vars(args).items()}, arguments.current_config()


def test_dmuon_keeps_its_name_and_the_distributed_optimizer_with_both_overlaps():
    flags = ["--optimizer", "dmuon", *OVERLAP, "--dmuon-workspace-mb", "64", "--ddp-bucket-size"]
    ((args, config),) = run_ranks(_parse, 1, [*flags, "1000", "--muon-no-split-qkv"])
    assert args["optimizer"] == "dmuon"
    assert args["use_distributed_optimizer"] == "True"
    assert args["use_layer_wise_distributed_optimizer"] == "False"
    assert args["overlap_param_gather"] == args["overlap_grad_reduce"] == "True"
    assert (config.workspace_mb, config.bucket_size, config.split_qkv) == (64, 1000, False)


@pytest.mark.parametrize(
    "flags",
    [
        ["--optimizer", "adam", "--use-distributed-optimizer", *OVERLAP],
        ["--optimizer", "sgd"],
        ["--optimizer", "muon", "--bf16", "--use-distributed-optimizer"],
    ],
    ids=lambda f: f[1],
)
def test_arguments_of_other_optimizers_are_as_they_were(flags):
    ((patched, config),) = run_ranks(_parse, 1, flags)
    ((plain, _),) = run_ranks(_parse, 1, flags, install=False)
    ours = {k for k in patched if k.startswith("dmuon_")}
    assert ours and config is None
    assert {k: v for k, v in patched.items() if k not in ours} == plain


def _train_stock(optimizer, install):
    if install:
        dmuon_megatron.install()
        # A run with DMuon before it leaves nothing behind.
        _parse(["--optimizer", "dmuon"])
        _parse(["--optimizer", "adam"])
    tiny = Tiny(bf16=True)
    distributed = optimizer == "adam"
    return train(
        tiny,
        steps=3,
        ddp=ddp_config(overlap=distributed, use_distributed_optimizer=distributed),
        optimizer=optimizer_config(
            tiny, overlap=distributed, optimizer=optimizer, use_distributed_optimizer=distributed
        ),
    ).losses


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_runs_with_other_optimizers_are_bit_for_bit_as_they_were(optimizer):
    if optimizer == "muon":
        pytest.importorskip("emerging_optimizers")
    patched = run_ranks(_train_stock, 2, optimizer, install=True)
    assert patched == run_ranks(_train_stock, 2, optimizer, install=False)


def _install_twice():
    import megatron.core.optimizer
    import megatron.training.training

    dmuon_megatron.install()
    first = megatron.core.optimizer.get_megatron_optimizer
    dmuon_megatron.install()
    return (
        megatron.core.optimizer.get_megatron_optimizer is first,
        megatron.training.training.get_megatron_optimizer is first,
    )


def test_installing_twice_changes_nothing_and_reaches_names_imported_elsewhere():
    assert run_ranks(_install_twice, 1) == [(True, True)]


def _wrap_on(path):
    _parse(["--optimizer", "dmuon"])
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config
    from megatron.training import training
    from megatron.training.models import dist_utils

    from tests.harness.tiny import build_model, start_megatron

    start_megatron()
    model = build_model(Tiny())
    if path == "models":
        groups = ProcessGroupCollection.use_mpu_process_groups()
        (chunk,) = dist_utils._ddp_wrap([model], True, ddp_config(), False, pg_collection=groups)
    else:
        (chunk,) = training.wrap_model_chunks_with_ddp(
            [model], get_model_config(model), ddp_config(), DP=training.DDP, pg_collection=None
        )
    config = optimizer_config(Tiny(), optimizer="dmuon")
    optimizer = training.get_megatron_optimizer(config, [chunk], config_overrides=None)
    return len(chunk.ownership.plan.owner), type(optimizer).__name__


@pytest.mark.parametrize("path", ["models", "training"])
def test_both_of_megatrons_ways_of_wrapping_lead_to_dmuon(path):
    assert run_ranks(_wrap_on, 2, path) == [(8, "DMuonChainedOptimizer")] * 2


def _fake_megatron(monkeypatch, version="0.19.2", **functions):
    core = types.ModuleType("megatron.core")
    core.__version__ = version
    module = types.ModuleType("megatron.fake")
    vars(module).update(functions)
    importer = types.ModuleType("megatron.importer")
    vars(importer).update(functions)
    for fake in (core, module, importer):
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    return module, importer


def _seam(name="hook", parameters=()):
    return seams.Seam("megatron.fake", name, lambda original: lambda: 2, parameters)


def test_a_missing_seam_is_an_error_that_names_it_and_nothing_is_replaced(monkeypatch):
    module, _ = _fake_megatron(monkeypatch, hook=lambda: 1)
    with pytest.raises(RuntimeError, match=r"megatron\.fake\.gone.*0\.19\.2.*does not have"):
        seams.replace([_seam(), _seam("gone")])
    assert module.hook() == 1


def test_a_seam_that_lost_a_parameter_is_an_error_that_names_both(monkeypatch):
    _fake_megatron(monkeypatch, hook=lambda a: 1)
    with pytest.raises(RuntimeError, match=r"megatron\.fake\.hook.*no parameter b"):
        seams.replace([_seam(parameters=("a", "b"))])


def test_a_megatron_that_cannot_be_imported_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.fake", None)
    with pytest.raises(RuntimeError, match=r"pip install 'dmuon-megatron\[train\]'"):
        seams.replace([_seam()])


def test_an_untested_version_with_all_seams_is_one_warning(monkeypatch):
    module, importer = _fake_megatron(monkeypatch, version="0.20.0", hook=(hook := lambda: 1))
    assert importer.hook is hook
    with pytest.warns(UserWarning, match=r"not tested with megatron-core 0\.20\.0") as caught:
        seams.replace([_seam(), _seam()][:1])
    assert len(caught) == 1
    assert module.hook() == importer.hook() == 2


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--tensor-model-parallel-size", "2"], "--tensor-model-parallel-size 2"),
        (["--fp16"], "--fp16"),
        (["--optimizer-cpu-offload"], "--optimizer-cpu-offload"),
        (["--muon-scalar-optimizer", "lion"], "--muon-scalar-optimizer lion"),
        (["--save", "/tmp/nowhere"], "--no-save-optim"),
        (["--load", "/tmp/nowhere"], "--no-load-optim"),
        (["--dmuon-workspace-mb", "0"], "--dmuon-workspace-mb"),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else None,
)
def test_unserved_flags_stop_every_rank_before_training_and_are_named(flags, named):
    for message in run_ranks(_refusal, 2, flags):
        assert named in message


def _refusal(flags):
    try:
        _parse(["--optimizer", "dmuon", *flags])
    except ValueError as error:
        return str(error)
    return "accepted"


def _unknown_value():
    try:
        _parse(["--optimizer", "dmuon", "--dmuon-ns-method", "cubic"])
    except SystemExit as stop:
        return stop.code
    return 0


def test_an_unknown_value_of_a_dmuon_flag_is_a_usage_error():
    assert run_ranks(_unknown_value, 1) == [2]


def _emerging_optimizers_is_not_needed():
    sys.modules["emerging_optimizers"] = None
    return len(train_dmuon(Tiny(), steps=1).losses)


def test_emerging_optimizers_is_not_needed():
    assert run_ranks(_emerging_optimizers_is_not_needed, 1) == [1]

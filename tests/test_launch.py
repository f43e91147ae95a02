"""`python -m dmuon_megatron.launch` runs scripts that know nothing of DMuon."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dmuon_megatron import launch

SCRIPTS = Path(__file__).parent / "scripts"
PRETRAIN = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --ffn-hidden-size 96 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --seq-length 32
    --max-position-embeddings 32 --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0 --bf16
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0
    --micro-batch-size 2 --global-batch-size 8 --train-iters 6 --split 100,0,0
    --eval-iters 0 --eval-interval 100
    --lr 1e-2 --min-lr 1e-2 --lr-decay-style constant --log-interval 1
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
"""


def _run(*command, timeout=300):
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def _pretrain(*arguments, ranks=2):
    """The losses that Megatron's training loop prints, by iteration."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    done = _run(
        *torchrun,
        "-m",
        "dmuon_megatron.launch",
        "--cpu",
        SCRIPTS / "pretrain_tiny.py",
        *shlex.split(PRETRAIN),
        *arguments,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count("for the CPU added --distributed-backend gloo") == 1
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]


def test_an_unmodified_script_trains_with_dmuon_on_both_of_megatrons_ways_to_wrap_a_model():
    newer = _pretrain("--optimizer", "dmuon")
    older = _pretrain("--optimizer", "dmuon", "--older-script")
    assert len(newer) == 6 and newer[-1] < 0.9 * newer[0]
    # Seeded alike, but the two ways draw the initial weights in another order.
    assert len(older) == 6 and older[-1] < 0.9 * older[0]


def test_the_script_finds_what_python_would_give_it(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'found'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "import beside\n"
        "from megatron.training.arguments import parse_args\n"
        "assert __name__ == '__main__' and beside.NAME == 'found'\n"
        "assert sys.argv[:3] == [__file__, '--optimizer', 'dmuon'], sys.argv\n"
        "assert sys.path[0] == os.path.dirname(os.path.abspath(__file__)), sys.path\n"
        "args = parse_args()\n"
        "print(args.optimizer, args.distributed_backend, os.environ['WORLD_SIZE'])\n"
    )
    done = _run("-m", "dmuon_megatron.launch", "--cpu", script, "--optimizer", "dmuon")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "dmuon gloo 1"


def test_a_megatron_beside_the_script_is_the_one_that_is_prepared(tmp_path):
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('the one beside the script')\n")
    (tmp_path / "script.py").write_text("")
    done = _run("-m", "dmuon_megatron.launch", "--cpu", tmp_path / "script.py")
    assert done.returncode == 1 and "the one beside the script" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments are required: SCRIPT"),
        (["--cpu"], "arguments are required: SCRIPT"),
        (["--gpu", "script.py"], "unrecognized arguments"),
        (["nowhere.py", "--help", "--cpu"], "there is no script nowhere.py"),
        ([__file__, "--optimizer", "dmuon"], "put --cpu before the script"),
        (["--cpu", __file__, "--distributed-backend", "nccl"], "--distributed-backend nccl does"),
        (
            ["--cpu", __file__, "--transformer-impl=transformer_engine"],
            "or give local",
        ),
    ],
)
def test_a_command_line_that_cannot_work_gets_one_clear_line(
    arguments, message, capsys, monkeypatch
):
    monkeypatch.setattr(launch, "_has_cuda", lambda: False)
    monkeypatch.setattr(launch, "run", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as end:
        launch.main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_cpu_flags_are_added_once_and_only_where_missing():
    given = ["--transformer-impl", "local", "--distributed-backend=gloo", "--no-rope-fusion"]
    arguments, added = launch.with_cpu_flags(given)
    assert arguments == given + added
    assert "--no-persist-layer-norm" in added
    assert not {"--transformer-impl", "--distributed-backend", "--no-rope-fusion"} & set(added)
    assert launch.with_cpu_flags(arguments) == (arguments, [])

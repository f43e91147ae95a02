"""The set-up script's refusals, the dataset, and one short quick start through Megatron's loop."""

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import build_dataset  # noqa: E402
import quickstart  # noqa: E402

SET_UP_TOOLS = ("bash", "dirname", "cat", "cksum", "find", "rm", "ls", "grep", "sed", "mkdir")


@pytest.fixture
def bare_machine(tmp_path):
    """PATH and HOME with the shell's tools alone: no interpreter, no compiler, no pyenv."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for tool in (*SET_UP_TOOLS, "touch"):
        (bin_folder / tool).symlink_to(shutil.which(tool))
    return {
        "PATH": str(bin_folder),
        "HOME": str(tmp_path),
        "DMUON_VENV": str(tmp_path / "environment"),
    }


def set_up(environment):
    """Exit code and last line of error output of sourcing the set-up script."""
    bash = shutil.which("bash")
    command = [bash, "-c", f"source {ROOT}/examples/setup.sh"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stderr.strip()


def test_missing_interpreter_gets_one_sentence(bare_machine):
    code, message = set_up(bare_machine)
    assert code == 1
    assert "Python 3.12 or newer was not found" in message and "\n" not in message


def test_interpreter_that_does_not_start_is_passed_over(bare_machine):
    """pyenv leaves a `python3.12` on PATH that fails unless that version is selected."""
    shim = Path(bare_machine["PATH"]) / "python3.12"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    assert "Python 3.12 or newer was not found" in set_up(bare_machine)[1]
    # with a working one behind it the set-up goes on to look for a compiler
    (Path(bare_machine["PATH"]) / "python3.13").symlink_to(sys.executable)
    code, message = set_up(bare_machine)
    assert code == 1
    assert "no C++ compiler was found" in message and "\n" not in message


def test_interpreter_of_pyenv_is_found(bare_machine):
    version = Path(bare_machine["HOME"]) / ".pyenv" / "versions" / "3.12.99" / "bin"
    version.mkdir(parents=True)
    (version / "python").symlink_to(sys.executable)
    assert "no C++ compiler was found" in set_up(bare_machine)[1]


def test_named_interpreter_that_is_too_old_is_refused(bare_machine, tmp_path):
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")  # what the version check answers on an older one
    old.chmod(0o755)
    code, message = set_up(bare_machine | {"PYTHON": str(old)})
    assert code == 1
    assert f"PYTHON={old}" in message and "\n" not in message


def test_environment_folder_with_other_content_is_left_alone(bare_machine):
    folder = Path(bare_machine["DMUON_VENV"])
    folder.mkdir()
    (folder / "thesis.tex").touch()
    code, message = set_up(bare_machine)
    assert code == 1
    assert f"DMUON_VENV={folder}" in message
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_dataset_is_deterministic_within_its_limit_and_ends_documents(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    limit = 300_000
    count, tokens = build_dataset.build(tmp_path / "a" / "one", limit)
    build_dataset.build(tmp_path / "two", limit)
    for suffix in (".bin", ".idx"):
        one, two = tmp_path / "a" / f"one{suffix}", tmp_path / f"two{suffix}"
        assert one.read_bytes() == two.read_bytes()

    dataset = IndexedDataset(str(tmp_path / "two"))
    assert len(dataset) == count > 1
    assert limit // 2 < tokens == sum(dataset.sequence_lengths) <= limit
    assert len(dataset.document_indices) == count + 1
    for document in dataset:
        assert document[-1] == build_dataset.END_OF_DOCUMENT
        assert not np.any(document[:-1] == build_dataset.END_OF_DOCUMENT)
        bytes(document[:-1].astype(np.uint8)).decode("utf-8")


def test_dataset_without_a_fitting_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="--max-bytes"):
        build_dataset.build(tmp_path / "none", 1)


def test_loss_table_averages_every_step_once():
    run = quickstart.Run([float(step) for step in range(1, 8)], 0.0, 1.0, 0.1)
    table = quickstart.loss_table({"dmuon": run}, steps=7, rows=3)
    labels, means = (list(column.cells) for column in table.columns)
    assert labels == ["1-2", "3-5", "6-7"]
    assert means == ["1.500", "4.000", "6.500"]


def test_quick_start_trains_with_dmuon(tmp_path):
    """The whole way on 2 ranks: dataset, Megatron's loop, the plan, the curves and the picture."""
    build_dataset.build(tmp_path / "data", 2**21)
    command = quickstart.command("dmuon", 5, 2, tmp_path / "data", tmp_path / "run")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert any(quickstart.is_plan(line) for line in done.stdout.splitlines())

    run = quickstart.read_run(tmp_path / "run")
    assert len(run.losses) == 5
    assert abs(run.losses[0] - math.log(build_dataset.VOCAB_SIZE)) < 0.2
    assert run.losses[-1] < run.losses[0] - 1
    assert 0 < run.optimizer_share < 1 and run.step_seconds > 0

    quickstart.draw({"dmuon": run}, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_library_example_trains():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            str(ROOT / "examples" / "library.py"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 10 and losses[-1] < 0.6 * losses[0]

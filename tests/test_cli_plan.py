"""The command `dmuon-megatron plan`."""

import json
import subprocess
import sys

import pytest

from dmuon_megatron.cli import main
from dmuon_megatron.planner.shapes import read_checkpoint, read_shapes
from tests.harness.ranks import run_ranks
from tests.harness.types import Tiny


def run(capsys, *arguments):
    """Exit status, standard output and standard error of `dmuon-megatron plan`."""
    status = main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# The settings of the study whose figures are known.
STUDY = ["--no-split", "--workspace-mb", "4000"]


def test_the_table_compares_with_megatron(capsys):
    command = ["--model", "qwen2.5-7b", "--dp", 8, "--compare", *STUDY]
    status, out, _ = run(capsys, *command)
    assert status == 0
    for text in ("Megatron LayerWise", "57.86", "45.86", "ping-pong", "round robin", "lower bound"):
        assert text in out


def test_json_is_all_of_standard_output():
    command = [sys.executable, "-m", "dmuon_megatron.cli", "plan", "--model", "Qwen2.5-7B"]
    command += ["--dp", "16", "--json", "--compare", "--memory-limit", "0", *STUDY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (stage,) = json.loads(done.stdout)
    assert stage["makespan_seconds"] == pytest.approx(16.74e-3, rel=5e-3)
    assert stage["makespan_seconds"] == max(stage["loads_seconds"])
    assert stage["lower_bound_seconds"] <= stage["makespan_seconds"]
    assert stage["ratio_megatron_over_dmuon"] > 1.35
    assert len(stage["owner"]) == 112
    assert {row["layout"] for row in stage["compare"]} >= {"Megatron LayerWise", "round robin"}


def test_stages_with_equal_matrices_are_planned_once_and_the_slowest_named(capsys):
    status, out, _ = run(
        capsys, "--model", "DeepSeek-V3", "--dp", 8, "--ep", 8, "--pp", 4, "--json"
    )
    assert status == 0
    stages = json.loads(out)
    assert 1 < len(stages) <= 4
    assert all(len(stage["experts"]) == 8 for stage in stages)
    status, out, _ = run(capsys, "--model", "Llama-3-8B", "--dp", 4, "--pp", 3)
    assert "slowest stage: Llama-3-8B stage 0" in out


def test_whole_matrices_have_homes_on_all_tensor_parallel_ranks(capsys):
    _, out, _ = run(capsys, "--model", "Llama-3-8B", "--dp", 4, "--tp", 2, "--json", "--compare")
    (whole,) = json.loads(out)
    _, out, _ = run(capsys, "--model", "Llama-3-8B", "--dp", 8, "--json")
    (flat,) = json.loads(out)
    assert whole["ranks"] == 8
    assert whole["makespan_seconds"] == flat["makespan_seconds"]
    _, out, _ = run(
        capsys, "--model", "Llama-3-8B", "--dp", 4, "--tp", 2, "--json", "--tp-mode", "blockwise"
    )
    (shards,) = json.loads(out)
    assert shards["ranks"] == 4
    assert shards["makespan_seconds"] != whole["makespan_seconds"]


@pytest.mark.parametrize("ranks", [8, 128])
def test_the_plot_is_written(capsys, tmp_path, ranks):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "loads.png"
    run(capsys, "--model", "Llama-3-8B", "--dp", ranks, "--compare", "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_written_is_an_error(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    status, _, err = run(
        capsys, "--model", "Llama-3-8B", "--dp", 8, "--plot", tmp_path / "no" / "x.png"
    )
    assert status == 2
    assert "--plot" in err


def test_shapes_come_from_csv_or_json(capsys, tmp_path):
    table = tmp_path / "shapes.csv"
    table.write_text("name, rows, cols, count\n# a comment\nfc1, 64, 32, 4\n\nproj, 32, 32\n")
    listed = tmp_path / "shapes.json"
    listed.write_text(
        json.dumps(
            [
                {"name": "fc1", "rows": 64, "cols": 32, "count": 4},
                {"name": "proj", "rows": 32, "cols": 32},
            ]
        )
    )
    tasks = read_shapes(table)
    assert tasks == read_shapes(listed)
    assert [task.name for task in tasks] == ["fc1.0", "fc1.1", "fc1.2", "fc1.3", "proj.0"]
    status, out, _ = run(capsys, "--shapes", table, "--dp", 2, "--json")
    assert status == 0
    assert len(json.loads(out)[0]["owner"]) == 5


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.csv", "fc1, 64, 32, 4\nfc2, 64\n", "line 2"),
        ("a.csv", "fc1, 64, many, 4\n", "whole numbers"),
        ("a.csv", "fc1, 64, 0, 4\n", "positive"),
        ("a.csv", "fc1, 64, 4, 0\n", "positive"),
        ("a.csv", "", "no shapes"),
        ("a.json", "{", "not JSON"),
        ("a.json", "{}", "list of objects"),
        ("a.json", '[{"name": "x", "rows": 3}]', "entry 1"),
        ("a.csv", "fc1, 8, 8, 2\nfc1, 8, 8, 2\n", "unique"),
    ],
)
def test_a_bad_shapes_file_is_named_with_the_line(capsys, tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    status, _, err = run(capsys, "--shapes", path, "--dp", 2)
    assert status == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "GPT-9", "--dp", 8], "Qwen2.5-7B"),
        (["--model", "Llama-3-8B", "--dp", 0], "--dp"),
        (["--model", "Llama-3-8B", "--dp", 8, "--ep", 2], "no experts"),
        (["--model", "Qwen3-30B-A3B", "--dp", 6, "--ep", 4], "--ep 4"),
        (["--model", "Qwen3-30B-A3B", "--dp", 6, "--ep", 3], "ep=3"),
        (["--model", "Llama-3-8B", "--dp", 8, "--pp", 99], "pp"),
        (["--model", "Llama-3-8B", "--dp", 8, "--tp", 7, "--tp-mode", "blockwise"], "tp=7"),
        (["--model", "Llama-3-8B", "--dp", 8, "--memory-limit", 0.5], "memory_limit"),
        (["--model", "Qwen3-30B-A3B", "--dp", 8, "--ep", 8, "--policy", "lpt"], "experts"),
        (["--shapes", "/nowhere/shapes.csv", "--dp", 8], "cannot be read"),
        (["--shapes", "x.csv", "--dp", 8, "--tp", 2], "--shapes"),
    ],
)
def test_wrong_arguments_get_one_line_that_names_them(capsys, arguments, message):
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def _saved(folder, tiny):
    """Saves the tiny model's weights as Megatron does; returns the shapes that Muon updates."""
    from megatron.core import dist_checkpointing

    from dmuon_megatron.matrices import find_matrices
    from tests.harness.tiny import build_model, start_megatron

    start_megatron()
    model = build_model(tiny)
    dist_checkpointing.save(model.sharded_state_dict(), str(folder))
    (matrices,) = find_matrices([model], split_qkv=False)
    return sorted((m.rows, m.cols) for m in matrices)


@pytest.mark.parametrize("tiny", [Tiny(), Tiny(layers=1, experts=4, shared_expert=True)])
def test_shapes_come_from_a_checkpoint_of_megatrons(capsys, tmp_path, tiny):
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    (expected,) = run_ranks(_saved, 1, folder, tiny)
    for path in (tmp_path, folder):
        tasks = read_checkpoint(path)
        assert sorted((task.rows, task.cols) for task in tasks) == expected
        assert {task.bucket for task in tasks} == set(range(tiny.layers))
    status, out, _ = run(capsys, "--checkpoint", tmp_path, "--dp", 2, "--json")
    assert status == 0 and len(json.loads(out)[0]["owner"]) == len(expected)


def test_what_is_no_checkpoint_is_named(capsys, tmp_path):
    status, _, err = run(capsys, "--checkpoint", tmp_path, "--dp", 2)
    assert status == 2 and f"--checkpoint {tmp_path}" in err

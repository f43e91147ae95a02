"""The script that checks kernels on a GPU, up to the launch: its rehearsal on a CPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples/gpu_check.sh"


def run(*arguments):
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("DMUON_WHEELS", None)
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], capture_output=True, text=True, env=environment
    )


def test_the_rehearsal_runs_every_kernel_and_newton_schulz_on_them(tmp_path):
    done = run("--rehearse", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rehearsal"] is True
    assert found["faults"] == found["skipped"] == []
    assert found["kernel_checks_passed"] == 6
    assert {row["on_kernels"] for row in found["newton_schulz"]} == {1.0}
    assert len(found["newton_schulz"]) == 6
    assert "newton_schulz_times" not in found, "times of a CPU are not a GPU's"


def test_without_a_gpu_it_says_so():
    done = run()
    assert done.returncode == 2
    assert "--rehearse" in done.stderr


def test_what_is_built_ahead_is_what_the_check_asks_for():
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "examples/gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for_hopper = module.needed("sm_90a")
    # both dtypes: three symmetric variants in seven tilings, two others in five
    assert len(for_hopper) == 2 * (3 * 7 + 2 * 5)
    for_ampere = module.needed("sm_80")
    assert all(found.k is not None for found in for_ampere)
    lengths = {found.k for found in for_ampere if found.op == "symmetric"}
    assert {*module.SIDES, 1032, 2056, 3584, 18944, 28672} <= lengths

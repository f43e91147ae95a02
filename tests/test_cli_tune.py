"""The command `dmuon-megatron tune`, as far as it goes without a GPU."""

import json

import pytest

from dmuon_megatron.cli import main, tune
from dmuon_megatron.kernels import inspection
from dmuon_megatron.kernels.compile import use_cache
from dmuon_megatron.kernels.inspection import Inspection


@pytest.fixture(autouse=True)
def own_cache():
    yield
    use_cache(None)


@pytest.fixture
def shapes(tmp_path):
    path = tmp_path / "shapes.csv"
    path.write_text("wide,512,2048\ntall,2048,512\nsmall,4,64\n")
    return path


def run(capsys, *arguments):
    status = main(["tune", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--aot --arch sm_90a compiles for one"),
        (("--aot",), "need --arch: sm_80 or sm_90a"),
        (("--arch", "sm_80"), "--arch is for --aot and --check"),
        (("--batches", "1,x"), "--batches must be whole numbers"),
        (("--jobs", "0"), "--jobs"),
    ],
)
def test_wrong_use_is_one_line_that_says_what_to_do(capsys, shapes, arguments, said):
    status, out, err = run(capsys, "--shapes", shapes, *arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_without_nvcc_compiling_says_so(capsys, shapes, monkeypatch):
    def missing():
        raise RuntimeError("nvcc was not found")

    monkeypatch.setattr(inspection, "nvcc", missing)
    status, _, err = run(capsys, "--shapes", shapes, "--aot", "--arch", "sm_90a")
    assert (status, "nvcc was not found" in err) == (2, True)


@pytest.fixture
def compiled(monkeypatch):
    """Records what would be compiled, in this process and at once."""
    specs = []

    def build(spec, directory, aot, check):
        specs.append((spec, aot, check))
        return {"kernel": spec.name, "faults": [], "seconds": 1.0}

    monkeypatch.setattr(inspection, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(tune, "build", build)
    return specs


def test_every_tiling_of_every_variant_is_compiled_once(capsys, shapes, compiled, tmp_path):
    command = ["--shapes", shapes, "--aot", "--jobs", 1, "--json", "--cache", tmp_path]
    status, out, _ = run(capsys, *command, "--arch", "sm_90a")
    assert status == 0
    specs = [spec for spec, aot, check in compiled if aot and not check]
    # sm_90a's binaries hold for any size: the Gram matrix of wide and tall, the small products,
    # and X's product with and without X added
    variants = {(s.op, s.transposed, s.has_c) for s in specs}
    assert variants == {
        ("symmetric", False, False),
        ("symmetric", True, False),
        ("symmetric", False, True),
        ("multiply", False, False),
        ("multiply", False, True),
    }
    assert len(specs) == len(set(specs)) == 3 * 7 + 2 * 5
    assert sorted(row["kernel"] for row in json.loads(out)) == sorted(s.name for s in specs)
    compiled.clear()
    assert run(capsys, *command, "--arch", "sm_80")[0] == 0
    assert {spec.k for spec, *_ in compiled} == {512, 2048}


def test_a_kernel_that_is_unfit_fails_the_command(capsys, shapes, monkeypatch, tmp_path):
    monkeypatch.setattr(inspection, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(inspection, "inspect", lambda spec: Inspection(255, 32, 300 << 10, None))
    command = ["--shapes", shapes, "--check", "--jobs", 1, "--cache", tmp_path]
    status, out, _ = run(capsys, *command, "--arch", "sm_80")
    assert status == 1
    assert "spills 32 bytes" in out
    assert "needs 307200 bytes of shared memory" in out


def test_an_inspection_names_missing_instructions():
    good = Inspection(168, 0, 98304, {"HGMMA": 8, "UTMALDG": 10})
    assert good.faults("sm_90a") == []
    slow = Inspection(168, 0, 98304, {"HMMA": 8, "HGMMA": 0, "UTMALDG": 1})
    assert slow.faults("sm_90a") == ["has no HGMMA"]

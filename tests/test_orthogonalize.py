"""What orthogonalize promises besides accuracy: any input, nothing written, nothing spread."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from dmuon_megatron.orthogonalize import (
    Workspace,
    default_restarts,
    ns_flops,
    orthogonalize,
    stats,
    useful_batch,
    workspace_bytes,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
METHODS = ["standard", "gram"]


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (4, 100), (3, 20, 33), (2, 3, 33, 20)])
def test_input_is_never_written(method, dtype, shape):
    """B23: `.bfloat16()` of a bf16 buffer is the buffer, which then was normalised in place."""
    for input_dtype in [dtype, torch.float32]:
        x = gaussian(*shape, dtype=input_dtype)
        before = x.clone()
        result = orthogonalize(x, method=method, dtype=dtype)
        assert torch.equal(x, before)
        assert result.dtype == x.dtype and result.shape == x.shape
        assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_stays_exactly_zero_and_others_do_not_notice(method, dtype):
    """B26: 0/0 in a zero-initialised projection."""
    x = gaussian(3, 24, 64)
    x[1] = 0
    result = orthogonalize(x, method=method, dtype=dtype)
    assert (result[1] == 0).all()
    for i in (0, 2):
        alone = orthogonalize(x[i], method=method, dtype=dtype)
        assert relative(result[i], alone) < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_rows_and_columns_and_rank_one(method, dtype):
    x = gaussian(24, 64)
    x[3], x[:, 5] = 0, 0
    result = orthogonalize(x, method=method, dtype=dtype)
    assert (result[3] == 0).all() and (result[:, 5] == 0).all()
    rank_one = orthogonalize(gaussian(24, 1) @ gaussian(1, 64), method=method, dtype=dtype)
    assert rank_one.isfinite().all()
    assert torch.linalg.matrix_norm(rank_one.double(), 2) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_nan_or_inf_is_reported_for_its_matrix_only(method, dtype, bad):
    x = gaussian(2, 2, 24, 64)
    clean = orthogonalize(x, method=method, dtype=dtype)
    x[1, 0, 2, 3] = bad
    finite = torch.empty(2, 2, dtype=torch.bool)
    result = orthogonalize(x, method=method, dtype=dtype, finite=finite)
    assert finite.tolist() == [[True, True], [False, True]]
    assert result[1, 0].isnan().all()
    assert torch.equal(result[finite], clean[finite])


def test_finite_is_a_scalar_for_one_matrix_and_true_for_none():
    finite = torch.tensor(False)
    orthogonalize(gaussian(3, 4), finite=finite)
    assert finite.item() is True
    nothing = torch.zeros(2, dtype=torch.bool)
    orthogonalize(torch.empty(2, 0, 4), finite=nothing)
    assert nothing.all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_invariance(method, dtype):
    """B10: an eps of 1e-7 is a floor for small gradients; B11: fp16 before the norm overflows."""
    x = gaussian(24, 64)
    expected = orthogonalize(x, method=method, dtype=dtype)
    for exponent in range(-20, 21, 4):
        scaled = x * 10.0**exponent
        error = relative(orthogonalize(scaled, method=method, dtype=dtype), expected)
        assert error < (1e-4 if dtype == torch.float32 else 0.05), exponent
    for power in (-100, -60, 60, 100):  # exactly representable, so exactly the same
        scaled = x * 2.0**power
        assert torch.equal(orthogonalize(scaled, method=method, dtype=dtype), expected), power


@pytest.mark.parametrize("magnitude", [1e-43, 1e-38, 1e37])
def test_at_the_ends_of_fp32(magnitude):
    x = (gaussian(24, 64).double() * magnitude).float()  # subnormal ones lose digits here
    expected = orthogonalize(x.double() / magnitude, method="standard")
    for method in METHODS:
        assert relative(orthogonalize(x, method=method), expected) < 1e-4
    widest = torch.full((3, 4), torch.finfo(torch.float32).max)
    assert relative(orthogonalize(widest), orthogonalize(torch.ones(3, 4))) < 1e-6


def test_half_precision_inputs_of_any_magnitude():
    for input_dtype, magnitudes in [(torch.bfloat16, (1e-30, 1e30)), (torch.float16, (1e-2, 1e4))]:
        x = gaussian(24, 64).to(input_dtype)
        expected = orthogonalize(x.double(), method="standard")
        for magnitude in magnitudes:
            power = 2.0 ** round(torch.tensor(magnitude).log2().item())
            assert relative(orthogonalize(x * power), expected) < 4e-3


def test_fp64_input_beyond_fp32_range():
    x = gaussian(24, 64).double()
    expected = orthogonalize(x)
    for magnitude in (1e-300, 1e300):
        assert relative(orthogonalize(x * magnitude), expected) < 1e-12
        assert relative(orthogonalize(x * magnitude, dtype=torch.float32), expected) < 1e-4


@pytest.mark.parametrize(
    "shape",
    [(4, 300), (300, 4), (1, 50), (50, 1), (1, 1), (7, 13), (65, 129), (64, 4096), (4096, 64)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_shapes(shape, dtype):
    x = gaussian(*shape)
    expected = orthogonalize(x.double(), method="standard")
    bound = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    for method in ["auto", *METHODS]:
        assert relative(orthogonalize(x, method=method, dtype=dtype), expected) < bound


def test_up_to_sixteen_rows_run_in_fp32():
    x = gaussian(16, 100)
    expected = orthogonalize(x)
    for dtype in DTYPES:
        assert torch.equal(orthogonalize(x, dtype=dtype), expected)
    assert not torch.equal(orthogonalize(gaussian(17, 100), dtype=torch.bfloat16), expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(method, dtype):
    base = gaussian(70, 100)
    cases = {
        "transposed": base[:40, :64].mT,
        "odd offset in a flat buffer": base.flatten()[13 : 13 + 40 * 64].view(40, 64),
        "padded rows": base[3:43, 7:71],
        "every second": base[::2, ::3],
        "columns first": base.mT[:40].mT,
        "expanded row": base[:1].expand(40, 100),
        "expanded batch": base[:40, :64].expand(3, 2, 40, 64),
        "interleaved": base.view(35, 2, 100).transpose(0, 1),
        "four dimensions": base[:, :96].unflatten(1, (4, 24)).permute(1, 0, 2).unsqueeze(1),
    }
    for name, x in cases.items():
        expected = orthogonalize(x.contiguous(), method=method, dtype=dtype)
        before = base.clone()
        result = orthogonalize(x, method=method, dtype=dtype)
        assert torch.equal(result, expected), name
        assert result.is_contiguous() and torch.equal(base, before), name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [4, 5])
def test_out_of_any_strides_is_filled_and_nothing_beside_it(method, dtype, input_dtype, steps):
    x = gaussian(2, 24, 40, dtype=input_dtype)
    arguments = dict(method=method, dtype=dtype, steps=steps)
    expected = orthogonalize(x, **arguments)
    frame = torch.full((2, 30, 50), float("nan"), dtype=input_dtype)
    outs = [
        torch.full_like(x, float("nan")),
        frame[:, 3:27, 5:45],
        torch.full((24, 2, 40), float("nan"), dtype=input_dtype).transpose(0, 1),
        torch.full((2, 40, 24), float("nan"), dtype=input_dtype).mT,
    ]
    for out in outs:
        assert orthogonalize(x, out=out, **arguments) is out
        assert torch.equal(out, expected)
    frame[:, 3:27, 5:45] = float("nan")
    assert frame.isnan().all()
    four = torch.empty(3, 2, 24, 40, dtype=input_dtype).transpose(0, 1)  # no view as (6, 24, 40)
    orthogonalize(x[:, None].expand(2, 3, 24, 40), out=four, **arguments)
    for i in range(3):
        assert relative(four[:, i], expected) < 1e-5


@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_may_be_the_input(dtype, steps):
    for method in METHODS:
        x = gaussian(2, 24, 40)
        expected = orthogonalize(x, method=method, dtype=dtype, steps=steps)
        orthogonalize(x, method=method, dtype=dtype, steps=steps, out=x)
        assert torch.equal(x, expected)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 4, 6), (2, 0, 6), (2, 3, 4, 0)])
def test_empty(shape):
    x = torch.empty(shape)
    assert orthogonalize(x).shape == x.shape
    assert orthogonalize(x, out=torch.empty(shape), finite=torch.empty(shape[:-2]).bool()) is not x


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_matrix_of_a_stack_is_its_own(method, dtype):
    """B20: a stack of experts normalised as one, or flattened into one matrix."""
    stack = gaussian(3, 24, 40) * torch.tensor([1.0, 1e-3, 1e5])[:, None, None]
    bound = 1e-5 if dtype == torch.float32 else 0.05
    for x in [stack, stack[:1], stack[None], stack.mT]:
        result = orthogonalize(x, method=method, dtype=dtype).flatten(0, -3)
        for i, matrix in enumerate(x.flatten(0, -3)):
            assert relative(result[i], orthogonalize(matrix, method=method, dtype=dtype)) < bound


@given(
    batch=st.integers(1, 4),
    m=st.integers(1, 70),
    n=st.integers(1, 200),
    method=st.sampled_from(["auto", *METHODS]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_shape_in_a_bounded_workspace(batch, m, n, method, dtype, seed):
    x = gaussian(batch, m, n, seed=seed)
    workspace = Workspace(max_bytes=20_000)
    result = orthogonalize(x, method=method, dtype=dtype, workspace=workspace)
    one = workspace_bytes(1, m, n, method=method, dtype=dtype)
    assert workspace.nbytes <= max(20_000, one)
    expected = orthogonalize(x.double(), method="standard")
    # a nearly square Gaussian matrix may have tiny singular values, which half precision loses
    bound = 1e-3 if dtype == torch.float32 else 0.5
    assert relative(result, expected) < bound
    tall = orthogonalize(x.mT, method=method, dtype=dtype, workspace=workspace).mT
    assert relative(tall, expected) < bound


def test_workspace_is_reused_and_bounded():
    workspace = Workspace(max_bytes=1 << 20)
    x = gaussian(40, 32, 64)
    expected = orthogonalize(x)
    assert torch.equal(orthogonalize(x, workspace=workspace), expected)
    held = workspace.nbytes
    assert 0 < held <= 1 << 20
    orthogonalize(x[:3], workspace=workspace, dtype=torch.bfloat16)
    assert workspace.nbytes == held
    workspace.release()
    assert workspace.nbytes == 0
    with pytest.raises(ValueError, match="--dmuon-workspace-mb"):
        Workspace(max_bytes=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [None, *DTYPES])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_workspace_bytes_is_what_one_batch_takes(method, dtype, input_dtype):
    for m, n in [(24, 40), (40, 24), (8, 40)]:
        workspace = Workspace()
        orthogonalize(
            gaussian(3, m, n).to(input_dtype), method=method, dtype=dtype, workspace=workspace
        )
        expected = workspace_bytes(3, m, n, method=method, dtype=dtype, input_dtype=input_dtype)
        assert workspace.nbytes == expected


def test_useful_batch_is_what_runs_as_one():
    assert useful_batch(512, 2048) == 1
    assert useful_batch(512, 2048, device="cuda") is None
    m, n = 64, 200
    size = useful_batch(m, n, dtype=torch.bfloat16)
    assert size > 1
    largest = workspace_bytes(size, m, n, dtype=torch.bfloat16)
    for batch in (size, 3 * size + 1):
        workspace = Workspace()
        orthogonalize(gaussian(batch, m, n), dtype=torch.bfloat16, workspace=workspace)
        assert workspace.nbytes == largest


@pytest.mark.parametrize("method", ["auto", *METHODS])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("shape", [(8, 64), (64, 90), (64, 96), (200, 64), (390, 400), (400, 260)])
@pytest.mark.parametrize(("steps", "restarts"), [(5, None), (5, (2,)), (1, None)])
def test_flops_are_those_that_run(method, dtype, shape, steps, restarts):
    if dtype == torch.bfloat16 and restarts:
        restarts = (1, 3)
    arguments = dict(method=method, dtype=dtype, steps=steps, restarts=restarts)
    coefficients = [(2.0, -1.5, 0.5)] * 8
    with FlopCounterMode(display=False) as counter:
        orthogonalize(gaussian(*shape), coefficients=coefficients, **arguments)
    assert ns_flops(*shape, **arguments) == counter.get_total_flops()


def test_flops_of_full_products():
    """On a GPU every product runs whole."""
    m, n = 512, 2048
    assert ns_flops(m, n, method="standard", device="cuda") == 5 * 2 * (2 * m * m * n + m**3)
    gram = 2 * (3 * 2 * m * m * n + (4 * 5 - 3 * 3) * m**3)
    assert ns_flops(n, m, method="gram", device="cuda") == gram
    assert ns_flops(m, n, device="cuda") == gram
    assert ns_flops(m, n) < gram


def test_auto_takes_the_gram_form_from_aspect_ratio_one_and_a_half():
    for shape, form in [
        ((64, 64), "standard"),
        ((64, 95), "standard"),
        ((64, 96), "gram"),
        ((96, 64), "gram"),
        ((16, 400), "standard"),
        ((17, 400), "gram"),
    ]:
        stats.clear()
        orthogonalize(gaussian(3, *shape))
        assert stats == {(form, "float32"): 3}


def test_default_restarts():
    assert [default_restarts(steps) for steps in (1, 2, 3, 5, 8)] == [
        (),
        (),
        (2,),
        (2, 4),
        (2, 4, 6),
    ]


def test_counter_tells_form_and_dtype_of_what_ran():
    stats.clear()
    orthogonalize(gaussian(5, 32, 64), dtype=torch.bfloat16)
    orthogonalize(gaussian(32, 32), dtype=torch.bfloat16)
    orthogonalize(gaussian(2, 8, 64), dtype=torch.bfloat16)
    assert stats == {
        ("gram", "bfloat16"): 5,
        ("standard", "bfloat16"): 1,
        ("standard", "float32"): 2,
    }


@pytest.mark.parametrize("shape", [(48, 48), (48, 100), (100, 48), (3, 48, 100)])
def test_standard_form_in_bf16_is_emerging_optimizers_arithmetic(shape):
    """Megatron's default, --muon-fp32-matmul-prec medium: a run keeps its bits."""
    utils = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    # of integers, whose squares add up to the same norm in their fp32 as in our fp64
    x = (gaussian(*shape) * 5).round()
    torch.set_float32_matmul_precision("medium")
    try:
        theirs = utils.newton_schulz(x, 5, "quintic")
    finally:
        torch.set_float32_matmul_precision("highest")
    ours = orthogonalize(x, method="standard", dtype=torch.bfloat16)
    if shape[-2] > shape[-1]:  # X B here for (B X^T)^T there: the sums' order is the library's
        assert relative(ours, theirs) < 1e-2
    else:
        assert torch.equal(ours, theirs)


def test_zero_padding_is_neutral():
    """Matrices of near shapes can share a batch."""
    x = gaussian(24, 40)
    expected = orthogonalize(x, method="gram")
    padded = torch.zeros(26, 48)
    padded[:24, :40] = x
    result = orthogonalize(padded, method="gram")
    assert relative(result[:24, :40], expected) < 1e-5
    assert (result[24:] == 0).all() and (result[:, 40:] == 0).all()


def test_scaled_fp16_gives_the_same(monkeypatch):
    """Large m in fp16 carries powers of two against subnormals; here for small m."""
    import dmuon_megatron.orthogonalize.newton_schulz as module

    x = gaussian(3, 48, 120)
    x[1] = gaussian(48, 1) @ gaussian(1, 120)  # the largest elements that X and X X^T can have
    x[2] = 1
    before = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    for method in METHODS:
        for coefficients in ["quintic", "polar_express"]:
            arguments = dict(method=method, coefficients=coefficients, dtype=torch.float16)
            plain = orthogonalize(x, **arguments)
            monkeypatch.setattr(module, "_FP16_SCALED_ROWS", 1)
            scaled = orthogonalize(x, **arguments)
            monkeypatch.undo()
            exact = orthogonalize(x.double(), method="standard", coefficients=coefficients)
            assert not torch.equal(plain, scaled)
            assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction == before
            for i in range(3):
                assert relative(scaled[i], exact[i]) < max(6e-3, 2 * relative(plain[i], exact[i]))


def test_tiny_elements_need_the_scaling_in_fp16(monkeypatch):
    """Elements of X near fp16's subnormals, as at 8192 x 28672: here by one dominant row."""
    import dmuon_megatron.orthogonalize.newton_schulz as module

    x = gaussian(32, 64) * 3e-4
    x[0, 0] = 64.0
    exact = orthogonalize(x.double(), method="standard", steps=8)[1:]
    errors = []
    for rows in (10**9, 1):
        monkeypatch.setattr(module, "_FP16_SCALED_ROWS", rows)
        result = orthogonalize(x, method="standard", steps=8, dtype=torch.float16)[1:]
        errors.append(relative(result, exact))
    assert errors[1] < errors[0] / 3


@pytest.mark.parametrize(
    ("x", "arguments", "error", "message"),
    [
        (torch.ones(4), {}, ValueError, r"\(\.\.\., m, n\)"),
        (torch.ones(4, 4, dtype=torch.int32), {}, TypeError, "floating point"),
        (torch.ones(4, 4, dtype=torch.complex64), {}, TypeError, "floating point"),
        (torch.ones(4, 4), dict(method="fast"), ValueError, "auto, gram, standard"),
        (torch.ones(4, 4), dict(dtype=torch.int8), TypeError, "dtype must be"),
        (torch.ones(4, 4), dict(steps=0), ValueError, "steps"),
        (torch.ones(4, 4), dict(out=torch.ones(4, 5)), ValueError, "out must have"),
        (torch.ones(4, 4), dict(out=torch.ones(4, 4).double()), ValueError, "out must have"),
        (torch.ones(2, 4, 4), dict(finite=torch.ones(3).bool()), ValueError, "finite must be"),
        (torch.ones(2, 4, 4), dict(finite=torch.ones(2)), ValueError, "finite must be"),
    ],
)
def test_wrong_arguments_are_named(x, arguments, error, message):
    with pytest.raises(error, match=message):
        orthogonalize(x, **arguments)


def test_gradients_are_not_recorded():
    x = gaussian(8, 20).requires_grad_()
    assert not orthogonalize(x).requires_grad


def test_without_native_half_products_the_arithmetic_is_the_same(monkeypatch):
    """CPUs that cannot multiply bf16: fp32 products of the same operands, rounded once."""
    import dmuon_megatron.orthogonalize.products as module

    x = gaussian(24, 64)
    native = orthogonalize(x, dtype=torch.bfloat16)
    monkeypatch.setattr(module, "native_on_cpu", lambda dtype: dtype == torch.float32)
    assert relative(orthogonalize(x, dtype=torch.bfloat16), native) < 1e-2


def test_benchmark_runs(tmp_path):
    script = Path(__file__).parents[1] / "examples" / "benchmarks" / "orthogonalize.py"
    report = tmp_path / "figures.json"
    run = subprocess.run(
        [
            *(sys.executable, str(script), "--shapes", "32x64", "2x24x24", "--turns", "1"),
            *("--device", "cpu", "--json", str(report)),
        ],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads(report.read_text())["rows"]
    assert [(row["shape"], row["dtype"]) for row in rows] == [
        ("32x64", "float32"),
        ("2x24x24", "float32"),
        ("32x64", "bfloat16"),
        ("2x24x24", "bfloat16"),
    ]
    assert all(row["auto_over"]["standard"] > 0 for row in rows)

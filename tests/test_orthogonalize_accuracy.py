"""Rounding errors of both forms on many kinds of matrix, against fp64; worst measured in brackets.

Every bound stands well below what a wrong recurrence gives (0.1 and more) and above what was
measured on these matrices.
"""

import math
import subprocess
import sys
from functools import cache

import pytest
import torch
from torch import Tensor

from dmuon_megatron.orthogonalize import orthogonalize

HALF = [torch.bfloat16, torch.float16]
SHAPES = [(96, 96), (64, 256), (400, 120), (17, 1088)]


def with_spectrum(values: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """A (len(values), n) matrix with these singular values and random directions."""
    m = len(values)
    left, right = (
        torch.linalg.qr(torch.randn(k, m, generator=generator, dtype=torch.float64)).Q
        for k in (m, n)
    )
    return left * values @ right.mT


@cache
def zoo(rows: int, columns: int) -> dict[str, Tensor]:
    """fp64 matrices of that shape, by name."""
    m, n = min(rows, columns), max(rows, columns)
    generator = torch.Generator().manual_seed(m * n)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    index = torch.arange(1, m + 1, dtype=torch.float64)
    matrices = {"gaussian": gaussian(m, n)}
    for condition in (1e2, 1e4, 1e6):
        power = -math.log(condition) / math.log(m)
        matrices[f"power law {condition:.0e}"] = with_spectrum(index**power, n, generator)
    for condition in (1e3, 1e6):
        values = condition ** -torch.linspace(0, 1, m, dtype=torch.float64)
        matrices[f"log {condition:.0e}"] = with_spectrum(values, n, generator)
    matrices["low rank"] = gaussian(m, max(1, m // 8)) @ gaussian(max(1, m // 8), n)
    rank_one = gaussian(m, 1) @ gaussian(1, n)
    matrices["rank 1"] = rank_one
    matrices["rank 1 + 1e-2"] = rank_one + 1e-2 * gaussian(m, n)
    matrices["rank 1 + 1e-4"] = rank_one + 1e-4 * gaussian(m, n)
    matrices["zero rows"] = gaussian(m, n) * (index % 2)[:, None]
    matrices["orthogonal"] = with_spectrum(torch.ones(m, dtype=torch.float64), n, generator)
    uniform = torch.rand(m, n, generator=generator, dtype=torch.float64)
    matrices["heavy tails"] = gaussian(m, n) / uniform.clamp_min(1e-6).sqrt()
    half = gaussian(m - m // 2, n)
    matrices["duplicated rows"] = torch.cat([half, half[: m // 2]])
    matrices["constant"] = torch.ones(m, n, dtype=torch.float64)
    spike = torch.logspace(-4, -7, m, dtype=torch.float64)
    spike[:2] = torch.tensor([1.0, 0.3])
    matrices["two spikes"] = with_spectrum(spike, n, generator)
    matrices["row scales"] = gaussian(m, n) * torch.logspace(0, -4, m, dtype=torch.float64)[:, None]
    return {
        name: matrix.mT.contiguous() if rows > columns else matrix
        for name, matrix in matrices.items()
    }


@cache
def stacked(shape: tuple[int, int]) -> Tensor:
    return torch.stack(list(zoo(*shape).values()))


@cache
def reference(shape: tuple[int, int], coefficients: str, steps: int = 5) -> Tensor:
    """Standard form in fp64 of the whole zoo."""
    return orthogonalize(stacked(shape), method="standard", coefficients=coefficients, steps=steps)


def errors(results: Tensor, expected: Tensor) -> Tensor:
    """Relative Frobenius error per matrix."""
    difference = (results.double() - expected).flatten(1).norm(dim=1)
    return difference / expected.flatten(1).norm(dim=1)


def assert_all_below(bound: float, values: Tensor, shape: tuple[int, int], skip: str = "") -> None:
    too_large = {
        name: value
        for name, value in zip(zoo(*shape), values.tolist(), strict=True)
        if name != skip and not value <= bound  # a NaN is too large as well
    }
    assert not too_large


def spectral_norms(results: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(results.double(), 2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("coefficients", ["simple", "quintic", "polar_express"])
class TestFiveSteps:
    """Against the standard form in fp64."""

    def run(self, shape, coefficients, dtype, **arguments) -> Tensor:
        return orthogonalize(stacked(shape), coefficients=coefficients, dtype=dtype, **arguments)

    def test_gram_in_fp64(self, shape, coefficients):
        expected = reference(shape, coefficients)
        for restarts in [(2, 4), (2,), ()]:
            result = self.run(shape, coefficients, None, method="gram", restarts=restarts)
            # (3e-11; 2e-12 with restarts)
            assert_all_below(1e-9, errors(result, expected), shape)

    def test_fp32(self, shape, coefficients):
        expected = reference(shape, coefficients)
        for bound, arguments in [
            (5e-4, dict(method="standard")),  # (4e-4 constant, 1.2e-4 others)
            (5e-4, dict(method="gram")),  # (3.5e-4 constant, 1.1e-4 others)
            (2e-3, dict(method="gram", restarts=(2,))),  # (3.5e-4)
        ]:
            result = self.run(shape, coefficients, torch.float32, **arguments)
            assert_all_below(bound, errors(result, expected), shape)

    @pytest.mark.parametrize("dtype", HALF)
    def test_gram_in_half_precision_is_bounded_and_near_the_standard_form(
        self, shape, coefficients, dtype
    ):
        expected = reference(shape, coefficients)
        gram = self.run(shape, coefficients, dtype, method="gram")
        standard = self.run(shape, coefficients, dtype, method="standard")
        # simple takes singular values up to 1.203 itself
        largest = 1.25 if coefficients == "simple" else 1.2  # (1.202, 1.17)
        assert_all_below(largest, spectral_norms(gram), shape)
        ratio = errors(gram, expected) / errors(standard, expected)
        # the standard form keeps a constant matrix's rank to the last bit
        assert_all_below(8.0, ratio, shape, skip="constant")  # (5.1)

    def test_fast_restarts_in_fp16_are_bounded(self, shape, coefficients):
        gram = self.run(shape, coefficients, torch.float16, method="gram", restarts=(2,))
        assert_all_below(1.25, spectral_norms(gram), shape)  # (1.21 simple, 1.19 others)


@pytest.mark.parametrize(
    ("shape", "dtype", "bound"),
    [
        ((64, 256), torch.float16, 6e-3),  # (9e-4)
        ((64, 256), torch.bfloat16, 3e-2),  # (1.2e-2)
        ((512, 96), torch.float16, 6e-3),  # (9e-4)
        ((512, 96), torch.bfloat16, 3e-2),  # (1.2e-2)
        ((96, 96), torch.float16, 1e-2),  # (2.2e-3)
        ((96, 96), torch.bfloat16, 5e-2),  # (1.8e-2)
    ],
)
def test_gaussian_in_half_precision(shape, dtype, bound):
    x = zoo(*shape)["gaussian"]
    expected = orthogonalize(x, method="standard")
    error = errors(orthogonalize(x, method="gram", dtype=dtype)[None], expected[None])
    assert error.item() <= bound


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("coefficients", "steps"), [("polar_express", 8), ("deepseekv4", 10)])
def test_many_steps_restart_every_two(shape, coefficients, steps):
    x = stacked(shape)
    for dtype in [*HALF, torch.float32]:
        result = orthogonalize(
            x, method="gram", coefficients=coefficients, steps=steps, dtype=dtype
        )
        assert_all_below(1.1, spectral_norms(result), shape)  # (1.02)
    gaussian = errors(result, reference(shape, coefficients, steps))[0]  # of fp32
    assert gaussian <= 1e-4  # (1.3e-5)


@pytest.mark.parametrize("tall", [False, True])
def test_products_in_panels_are_as_exact(tall):
    """384 rows: on a CPU symmetric products run in panels, in every dtype."""
    m, n = 384, 420
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(m, n, generator=generator, dtype=torch.float64)
    spectrum = 1e-4 ** torch.linspace(0, 1, m, dtype=torch.float64)
    x = torch.stack([gaussian, with_spectrum(spectrum, n, generator)])
    x = x.mT.contiguous() if tall else x
    expected = orthogonalize(x, method="standard")
    assert errors(orthogonalize(x, method="gram"), expected).max() <= 1e-9  # (3e-14)
    for dtype, bound in [
        (torch.float32, 1e-4),  # (6e-6)
        (torch.float16, 2e-2),  # (6e-3)
        (torch.bfloat16, 0.1),  # (5e-2)
    ]:
        for method in ["standard", "gram"]:
            result = orthogonalize(x, method=method, dtype=dtype)
            assert errors(result, expected).max() <= bound
            assert spectral_norms(result).max() <= 1.2


@pytest.mark.parametrize(
    ("coefficients", "low", "high"),
    [("simple", 0.68, 1.14), ("quintic", 0.97, 1.04), ("polar_express", 0.86, 1.13)],
)
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_singular_values_end_in_the_sets_band(coefficients, low, high, method):
    x = zoo(96, 96)["log 1e+03"]
    u, values, vh = torch.linalg.svd(x)
    inner = u.mT @ orthogonalize(x, method=method, coefficients=coefficients) @ vh.mT
    reached = inner.diagonal()
    assert (inner - reached.diag()).norm() < 1e-9  # directions are kept
    reached = reached[values / values.norm() >= 1e-2]
    assert low <= reached.min() and reached.max() <= high


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("restarts", [(), (1,), (4,)])
def test_half_precision_without_enough_restarts_is_refused(dtype, restarts):
    with pytest.raises(ValueError, match=r"restarts.*Leave restarts at None"):
        orthogonalize(torch.randn(32, 64), method="gram", dtype=dtype, restarts=restarts)


def test_fast_restarts_are_refused_where_they_diverge():
    x = torch.randn(32, 64)
    with pytest.raises(ValueError, match="bfloat16 diverges beyond 2"):
        orthogonalize(x, method="gram", dtype=torch.bfloat16, restarts=(2,))
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ValueError, match="diverges beyond 2"):
            orthogonalize(x, method="gram", restarts=(2,))
        orthogonalize(x, method="gram")
    finally:
        torch.set_float32_matmul_precision("highest")


def test_tf32_by_the_newer_setting_is_noticed():
    """Once that setting was used, torch raises when asked by the older function."""
    script = (
        "import torch; from dmuon_megatron.orthogonalize import orthogonalize\n"
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "orthogonalize(torch.randn(32, 64))\n"
        "orthogonalize(torch.randn(32, 64), restarts=())\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "restarts=() leaves 5 Gram steps" in run.stderr


@pytest.mark.parametrize("restarts", [(0, 2), (2, 5), (4, 2), (2, 2)])
def test_restarts_that_are_no_step_are_refused(restarts):
    with pytest.raises(ValueError, match="rising step indices"):
        orthogonalize(torch.randn(32, 64), method="gram", restarts=restarts)

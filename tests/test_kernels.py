"""The kernels: their very text, run on TileLang's CPU target, against fp64 on torch.

What that cannot show (TMA, swizzles, barriers, overlaid shared memory) is checked on a GPU by
examples/gpu_check.py. Each compilation takes seconds, so few variants serve many cases.
"""

import re
import subprocess
import sys

import pytest
import torch

from dmuon_megatron.kernels import Config, Spec, config, matmul_add, symmetric_matmul

ROUNDING = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-11}
SMALL = Config(32, 32, 32, 1, 128)  # square tiles in one band; the default has neither

# (batch, m, k): one row, less than 16 bytes, ragged against tiles and 16 bytes, several bands
SHAPES = [(1, 1, 1), (2, 7, 17), (1, 33, 7), (3, 64, 65), (1, 65, 129), (2, 129, 33), (1, 200, 64)]

# dtype, transposed operands, C, gamma, tiling
SYMMETRIC = {
    "fp32": (torch.float32, False, True, 0.75, None),
    "fp32-transposed": (torch.float32, True, True, 0.0, None),
    "fp32-square-tiles": (torch.float32, False, False, 0.0, SMALL),
    "bf16": (torch.bfloat16, False, False, -0.5, None),
    "fp16-transposed": (torch.float16, True, False, 0.25, None),
}
MULTIPLY = {
    "fp32": (torch.float32, 1.5),
    "bf16": (torch.bfloat16, 0.0),
    "fp16": (torch.float16, -0.5),
}


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def integers(*shape, dtype=torch.float32, seed=0):
    """Small whole numbers: every product and sum is exact, so a misplaced row cannot hide."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def close(actual, expected, k):
    """One rounding to the dtype, and the sum's own in fp32."""
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        actual.double(),
        expected,
        rtol=ROUNDING[actual.dtype],
        atol=max(1e-6, 2**-23 * k) * max(scale, 1e-3),
    )


@pytest.fixture(scope="module")
def references():
    from dmuon_megatron.kernels.multiply import reference as multiply
    from dmuon_megatron.kernels.symmetric import reference as symmetric

    return symmetric, multiply


@pytest.mark.parametrize("variant", SYMMETRIC)
def test_symmetric_kernel_equals_torch_and_writes_all_of_a_symmetric_result(variant, references):
    dtype, transposed, has_c, gamma, tiling = SYMMETRIC[variant]
    # half is emulated on CPUs, and slow
    shapes = SHAPES[:4] if dtype == torch.float16 else SHAPES
    for batch, m, k in shapes:
        for make in (random, integers):
            a = make(batch, m, k, dtype=dtype)
            if transposed:
                a = a.mT.contiguous().mT
            c = make(batch, m, m, dtype=dtype, seed=1)
            c = c + c.mT if has_c else None
            out = torch.full((batch, m, m), float("nan"), dtype=dtype)
            numbers = dict(alpha=0.5, beta=-1.5, gamma=gamma)
            got = symmetric_matmul(a, a, c, **numbers, out=out, config=tiling, arch="cpu")
            assert got is out
            assert torch.equal(out, out.mT), (batch, m, k)
            close(out, references[0](a, a, c, **numbers), k)
    again = symmetric_matmul(a, a, c, **numbers, config=tiling, arch="cpu")
    assert torch.equal(again, out), "the same call gave other bits"


def test_symmetric_kernel_multiplies_commuting_matrices(references):
    """P and Q are different polynomials of one symmetric matrix; torch's P Q is not symmetric."""
    s = random(2, 96, 96)
    s = (s + s.mT) / 20
    p, q = s @ s + s, 2 * s - s @ s @ s
    p, q = (p + p.mT) / 2, (q + q.mT) / 2
    d = symmetric_matmul(p, q, s, alpha=0.5, beta=2.0, arch="cpu")
    assert torch.equal(d, d.mT)
    assert (d.double() - references[0](p, q, s, alpha=0.5, beta=2.0)).norm() < 1e-6 * d.norm()


@pytest.mark.parametrize("variant", MULTIPLY)
def test_multiply_kernel_equals_torch_and_writes_all(variant, references):
    dtype, beta = MULTIPLY[variant]
    for batch, m, n in [*SHAPES, (1, 7, 200), (2, 129, 17)]:
        for make in (random, integers):
            for right in (False, True):
                side = n if right else m
                q, x = make(batch, side, side, dtype=dtype), make(batch, m, n, dtype=dtype, seed=1)
                out = torch.full_like(x, float("nan"))
                got = matmul_add(q, x, alpha=0.5, beta=beta, right=right, out=out, arch="cpu")
                assert got is out
                pair = (x, q) if right else (q, x)
                expected = references[1](*pair, x if beta else None, alpha=0.5, beta=beta)
                close(out, expected, side)


STRIDED = {
    "transposed view": lambda: random(2, 17, 40).mT,
    "slice with an odd offset": lambda: random(2 * 40 * 17 + 1).as_strided(
        (2, 40, 17), (680, 17, 1), 1
    ),
    "aligned shape, odd offset": lambda: random(2 * 40 * 16 + 1)[1:].view(2, 40, 16),
    "padded pitch": lambda: random(2, 40, 32)[:, :, :24],
    "every second row": lambda: random(2, 80, 24)[:, ::2],
    "expanded batch": lambda: random(1, 40, 24).expand(2, 40, 24),
    "expanded row": lambda: random(2, 1, 24).expand(2, 40, 24),
    "one matrix": lambda: random(40, 24),
    "two batch dimensions": lambda: random(2, 3, 40, 24),
}


@pytest.mark.parametrize("kind", STRIDED)
def test_operands_of_any_stride(kind, references):
    """tile-ai/tilelang#3025: offsets taken from the shape where the stride is another."""
    x = STRIDED[kind]()
    before = x.clone()
    *lead, m, n = x.shape
    c = random(*lead, m, m)
    c = c + c.mT
    d = symmetric_matmul(x, x, c, beta=2.0, arch="cpu")
    close(d, references[0](x, x, c, beta=2.0), n)
    y = matmul_add(c, x, beta=2.0, arch="cpu")
    close(y, references[1](c, x, x, beta=2.0), m)
    assert torch.equal(x, before)


def test_results_go_into_any_strides(references):
    x = random(2, 40, 24)
    out = torch.full((2, 40, 80), float("nan"))[:, :, ::2]
    c = torch.eye(40).expand(2, 40, 40)
    symmetric_matmul(x, x, c, out=out, arch="cpu")
    close(out, references[0](x, x, c), 24)
    out = torch.full((2, 24, 40), float("nan")).mT
    matmul_add(c, x, beta=1.0, out=out, arch="cpu")
    close(out, 2 * x.double(), 40)


@pytest.mark.parametrize("shape", [(0, 8, 8), (2, 0, 8), (2, 8, 0)])
def test_empty_operands(shape):
    x = torch.empty(shape)
    c = random(shape[0], shape[1], shape[1])
    c = c + c.mT
    d = symmetric_matmul(x, x, c, beta=2.0, gamma=1.0, arch="cpu")
    assert torch.equal(d, 2 * c + torch.eye(shape[1]))
    assert matmul_add(c, x, beta=1.0, arch="cpu").shape == shape


def test_shapes_of_odd_sizes(references):
    """NVIDIA-NeMo/Emerging-Optimizers#245: hyper-connection weights of (4, N) stopped the run."""
    for m, n in [(4, 1030), (7, 13), (1, 300), (8, 8), (16, 4096), (1030, 4)]:
        x, q = random(m, n), random(m, m, seed=1)
        q = q + q.mT
        close(symmetric_matmul(x, x, q, arch="cpu"), references[0](x, x, q), n)
        close(matmul_add(q, x, beta=1.0, arch="cpu"), references[1](q, x, x), m)


def test_batches_beyond_a_grid_dimension_are_split(monkeypatch, references):
    from dmuon_megatron.kernels import launch

    monkeypatch.setattr(launch, "_MAX_BATCH", 2)
    x, q = random(5, 8, 8), torch.eye(8).expand(5, 8, 8)
    close(symmetric_matmul(x, x, q, arch="cpu"), references[0](x, x, q), 8)
    close(matmul_add(q, x, beta=1.0, arch="cpu"), 2 * x.double(), 8)


def test_numbers_and_shapes_compile_nothing():
    from dmuon_megatron.kernels import compile as compiler

    x, c = random(1, 8, 8), torch.eye(8)[None]
    symmetric_matmul(x, x, c, arch="cpu")
    before = compiler.load.cache_info().misses
    for alpha in (0.1, 2.0, -3.0):
        symmetric_matmul(x, x, c, alpha=alpha, beta=alpha, gamma=alpha, arch="cpu")
    x, c = random(2, 40, 24), torch.eye(40).expand(2, 40, 40)
    symmetric_matmul(x, x, c, arch="cpu")
    assert compiler.load.cache_info().misses == before


def test_what_does_not_fit_is_refused():
    x, q = random(2, 8, 16), random(2, 8, 8)
    with pytest.raises(ValueError, match="out must not overlap"):
        symmetric_matmul(q, q, out=q)
    with pytest.raises(ValueError, match="out must not overlap"):
        matmul_add(q, x, out=x)
    with pytest.raises(ValueError, match="out must be"):
        symmetric_matmul(x, x, out=x.clone())
    with pytest.raises(ValueError, match="c must be"):
        symmetric_matmul(x, x, x)
    with pytest.raises(ValueError, match="c must be torch"):
        symmetric_matmul(x, x, q.double())
    with pytest.raises(ValueError, match="a and b"):
        symmetric_matmul(x, q)
    with pytest.raises(ValueError, match="q must be"):
        matmul_add(q, x, right=True)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_without_a_kernel_torch_computes_the_same(dtype, references):
    """On a CPU unless the kernel's text is asked for; the result is symmetric all the same."""
    a, c = random(2, 33, 17, dtype=dtype), random(2, 33, 33, dtype=dtype, seed=1)
    c = c + c.mT
    d = symmetric_matmul(a, a, c, alpha=0.5, beta=2.0, gamma=0.25)
    assert torch.equal(d, d.mT)
    expected = references[0](a, a, c, alpha=0.5, beta=2.0, gamma=0.25)
    assert (d.double() - expected).norm() < 4 * ROUNDING[dtype] * expected.norm()
    y = matmul_add(c, a, alpha=0.5, beta=2.0)
    expected = references[1](c, a, a, alpha=0.5, beta=2.0)
    assert (y.double() - expected).norm() < 4 * ROUNDING[dtype] * expected.norm()


def test_gpus_without_kernels_run_on_torch_and_say_so(monkeypatch):
    from dmuon_megatron.kernels import launch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    launch.device_architecture.cache_clear()
    with pytest.warns(UserWarning, match=r"no kernels for Some GPU \(sm_120\).*torch"):
        assert launch.device_architecture(0) is None
    launch.device_architecture.cache_clear()


def test_import_brings_neither_torch_nor_tilelang():
    code = (
        "import sys, dmuon_megatron.kernels as k; assert k.__all__;"
        "bad = {'torch', 'tilelang', 'tvm'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_patched_compiler_is_put_back():
    """The C target's bf16 needs TileLang patched while it compiles, and only then."""
    from tilelang.jit.adapter.wrapper import TLCPUSourceWrapper

    from dmuon_megatron.kernels.compile import _bfloat16_on_cpu

    lower = sys.modules["tilelang.engine.lower"]
    before = lower._prepare_device_codegen_mod, TLCPUSourceWrapper._TYPE_MAP
    with pytest.raises(KeyError), _bfloat16_on_cpu():
        raise KeyError
    assert (lower._prepare_device_codegen_mod, TLCPUSourceWrapper._TYPE_MAP) == before


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("op", ["symmetric", "multiply"])
def test_one_tiling_compiles_for_each_gpu_architecture(op, arch):
    """All the others: `dmuon-megatron tune --aot --check`."""
    from dmuon_megatron.kernels.compile import configs, cuda_source
    from dmuon_megatron.kernels.inspection import inspect, nvcc

    try:
        nvcc()
    except RuntimeError as error:
        pytest.skip(str(error))
    length = 1024 if arch == "sm_80" else None
    has_c = arch == "sm_90a"  # takes seconds more
    spec = Spec(op, arch, "bfloat16", configs(op, arch)[0], has_c=has_c, k=length)
    assert inspect(spec).faults(arch) == []
    # a batch may hold more than 2^31 elements: its matrices start at 64-bit offsets
    source, _ = cuda_source(spec)
    assert re.search(r"\(int64_t\)blockIdx\.[yz]\) \* \w", source)


def test_tilings_avoid_known_faults():
    from dmuon_megatron.kernels.compile import MODULES, configs

    for op in MODULES:
        for arch in config.SHARED_BYTES:
            for tiling in configs(op, arch):
                assert tiling.block_n % 16 == 0, "tile-ai/tilelang#2593"
                assert tiling.block_m * tiling.block_n <= 256 * 128, "256 x 256 tiles spill"
                assert tiling.threads in (128, 256), "384 threads fail in layout inference"
            assert len({tiling.name for tiling in configs(op, arch)}) == len(configs(op, arch))

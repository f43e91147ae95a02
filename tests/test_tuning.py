"""Tuning of kernels: what may be timed, what is kept, what all ranks then run.

The logic is tested with made-up kernels and timers, the way from a choice to Newton-Schulz with
the kernels' text on TileLang's CPU target.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dmuon_megatron import tuning
from dmuon_megatron.kernels.config import Config
from dmuon_megatron.orthogonalize import backend, orthogonalize
from dmuon_megatron.orthogonalize.products import multiply_add, symmetric_multiply_add
from dmuon_megatron.store import Store
from dmuon_megatron.tuning.problems import Problem, batch_class, products
from dmuon_megatron.tuning.tuner import KIND, TORCH, Tuner

CPU = torch.device("cpu")
SQUARE = Problem("symmetric", "float32", 40, 40, 40, 4, has_c=True)
WIDE = Problem("symmetric", "float32", 40, 40, 72, 4)
APPLY = Problem("multiply", "float32", 40, 72, 40, 4, has_c=True)


@pytest.fixture(autouse=True)
def nothing_registered():
    backend.register(None)
    yield
    backend.register(None)


class Bench:
    """Made-up kernels that take made-up time: names -> (cost in seconds, product)."""

    def __init__(self, kernels, torch_cost=10e-6):
        self.kernels, self.torch_cost = kernels, torch_cost
        self.built, self.timed = [], []
        self._name = TORCH

    def candidates(self, problem):
        def builder(name):
            def build():
                self.built.append((problem, name))
                product = self.kernels[name][1]
                if product is None:
                    raise RuntimeError("nvcc was not found")

                def run(*arguments):
                    self._name = name
                    return product(*arguments)

                return run

            return build

        return {name: builder(name) for name in self.kernels}

    def seconds(self, call):
        self._name = TORCH
        call()
        self.timed.append(self._name)
        return self.torch_cost if self._name == TORCH else self.kernels[self._name][0]


def right(out, a, b, c, alpha, beta):
    out.copy_(alpha * (a @ b))
    if c is not None:
        out.add_(c, alpha=beta)
    if out.shape[-1] == out.shape[-2]:
        out.copy_(out.tril() + out.tril(-1).mT)


def swapped_rows(out, *arguments):
    right(out, *arguments)
    out[:, [2, 3]] = out[:, [3, 2]]


def leaves_a_corner(out, *arguments):
    corner = out[-1, -1, -1].clone()
    right(out, *arguments)
    out[-1, -1, -1] = corner


def not_symmetric(out, *arguments):
    right(out, *arguments)
    out[:, 3, 5] *= 1 + 2**-23


def declines(out, *arguments):
    return False


def raises(out, *arguments):
    raise RuntimeError("launch failed")


class Unsteady:
    def __init__(self):
        self.calls = 0

    def __call__(self, out, *arguments):
        right(out, *arguments)
        self.calls += 1
        out *= 1 + (self.calls % 2) * 2**-22


def ignores_c(out, a, b, c, alpha, beta):
    right(out, a, b, None, alpha, beta)


WRONG = {
    "swapped rows": (swapped_rows, "wrong on whole numbers"),
    "leaves a corner": (leaves_a_corner, "wrong on whole numbers"),
    "not symmetric": (not_symmetric, "not symmetric|wrong on whole"),
    "declines": (declines, "wrong on whole numbers"),
    "raises": (raises, "launch failed"),
    "unsteady": (Unsteady(), "other bits in a second run"),
    "ignores C": (ignores_c, "wrong on whole numbers"),
}


def make_tuner(bench, tmp_path, key=None, **kwargs):
    return Tuner(
        CPU,
        key or {"device": "made up"},
        bench.candidates,
        store=Store(tmp_path),
        seconds=bench.seconds,
        **kwargs,
    )


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_kernel_is_never_timed_or_chosen(kind, tmp_path):
    """tile-ai/tilelang#2593, #2522: compilers that silently swap or drop rows."""
    product, reason = WRONG[kind]
    bench = Bench({"wrong": (1e-9, product), "slow": (5e-6, right)})
    tuner = make_tuner(bench, tmp_path)
    tuner.measure([SQUARE], 100)
    assert bench.timed == [TORCH, "slow"]
    assert tuner.choice(SQUARE) == "slow"
    (line,) = tuner.faults([SQUARE])
    assert line.startswith(f"{SQUARE.name}/wrong: ")
    assert any(part in line for part in reason.split("|"))
    # and stays out after a restart, without another try
    again = Bench(bench.kernels)
    tuner = make_tuner(again, tmp_path)
    tuner.measure([SQUARE], 100)
    assert again.built == []
    assert tuner.choice(SQUARE) == "slow"


def test_a_choice_is_never_slower_than_torch(tmp_path):
    for cost, expected in ((10.1e-6, TORCH), (9.9e-6, TORCH), (9.5e-6, "kernel")):
        bench = Bench({"kernel": (cost, right)})
        tuner = make_tuner(bench, tmp_path / str(cost))
        assert tuner.choice(SQUARE) == TORCH, "chosen before it was measured"
        tuner.measure([SQUARE, APPLY], 100)
        assert {tuner.choice(SQUARE), tuner.choice(APPLY)} == {expected}


def test_every_shape_has_its_own_entry(tmp_path):
    """tile-ai/tilelang#1250: one shape's choice was used for another."""
    bench = Bench({"kernel": (5e-6, right)})
    tuner = make_tuner(bench, tmp_path)
    tuner.measure([SQUARE], 100)
    others = [
        WIDE,
        SQUARE._replace(batch=1),
        SQUARE._replace(k=48),
        SQUARE._replace(has_c=False),
        SQUARE._replace(dtype="float64"),
        WIDE._replace(transposed=True),
    ]
    assert len({p.name for p in (SQUARE, *others)}) == 7
    assert {problem for problem, _ in tuner.missing([SQUARE, *others])} == set(others)
    assert {tuner.choice(problem) for problem in others} == {TORCH}


def test_results_of_another_device_or_version_are_not_used(tmp_path):
    bench = Bench({"kernel": (5e-6, right)})
    make_tuner(bench, tmp_path, {"device": "one", "torch": "2"}).measure([SQUARE], 100)
    for key in ({"device": "two", "torch": "2"}, {"device": "one", "torch": "3"}):
        assert make_tuner(bench, tmp_path, key).choice(SQUARE) == TORCH
    assert make_tuner(bench, tmp_path, {"torch": "2", "device": "one"}).choice(SQUARE) == "kernel"


KEY = """
import json, sys, torch
from dmuon_megatron.kernels.compile import MODULES
from dmuon_megatron.tuning.adopt import spec_of
from dmuon_megatron.tuning.problems import Problem
from dmuon_megatron.tuning.tuner import kernel_tuner
from dmuon_megatron.kernels import compile
p = Problem("symmetric", "bfloat16", 512, 512, 1024, 1, has_c=True)
names = sorted(MODULES, reverse=len(sys.argv) > 1)
def program(op):
    spec = spec_of(p._replace(op=op), compile.configs(op, "sm_90a")[0], "sm_90a")
    return MODULES[op].program(spec)
for name in names:
    program(name)
t = kernel_tuner(torch.device("cpu"), "sm_90a")
program = program("symmetric")
print(json.dumps([t.key, hash(program.script(show_meta=True)), t.missing([p])]))
"""


def test_keys_do_not_depend_on_what_was_built_before():
    """tile-ai/tilelang#2662: another build order gave another key."""
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    answers = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", KEY, *extra],
                capture_output=True,
                text=True,
                check=True,
                env=environment,
            ).stdout
        )
        for extra in ([], ["reversed"])
    ]
    assert answers[0] == answers[1]
    key = answers[0][0]
    assert {"device", "torch", "tilelang", "dmuon", "arch", "kernels"} <= set(key)
    assert all(key[name] for name in ("device", "torch", "tilelang", "arch", "kernels"))


def test_no_budget_builds_nothing(tmp_path):
    bench = Bench({"kernel": (5e-6, right)})
    tuner = make_tuner(bench, tmp_path)
    tuner.measure([SQUARE], 0)
    assert (bench.built, bench.timed) == ([], [])
    make_tuner(bench, tmp_path).measure([SQUARE], 100)
    bench.built.clear()
    tuner = make_tuner(bench, tmp_path)
    tuner.measure([SQUARE], 0)
    assert tuner.choice(SQUARE) == "kernel", "what the store has is used without a budget"
    assert bench.built == []


def test_a_budget_gives_every_problem_its_first_kernel_and_the_next_run_goes_on(tmp_path):
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    bench = Bench({"first": (5e-6, right), "second": (4e-6, right)})
    tuner = make_tuner(bench, tmp_path, clock=clock)
    tuner.measure([SQUARE, APPLY], 5.5)
    assert bench.built == [(SQUARE, "first"), (APPLY, "first"), (SQUARE, "second")]
    assert (tuner.choice(SQUARE), tuner.choice(APPLY)) == ("second", "first")
    bench.built.clear()
    tuner = make_tuner(bench, tmp_path)
    assert tuner.missing([SQUARE, APPLY]) == [(APPLY, "second")]
    tuner.measure([SQUARE, APPLY], 100)
    assert bench.built == [(APPLY, "second")]
    assert tuner.missing([SQUARE, APPLY]) == []


def test_a_kernel_that_cannot_be_built_here_is_tried_again_elsewhere(tmp_path):
    bench = Bench({"kernel": (5e-6, None)})
    tuner = make_tuner(bench, tmp_path)
    tuner.measure([SQUARE], 100)
    assert tuner.choice(SQUARE) == TORCH
    assert tuner.missing([SQUARE]) == []
    assert "nvcc was not found" in tuner.faults([SQUARE])[0]
    assert make_tuner(bench, tmp_path).missing([SQUARE]) == [(SQUARE, "kernel")]


def test_two_processes_do_not_tune_one_device_at_once(tmp_path, monkeypatch):
    """tile-ai/TileOPs#772: a timing taken under load was kept for ever."""
    from contextlib import contextmanager

    holders = []

    @contextmanager
    def locked(path, seconds):
        holders.append(path)
        # while this process waited, another one has measured
        Store(tmp_path).update(KIND, {"device": "made up"}, {f"{SQUARE.name}/torch": 10.0})
        yield
        assert bench.timed == ["kernel"]
        holders.append("released")

    monkeypatch.setattr(tuning.tuner, "locked", locked)
    bench = Bench({"kernel": (5e-6, right)})
    make_tuner(bench, tmp_path).measure([SQUARE], 100)
    assert len(holders) == 2


def test_nonsense_in_the_store_is_not_chosen(tmp_path):
    key = {"device": "made up"}
    values = {f"{SQUARE.name}/torch": 10.0, f"{SQUARE.name}/kernel": -1.0}
    Store(tmp_path).update(KIND, key, values)
    assert make_tuner(Bench({"kernel": (5e-6, right)}), tmp_path).choice(SQUARE) == TORCH


class Recorder:
    """Notes each product as a problem and leaves it to torch."""

    name = "recorder"

    def __init__(self):
        self.seen = []

    def multiply(self, out, a, b, c, alpha, beta):
        self._note("multiply", out, a, c, False)

    def symmetric(self, out, a, b, c, alpha, beta):
        self._note("symmetric", out, a, c, not a.is_contiguous())

    def _note(self, op, out, a, c, transposed):
        m, n = out.shape[-2:]
        batch = batch_class(out.numel() // (m * n))
        dtype = str(out.dtype).removeprefix("torch.")
        self.seen.append(Problem(op, dtype, m, n, a.shape[-1], batch, transposed, c is not None))


@pytest.mark.parametrize("shape", [(3, 24, 96), (3, 96, 24), (1, 24, 24), (2, 32, 40)])
@pytest.mark.parametrize("method", ["auto", "standard", "gram"])
@pytest.mark.parametrize("steps", [5, 6])
def test_what_is_tuned_is_what_runs(shape, method, steps):
    recorder = Recorder()
    orthogonalize(
        torch.randn(shape), method=method, steps=steps, dtype=torch.bfloat16, backend=recorder
    )
    batch, rows, cols = shape
    expected = products(rows, cols, batch, dtype=torch.bfloat16, method=method, steps=steps)
    counted = {problem: recorder.seen.count(problem) for problem in recorder.seen}
    assert counted == dict(expected)


def test_problems_come_once_with_the_most_work_first():
    shapes = {(24, 96): [1, 3, 4], (96, 24): [4], (512, 1024): [2], (4, 64): [1]}
    problems = tuning.ns_problems(shapes, dtype=torch.bfloat16)
    assert len(problems) == len(set(problems))
    assert {problems[0].m, problems[0].n} <= {512, 1024}
    assert {problem.batch for problem in problems} == {1, 2, 4}
    assert all(4 not in (problem.m, problem.n) for problem in problems), "m <= 16 runs in fp32"
    assert tuning.ns_problems(shapes, dtype=torch.float32) == []


def cpu_choices(rows, cols, batch):
    """The safest tiling of TileLang's CPU target for all of Newton-Schulz's products."""
    from dmuon_megatron.kernels.compile import configs

    counted = products(rows, cols, batch, dtype=torch.bfloat16)
    return {problem: configs(problem.op, "cpu")[0] for problem in counted}


@pytest.mark.parametrize("shape", [(2, 33, 100), (100, 33), (40, 40)])
def test_newton_schulz_on_the_kernels_equals_torch(shape):
    """The kernels' text within Newton-Schulz: layouts, commuting operands, what is added."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = orthogonalize(x.double())
    on_torch = orthogonalize(x, dtype=torch.bfloat16, backend="torch")
    batch = 1 if x.dim() == 2 else shape[0]
    kernels = tuning.TileLangBackend(cpu_choices(*shape[-2:], batch), "cpu")
    backend.calls.clear()
    on_kernels = orthogonalize(x, dtype=torch.bfloat16, backend=kernels)
    assert {name for name, _ in backend.calls} == {"tilelang"}
    mine, theirs = ((y.double() - exact).norm().item() for y in (on_kernels, on_torch))
    assert mine <= 1.2 * theirs, (mine, theirs)


@pytest.mark.parametrize("k", [72, 75])
@pytest.mark.parametrize("transposed", [False, True])
def test_kernels_get_whole_16_byte_pieces(k, transposed, monkeypatch):
    """On a GPU every kernel declares m and k as multiples of 8 and refuses others."""
    calls = []
    monkeypatch.setattr(
        "dmuon_megatron.kernels.compile.load",
        lambda spec: lambda *arguments: calls.append([t.shape for t in arguments[:4]]),
    )
    for m in (40, 44):
        problem = Problem("symmetric", "bfloat16", m, m, k, 1, transposed)
        x = torch.randn(k, m).mT if transposed else torch.randn(m, k)
        x = x.bfloat16()
        kernels = tuning.TileLangBackend({problem: Config(64, 64, 64, 4, 128)}, "sm_90a")
        assert kernels.symmetric(torch.empty(m, m, dtype=x.dtype), x, x.mT, None, 1.0, 0.0)
    assert len(calls) == 2
    assert all(size % 8 == 0 for shapes in calls for shape in shapes for size in shape[1:])


def test_a_batch_of_another_class_runs_the_nearest_kernel():
    config, other = Config(64, 32, 32, 1, 128, 2), Config(32, 32, 32, 1, 128)
    kernels = tuning.TileLangBackend(
        {SQUARE._replace(batch=1): config, SQUARE._replace(batch=8): other}, "cpu"
    )

    def find(batch):
        return kernels._find(SQUARE._replace(batch=0), torch.empty(batch, 40, 40))

    assert [find(batch) for batch in (1, 2, 7, 100)] == [config, config, other, other]
    assert kernels._find(SQUARE._replace(batch=0, k=41), torch.empty(1, 40, 40)) is None


@pytest.fixture
def built(monkeypatch):
    """As if the CPU target's kernels lay in the store."""
    monkeypatch.setattr("dmuon_megatron.kernels.compile.is_built", lambda spec: True)


def test_adopted_kernels_run_and_are_counted(built):
    """X-Square-Robot/dmuon cf387926: the choice was announced, and torch ran."""
    adopted = tuning.adopt(cpu_choices(40, 40, 1), "cpu", CPU)
    assert adopted.faults == []
    assert tuning.settle(adopted, []) == "tilelang"
    backend.calls.clear()
    orthogonalize(torch.randn(40, 40), dtype=torch.bfloat16)
    assert sum(count for (name, _), count in backend.calls.items() if name == "tilelang") == 15
    assert sum(backend.calls.values()) == 15


def test_one_rank_with_a_fault_sends_all_ranks_back_to_torch(built):
    adopted = tuning.adopt(cpu_choices(40, 40, 1), "cpu", CPU)
    with pytest.warns(UserWarning, match=r"all ranks run on torch.*1 kernel.*rank 3's kernel"):
        assert tuning.settle(adopted, ["rank 3's kernel"]) == "torch"
    assert backend.registered() == "torch"


def test_a_kernel_wrong_on_this_device_is_not_adopted(built, monkeypatch):
    from dmuon_megatron.kernels import compile as compiler

    real = compiler.load

    def broken(spec):  # what the tilings' own numbers do not show
        kernel = real(spec)
        if spec.op == "symmetric":
            return lambda a, b, c, d, *numbers: (kernel(a, b, c, d, *numbers), d[:, 0, 0].zero_())
        return kernel

    monkeypatch.setattr(compiler, "load", broken)
    adopted = tuning.adopt(cpu_choices(40, 40, 1), "cpu", CPU)
    assert adopted.backend is None
    assert all("symmetric" in line and "wrong" in line for line in adopted.faults)
    with pytest.warns(UserWarning, match="all ranks run on torch"):
        assert tuning.settle(adopted, adopted.faults) == "torch"


def test_adopting_compiles_nothing(monkeypatch, tmp_path):
    """After start-up a compiler must not run: not on this rank, not on a thousand at once."""
    monkeypatch.setattr(
        "dmuon_megatron.kernels.compile.load", lambda spec: pytest.fail("compiled a kernel")
    )
    tuning.tuner.keep_binaries(Store(tmp_path))
    try:
        adopted = tuning.adopt(cpu_choices(40, 40, 1), "cpu", CPU)
    finally:
        from dmuon_megatron.kernels.compile import use_cache

        use_cache(None)
    assert adopted.backend is None
    assert all("is not in this node's store" in line for line in adopted.faults)


def _forget_kernels_in_memory():
    import tilelang.cache

    for one in tilelang.cache._dispatch_map.values():
        one._memory_cache.clear()


def test_binaries_travel_to_another_store(tmp_path, monkeypatch):
    from dmuon_megatron.kernels import compile as compiler
    from dmuon_megatron.tuning.adopt import spec_of

    config = compiler.configs("multiply", "cpu")[0]
    spec = spec_of(APPLY, config, "cpu")
    _forget_kernels_in_memory()  # an earlier test may have loaded this one
    try:
        compiler.use_cache(tmp_path / "one")
        assert not compiler.is_built(spec)
        compiler.load.__wrapped__(spec)
        assert compiler.is_built(spec)
        data = tuning.pack([spec, spec])

        compiler.use_cache(tmp_path / "two")
        assert not compiler.is_built(spec)
        assert tuning.unpack(data, tmp_path / "two")
        assert tuning.unpack(data, tmp_path / "two"), "a second process of the node"
        assert compiler.is_built(spec)
        monkeypatch.setenv("PATH", "")  # no compiler
        compiler.load.__wrapped__(spec)
        assert not list((tmp_path / "two").glob(".unpack-*"))
    finally:
        compiler.use_cache(None)


def test_a_disk_that_fails_costs_the_binaries_only(tmp_path, monkeypatch):
    """triton-lang/triton#11512: a shared cache's ESTALE killed one rank and hung the job."""
    assert not tuning.unpack(b"garbage", tmp_path)
    assert not tuning.unpack(b"", tmp_path)
    (tmp_path / "file").write_text("")
    assert not tuning.unpack(tuning.pack([]), tmp_path / "file")

    def stale(*arguments, **options):
        raise OSError(116, "Stale file handle")

    from dmuon_megatron.kernels import compile as compiler
    from dmuon_megatron.tuning.adopt import spec_of

    spec = spec_of(APPLY, compiler.configs("multiply", "cpu")[0], "cpu")
    try:
        compiler.use_cache(tmp_path)
        compiler.binary_directory(spec).mkdir(parents=True)
        monkeypatch.setattr(Path, "rglob", stale)
        monkeypatch.setattr(Path, "mkdir", stale)
        monkeypatch.setattr("tarfile.TarFile.add", stale)
        assert not compiler.is_built(spec)
        assert tuning.pack([spec]) == b""
        assert not tuning.unpack(b"", tmp_path)
    finally:
        compiler.use_cache(None)


def test_without_a_gpu_torch_is_prepared(tmp_path):
    problems = tuning.ns_problems({(64, 128): [1]}, dtype=torch.bfloat16)
    prepared = tuning.prepare(problems, 60, device="cpu", store=Store(tmp_path))
    assert (dict(prepared.choices), prepared.arch, prepared.missing) == ({}, None, 0)
    assert tuning.settle(tuning.adopt(prepared.choices, prepared.arch, CPU), []) == "torch"
    with pytest.raises(ValueError, match="--dmuon-tune-budget"):
        tuning.prepare(problems, -1, device="cpu")


def test_torch_candidates_are_newton_schulz_own_products():
    """What torch's time is taken of must be what runs when torch wins."""
    from dmuon_megatron.tuning.tuner import torch_product
    from dmuon_megatron.tuning.verify import operands

    for problem, function in ((WIDE, symmetric_multiply_add), (APPLY, multiply_add)):
        out, a, b, c = operands(problem, CPU)
        torch_product(problem)(out, a, b, c, 0.5, 2.0)
        assert torch.equal(out, function(out.clone(), a, b, c, alpha=0.5, beta=2.0))

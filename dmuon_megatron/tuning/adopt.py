"""The TileLang backend: kernels that were verified on this device, for the products they serve."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dmuon_megatron.kernels.config import Config, Spec, padded
from dmuon_megatron.kernels.launch import direct, make_spec, matmul_add, symmetric_matmul
from dmuon_megatron.orthogonalize import backend as backends
from dmuon_megatron.tuning.problems import Problem, batch_class
from dmuon_megatron.tuning.verify import fault


def spec_of(problem: Problem, config: Config, arch: str) -> Spec:
    """The binary that serves a problem with a tiling."""
    return make_spec(
        problem.op,
        arch,
        problem.dtype,
        config,
        transposed=problem.transposed,
        has_c=problem.has_c,
        k=padded(problem.k, problem.dtype),
    )


class TileLangBackend:
    """Runs the problems it has a tiling for, and leaves all others to torch.

    A batch of a class that was not tuned runs the nearest class's kernel: binaries hold for any.
    """

    name = "tilelang"

    def __init__(self, choices: Mapping[Problem, Config], arch: str) -> None:
        self.arch = arch
        self._loaded: dict[tuple[Problem, Config], Callable[..., None]] = {}
        self._classes: dict[Problem, dict[int, Config]] = {}
        for problem, config in choices.items():
            same = self._classes.setdefault(problem._replace(batch=0), {})
            same[problem.batch] = config

    def multiply(
        self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float
    ) -> bool:
        m, n, k = *out.shape[-2:], a.shape[-1]
        if m != k and n != k:
            return False
        right = m != k  # X Q; Q X if both are square, which is the same to the kernel
        q, x = (b, a) if right else (a, b)
        if c is not None and (c.data_ptr(), c.shape, c.stride()) != (
            x.data_ptr(),
            x.shape,
            x.stride(),
        ):
            return False  # only X itself can be added
        problem = Problem("multiply", _name(out), m, n, k, 0, False, c is not None)
        config = self._find(problem, out)
        if config is None:
            return False
        beta = 0.0 if c is None else beta
        ready = direct(a, b, x, out)
        if ready is not None:
            self._kernel(problem, config)(*ready, alpha, beta)
        else:
            options = dict(alpha=alpha, beta=beta, right=right, out=out)
            matmul_add(q, x, **options, config=config, arch=self.arch)
        return True

    def symmetric(
        self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float
    ) -> bool:
        m, k = a.shape[-2:]
        transposed = not a.is_contiguous()
        problem = Problem("symmetric", _name(out), m, m, k, 0, transposed, c is not None)
        config = self._find(problem, out)
        if config is None:
            return False
        # the kernel wants B of a B^T in a's layout: b's transpose, or a symmetric b itself
        right = b.mT if b.mT.is_contiguous() != transposed else b
        addend = out if c is None else c
        ready = direct(*((a.mT, right.mT) if transposed else (a, right)), addend, out)
        if ready is not None and k % 8 == 0:  # a transposed operand's k is not its last dimension
            self._kernel(problem, config)(*ready, alpha, beta, 0.0)
        else:
            options = dict(alpha=alpha, beta=beta, out=out)
            symmetric_matmul(a, right, c, **options, config=config, arch=self.arch)
        return True

    def _find(self, problem: Problem, out: Tensor) -> Config | None:
        known = self._classes.get(problem)
        if known is None:
            return None
        size = batch_class(max(1, out.numel() // (problem.m * problem.n)))
        return known[min(known, key=lambda known_size: (abs(known_size - size), known_size))]

    def _kernel(self, problem: Problem, config: Config) -> Callable[..., None]:
        kernel = self._loaded.get((problem, config))
        if kernel is None:
            from dmuon_megatron.kernels.compile import load

            kernel = self._loaded[problem, config] = load(spec_of(problem, config, self.arch))
        return kernel


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class Adopted(NamedTuple):
    """One rank's kernels, loaded and verified on its device.

    Attributes:
        backend: what may be registered; None if there is nothing to run or something is wrong.
        faults: what is wrong, one line each.
    """

    backend: TileLangBackend | None
    faults: list[str]


def adopt(choices: Mapping[Problem, Config], arch: str | None, device: torch.device) -> Adopted:
    """Loads the chosen kernels on this rank and verifies each on its device. Compiles nothing.

    Args:
        choices, arch: of :class:`Prepared`, the same on every rank.
        device: this rank's.
    """
    if not choices or arch is None:
        return Adopted(None, [])
    from dmuon_megatron.kernels.compile import is_built, load

    candidate = TileLangBackend(choices, arch)
    faults = []
    for problem, config in choices.items():
        spec = spec_of(problem, config, arch)
        if not is_built(spec):
            faults.append(f"kernel {spec.name} is not in this node's store")
            continue
        try:
            load(spec)
        except RuntimeError as error:
            faults.append(str(error))
            continue
        product = candidate.symmetric if problem.op == "symmetric" else candidate.multiply
        if wrong := fault(product, problem, device):
            faults.append(f"kernel {spec.name}: {wrong}")
    return Adopted(None if faults else candidate, faults)


def settle(adopted: Adopted, faults: Iterable[str], *, say: bool = True) -> str:
    """Registers this rank's backend, unless any rank of the job found a fault.

    All ranks must run the same kernels, since other kernels round differently.

    Args:
        adopted: this rank's.
        faults: those of all ranks.
        say: warn about faults; let one rank do so.

    Returns:
        The name of the backend in use: "tilelang" or "torch".
    """
    faults = sorted(set(faults))
    if faults and say:
        warnings.warn(
            f"all ranks run on torch's matrix products, since {len(faults)} kernel(s) failed on "
            f"some device: {faults[0]}",
            stacklevel=2,
        )
    backends.register(None if faults else adopted.backend)
    return backends.registered()

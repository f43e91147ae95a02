"""The TileLang backend: kernels that were verified on this device, for the products they serve."""

import warnings
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dmuon_megatron.kernels.config import Config, Spec, padded
from dmuon_megatron.kernels.launch import make_spec, matmul_add, symmetric_matmul
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
        config = self._find("multiply", out, m, n, k, False, c is not None)
        if config is None:
            return False
        beta = 0.0 if c is None else beta
        matmul_add(
            q, x, alpha=alpha, beta=beta, right=right, out=out, config=config, arch=self.arch
        )
        return True

    def symmetric(
        self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float
    ) -> bool:
        m, k = a.shape[-2:]
        transposed = not a.is_contiguous()
        config = self._find("symmetric", out, m, m, k, transposed, c is not None)
        if config is None:
            return False
        # the kernel wants B of a B^T in a's layout: b's transpose, or a symmetric b itself
        right = b.mT if b.mT.is_contiguous() != transposed else b
        symmetric_matmul(
            a, right, c, alpha=alpha, beta=beta, out=out, config=config, arch=self.arch
        )
        return True

    def _find(
        self, op: str, out: Tensor, m: int, n: int, k: int, transposed: bool, has_c: bool
    ) -> Config | None:
        dtype = str(out.dtype).removeprefix("torch.")
        known = self._classes.get(Problem(op, dtype, m, n, k, 0, transposed, has_c))
        if known is None:
            return None
        size = batch_class(max(1, out.numel() // (m * n)))
        return known[min(known, key=lambda known_size: (abs(known_size - size), known_size))]


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

"""Whether a product is right: against torch, on random and on whole numbers, twice.

A kernel that fails here is never timed and never used.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dmuon_megatron.tuning.problems import Problem

Product = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, float], object]
"""f(out, a, b, c, alpha, beta): out = alpha a b + beta c, or without c alpha a b."""

VERIFIED_BATCH = 2
"""Matrices in a verification at most: a second one shows wrong offsets, more show nothing new."""

_ROUNDING = {"float32": 2**-22, "bfloat16": 2**-8, "float16": 2**-11}


class Operands(NamedTuple):
    out: Tensor
    a: Tensor
    b: Tensor
    c: Tensor | None


def operands(
    problem: Problem, device: torch.device, *, whole: bool = False, batch: int | None = None
) -> Operands:
    """Tensors for a problem, as Newton-Schulz would pass them; ``out`` is full of NaN.

    Args:
        whole: small whole numbers, whose sums are exact; else normally distributed.
        batch: how many matrices, by default the problem's.
    """
    batch = problem.batch if batch is None else batch
    dtype = getattr(torch, problem.dtype)
    generator = torch.Generator(device).manual_seed(problem.m + problem.k)

    def make(*shape: int) -> Tensor:
        if whole:
            numbers = torch.randint(-3, 4, shape, generator=generator, device=device)
        else:
            numbers = torch.randn(shape, generator=generator, device=device)
        return numbers.to(dtype)

    m, n, k = problem.m, problem.n, problem.k
    out = torch.full((batch, m, n), float("nan"), dtype=dtype, device=device)
    if problem.op == "symmetric":
        a = make(batch, k, m).mT if problem.transposed else make(batch, m, k)
        c = make(batch, m, m) if problem.has_c else None
        return Operands(out, a, a.mT, None if c is None else c.tril() + c.tril(-1).mT)
    a, b = make(batch, m, k), make(batch, k, n)
    # what is added is the operand of the result's shape
    return Operands(out, a, b, (b if m == k else a) if problem.has_c else None)


def fault(
    product: Product,
    problem: Problem,
    device: torch.device,
    *,
    runs: int = 2,
    exact: torch.dtype = torch.float32,
) -> str:
    """What is wrong with ``product`` on this device; empty if nothing is.

    Checks that all of a NaN-filled result is written, its exact value for whole numbers, its
    rounding for random ones, symmetry bit for bit, and the same bits in all of ``runs`` runs.
    ``exact`` is the dtype of torch's product.
    """
    batch = min(problem.batch, VERIFIED_BATCH)
    for whole in (True, False):
        out, a, b, c = operands(problem, device, whole=whole, batch=batch)
        kind = "whole" if whole else "random"
        # a power of two keeps sums of whole numbers exact, and within fp16's range
        alpha, beta = 2.0**-6, 1.0 if whole else -1.5
        try:
            product(out, a, b, c, alpha, beta)
            for _ in range(runs - 1):
                again = torch.full_like(out, float("nan"))
                product(again, a, b, c, alpha, beta)
                if not torch.equal(out.nan_to_num(nan=7.0), again.nan_to_num(nan=7.0)):
                    return f"gives other bits in a second run on {kind} numbers"
        except Exception as error:  # a launch fails in as many ways as there are drivers
            return f"{type(error).__name__}: {error}"[:300]
        for i in range(batch):
            expected = alpha * _exact_product(a[i].to(exact), b[i].to(exact))
            if c is not None:
                expected += beta * c[i].to(exact)
            if whole:
                wrong = out[i] != expected.to(out.dtype)
            else:
                # the order of the sum's k terms is the kernel's own, in fp32
                slack = alpha * problem.k**0.5 * (2**-23 * max(problem.k / 8, 8))
                limit = _ROUNDING[problem.dtype] * expected.abs() + slack
                wrong = ~((out[i].to(exact) - expected).abs() <= limit)
            if wrong.any():
                return f"{int(wrong.sum())} of {wrong.numel()} elements wrong on {kind} numbers"
        if problem.op == "symmetric" and not torch.equal(out, out.mT):
            return f"result is not symmetric on {kind} numbers"
    return ""


def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    """The product in the operands' dtype, never in tf32."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_tf32
    settings.allow_tf32 = False
    try:
        return a @ b
    finally:
        settings.allow_tf32 = before

"""Who computes the products of Newton-Schulz: a backend where it has a kernel, else torch.

A backend is registered once it has been verified on this device (``dmuon_megatron.tuning`` does
that); until then everything runs on torch. ``calls`` counts what really ran.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from dmuon_megatron.orthogonalize import products

TORCH = "torch"

calls: Counter[tuple[str, str]] = Counter()
"""Products so far by (backend, operation): ("tilelang", "symmetric") -> 12; a batch counts once."""


class Backend(Protocol):
    """Computes what it can. Both functions return False, and do nothing, for what they cannot.

    ``out`` never overlaps an operand. Tensors are matrices or batches of them, of one dtype.
    """

    name: str

    def multiply(
        self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float
    ) -> bool:
        """out = alpha a b + beta c; without c: alpha a b."""

    def symmetric(
        self, out: Tensor, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float
    ) -> bool:
        """As multiply; out and c are symmetric, and b is a's transpose or both are symmetric."""


_registered: Backend | None = None
_current: Backend | None = None


def register(backend: Backend | None) -> None:
    """Makes ``backend`` what "auto" tries before torch; None: torch alone."""
    global _registered
    _registered = backend


def registered() -> str:
    """The name of what "auto" tries first."""
    return TORCH if _registered is None else _registered.name


@contextlib.contextmanager
def using(choice: str | Backend) -> Iterator[None]:
    """Products inside run on ``choice``: "auto", "torch", the registered one's name, or a backend.

    Raises:
        ValueError: no backend of that name is registered.
    """
    global _current
    if not isinstance(choice, str):
        chosen = choice
    elif choice == "auto":
        chosen = _registered
    elif choice == TORCH:
        chosen = None
    elif choice == registered():
        chosen = _registered
    else:
        raise ValueError(
            f"backend {choice!r} is not ready; verified on this device: {registered()}. "
            "Use dmuon_megatron.tuning.adopt first, or backend='auto'."
        )
    before, _current = _current, chosen
    try:
        yield
    finally:
        _current = before


def multiply_add(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    """out = alpha a b + beta c (without ``c``: alpha a b)."""
    if _current is not None and _current.multiply(out, a, b, c, alpha, beta):
        calls[_current.name, "multiply"] += 1
        return out
    calls[TORCH, "multiply"] += 1
    return products.multiply_add(out, a, b, c, alpha=alpha, beta=beta)


def symmetric_multiply_add(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    """As :func:`multiply_add`, where the result is symmetric.

    Either b is a's transpose, or both are symmetric.
    """
    if _current is not None and _current.symmetric(out, a, b, c, alpha, beta):
        calls[_current.name, "symmetric"] += 1
        return out
    calls[TORCH, "symmetric"] += 1
    return products.symmetric_multiply_add(out, a, b, c, alpha=alpha, beta=beta)

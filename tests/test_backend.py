"""Which code computes Newton-Schulz's products, and that the count of it is true."""

import pytest
import torch

from dmuon_megatron.orthogonalize import backend, orthogonalize, products


class Fake:
    """Computes products with X in torch's place, and declines all symmetric ones."""

    name = "fake"

    def multiply(self, out, a, b, c, alpha, beta):
        products.multiply_add(out, a, b, c, alpha=alpha, beta=beta)
        return True

    def symmetric(self, out, a, b, c, alpha, beta):
        return False


@pytest.fixture(autouse=True)
def fresh():
    backend.register(None)
    backend.calls.clear()
    yield
    backend.register(None)


def run(choice="auto"):
    x = torch.randn(2, 32, 96, generator=torch.Generator().manual_seed(0))
    return orthogonalize(x, backend=choice)


def test_calls_count_what_really_ran():
    """X-Square-Robot/dmuon cf387926: a fast kernel was announced and never called."""
    alone = run()
    # five steps in three segments: a Gram matrix and a product with X each; 4 x 5 - 3 x 3 others
    assert backend.calls == {("torch", "symmetric"): 3 + 11, ("torch", "multiply"): 3}
    backend.register(Fake())
    backend.calls.clear()
    together = run()
    assert backend.calls == {("torch", "symmetric"): 14, ("fake", "multiply"): 3}
    assert torch.equal(alone, together)


def test_a_backend_is_used_only_when_chosen():
    backend.register(Fake())
    run("torch")
    assert all(name == "torch" for name, _ in backend.calls)
    run("fake")
    assert backend.calls["fake", "multiply"] == 3
    backend.register(None)
    run(Fake())
    assert backend.calls["fake", "multiply"] == 6


def test_a_backend_that_was_not_verified_is_refused():
    with pytest.raises(ValueError, match="'tilelang' is not ready"):
        run("tilelang")
    run()  # nothing of the refusal stays
    assert set(backend.calls) == {("torch", "symmetric"), ("torch", "multiply")}

"""Muon's update as pure functions of tensors: momentum, batches of Newton-Schulz problems, update.

The same update as Megatron's ``--optimizer muon`` (emerging-optimizers): for a gradient G

    B <- B + (1 - momentum) (G - B)                         the buffer is an average, not a sum
    N  = B, or with Nesterov  G + momentum (B - G)
    U  = scale x orthogonalize(N), for every block of rows that counts as a matrix of its own
    W <- (1 - lr x weight_decay) W - lr U
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dmuon_megatron.orthogonalize import (
    Workspace,
    orthogonalize,
    useful_batch,
    workspace_bytes,
)

ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]


@dataclass(frozen=True)
class Recipe:
    """What defines the update of a matrix, besides learning rate and weight decay.

    Attributes:
        momentum: weight of the old average in the momentum buffer.
        nesterov: look ahead, as Nesterov's momentum does.
        coefficients: name of the Newton-Schulz coefficient set.
        steps: Newton-Schulz steps.
        scale_mode: how the size of the update depends on the shape, see ``scale_factor``.
        extra_scale: further factor on the update.
        dtype: storage type inside the iteration.
        precision: torch's float32 matmul precision during the iteration; matters for fp32 on CUDA.
        method: form of the iteration, see ``orthogonalize``.
    """

    momentum: float = 0.95
    nesterov: bool = False
    coefficients: str = "quintic"
    steps: int = 5
    scale_mode: ScaleMode = "spectral"
    extra_scale: float = 1.0
    dtype: torch.dtype = torch.float32
    precision: Literal["highest", "high", "medium"] = "highest"
    method: str = "auto"


@dataclass(frozen=True)
class Block:
    """Rows of a matrix that are one Newton-Schulz problem.

    A fused QKV weight interleaves its rows by query group, so a block takes ``rows`` rows,
    beginning at row ``start``, from each of ``groups`` equal groups of rows.
    """

    groups: int
    start: int
    rows: int
    cols: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.groups * self.rows, self.cols

    def view(self, matrix: Tensor) -> Tensor:
        """The block inside its matrix, shape (groups, rows, cols), no copy.

        Args:
            matrix: the whole matrix, contiguous, any shape with rows x cols elements.
        """
        grouped = matrix.view(self.groups, -1, self.cols)
        return grouped[:, self.start : self.start + self.rows]


def scale_factor(rows: int, cols: int, mode: ScaleMode) -> float:
    """Size of the update of a (rows, cols) block.

    ``spectral``: sqrt(max(rows, cols)), https://arxiv.org/abs/2502.16982, transfers AdamW's
    learning rates; ``unit_rms_norm``: sqrt(rows / cols), https://arxiv.org/abs/2502.07529;
    ``shape_scaling``: sqrt(max(1, rows / cols)), https://kellerjordan.github.io/posts/muon/.

    Raises:
        ValueError: unknown mode.
    """
    if mode == "spectral":
        return max(rows, cols) ** 0.5
    if mode == "unit_rms_norm":
        return (rows / cols) ** 0.5
    if mode == "shape_scaling":
        return max(1.0, rows / cols) ** 0.5
    raise ValueError(
        f"--muon-scale-mode must be spectral, unit_rms_norm or shape_scaling, got {mode!r}"
    )


class Problem(NamedTuple):
    """One Newton-Schulz problem: block ``block`` of matrix number ``matrix``."""

    matrix: int
    block: Block


def batch_size(m: int, n: int, recipe: Recipe, max_bytes: int, device: torch.device) -> int:
    """Largest batch of (m, n) problems, m <= n, that pays and fits: at least one.

    Args:
        max_bytes: bound on the stack in fp32 and the iteration's scratch memory.
        device: where it runs. A CPU gains nothing from batches of large matrices.
    """
    form = {"method": recipe.method, "dtype": recipe.dtype, "steps": recipe.steps}
    fitting = max(1, max_bytes // (4 * m * n + workspace_bytes(1, m, n, **form)))
    return min(fitting, useful_batch(m, n, **form, device=device) or fitting)


def momentum_(
    momenta: list[Tensor], grads: list[Tensor], momentum: float, nesterov: bool
) -> list[Tensor]:
    """Average the gradients into the momenta, in place.

    Args:
        momenta, grads: tensors of equal shapes and dtypes, pairwise.

    Returns:
        What Newton-Schulz is to orthogonalize: the momenta themselves, or with ``nesterov`` the
        gradients, overwritten by the look-ahead.
    """
    if not grads:
        return []
    torch._foreach_lerp_(momenta, grads, 1 - momentum)
    if not nesterov:
        return momenta
    torch._foreach_lerp_(grads, momenta, momentum)
    return grads


def orthogonalize_batch(
    batch: Sequence[Problem],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    recipe: Recipe,
    workspace: Workspace,
) -> None:
    """Write the scaled orthogonal factor of every block of the batch.

    Args:
        batch: problems of one shape.
        inputs: by matrix number, fp32, read only.
        outputs: by matrix number, fp32; may be the inputs. Only the rows of the blocks are written.
        recipe: the update.
        workspace: scratch memory of the iteration, reused from batch to batch.
    """
    number, block = batch[0]
    alone = len(batch) == 1 and block.groups == 1  # rows of the matrix as they stand: no copies
    if alone:
        source, result = block.view(inputs[number])[0], block.view(outputs[number])[0]
    else:
        source = torch.empty(len(batch), *block.shape, dtype=torch.float32, device=inputs[0].device)
        result = source
        for slot, (number, block) in zip(source, batch, strict=True):
            _lay(slot, block).copy_(block.view(inputs[number]))
    with _matmul_precision(recipe.precision):
        orthogonalize(
            source,
            method=recipe.method,
            coefficients=recipe.coefficients,
            steps=recipe.steps,
            dtype=recipe.dtype,
            out=result,
            workspace=workspace,
        )
    for factor, (number, block) in zip(result[None] if alone else result, batch, strict=True):
        scale = scale_factor(*block.shape, recipe.scale_mode) * recipe.extra_scale
        if alone:
            factor.mul_(scale)
        else:
            torch.mul(_lay(factor, block), scale, out=block.view(outputs[number]))


@contextlib.contextmanager
def _matmul_precision(precision: str):
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has chosen by torch.backends' newer settings, which then count
        yield
        return
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _lay(slot: Tensor, block: Block) -> Tensor:
    """A slot of the block's shape or its transpose, seen with the axes of the block's view."""
    oriented = slot if slot.shape == block.shape else slot.mT
    return oriented.unflatten(0, (block.groups, block.rows))


def apply_(weights: list[Tensor], updates: list[Tensor], lr: float, weight_decay: float) -> None:
    """Decoupled weight decay, then the update, in place: W <- (1 - lr wd) W - lr U."""
    if not weights:
        return
    if weight_decay:
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
    torch._foreach_add_(weights, updates, alpha=-lr)

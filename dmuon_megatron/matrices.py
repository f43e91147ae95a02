"""Which parameters Muon updates, and how each splits into Newton-Schulz problems."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dmuon_megatron.muon import Block


@dataclass(frozen=True, eq=False)
class Matrix:
    """A 2-D hidden weight that Muon updates.

    Attributes:
        name: its name in the model, unique over the model chunks of a pipeline stage.
        param: the model's parameter, shape (rows, cols).
        blocks: its Newton-Schulz problems, which together cover every row once.
    """

    name: str
    param: torch.nn.Parameter
    blocks: tuple[Block, ...]

    @property
    def rows(self) -> int:
        return self.param.shape[0]

    @property
    def cols(self) -> int:
        return self.param.shape[1]


def is_matrix(param: torch.nn.Parameter) -> bool:
    """Whether Muon updates this parameter: Megatron's rule for its own Muon.

    Two dimensions, and neither an embedding nor the output layer. Everything else is Adam's.
    """
    return param.dim() == 2 and not getattr(param, "is_embedding_or_output_parameter", False)


def find_matrices(
    model_chunks: Iterable[torch.nn.Module], *, split_qkv: bool
) -> list[list[Matrix]]:
    """The trainable matrices of every model chunk, in forward order.

    Args:
        model_chunks: Megatron models with a ``config`` (TransformerConfig), not yet wrapped in DDP.
        split_qkv: make the Q, K and V rows of fused QKV weights blocks of their own.

    Raises:
        ValueError: a fused QKV weight whose rows do not divide as the model's config says.
    """
    chunks = list(model_chunks)
    found = []
    for number, chunk in enumerate(chunks):
        prefix = f"chunk{number}." if len(chunks) > 1 else ""
        found.append(
            [
                Matrix(prefix + name, param, _blocks(name, param, chunk.config, split_qkv))
                for name, param in chunk.named_parameters()
                if param.requires_grad and is_matrix(param)
            ]
        )
    return found


def _blocks(name: str, param: torch.nn.Parameter, config, split_qkv: bool) -> tuple[Block, ...]:
    rows, cols = param.shape
    if not (split_qkv and "linear_qkv.weight" in name):
        return (Block(1, 0, rows, cols),)
    sizes = qkv_sizes(config)
    if rows % sum(sizes):
        raise ValueError(
            f"{name} has {rows} rows, which do not divide into query groups of {sum(sizes)} rows "
            f"({' + '.join(map(str, sizes))} by the model's num_attention_heads, num_query_groups "
            "and kv_channels). Pass --muon-no-split-qkv to orthogonalize it as one matrix."
        )
    groups = rows // sum(sizes)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(
        Block(groups, start, size, cols) for start, size in zip(starts, sizes, strict=True)
    )


def qkv_sizes(config) -> list[int]:
    """Rows of Q, (gate,) K and V in each query group of Megatron's fused QKV weight.

    Args:
        config: TransformerConfig with num_attention_heads, num_query_groups and kv_channels.
    """
    query = config.num_attention_heads // config.num_query_groups * config.kv_channels
    gate = [query] if getattr(config, "attention_output_gate", False) else []
    return [query, *gate, config.kv_channels, config.kv_channels]

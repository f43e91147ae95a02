"""Builds the tiny real Megatron GPT that tests train, its deterministic weights and its data.

Weights depend on the seed and the parameter's name only, and data on the sample's number only, so
that runs on any number of ranks start from one model and see one global batch.
"""

import zlib

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from tests.harness.types import Tiny


def start_megatron(*, tp: int = 1, pp: int = 1, ep: int = 1, cp: int = 1, seed: int = 1) -> None:
    """Set up Megatron's parallel state and random states on this rank, once."""
    if parallel_state.model_parallel_is_initialized():
        return
    parallel_state.initialize_model_parallel(
        tp, pp, context_parallel_size=cp, expert_model_parallel_size=ep
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def transformer_config(tiny: Tiny) -> TransformerConfig:
    """Megatron's configuration for this model under the current parallel state."""
    moe = {}
    if tiny.experts:
        moe = {
            "num_moe_experts": tiny.experts,
            "moe_router_topk": tiny.top_k,
            "moe_ffn_hidden_size": tiny.ffn,
            "moe_token_dispatcher_type": "alltoall",
            # Any balancing loss would depend on how samples are grouped into microbatches.
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_shared_expert_intermediate_size": tiny.ffn if tiny.shared_expert else None,
        }
    return TransformerConfig(
        num_layers=tiny.layers,
        hidden_size=tiny.hidden,
        num_attention_heads=tiny.heads,
        num_query_groups=tiny.groups,
        ffn_hidden_size=tiny.ffn,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization=tiny.norm,
        add_bias_linear=tiny.bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=tiny.bf16,
        params_dtype=tiny.dtype,
        pipeline_dtype=tiny.dtype,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        # What needs a device, Transformer Engine or Apex.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **moe,
    )


def build_model(tiny: Tiny, config: TransformerConfig | None = None) -> torch.nn.Module:
    """This rank's part of the model, not wrapped in DDP, with its deterministic weights."""
    config = config or transformer_config(tiny)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(
            num_experts=tiny.experts or None, moe_grouped_gemm=False, normalization=tiny.norm
        ),
        vocab_size=tiny.vocab,
        max_sequence_length=tiny.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tiny.tied,
        position_embedding_type="rope",
    )
    if tiny.bf16:
        model = Float16Module(config, model)
    set_weights(model, tiny.seed)
    return model


@torch.no_grad()
def set_weights(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter by its name: matrices and biases normal, norms near one.

    A name is the same on all ranks without tensor, pipeline and expert parallelism.
    """
    for name, param in model.named_parameters():
        name = plain_name(name)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        noise = torch.randn(param.shape, generator=generator)
        norm_scale = param.ndim == 1 and name.endswith("weight")
        param.copy_(1 + 0.1 * noise if norm_scale else 0.05 * noise)


def plain_name(name: str) -> str:
    """A parameter's name in the bare model: each wrapper (DDP, Float16Module) adds "module."."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def sample(tiny: Tiny, index: int) -> torch.Tensor:
    """Sample number ``index``: int64 (sequence + 1), counting up by 1, 3 or 5 modulo the vocab."""
    generator = torch.Generator().manual_seed(1000 + index)
    start = torch.randint(tiny.vocab, (1,), generator=generator)
    stride = (1, 3, 5)[index % 3]
    return (start + stride * torch.arange(tiny.sequence + 1)) % tiny.vocab


def global_batch(step: int, size: int) -> range:
    """The numbers of the samples that step ``step`` trains on.  Four batches come round again."""
    return range((step % 4) * size, (step % 4 + 1) * size)


def microbatches(
    tiny: Tiny, step: int, size: int, count: int, rank: int | None = None, ranks: int | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One data-parallel rank's share of a step, as ``count`` pairs (tokens, labels).

    Args:
        size: samples in the global batch, a multiple of ``ranks * count``.
        count: microbatches on each rank.
        rank, ranks: place in the data-parallel group; this rank's by default.

    Returns:
        ``count`` pairs of int64 tensors (size / ranks / count, sequence).
    """
    rank = parallel_state.get_data_parallel_rank() if rank is None else rank
    ranks = parallel_state.get_data_parallel_world_size() if ranks is None else ranks
    if size % (ranks * count):
        raise ValueError(f"{size} samples do not go into {ranks} ranks x {count} microbatches")
    each = size // (ranks * count)
    samples = list(global_batch(step, size))
    pairs = []
    for microbatch in range(count):
        first = (microbatch * ranks + rank) * each
        tokens = torch.stack([sample(tiny, i) for i in samples[first : first + each]])
        pairs.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return pairs


def forward_loss(
    model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Each token's loss (microbatch, sequence), or the activations of a stage that is not last."""
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape[0], -1)
    return model(tokens, positions, None, labels=labels)


def mean_over_data_parallel(value: torch.Tensor) -> float:
    """The mean of a scalar over the data-parallel ranks."""
    value = value.detach().clone().float()
    dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
    return value.item() / parallel_state.get_data_parallel_world_size()

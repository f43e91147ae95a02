"""DMuon without megatron.training: a training loop of one's own on Megatron's parts.

    torchrun --nproc-per-node 2 examples/library.py

The two lines that differ from a loop with Megatron's Adam are marked. On a machine without CUDA it
runs on the CPU over gloo.
"""

import os

import torch
import torch.distributed as dist

from dmuon_megatron import emulation

if not torch.cuda.is_available():
    emulation.install()  # before anything of Megatron is imported

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from dmuon_megatron import DMuonConfig, get_dmuon_optimizer, wrap_with_ddp

VOCABULARY, SEQUENCE, BATCH, STEPS = 128, 32, 4, 10


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if emulation.installed() else "nccl")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)  # the same weights on every rank

    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    spec = get_gpt_layer_local_spec()
    model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE).cuda()

    # In place of DistributedDataParallel(config, ddp_config, model). Takes and returns all model
    # chunks of the pipeline stage, here one.
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, overlap_param_gather=True, grad_reduce_in_fp32=True
    )
    chunks = wrap_with_ddp([model], ddp_config, DMuonConfig())

    # In place of get_megatron_optimizer(config, chunks).
    optimizer = get_dmuon_optimizer(
        OptimizerConfig(lr=1e-2, weight_decay=0.01, clip_grad=1.0, muon_momentum=0.9), chunks
    )

    generator = torch.Generator().manual_seed(dist.get_rank())
    text = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator).cuda()
    positions = torch.arange(SEQUENCE, device=text.device).expand(BATCH, SEQUENCE)
    for step in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        loss = chunks[0](text[:, :-1], positions, None, labels=text[:, 1:]).mean()
        loss.backward()
        finalize_model_grads(chunks)  # waits until all gradients have reached their owners
        _, grad_norm, _ = optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {float(grad_norm):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

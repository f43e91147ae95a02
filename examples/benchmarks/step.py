"""Times optimizer steps side by side: DMuon, Megatron's own Muon and AdamW.

    python examples/benchmarks/step.py                       # 4 ranks, on the CPU without GPUs
    python examples/benchmarks/step.py --precision high --json step.json

One GPT, one process per rank, all optimizers in one run, taking turns. A step is timed from the
reduced gradients to the published weights, nothing overlapped, on the slowest rank. Megatron's Muon
is its LayerWiseDistributedOptimizer, wired as its pretrain_gpt.py does it (all-reduced gradients,
weights gathered), and needs emerging-optimizers.
"""

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

COEFFICIENTS, STEPS = "quintic", 5


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, default=4, help="ranks (default: 4)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each optimizer")
    parser.add_argument(
        "--precision",
        choices=("medium", "high"),
        default="medium",
        help="--muon-fp32-matmul-prec of both Muons: medium (Megatron's default) is bf16",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def launch(args: argparse.Namespace) -> int:
    """Start the ranks of this very script."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    if not environment.get("GLOO_SOCKET_IFNAME") and Path("/sys/class/net/lo").exists():
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            f"--nproc-per-node={args.nproc}",
            *sys.argv,
        ],
        env=environment,
        check=False,
    ).returncode


# What a ring sends from each rank, as a multiple of the full tensor and of (ranks - 1) / ranks.
RING = {
    "all_reduce": 2,
    "reduce": 1,
    "broadcast": 1,
    "reduce_scatter_tensor": 1,
    "all_gather_into_tensor": 1,
    "all_gather": 1,
}


@contextlib.contextmanager
def counted_bytes(traffic: Counter):
    """Add up the bytes a ring would send from each rank for the collectives in the block."""
    import torch.distributed as dist
    from megatron.core.distributed import param_and_grad_buffer as megatron

    names = [(dist, name, name) for name in RING]
    names += [(megatron, "dist_all_gather_func", "all_gather_into_tensor")]
    names += [(megatron, "dist_reduce_scatter_func", "reduce_scatter_tensor")]

    def wrap(function, operation):
        def call(*args, **kwargs):
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            if operation == "reduce_scatter_tensor":
                tensors = [args[1]]
            size = sum(t.numel() * t.element_size() for t in tensors)
            ranks = dist.get_world_size()
            traffic["bytes"] += RING[operation] * size * (ranks - 1) / ranks
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as undo:
        for module, attribute, operation in names:
            original = getattr(module, attribute)
            undo.callback(setattr, module, attribute, original)
            setattr(module, attribute, wrap(original, operation))
        yield


class Contender:
    """A model of its own with one optimizer."""

    def __init__(self, name: str, args: argparse.Namespace):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from dmuon_megatron import get_dmuon_optimizer, wrap_with_ddp

        self.name = name
        layer_wise = name == "megatron muon"
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=not layer_wise, grad_reduce_in_fp32=True
        )
        config = OptimizerConfig(
            optimizer={"dmuon": "dmuon", "megatron muon": "muon", "adamw": "adam"}[name],
            lr=1e-3,
            weight_decay=0.01,
            bf16=True,
            use_distributed_optimizer=not layer_wise,
            use_layer_wise_distributed_optimizer=layer_wise,
            muon_fp32_matmul_prec=args.precision,
            muon_coefficient_type=COEFFICIENTS,
            muon_num_ns_steps=STEPS,
        )
        model = build_model(args)
        if name == "dmuon":
            (self.model,) = wrap_with_ddp([model], ddp)
            self.optimizer = get_dmuon_optimizer(config, [self.model])
        else:
            self.model = DistributedDataParallel(model.config, ddp, model)
            self.optimizer = get_megatron_optimizer(config, [self.model])
        self.seconds: list[float] = []
        self.traffic = Counter()

    def step(self, number: int) -> None:
        """One step on random gradients, timed on the slowest rank."""
        import torch
        import torch.distributed as dist

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        generator = torch.Generator(self.model.buffers[0].grad_data.device).manual_seed(number)
        for buffer in self.model.buffers:
            buffer.grad_data.normal_(std=1e-3, generator=generator)
        with counted_bytes(self.traffic):
            self.model.finish_grad_sync()
            torch.cuda.synchronize()
            dist.barrier()
            begin = time.perf_counter()
            self.optimizer.step()
            torch.cuda.synchronize()
            seconds = torch.tensor([time.perf_counter() - begin], device="cuda")
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.seconds.append(seconds.item())

    def newton_schulz_flops(self) -> float:
        """FLOPs of Newton-Schulz in one step on the rank that has most of them."""
        import torch
        import torch.distributed as dist

        from dmuon_megatron.orthogonalize import ns_flops

        flops = 0
        if self.name == "dmuon":
            for owned in self.optimizer.muon.owned:
                where = {"dtype": self.optimizer.muon.recipe.dtype, "device": owned.main.device}
                for block in owned.matrix.blocks:
                    flops += ns_flops(*sorted(block.shape), steps=STEPS, **where)
        elif self.name == "megatron muon":
            for param in self.optimizer.get_parameters():
                if param.dim() == 2 and not getattr(param, "is_embedding_or_output_parameter", 0):
                    flops += sum(STEPS * full_products(*s) for s in blocks(param))
        most = torch.tensor([float(flops)], dtype=torch.float64, device="cuda")
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return most.item()


def blocks(param) -> list[tuple[int, int]]:
    """Shapes that Megatron's Muon orthogonalizes a parameter in."""
    sizes = getattr(param, "qkv_split_shapes", None)
    if sizes is None:
        return [tuple(param.shape)]
    groups = param.shape[0] // sum(sizes)
    return [(groups * size, param.shape[1]) for size in sizes]


def full_products(rows: int, cols: int) -> int:
    """FLOPs of a standard Newton-Schulz step with full products: X X^T, A A, B X."""
    m, n = sorted((rows, cols))
    return 4 * m * m * n + 2 * m**3


def build_model(args: argparse.Namespace):
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=4 * args.hidden,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=4096,
        max_sequence_length=128,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return Float16Module(config, model.cuda())


def worker(args: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch

    if not torch.cuda.is_available():
        from dmuon_megatron import emulation

        emulation.install()
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        backend = "gloo"
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl"
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    dist.init_process_group(backend)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    names = ["dmuon", "megatron muon", "adamw"]
    if importlib.util.find_spec("emerging_optimizers") is None:
        names.remove("megatron muon")
    contenders = [Contender(name, args) for name in names]
    for number in range(args.rounds + 1):  # the first is a warm-up
        for contender in contenders:
            contender.step(number)
    flops = {c.name: c.newton_schulz_flops() for c in contenders}
    if dist.get_rank() == 0:
        show(args, contenders, flops)
    dist.barrier()
    dist.destroy_process_group()


def show(args: argparse.Namespace, contenders: list[Contender], flops: dict[str, float]) -> None:
    """Print the table, and write the JSON file."""
    from rich.console import Console
    from rich.table import Table

    medians = {c.name: statistics.median(c.seconds[1:]) for c in contenders}
    table = Table(
        title=f"Optimizer step, {args.nproc} ranks, {args.layers} layers of {args.hidden}, "
        f"Newton-Schulz in {'bf16' if args.precision == 'medium' else 'fp32'}",
        title_justify="left",
    )
    for heading in ("", "median ms", "fastest", "slowest", "DMuon / it", "NS GFLOP", "MB sent"):
        table.add_column(heading, justify="right")
    for c in contenders:
        timed = c.seconds[1:]
        table.add_row(
            c.name,
            *(f"{1e3 * t:.1f}" for t in (medians[c.name], min(timed), max(timed))),
            f"{medians['dmuon'] / medians[c.name]:.2f}",
            f"{flops[c.name] / 1e9:.1f}",
            f"{c.traffic['bytes'] / len(c.seconds) / 1e6:.1f}",
        )
    Console(width=100).print(table)
    print(
        "NS GFLOP: on the busiest rank. MB sent: per rank and step by a ring, gradients included."
    )
    figures = {
        "ranks": args.nproc,
        "layers": args.layers,
        "hidden": args.hidden,
        "precision": args.precision,
        "rounds": args.rounds,
        "seconds": medians,
        "newton_schulz_flops": flops,
        "bytes_sent": {c.name: c.traffic["bytes"] / len(c.seconds) for c in contenders},
        "ratio_dmuon_over_adamw": medians["dmuon"] / medians["adamw"],
    }
    if "megatron muon" in medians:
        figures["ratio_dmuon_over_megatron_muon"] = medians["dmuon"] / medians["megatron muon"]
    else:
        print("Megatron's Muon was left out; dmuon-megatron[bench] brings what it needs.")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    arguments = parse()
    if "RANK" in os.environ:
        worker(arguments)
    else:
        sys.exit(launch(arguments))

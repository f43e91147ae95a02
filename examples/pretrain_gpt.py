"""Pretrains a GPT with Megatron-LM's training loop, `--optimizer dmuon` being one more choice.

Takes every usual Megatron flag (`--help` lists them; ours start with --dmuon-). On GPUs:

    torchrun --nproc-per-node 8 examples/pretrain_gpt.py --optimizer dmuon \\
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather ...

Without CUDA it trains on the CPU over gloo, which needs a few flags more:

    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --optimizer dmuon \\
        --distributed-backend gloo --transformer-impl local --no-persist-layer-norm \\
        --no-gradient-accumulation-fusion --no-rope-fusion --no-masked-softmax-fusion ...

Two lines make a pretrain script ready for dmuon: the import and the call of `install`. A script
that shall stay as it is runs under `python -m dmuon_megatron.launch` instead.
"""

from functools import partial

import torch

import dmuon_megatron

if not torch.cuda.is_available():
    from dmuon_megatron import emulation

    emulation.install()  # before anything of Megatron is imported

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
# Flags of Megatron's own script that need data paths or losses which this one leaves out.
NOT_SERVED = (
    "sft",
    "fim_data",
    "hybrid_context_parallel",
    "dataloader_inter_document_masking",
    "logits_load_dir",
)


def build_datasets(train_valid_test_samples, vp_stage=None):
    """Megatron's dataset provider: (train, validation, test), None where no stage reads them.

    Every tensor-parallel rank reads the samples itself: the files are memory-mapped, so peers of
    one host share the pages and nothing has to be broadcast.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
    )
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        train_valid_test_samples,
        partial(is_first_or_last_pipeline_stage, vp_stage),
        config,
    ).build()


build_datasets.is_distributed = True  # to Megatron: call it on every rank


def read_batch(data_iterator, vp_stage=None):
    """One microbatch on this rank's device, cut along the sequence for context parallelism.

    Returns:
        a dict of BATCH_KEYS: int64 (batch, sequence) tensors, the float32 loss mask of that shape
        and the attention mask or None; all None on a stage between the first and the last
    """
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    batch = dict.fromkeys(BATCH_KEYS) | next(data_iterator)
    batch = {
        key: None if batch[key] is None else batch[key].cuda(non_blocking=True)
        for key in BATCH_KEYS
    }
    return get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
    )


def masked_loss(loss_mask, losses):
    """Megatron's loss function: sum over unmasked tokens, their number, and what to log."""
    loss_mask = loss_mask.reshape(-1).float()
    loss = (losses.reshape(-1).float() * loss_mask).sum()
    tokens = loss_mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for rejected in (torch.isnan, torch.isinf):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejected,
                message="the loss of this rank's microbatch is not finite",
                tolerance=0.0,
                fatal=True,
            )
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(data_iterator, model):
    """Megatron's forward step: the model's output and the function that makes it a loss."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = read_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(masked_loss, batch["loss_mask"])


def main() -> None:
    dmuon_megatron.install()
    args = parse_and_validate_args()
    for name in NOT_SERVED:
        if getattr(args, name, None):
            raise SystemExit(
                f"pretrain_gpt.py does not serve --{name.replace('_', '-')}; run Megatron-LM's own "
                "pretrain_gpt.py under `python -m dmuon_megatron.launch` for it"
            )
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

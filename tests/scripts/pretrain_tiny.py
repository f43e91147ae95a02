"""A pretrain script as anybody's: Megatron's training loop, mock data, and no word of DMuon."""

from functools import partial

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args


def datasets(sizes, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config).build()


datasets.is_distributed = True


def build_model(pre_process=True, post_process=True, vp_stage=None, config=None, **_):
    """The way older scripts make their model, wrapped by megatron.training itself."""
    args = get_args()
    return GPTModel(
        config or core_transformer_config_from_args(args),
        get_gpt_layer_local_spec(normalization=args.normalization),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )


def loss(mask, output):
    losses, mask = output.view(-1).float(), mask.view(-1).float()
    total, count = (losses * mask).sum(), mask.sum().to(torch.int)
    return total, count, {"lm loss": torch.stack([total.detach(), count.detach().float()])}


def forward_step(iterator, model):
    batch = {name: value.cuda() for name, value in next(iterator).items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss, batch["loss_mask"])


def add_arguments(parser):
    parser.add_argument("--older-script", action="store_true")
    return parser


if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=add_arguments)
    older = args.older_script
    container = pretrain_cfg_container_from_args(
        args, None if older else gpt_config_from_args(args)
    )
    pretrain(
        container,
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=build_model if older else None,
    )

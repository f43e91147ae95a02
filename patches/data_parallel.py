"""Megatron's two ways of wrapping a model in DDP, with owners for runs with DMuon.

``pretrain_gpt.py`` of 0.19 wraps in ``megatron.training.models``; scripts with a model provider
wrap in ``megatron.training.training``.
"""

from dmuon_megatron.patches.arguments import current_config
from dmuon_megatron.patches.seams import Seam


def seams() -> list[Seam]:
    return [
        Seam(
            "megatron.training.models.dist_utils",
            "_ddp_wrap",
            _models_path,
            ("model", "data_parallel_random_init", "ddp_config", "pg_collection"),
        ),
        Seam(
            "megatron.training.training",
            "wrap_model_chunks_with_ddp",
            _training_path,
            ("model_chunks", "config", "ddp_config", "pg_collection"),
        ),
    ]


def _models_path(original):
    def _ddp_wrap(model, data_parallel_random_init, ddp_config, *args, pg_collection, **kwargs):
        config = current_config()
        if config is None:
            return original(
                model,
                data_parallel_random_init,
                ddp_config,
                *args,
                pg_collection=pg_collection,
                **kwargs,
            )
        chunks = _wrap(model, ddp_config, config, pg_collection)
        if data_parallel_random_init:
            for chunk in chunks:
                chunk.broadcast_params()
        return chunks

    return _ddp_wrap


def _training_path(original):
    def wrap_model_chunks_with_ddp(model_chunks, config, ddp_config, *args, **kwargs):
        settings = current_config()
        if settings is None:
            return original(model_chunks, config, ddp_config, *args, **kwargs)
        return _wrap(model_chunks, ddp_config, settings, kwargs.get("pg_collection"))

    return wrap_model_chunks_with_ddp


def _wrap(model_chunks, ddp_config, config, pg_collection):
    from dmuon_megatron.data_parallel import wrap_with_ddp

    return wrap_with_ddp(model_chunks, ddp_config, config, pg_collection)

"""Megatron's optimizer builder, which knows DMuon by name."""

from dmuon_megatron.patches.seams import Seam


def seams() -> list[Seam]:
    return [
        Seam(
            "megatron.core.optimizer",
            "get_megatron_optimizer",
            _with_dmuon,
            ("config", "model_chunks", "config_overrides", "use_gloo_process_groups"),
        )
    ]


def _with_dmuon(original):
    def get_megatron_optimizer(config, model_chunks, *args, **kwargs):
        if config.optimizer != "dmuon":
            return original(config, model_chunks, *args, **kwargs)
        from dmuon_megatron.build import get_dmuon_optimizer

        dump = kwargs.pop("dump_param_to_param_group_map", None)
        if dump is not None:
            raise ValueError(
                "--optimizer dmuon does not write --dump-param-to-param-group-map yet: leave it out"
            )
        return get_dmuon_optimizer(config, model_chunks, *args, **kwargs)

    return get_megatron_optimizer

"""Megatron's norm of all weights, which waits for weights that are still being published.

After a step with ``--overlap-param-gather`` other ranks' matrices are still on their way. Megatron
takes the fp32 main weights of 16-bit parameters, summed over their owners, and needs not wait for
those; an fp32 parameter it reads from the model.
"""

from dmuon_megatron.patches.seams import Seam


def seams() -> list[Seam]:
    return [
        Seam(
            "megatron.training.utils.common_utils",
            "calc_params_l2_norm",
            _with_published_weights,
            ("model", "force_create_fp32_copy"),
        )
    ]


def _with_published_weights(original):
    def calc_params_l2_norm(model, force_create_fp32_copy=False):
        from dmuon_megatron.data_parallel import OwnerDataParallel

        for chunk in model if isinstance(model, list) else [model]:
            if isinstance(chunk, OwnerDataParallel):
                chunk.settle(
                    param
                    for param in chunk.params_with_grad
                    if force_create_fp32_copy or not hasattr(param, "main_param")
                )
        return original(model, force_create_fp32_copy)

    return calc_params_l2_norm

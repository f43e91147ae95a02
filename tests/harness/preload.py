"""What every rank needs, imported once in the server that ranks are forked from.

The server never runs autograd and starts no thread: neither survives a fork.
"""

import gc

import dmuon_megatron.emulation

dmuon_megatron.emulation.install()

import megatron.core.distributed  # noqa: E402
import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402
import megatron.core.optimizer  # noqa: E402
import megatron.core.pipeline_parallel  # noqa: E402
import megatron.training  # noqa: E402
import megatron.training.training  # noqa: E402, F401
import pytest  # noqa: E402, F401
import torch  # noqa: E402

torch.set_num_threads(1)
# Collecting in a rank would touch, and so copy, all the pages it shares with the server.
gc.collect()
gc.freeze()

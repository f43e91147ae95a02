"""DMuon in the harness's training loop."""

from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides

from dmuon_megatron import DMuonConfig, get_dmuon_optimizer, wrap_with_ddp
from tests.harness.loop import Run, ddp_config, optimizer_config, train
from tests.harness.tiny import Tiny

# Owners by a model of the device: a plan from measured times may change from run to run.
UNTIMED = DMuonConfig(profile_budget=0)


def train_dmuon(
    tiny: Tiny,
    *,
    overlap: bool = True,
    dmuon: DMuonConfig | None = None,
    ddp: dict | None = None,
    optimizer: dict | None = None,
    **kwargs,
) -> Run:
    """``loop.train`` with DMuon: fp32 Newton-Schulz, as the reference has it.

    Args:
        overlap: both overlaps on or off.
        dmuon: settings of DMuon; ``UNTIMED`` by default.
        ddp, optimizer: changes to ``ddp_config`` and ``optimizer_config``.
        kwargs: further arguments of ``train``.
    """
    return train(
        tiny,
        wrap=lambda config, ddp, model: wrap_with_ddp([model], ddp, dmuon or UNTIMED)[0],
        build_optimizer=dmuon_optimizer,
        ddp=ddp_config(overlap=overlap, **(ddp or {})),
        optimizer=dmuon_config(tiny, overlap=overlap, **(optimizer or {})),
        **kwargs,
    )


def dmuon_config(tiny: Tiny, *, overlap: bool = True, **changes) -> OptimizerConfig:
    """``optimizer_config`` for DMuon, with the reference's update."""
    muon = {
        "optimizer": "dmuon",
        "muon_momentum": 0.95,
        "muon_fp32_matmul_prec": "highest",
    }
    return optimizer_config(tiny, overlap=overlap, **(muon | changes))


def dmuon_optimizer(config: OptimizerConfig, chunks: list):
    """DMuon's optimizer, with the parameter groups that Megatron's training loop asks for."""
    return get_dmuon_optimizer(
        config, chunks, config_overrides=get_standard_config_overrides(config)
    )

"""Megatron's command line: the optimizer's name, the ``--dmuon-*`` flags, and their validation."""

import argparse
from typing import get_args

from dmuon_megatron.config import DMuonConfig, NSMethod, OwnerPolicy, refuse_unsupported
from dmuon_megatron.patches.seams import Seam

# Megatron hands neither its DDP wrapping nor its optimizer builder the arguments, so the settings
# of the run wait here. None: the run has another optimizer.
_current: DMuonConfig | None = None


def current_config() -> DMuonConfig | None:
    """The settings of this process's run, None unless it runs with ``--optimizer dmuon``."""
    return _current


def seams() -> list[Seam]:
    module = "megatron.training.arguments"
    return [
        Seam(module, "add_megatron_arguments", _with_flags, ("parser",)),
        Seam(module, "validate_args", _with_validation, ("args", "defaults")),
    ]


def _with_flags(original):
    def add_megatron_arguments(parser: argparse.ArgumentParser):
        parser = original(parser)
        optimizer = next(a for a in parser._actions if "--optimizer" in a.option_strings)
        optimizer.choices = [*optimizer.choices, "dmuon"]
        _add_flags(parser)
        return parser

    return add_megatron_arguments


def _add_flags(parser: argparse.ArgumentParser) -> None:
    default = DMuonConfig()
    group = parser.add_argument_group(
        "dmuon",
        "distributed Muon (--optimizer dmuon); the update itself is set by the --muon-* flags",
    )
    group.add_argument(
        "--dmuon-workspace-mb",
        type=int,
        default=default.workspace_mb,
        help="Memory in MiB that one batch of Newton-Schulz problems may take. More memory batches "
        "more matrices of one shape, which is faster for small ones and changes nothing for "
        "large ones.",
    )
    group.add_argument(
        "--dmuon-ns-method",
        choices=get_args(NSMethod),
        default=default.ns_method,
        help="Form of the Newton-Schulz iteration. gram iterates on the small Gram matrix: fewer "
        "FLOPs for matrices at least 1.5 times as long as wide, equal results up to rounding. "
        "auto takes the cheaper one for each shape.",
    )
    group.add_argument(
        "--dmuon-owner-policy",
        choices=get_args(OwnerPolicy),
        default=default.owner_policy,
        help="How matrices are assigned to data-parallel ranks: milp balances the time of their "
        "batched updates as evenly as can be, lpt does so greedily, numel balances their sizes, "
        "round-robin their number. Changes the step time only.",
    )
    group.add_argument(
        "--dmuon-waves",
        type=int,
        default=default.waves,
        help="In how many parts the matrices are updated and published. With "
        "--overlap-param-gather a part is sent to the other ranks while the next is computed; each "
        "costs a few kernel launches. Changes no result.",
    )
    group.add_argument(
        "--dmuon-plan-budget",
        type=float,
        default=default.plan_budget,
        metavar="SECONDS",
        help="Longest time at start-up for finding a better plan than lpt's. Most models need less "
        "than a second.",
    )
    group.add_argument(
        "--dmuon-profile-budget",
        type=float,
        default=default.profile_budget,
        metavar="SECONDS",
        help="Longest time at start-up for timing Newton-Schulz on this device. Times are kept on "
        "disk, so that later runs need none. 0 plans by a model of the device.",
    )


def _with_validation(original):
    def validate_args(args, defaults={}):  # noqa: B006, Megatron's own signature
        global _current
        if args.optimizer != "dmuon":
            _current = None
            return original(args, defaults)
        _refuse(args)
        # Megatron accepts its distributed optimizer, and the overlaps that need it, for Adam and
        # SGD only; under any other name it switches them off.
        args.use_distributed_optimizer = True
        args.optimizer = "adam"
        try:
            validated = original(args, defaults)
        finally:
            args.optimizer = "dmuon"
        args.use_layer_wise_distributed_optimizer = False
        _refuse(args)
        _current = DMuonConfig.from_args(args)
        return validated

    return validate_args


def _refuse(args) -> None:
    refuse_unsupported(args)
    for path, switch, verb in (
        ("save", "no_save_optim", "saved"),
        ("load", "no_load_optim", "loaded"),
    ):
        if getattr(args, path, None) and not getattr(args, switch, None):
            if path == "load" and getattr(args, "finetune", False):
                continue
            raise ValueError(
                f"--optimizer dmuon cannot run with --{path} alone: DMuon's optimizer state cannot "
                f"be {verb} yet. Add --{switch.replace('_', '-')} to {path} the weights only."
            )

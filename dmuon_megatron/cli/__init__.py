"""The command `dmuon-megatron`."""

import argparse
import sys
from collections.abc import Sequence

from dmuon_megatron.cli import plan, tune


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns its exit status. 2: wrong use, with one line that says why."""
    parser = argparse.ArgumentParser(prog="dmuon-megatron", description=__doc__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    plan.add_parser(commands)
    tune.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except ValueError as error:
        print(f"dmuon-megatron: {error}", file=sys.stderr)
        return 2

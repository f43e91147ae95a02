"""Run an unmodified Megatron pretrain script with DMuon available.

    python -m dmuon_megatron.launch [--cpu] SCRIPT ARGS...
    torchrun --nproc-per-node 4 -m dmuon_megatron.launch [--cpu] SCRIPT ARGS...

The script runs as Python would run it, with ``--optimizer dmuon`` and the ``--dmuon-*`` flags among
Megatron's.  ``--cpu`` runs it without a GPU, over gloo (see ``dmuon_megatron.emulation``).
"""

import argparse
import os
import runpy
import socket
import sys
from pathlib import Path

# Flags without which Megatron does not run on a CPU, with the only value that works there.  None
# marks a flag that takes no value.  Each names something that needs NCCL, Transformer Engine, Apex
# or one of Megatron's CUDA kernels.
CPU_FLAGS = {
    "--distributed-backend": "gloo",
    "--transformer-impl": "local",
    "--no-persist-layer-norm": None,
    "--no-gradient-accumulation-fusion": None,
    "--no-rope-fusion": None,
    "--no-masked-softmax-fusion": None,
}


def main(arguments: list[str] | None = None) -> None:
    """Parse the launcher's own arguments and run the script.

    Args:
        arguments: the command line without the program's name; ``sys.argv[1:]`` by default.

    Raises:
        SystemExit: with status 2 and a message, on a command line that cannot work.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dmuon_megatron.launch",
        usage="%(prog)s [--cpu] SCRIPT ARGS...",
        description="Run an unmodified Megatron pretrain script with --optimizer dmuon available.",
        epilog="Or: torchrun --nproc-per-node N -m dmuon_megatron.launch [--cpu] SCRIPT ARGS...",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="run without a GPU, over gloo; adds the Megatron flags that this needs",
    )
    parser.add_argument("script", metavar="SCRIPT", help="the pretrain script")
    parser.add_argument("rest", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    own = parser.parse_args(arguments)

    if not Path(own.script).is_file():
        parser.error(f"there is no script {own.script}")
    rest = own.rest
    if own.cpu:
        try:
            rest, added = with_cpu_flags(rest)
        except ValueError as error:
            parser.error(str(error))
        _set_up_cpu_environment()
        if added and os.environ.get("RANK", "0") == "0":
            print(f"dmuon: for the CPU added {' '.join(added)}", flush=True)
    elif not _has_cuda():
        parser.error("there is no CUDA device here: put --cpu before the script to run on the CPU")
    run(own.script, rest, cpu=own.cpu)


def with_cpu_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Megatron's arguments with the ones that a CPU run needs, and which those are.

    Raises:
        ValueError: one is there with a value that cannot work on a CPU.
    """
    added = []
    for flag, value in CPU_FLAGS.items():
        given = _value(arguments, flag)
        if given is None:
            added += [flag] if value is None else [flag, value]
        elif value is not None and given != value:
            raise ValueError(
                f"{flag} {given} does not run on the CPU: leave it out or give {value}"
            )
    return [*arguments, *added], added


def _value(arguments: list[str], flag: str) -> str | None:
    """What ``flag`` was given last: its value, "" if none follows, None if it is not there."""
    value = None
    for index, argument in enumerate(arguments):
        if argument == flag:
            value = next(iter(arguments[index + 1 :]), "")
        elif argument.startswith(f"{flag}="):
            value = argument.removeprefix(f"{flag}=")
    return value


def run(script: str, arguments: list[str], *, cpu: bool) -> None:
    """Run ``script`` as the main program, Megatron prepared.

    Args:
        script: path of a Python file.
        arguments: what it finds in ``sys.argv[1:]``.
        cpu: install the emulation first.
    """
    sys.argv = [script, *arguments]
    # Python puts the script's folder where -m has put the current one.  This comes before Megatron
    # is imported: a script in a source checkout must get the Megatron beside it.
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).resolve().parent)
    if cpu:
        import dmuon_megatron.emulation

        dmuon_megatron.emulation.install()
    import dmuon_megatron

    dmuon_megatron.install()
    runpy.run_path(script, run_name="__main__")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _set_up_cpu_environment() -> None:
    """Rendezvous for a run that torchrun has not started, and gloo's network interface."""
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # gloo takes the interface of the host's name, which containers often cannot resolve.
    one_host = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
    if one_host and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


if __name__ == "__main__":
    main()

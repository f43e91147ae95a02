"""Megatron on the CPU over gloo, for tests and for trying things out without a GPU.

``install()`` makes an unedited Megatron run on a machine that has no accelerator::

    import dmuon_megatron.emulation

    dmuon_megatron.emulation.install()  # before anything imports megatron
    import megatron.core

What it replaces stands in three modules, told apart by whose gap it fills:

- ``cuda``: names of CUDA devices mean the CPU, and ``torch.cuda`` answers without a device.
- ``collectives``: what gloo refuses and NCCL does.
- ``megatron``: faults of Megatron's wheel, or of Megatron without Transformer Engine and Apex.

Everything is process-wide and stays until the process ends.  Computation is real: only the place
where it happens and the ordering of streams are made up, so what depends on them (a missing stream
wait, NCCL's reduction order, CUDA graphs, fused kernels) cannot be seen here.

The optimizer never uses this package.  While it is installed ``tensor.is_cuda`` is True and
``tensor.type()`` names a CUDA type, as Megatron needs; ``tensor.device.type`` stays ``"cpu"`` and
is what tells the truth.
"""

import sys

_installed = False


def install() -> None:
    """Make Megatron run on the CPU in this process.  Doing it again does nothing.

    It imports parts of ``megatron.core``, and torch if that has not happened yet.  The process
    group is left to the caller: initialise it with the gloo backend.

    Raises:
        RuntimeError: megatron was imported before, and has bound names that must be replaced first.
        ImportError: megatron-core or torch is not installed.
    """
    global _installed
    if _installed:
        return
    early = sorted({"megatron.core", "megatron.training"} & set(sys.modules))
    if early:
        raise RuntimeError(
            f"dmuon_megatron.emulation.install() came after the import of {' and '.join(early)}, "
            "which has already bound the names that the emulation replaces: call it first"
        )
    from dmuon_megatron.emulation import collectives, cuda, megatron

    cuda.install()
    collectives.install()
    megatron.install()
    _installed = True


def installed() -> bool:
    """Whether ``install()`` has been done in this process."""
    return _installed

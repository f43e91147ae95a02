"""Everything that touches Megatron's globals. ``install`` puts DMuon into Megatron.

What is replaced, and by what, stands in ``arguments.py`` (command line), ``data_parallel.py`` (DDP
wrapping), ``optimizer.py`` (optimizer construction) and ``params_norm.py`` (logging); ``seams.py``
replaces it. A run with another optimizer goes through the originals.
"""

_installed = False


def install() -> None:
    """Make ``--optimizer dmuon`` available to Megatron's pretrain scripts. Safe to call again.

    Call it before Megatron parses its arguments.

    Raises:
        RuntimeError: this Megatron lacks a function that DMuon hooks into, named in the message, or
            ``megatron.training`` cannot be imported.
    """
    global _installed
    if _installed:
        return
    from dmuon_megatron.patches import arguments, data_parallel, optimizer, params_norm, seams

    replaced = (arguments, data_parallel, optimizer, params_norm)
    seams.replace([seam for module in replaced for seam in module.seams()])
    _installed = True

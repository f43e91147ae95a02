"""The GPU kernels, written in TileLang; installed as `dmuon_megatron.kernels`.

``symmetric.py`` and ``multiply.py`` each hold a kernel with its configurations and its reference;
``compile.py`` makes functions of them, ``launch.py`` calls those with tensors of any kind.

Importing this package imports neither TileLang nor torch; the first use of a name below does.
"""

_PLACES = {
    "Config": "config",
    "Spec": "config",
    "matmul_add": "launch",
    "symmetric_matmul": "launch",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str):
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)

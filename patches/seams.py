"""Replacing functions of Megatron, after a look whether they are still there."""

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TESTED_VERSIONS = ("0.19.",)


@dataclass(frozen=True)
class Seam:
    """A function of Megatron that DMuon wraps.

    Attributes:
        module: where it is defined.
        name: its name there.
        wrap: takes the original, returns the replacement.
        parameters: parameter names that the replacement relies on.
    """

    module: str
    name: str
    wrap: Callable[[Callable], Callable]
    parameters: tuple[str, ...] = ()


def replace(seams: Sequence[Seam]) -> None:
    """Replace every seam, also where a megatron module imported it by name; all or none.

    Raises:
        RuntimeError: one of them is missing; nothing is replaced then.
    """
    originals = [_find(seam) for seam in seams]
    _warn_if_untested()
    for seam, original in zip(seams, originals, strict=True):
        wrapped = functools.wraps(original)(seam.wrap(original))
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "megatron" and vars(module).get(seam.name) is original:
                setattr(module, seam.name, wrapped)


def _find(seam: Seam) -> Callable:
    where = f"{seam.module}.{seam.name}"
    try:
        module = importlib.import_module(seam.module)
    except ImportError as error:
        raise RuntimeError(
            f"DMuon hooks into {where}, but {seam.module} cannot be imported ({error}). If a "
            "package is missing, install what Megatron's training loop needs: "
            "pip install 'dmuon-megatron[train]'."
        ) from error
    original = getattr(module, seam.name, None)
    if original is None:
        raise RuntimeError(
            f"DMuon hooks into {where}, which this Megatron ({_version()}) does not have. Tested "
            f"are megatron-core {', '.join(v + 'x' for v in TESTED_VERSIONS)}: install one of "
            "them, or a dmuon-megatron made for yours."
        )
    missing = [p for p in seam.parameters if p not in inspect.signature(original).parameters]
    if missing:
        raise RuntimeError(
            f"DMuon hooks into {where}, which in this Megatron ({_version()}) has no parameter "
            f"{', '.join(missing)}. Tested are megatron-core "
            f"{', '.join(v + 'x' for v in TESTED_VERSIONS)}."
        )
    return original


def _version() -> str:
    return importlib.import_module("megatron.core").__version__


def _warn_if_untested() -> None:
    version = _version()
    if not version.startswith(TESTED_VERSIONS):
        warnings.warn(
            f"dmuon-megatron was not tested with megatron-core {version} (tested: "
            f"{', '.join(v + 'x' for v in TESTED_VERSIONS)}); everything it hooks into is there",
            stacklevel=4,
        )

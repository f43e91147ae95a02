"""Compiled kernels as bytes, for nodes that do not share the store."""

import io
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from dmuon_megatron.kernels.config import Spec


def pack(specs: Iterable[Spec]) -> bytes:
    """The files of compiled kernels as one archive.

    What is not there is left out; if the disk fails, there is nothing in it, and :func:`adopt`
    then reports the kernels as missing on the nodes that got it.
    """
    from dmuon_megatron.kernels.compile import binary_directory

    stream = io.BytesIO()
    try:
        with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as archive:
            for spec in dict.fromkeys(specs):
                folder = binary_directory(spec)
                if folder is not None and folder.is_dir():
                    archive.add(folder, f"{folder.parent.name}/{folder.name}")
    except OSError:
        return b""
    return stream.getvalue()


def unpack(data: bytes, directory: str | Path) -> bool:
    """Puts :func:`pack`'s kernels below ``directory``, that of ``keep_binaries``.

    Each kernel's folder appears at once or not at all, and one that is there stays. A disk that
    fails costs the kernels, not the run: :func:`adopt` then reports them as missing.

    Returns:
        Whether all went well.
    """
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=directory, prefix=".unpack-") as folder,
            tarfile.open(fileobj=io.BytesIO(data)) as archive,
        ):
            archive.extractall(folder, filter="data")
            for kernel in Path(folder).glob("*/*"):
                _move(kernel, directory / kernel.parent.name / kernel.name)
        return True
    except (OSError, EOFError, tarfile.TarError):
        return False


def _move(source: Path, target: Path) -> None:
    """Moves a folder to where none is; another process of the node may be faster."""
    target.parent.mkdir(exist_ok=True)
    try:
        if not target.is_dir():
            source.rename(target)
    except OSError:
        if not target.is_dir():
            raise

"""Scratch memory that one batch after another reuses."""

import torch

# Every tensor starts on a cache line, a CUDA sector and whatever alignment a kernel may ask for.
_ALIGNMENT = 256


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to what :meth:`Workspace.take` really uses for it."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Workspace:
    """A stack of scratch tensors in one buffer per device.

    ``max_bytes`` bounds what :func:`orthogonalize` takes: it splits a batch so that a part fits,
    and exceeds the bound only for a single matrix that needs more. The buffer grows to the
    largest need seen and is kept; :meth:`release` frees it. Use one workspace per CUDA stream.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes <= 0:
            raise ValueError(f"max_bytes must be positive, got {max_bytes} (--dmuon-workspace-mb)")
        self.max_bytes = max_bytes
        self._buffers: dict[torch.device, torch.Tensor] = {}
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def reserve(self, nbytes: int, device: torch.device) -> None:
        """Forget all tensors taken before and make room for ``nbytes``."""
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < nbytes:
            self._buffers.pop(device, None)
            buffer = None  # the old buffer must be free before the larger one is allocated
            self._buffers[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used = 0

    def take(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A contiguous, uninitialised tensor out of the room made by :meth:`reserve`."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        start, self._used = self._used, self._used + aligned(nbytes)
        return self._buffers[device][start : start + nbytes].view(dtype).view(shape)

    def release(self) -> None:
        """Free the buffers."""
        self._buffers.clear()

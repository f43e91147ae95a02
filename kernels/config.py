"""What one compiled kernel is made for, in plain values: no TileLang, no torch."""

from typing import Literal, NamedTuple

Op = Literal["symmetric", "multiply"]

ARCHITECTURES = {(8, 0): "sm_80", (9, 0): "sm_90a"}
"""CUDA capability -> architecture that kernels are built for; any other device runs on torch."""

HALF = ("bfloat16", "float16")
"""Dtypes on GPUs. TileLang's fp32 products there are tf32, so fp32 stays with torch."""

SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024}
"""Shared memory that one thread block may use (CUDA programming guide, compute capabilities)."""


class Config(NamedTuple):
    """How a kernel cuts its work.

    Attributes:
        block_m, block_n: rows and columns of the result that one thread block computes.
        block_k: length of the sum per pipeline stage.
        stages: pipeline stages in shared memory.
        threads: threads that compute; on sm_90a 128 more load.
        group: tile rows that neighbouring thread blocks share, for the L2 cache.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    threads: int
    group: int = 1

    @property
    def name(self) -> str:
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k}"
            f"-s{self.stages}-t{self.threads}-g{self.group}"
        )


class Spec(NamedTuple):
    """One kernel binary.

    Attributes:
        op: "symmetric" or "multiply".
        arch: "sm_80", "sm_90a", or "cpu" (TileLang's C target, which tests run).
        dtype: of operands and result; sums are in fp32.
        config: the tiling.
        transposed: "symmetric" only: A and B lie as (k, m) in memory.
        has_c: whether C (of "multiply": X once more) is added; without it, it is not read.
        k: length of the sum where the binary is made for one, else None. On sm_80 TileLang 0.1.15
            cannot pipeline a sum of unknown length in more than 2 stages.
    """

    op: Op
    arch: str
    dtype: str
    config: Config
    transposed: bool = False
    has_c: bool = False
    k: int | None = None

    @property
    def name(self) -> str:
        """Readable and unique; letters, digits and ._- only."""
        flags = ("t" if self.transposed else "n") + ("c" if self.has_c else "0")
        length = "" if self.k is None else f"-k{self.k}"
        return f"{self.op}-{flags}-{self.dtype}-{self.arch}-{self.config.name}{length}"


def alignment(dtype: str) -> int:
    """Elements in 16 bytes: TMA and 16-byte copies need every row to start on such a boundary."""
    return 4 if dtype == "float32" else 8


def padded(size: int, dtype: str) -> int:
    """``size`` elements rounded up to whole 16-byte pieces."""
    step = alignment(dtype)
    return -(-size // step) * step

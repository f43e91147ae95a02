"""From a kernel's specification to a function that can be called.

Compiling for a GPU needs nvcc but no GPU; what was compiled is kept in TileLang's cache on disk,
from where it loads without nvcc. The key in that cache holds the program, so a changed kernel is
compiled anew, and the target, which is why the target is always spelled out here and never "auto".
"""

import contextlib
import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import tilelang
from tilelang import tvm

from dmuon_megatron.kernels import config, multiply, symmetric
from dmuon_megatron.kernels.config import Config, Op, Spec

MODULES = {"symmetric": symmetric, "multiply": multiply}

# TileLang's compilation is not safe in several threads (tile-ai/tilelang#1935).
_lock = threading.Lock()
_directory: Path | None = None


def configs(op: Op, arch: str) -> tuple[Config, ...]:
    """The tilings of an operation on an architecture, the safest first."""
    return MODULES[op].CONFIGS[arch]


def use_cache(directory: str | os.PathLike[str] | None) -> None:
    """Keeps compiled kernels below ``directory``; None: in TileLang's own cache."""
    global _directory
    _directory = None if directory is None else Path(directory)


def binary_directory(spec: Spec) -> Path | None:
    """Where a kernel's files are, by the kernels' sources; None: in TileLang's own cache."""
    return None if _directory is None else _directory / source_digest() / spec.name


def is_built(spec: Spec) -> bool:
    """Whether a compiled kernel is in the directory of ``use_cache``; not if the disk fails."""
    folder = binary_directory(spec)
    try:
        return folder is not None and any(folder.rglob("manifest.json"))
    except OSError:
        return False


@cache
def source_digest() -> str:
    """Changes when the kernels do."""
    files = [Path(module.__file__) for module in (*MODULES.values(), config)]
    content = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(tilelang.__version__.encode() + content).hexdigest()[:12]


@cache
def load(spec: Spec) -> Callable[..., None]:
    """The kernel, out of the cache or compiled; takes the arguments of its program.

    Raises:
        RuntimeError: it cannot be compiled; the message names the kernel.
    """
    program = MODULES[spec.op].program(spec)
    if spec.arch == "cpu":
        arguments = dict(
            target="c",
            target_host="c",
            execution_backend="cython",
            # TileLang's C templates lack the wide conversions that vectorized bf16 needs
            pass_configs={"tirx.disable_vectorize": True},
            compile_flags=["-O2"],
        )
        context = _bfloat16_on_cpu()
    else:
        arguments = dict(target=cuda_target(spec.arch), execution_backend="tvm_ffi")
        context = contextlib.nullcontext()
    try:
        with _lock, _quiet(), _cache_of(spec), context:
            return tilelang.compile(program, **arguments)
    except Exception as error:  # TileLang raises whatever its parts raise
        raise RuntimeError(f"kernel {spec.name} cannot be compiled: {error}") from error


def cuda_target(arch: str) -> dict[str, str]:
    """TileLang's name for a GPU architecture; the same everywhere, so that cache keys agree."""
    return {"kind": "cuda", "arch": arch}


@cache
def cuda_source(spec: Spec) -> tuple[str, int]:
    """CUDA C++ of a kernel and the bytes of shared memory it asks for at its launch."""
    target = tvm.target.Target(cuda_target(spec.arch))
    with _lock, _quiet(), tvm.transform.PassContext(opt_level=3), target:
        artifact = tilelang.lower(MODULES[spec.op].program(spec), target=target)
    shared = [
        int(value)
        for function in artifact.device_mod.functions.values()
        for name, value in function.attrs.items()
        if "dyn_shared" in name
    ]
    return artifact.kernel_source, max(shared, default=0)


@contextlib.contextmanager
def _cache_of(spec: Spec):
    """Has TileLang keep the kernel's files by themselves, so that they can be sent to others."""
    chosen, before = binary_directory(spec), tilelang.env.TILELANG_CACHE_DIR
    if chosen is not None:
        tilelang.env.TILELANG_CACHE_DIR = str(chosen)
    try:
        yield
    finally:
        tilelang.env.TILELANG_CACHE_DIR = before


@contextlib.contextmanager
def _quiet():
    """Without TileLang's two lines of log for every kernel."""
    logger = logging.getLogger("tilelang")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _bfloat16_on_cpu():
    """Lets TileLang 0.1.15's C target store bf16.

    It turns bf16 storage into uint16 in host code only, while for this target the kernel counts as
    device code, and its wrapper has no name for the type.
    """
    from tilelang.jit.adapter.wrapper import TLCPUSourceWrapper

    lower = sys.modules["tilelang.engine.lower"]
    original, types = lower._prepare_device_codegen_mod, TLCPUSourceWrapper._TYPE_MAP

    def prepare(module):
        return tvm.tirx.transform.BF16StorageLegalize()(original(module))

    lower._prepare_device_codegen_mod = prepare
    TLCPUSourceWrapper._TYPE_MAP = types | {"bfloat16": "uint16_t"}
    try:
        yield
    finally:
        lower._prepare_device_codegen_mod = original
        TLCPUSourceWrapper._TYPE_MAP = types

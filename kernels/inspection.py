"""What nvcc makes of a kernel: registers, spills, shared memory, instructions. Needs no GPU."""

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from dmuon_megatron.kernels.compile import cuda_source
from dmuon_megatron.kernels.config import SHARED_BYTES, Spec

EXPECTED = {"sm_80": ("HMMA", "LDGSTS"), "sm_90a": ("HGMMA", "UTMALDG")}
"""Instructions without which a kernel is slow: tensor cores, asynchronous copies."""


class Inspection(NamedTuple):
    """A compiled kernel.

    Attributes:
        registers: per thread.
        spill_bytes: of registers per thread that went to memory.
        shared_bytes: of shared memory per thread block, static and dynamic.
        instructions: how often each occurs; None where there is no disassembler.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    instructions: Counter[str] | None

    def faults(self, arch: str) -> list[str]:
        """What makes the kernel unfit for use; empty if nothing does."""
        found = []
        if self.spill_bytes:
            found.append(f"spills {self.spill_bytes} bytes of registers")
        if self.shared_bytes > SHARED_BYTES[arch]:
            found.append(f"needs {self.shared_bytes} bytes of shared memory")
        if self.instructions is not None:
            found += [f"has no {i}" for i in EXPECTED[arch] if not self.instructions[i]]
        return found


def inspect(spec: Spec) -> Inspection:
    """Compiles a kernel for its GPU architecture and looks at the result.

    Raises:
        RuntimeError: it cannot be compiled; with the compiler's last words.
    """
    try:
        source, dynamic = cuda_source(spec)
    except Exception as error:  # TileLang raises whatever its parts raise
        raise RuntimeError(f"kernel {spec.name} cannot be lowered: {error}") from error
    number = spec.arch.removeprefix("sm_")
    tilelang = Path(find_spec("tilelang").origin).parent
    with tempfile.TemporaryDirectory(prefix="dmuon-kernel-") as folder:
        code, binary = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        code.write_text(source)
        command = [
            nvcc(),
            *("-std=c++20", "-w", "-cubin", "--ptxas-options=-v"),
            *("-gencode", f"arch=compute_{number},code=sm_{number}"),
            f"-I{tilelang / 'src'}",
            f"-I{tilelang / '3rdparty/cutlass/include'}",
            *(str(code), "-o", str(binary)),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"nvcc fails on kernel {spec.name}: {done.stderr[-1000:]}")
        instructions = _instructions(binary)
    static = _figure(r"(\d+) bytes smem", done.stderr)
    return Inspection(
        registers=_figure(r"Used (\d+) registers", done.stderr),
        spill_bytes=_figure(r"(\d+) bytes spill stores", done.stderr),
        shared_bytes=static + dynamic,
        instructions=instructions,
    )


def nvcc() -> str:
    """Path of the CUDA compiler.

    Raises:
        RuntimeError: there is none.
    """
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None:
        raise RuntimeError("nvcc was not found: install the CUDA toolkit, or put it on PATH")
    return found


def _figure(pattern: str, text: str) -> int:
    return max((int(value) for value in re.findall(pattern, text)), default=0)


def _instructions(binary: Path) -> Counter[str] | None:
    """Opcodes of a cubin, without their modifiers."""
    disassembler = shutil.which("nvdisasm")
    triton = find_spec("triton")  # brings one along
    if disassembler is None and triton is not None:
        beside = Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm"
        disassembler = str(beside) if beside.exists() else None
    if disassembler is None:
        return None
    done = subprocess.run([disassembler, "-c", str(binary)], capture_output=True, text=True)
    if done.returncode:
        return None
    opcode = r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)"
    return Counter(re.findall(opcode, done.stdout, re.MULTILINE))

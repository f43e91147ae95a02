"""CUDA devices that are the CPU.

Two mechanisms.  A ``TorchFunctionMode`` sees every call into torch and turns each CUDA device it
names into the CPU; and the functions of ``torch.cuda`` that would ask a driver get answers.
"""

import contextlib
import os
import time
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
# Reported as the memory of the device; Megatron only prints it.
MEMORY_BYTES = 1 << 34


def _on_cpu(device):
    """The CPU for whatever names a CUDA device ("cuda", "cuda:1", an index), else what came."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
        return CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return CPU
    return device


def _itself(tensor, *_args, **_kwargs):
    return tensor


def _to(tensor, *args, **kwargs):
    return torch.Tensor.to(tensor, *map(_on_cpu, args[:1]), *args[1:], **kwargs)


def _type(tensor, dtype=None, *args, **kwargs):
    """Megatron's optimizers sort parameters by the string 'torch.cuda.FloatTensor' and its like."""
    if dtype is None:
        return torch.Tensor.type(tensor).replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return torch.Tensor.type(tensor, dtype, *args, **kwargs)


_HANDLERS = {
    torch.Tensor.cuda: _itself,
    torch.Tensor.pin_memory: _itself,
    torch.Tensor.to: _to,
    torch.Tensor.type: _type,
    # Megatron's token dispatcher brings its split sizes to the host only if they are on a device.
    torch.Tensor.is_cuda.__get__: lambda _tensor: True,
}


class CudaToCpu(TorchFunctionMode):
    """While entered, calls into torch that name a CUDA device use the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return _HANDLERS.get(func, func)(*args, **kwargs)


class Event:
    """A CUDA event on a device where everything has happened by the time it is recorded."""

    def __init__(self, *_args, **_kwargs):
        self._seconds = None

    def record(self, stream=None):
        self._seconds = time.perf_counter()

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, end):
        """Milliseconds from this event to ``end``, as for a CUDA event."""
        return 1e3 * (end._seconds - self._seconds)


class Stream:
    """A CUDA stream on a device that runs everything at once, in program order."""

    cuda_stream = 0

    def __init__(self, device=None, priority=0, **_kwargs):
        self.device, self.priority = CPU, priority

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    @staticmethod
    def priority_range():
        return (0, -1)


_DEFAULT_STREAM = Stream()
_streams = [_DEFAULT_STREAM]


class StreamContext(contextlib.ContextDecorator):
    """``torch.cuda.stream(stream)``: only ``current_stream()`` notices."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        _streams.append(self.stream or _streams[-1])
        return self.stream

    def __exit__(self, *_exc):
        _streams.pop()


class Device(contextlib.nullcontext):
    """``torch.cuda.device(index)``; a class, since torch tests for instances of it."""


class _Generators:
    """``torch.cuda.default_generators``: the CPU's generator under every index."""

    def __getitem__(self, _index):
        return torch.default_generator

    def __len__(self):
        return torch.cuda.device_count()


class _Zeros(dict):
    """``torch.cuda.memory_stats()``: zero for every statistic."""

    def __missing__(self, key):
        return 0


def _nothing(*_args, **_kwargs):
    return None


def _zero(*_args, **_kwargs):
    return 0


def _stubs() -> dict:
    """The replaced names of torch.cuda."""
    presence = {
        # One device for each local rank: megatron.training asserts that there are devices.
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        "current_device": lambda: int(os.environ.get("LOCAL_RANK", 0)),
        "set_device": _nothing,
        "device": Device,
        "get_device_name": lambda *_: "cpu",
        "get_device_capability": lambda *_: (8, 0),
        "get_device_properties": lambda *_: SimpleNamespace(
            name="cpu", major=8, minor=0, total_memory=MEMORY_BYTES, multi_processor_count=1
        ),
        "_lazy_init": _nothing,
        "_lazy_call": lambda call, **_: call(),
    }
    ordering = {
        "Stream": Stream,
        "Event": Event,
        "stream": StreamContext,
        "current_stream": lambda *_: _streams[-1],
        "default_stream": lambda *_: _DEFAULT_STREAM,
        "set_stream": lambda stream: _streams.__setitem__(-1, stream),
        "synchronize": _nothing,
        "is_current_stream_capturing": lambda: False,
    }
    # The device's generator is the CPU's, so that forking Megatron's random states really forks.
    random = {
        "default_generators": _Generators(),
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        "get_rng_state": lambda *_a, **_k: torch.get_rng_state(),
        "set_rng_state": lambda state, *_a, **_k: torch.set_rng_state(state),
    }
    memory = {
        "empty_cache": _nothing,
        "memory_allocated": _zero,
        "max_memory_allocated": _zero,
        "memory_reserved": _zero,
        "max_memory_reserved": _zero,
        "device_memory_used": _zero,
        "reset_peak_memory_stats": _nothing,
        "memory_stats": lambda *_: _Zeros(),
        "mem_get_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
    }
    return presence | ordering | random | memory


def install() -> None:
    """Map CUDA to the CPU in this process and thread, for good."""
    # Megatron wants it for tensor parallelism on a device.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Dynamo cannot trace the names replaced below.  This makes torch.compile return what it is
    # given, which is how Megatron writes its fusions.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # It notes some of these names when it is imported: let it have the real ones.
    import torch._dynamo

    stubs = _stubs()
    for name, value in stubs.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = stubs["get_rng_state"]
    torch.cuda.random.set_rng_state = stubs["set_rng_state"]
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = _zero
    # Its argument is parsed before any mode sees the call.
    torch.Tensor.record_stream = _nothing
    # Otherwise torch.optim asks the driver for a stream, and DataLoader pins memory.
    torch.accelerator.is_available = lambda: False

    # backward() is itself a call that the mode handles, and a mode is off within its own call: the
    # hooks and custom backward functions that run in there need it again.
    run_backward = torch.autograd._engine_run_backward

    def run_backward_on_cpu(*args, **kwargs):
        with CudaToCpu():
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = run_backward_on_cpu
    CudaToCpu().__enter__()

"""Run a function on several ranks, each a process with gloo initialised and Megatron imported.

    losses = run_ranks(train_a_little, 4, steps=5)

Ranks are forked from a server that has imported Megatron once (``preload``), so that they start in
milliseconds.  The function and its arguments are pickled: it is a module's top-level function.
"""

import ctypes
import faulthandler
import io
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 120.0
# After one rank has died or failed, how long the others may take to say what they saw.
GRACE_SECONDS = 5.0
# How long a rank that is done keeps its sockets open for peers that are not.
LINGER_SECONDS = 1.0
# What a rank needs in its environment before anything is imported.
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
}
# How much of a traceback is shown.
MOST_FRAMES = 40
STACK_SIGNAL = signal.SIGUSR1
# How gloo says that another rank has ended.
PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


@dataclass
class RankError:
    """How one rank failed.

    Attributes:
        rank: which one.
        kind: name of the exception's class, or "died" or "hung".
        kinds: names of the class and its bases, to match an expected exception.
        message: the exception's text.
        details: traceback, or the stacks of all the rank's threads.
    """

    rank: int
    kind: str
    message: str
    details: str = ""
    kinds: list[str] = field(default_factory=list)

    def __str__(self):
        first_line = self.message.partition("\n")[0]  # a traceback ends with all of it
        return f"rank {self.rank}: {self.kind}: {first_line}\n{self.details}".rstrip()


class RanksFailed(AssertionError):
    """At least one rank failed.  ``errors`` has a RankError for each, causes first."""

    def __init__(self, errors: list[RankError], world_size: int):
        self.errors = errors
        super().__init__(
            f"{len(errors)} of {world_size} ranks failed\n"
            + "\n".join(f"---- {error}" for error in errors)
        )


def run_ranks(fn, world_size: int, *args, timeout: float = TIMEOUT_SECONDS, **kwargs) -> list:
    """Call ``fn(*args, **kwargs)`` on every rank and return the results in rank order.

    Args:
        fn: a top-level function of a module.  In it ``torch.distributed`` is initialised, and its
            arguments, result and exceptions are its own; the result must be picklable.
        world_size: how many ranks.
        timeout: seconds after which ranks count as hung.  All of them are then killed, and the
            error shows where each one stood.

    Raises:
        RanksFailed: a rank raised, died or hung.
    """
    results, errors = _run(fn, world_size, args, kwargs, timeout)
    if errors:
        raise RanksFailed(errors, world_size)
    return results


def run_ranks_expecting_error(
    fn,
    world_size: int,
    *args,
    error: type[Exception] = Exception,
    timeout: float = TIMEOUT_SECONDS,
    **kwargs,
) -> list[str]:
    """Call ``fn`` on every rank, where every one must raise ``error``; return their messages.

    Raises:
        RanksFailed: a rank died, hung or raised something else.
        AssertionError: a rank returned.
    """
    _, errors = _run(fn, world_size, args, kwargs, timeout)
    if [e for e in errors if error.__name__ not in e.kinds]:
        raise RanksFailed(errors, world_size)
    failed = {e.rank: e.message for e in errors}
    returned = sorted(set(range(world_size)) - set(failed))
    assert not returned, f"ranks {returned} raised no {error.__name__}; the others: {failed}"
    return [failed[rank] for rank in range(world_size)]


# ---- in the test process ----


@contextmanager
def _environment(values: dict):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _server():
    """The context whose processes are forked from the server, started if it is not running."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness.preload"])
    # The server's own sys.path does not have what pytest or a test module added to ours.
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    with _environment({**SERVER_ENVIRONMENT, "PYTHONPATH": path}):
        multiprocessing.forkserver.ensure_running()
    return context


def _server_pid() -> int:
    return multiprocessing.forkserver._forkserver._forkserver_pid


def _run(fn, world_size, args, kwargs, timeout):
    from torch.distributed import TCPStore

    context = _server()
    # The store lives here, so that no rank's end takes it from the others.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    work = pickle.dumps((fn, args, kwargs))
    with tempfile.TemporaryDirectory(prefix="dmuon-ranks-") as folder:
        ranks = [
            _Rank(context, rank, world_size, store.port, work, folder) for rank in range(world_size)
        ]
        try:
            return _collect(ranks, timeout)
        finally:
            for rank in ranks:
                rank.end()


class _Rank:
    """One rank's process, as the test process sees it."""

    def __init__(self, context, rank, world_size, port, work, folder):
        self.rank = rank
        self.stacks = Path(folder) / f"stacks-{rank}"
        self.result, self.error = None, None
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_rank_main,
            args=(rank, world_size, port, work, str(self.stacks), theirs, _server_pid()),
            name=f"rank-{rank}",
        )
        self.process.start()
        theirs.close()

    @property
    def done(self):
        return self.result is not None or self.error is not None

    def read(self) -> None:
        """Take what the rank sent, or the news that it died."""
        try:
            message = self.pipe.recv_bytes() if self.pipe.poll() else None
        except (EOFError, ConnectionResetError):
            message = None
        if message is None:
            self.process.join(GRACE_SECONDS)
            code = self.process.exitcode
            how = (
                f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
            )
            self.error = RankError(self.rank, "died", f"ended by {how} before it had a result")
            return
        outcome = pickle.loads(message)
        if isinstance(outcome, RankError):
            self.error = outcome
        else:
            self.result = outcome

    def dump_stacks(self) -> None:
        if self.process.is_alive():
            os.kill(self.process.pid, STACK_SIGNAL)

    def hung(self, seconds: float) -> None:
        stacks = self.stacks.read_text() if self.stacks.exists() else ""
        self.error = RankError(
            self.rank,
            "hung",
            f"no result after {seconds:.1f} s; its stacks, latest call first:",
            stacks,
        )

    def end(self) -> None:
        """Let a rank that is done go, and kill any other."""
        if self.done and self.process.is_alive():
            with suppress(OSError):
                self.pipe.send_bytes(b"go")
            self.process.join(LINGER_SECONDS)
        self.pipe.close()
        self.process.kill()
        # And whatever it has started: it leads a process group.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.process.close()


def _collect(ranks, timeout):
    """Wait for all ranks; returns (results in rank order, errors with their causes first)."""
    start = time.monotonic()
    deadline = start + timeout
    errors = []
    while waiting := [rank for rank in ranks if not rank.done]:
        by_handle = {rank.pipe: rank for rank in waiting}
        left = deadline - time.monotonic()
        ready = multiprocessing.connection.wait(list(by_handle), max(left, 0))
        for handle in ready:
            rank = by_handle[handle]
            rank.read()
            if rank.error:
                errors.append(rank.error)
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if not ready and time.monotonic() >= deadline:
            for rank in waiting:
                rank.dump_stacks()
            time.sleep(0.5)  # for the dumps to be written
            for rank in waiting:
                rank.hung(time.monotonic() - start)
                errors.append(rank.error)
    # Stable: in order of arrival, with what only followed from another rank's end put last.
    errors.sort(key=lambda error: any(text in error.message for text in PEER_IS_GONE))
    return [rank.result and rank.result[0] for rank in ranks], errors


# ---- in a rank ----


def _end_with_server(server: int) -> None:
    """Have the kernel kill this process with the server, which ends with the test process."""
    # The server stays as long as anybody holds this pipe open.  The test process alone should.
    os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)
    multiprocessing.forkserver._forkserver._forkserver_alive_fd = None
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)


def _rank_main(rank, world_size, port, work, stacks, pipe, server):
    os.setpgid(0, 0)
    _end_with_server(server)
    with Path(stacks).open("w") as file:
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
        try:
            _start(rank, world_size, port)
            fn, args, kwargs = pickle.loads(work)
            message = _pickled((fn(*args, **kwargs),))
            code = 0
        except BaseException as error:
            message, code = _pickled(_described(rank, error)), 1
        with suppress(OSError, EOFError):
            pipe.send_bytes(message)
            # Closing the sockets now could fail peers that still read from them.
            if pipe.poll(LINGER_SECONDS if code else None):
                pipe.recv_bytes()
        sys.stdout.flush()
        sys.stderr.flush()
        # Nothing here needs the interpreter's teardown, and a process group's can hang.
        os._exit(code)


def _start(rank, world_size, port):
    import torch
    import torch.distributed as dist

    import tests.harness.preload  # noqa: F401  there already, unless it failed in the server

    warnings.simplefilter("ignore")  # Megatron's, many and the same on every rank
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    # Hangs are reported from outside, with stacks, before gloo loses its patience.
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(hours=1)
    )


class _Pickler(pickle.Pickler):
    """Sends tensors as plain values.

    Torch's ways would be shared memory, which dies with the rank, or a function that Megatron has
    replaced by its own, which would bring Megatron into the test process.
    """

    def reducer_override(self, obj):
        import torch

        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        values = obj.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return _tensor, (values, obj.dtype, tuple(obj.shape))


def _tensor(values: bytes, dtype, shape: tuple):
    import torch

    if not values:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(values), dtype=dtype).view(shape)


def _pickled(outcome: Any) -> bytes:
    import torch

    file = io.BytesIO()
    with torch._C.DisableTorchFunction():
        _Pickler(file).dump(outcome)
    return file.getvalue()


def _described(rank: int, error: BaseException) -> RankError:
    return RankError(
        rank,
        type(error).__name__,
        str(error),
        "".join(traceback.format_exception(error, limit=-MOST_FRAMES)),
        [base.__name__ for base in type(error).__mro__],
    )

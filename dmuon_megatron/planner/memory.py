"""How many bytes of optimizer state each rank may own."""

import numpy as np

from dmuon_megatron.planner.problem import Problem

RELAXATION = 1.05
"""Factor by which a bound that no assignment meets is widened, time after time."""


def memory_caps(problem: Problem, memory_limit: float | None) -> np.ndarray:
    """Bytes each rank may own, int64 (ranks,).

    A worker's own `memory` is taken as it is. The others may own `memory_limit` times the average,
    or the largest matrix if that is more.

    Args:
        memory_limit: Factor on the average; None: no bound.

    Raises:
        ValueError: `memory_limit` is below one, a matrix fits no worker, or all workers together
            are too small.
    """
    if memory_limit is not None and not memory_limit >= 1:
        raise ValueError(f"memory_limit must be at least 1 (times the average), got {memory_limit}")
    total = int(problem.state_bytes @ problem.counts)
    largest = int(problem.state_bytes.max(initial=0))
    if memory_limit is None:
        shared = total
    else:
        shared = max(int(memory_limit * total / problem.ranks), largest)
    caps = [shared if w.memory is None else int(w.memory) for w in problem.workers]
    if max(caps) < largest:
        kind = max(problem.kinds, key=lambda kind: kind.state_bytes)
        raise ValueError(
            f"matrix {kind.tasks[0].name!r} needs {largest} bytes of optimizer state, but the "
            f"largest worker memory is {max(caps)} bytes; raise Worker.memory or shard the model"
        )
    if all(w.memory is not None for w in problem.workers) and sum(caps) < total:
        raise ValueError(
            f"the matrices need {total} bytes of optimizer state, but all workers together have "
            f"{sum(caps)} bytes; raise Worker.memory or use more ranks"
        )
    return np.array(caps, dtype=np.int64)


def relaxed(caps: np.ndarray) -> np.ndarray:
    """The caps widened by one step."""
    return np.ceil(caps * RELAXATION).astype(np.int64)

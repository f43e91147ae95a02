"""Matrices from a file or a checkpoint, for models that are not in the catalogue."""

import csv
import json
import math
import re
from pathlib import Path

from dmuon_megatron.planner.task import MatrixTask

COLUMNS = ("name", "rows", "cols", "count")


def read_shapes(path: str | Path) -> list[MatrixTask]:
    """Matrices listed in a file as name, rows, cols, count.

    A file called *.json holds a list of objects with these keys, any other one line per shape with
    commas between; a first line with the names and lines that start with # are left out. `count`
    may be missing and is 1 then. Shapes of equal count are taken as one layer's, so that matrix i
    of each of them is in the same bucket.

    Raises:
        ValueError: The file cannot be read, is empty, or a line is wrong; with file and line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--shapes {path}: cannot be read: {error}") from error
    tasks = []
    for place, row in _rows(path, text):
        name = str(row.get("name") or "").strip()
        try:
            rows, cols = int(row["rows"]), int(row["cols"])
            count = int(row.get("count", 1))
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"{place}: expected name, rows, cols, count with whole numbers, got {dict(row)}"
            ) from None
        if not name or min(rows, cols, count) < 1:
            raise ValueError(
                f"{place}: expected a name and positive rows, cols and count, got {dict(row)}"
            )
        tasks += [MatrixTask(f"{name}.{i}", rows, cols, bucket=i) for i in range(count)]
    if not tasks:
        raise ValueError(f"--shapes {path}: no shapes in it")
    return tasks


def _rows(path: Path, text: str):
    """(place, values by column name) of each shape of the file."""
    if path.suffix == ".json":
        try:
            listed = json.loads(text)
        except ValueError as error:
            raise ValueError(f"--shapes {path}: not JSON: {error}") from error
        if not isinstance(listed, list) or not all(isinstance(row, dict) for row in listed):
            raise ValueError(f"--shapes {path}: expected a list of objects with {COLUMNS}")
        for number, row in enumerate(listed, 1):
            yield f"--shapes {path}, entry {number}", row
        return
    for number, values in enumerate(csv.reader(text.splitlines(), skipinitialspace=True), 1):
        if not values or values[0].startswith("#") or tuple(values[:3]) == COLUMNS[:3]:
            continue
        if not 3 <= len(values) <= 4:
            raise ValueError(
                f"--shapes {path}, line {number}: expected name, rows, cols, count, got {values}"
            )
        yield f"--shapes {path}, line {number}", dict(zip(COLUMNS, values, strict=False))


# What Adam updates, by name; and everything that is no weight of the model.
_NO_MATRIX = re.compile(r"embedding|output_layer|^(optimizer|rng|rerun|common|_)|_extra_state")
_TRACKER = "latest_checkpointed_iteration.txt"


def read_checkpoint(path: str | Path) -> list[MatrixTask]:
    """Matrices of a model that Megatron saved with --ckpt-format torch_dist.

    Only the index is read. Megatron stacks the layers' equal tensors, and experts', into one of
    more dimensions; matrix i of a stack is taken as layer i's. Fused weights count as one
    Newton-Schulz problem each: the index does not tell how they are fused.

    Args:
        path: The folder of one iteration, or the one above it that Megatron's --save names.

    Raises:
        ValueError: There is no such checkpoint, or no matrix in it.
    """
    from torch.distributed.checkpoint import FileSystemReader

    path = Path(path)
    folder = path
    if (path / _TRACKER).is_file():
        iteration = (path / _TRACKER).read_text().strip()
        folder = path / (f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration)
    try:
        entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:
        raise ValueError(
            f"--checkpoint {path}: no torch_dist checkpoint can be read in {folder}: {error}"
        ) from error
    tasks = []
    for name, entry in entries.items():
        shape = tuple(getattr(entry, "size", ()))
        if _NO_MATRIX.search(name) or len(shape) < 2:
            continue
        layer = re.search(r"\blayers\.(\d+)?", name)
        by_layer = layer is not None and layer[1] is None
        by_expert = re.search(r"\bexperts\b", name) is not None
        stacked = len(shape) - 2
        if stacked != by_layer + by_expert and (by_layer or stacked):
            continue  # a vector of each layer, a convolution, ...
        copies = math.prod(shape[:-2])
        for i in range(copies):
            if by_layer:
                number = i // math.prod(shape[1:-2])
            else:
                number = int(layer[1]) if layer else 0
            tasks.append(MatrixTask(f"{name}.{i}", *shape[-2:], bucket=number))
    if not tasks:
        raise ValueError(f"--checkpoint {path}: no matrix in it")
    return tasks

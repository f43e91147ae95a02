"""Matrices from a file, for models that are not in the catalogue."""

import csv
import json
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

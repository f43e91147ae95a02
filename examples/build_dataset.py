"""Builds a Megatron indexed dataset from the sources of the Python standard library.

Real text that every machine has, one token a byte, one document a file:

    python examples/build_dataset.py data/stdlib
    python examples/pretrain_gpt.py --data-path data/stdlib \\
        --tokenizer-type NullTokenizer --vocab-size 256 ...

Megatron's NullTokenizer works offline and takes its last id, 255, for the end of a document. The
byte 255 never occurs in UTF-8, so the vocabulary is exactly 256.
"""

import argparse
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCAB_SIZE = 256
END_OF_DOCUMENT = VOCAB_SIZE - 1
# Enough for the quick start to see no byte twice, small enough to be built within a second.
DEFAULT_BYTES = 8 * 2**20


def stdlib_sources() -> list[Path]:
    """The standard library's modules, in an order that depends on their names alone.

    Test suites are left out (a third of the text, and repetitive). Sorting by a hash of the name
    mixes the packages, so that a cut anywhere, by size or into training and validation, leaves
    both sides with text of the same kind.
    """
    root = Path(sysconfig.get_path("stdlib"))
    unwanted = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    names = [
        path.relative_to(root)
        for path in root.rglob("*.py")
        if not unwanted & set(path.relative_to(root).parts)
    ]
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    return [root / name for name in names]


def documents(sources: list[Path], max_bytes: int) -> Iterator[np.ndarray]:
    """uint8 arrays, each one UTF-8 file and its end-of-document mark, `max_bytes` in all at most.

    Empty files, files that are not UTF-8 and files that no longer fit are passed over.
    """
    total = 0
    for path in sources:
        text = path.read_bytes()
        try:
            text.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if not text or total + len(text) + 1 > max_bytes:
            continue
        total += len(text) + 1
        yield np.append(np.frombuffer(text, dtype=np.uint8), np.uint8(END_OF_DOCUMENT))


def build(prefix: Path, max_bytes: int = DEFAULT_BYTES) -> tuple[int, int]:
    """Writes `prefix`.bin and `prefix`.idx.

    Args:
        prefix: path without suffix, as `--data-path` takes it; its folder is created.
        max_bytes: size limit of the text, end-of-document marks included.

    Returns:
        the number of documents and of tokens

    Raises:
        ValueError: no source file fits, or this Python ships without its library's sources.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import (
        DType,
        IndexedDatasetBuilder,
        get_bin_path,
        get_idx_path,
    )

    prefix.parent.mkdir(parents=True, exist_ok=True)
    dtype = DType.optimal_dtype(VOCAB_SIZE)
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=dtype)
    count = tokens = 0
    for document in documents(stdlib_sources(), max_bytes):
        builder.add_document(torch.from_numpy(document.astype(dtype)), [len(document)])
        count += 1
        tokens += len(document)
    if not count:
        raise ValueError(
            f"no Python source of at most {max_bytes} bytes in {sysconfig.get_path('stdlib')}; "
            "raise --max-bytes or use a Python that ships its sources"
        )
    builder.finalize(get_idx_path(str(prefix)))
    return count, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prefix", type=Path, help="output path without .bin and .idx")
    parser.add_argument(
        "--max-bytes",
        type=int,
        default=DEFAULT_BYTES,
        help="size limit of the text (default: %(default)s)",
    )
    args = parser.parse_args()
    try:
        count, tokens = build(args.prefix, args.max_bytes)
    except ValueError as error:
        sys.exit(f"build_dataset: {error}")
    print(f"{args.prefix}.bin/.idx: {count} files of the standard library, {tokens} byte tokens")


if __name__ == "__main__":
    main()

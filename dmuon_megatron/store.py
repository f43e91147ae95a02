"""One place on disk for what is found out about a device: measured costs and tuned kernels.

Every key (device, versions, method, ...) has a file of its own, written whole beside the old one
and moved over it, so that readers see the old or the new content, never a part. Whatever goes
wrong with the disk costs only the memory of earlier runs: the store then acts as if it were empty,
repairs the file at the next write if it can, and says so once.
"""

import contextlib
import hashlib
import json
import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

VERSION = 1
"""Format of the files; files of another version are never read."""

ATTEMPTS = 4
"""Tries of a file operation: network file systems fail now and then with ESTALE or EBUSY."""

PAUSE = 0.02
"""Seconds before the second try; doubled for each further one."""

LOCK_SECONDS = 10.0
"""Longest wait for other writers; after it the file is written without the lock.

The lock only keeps two writers from losing each other's entries; files are whole without it.
"""

DIRECTORY_VARIABLE = "DMUON_CACHE_DIR"
"""Environment variable that moves the store."""


class StoreWarning(UserWarning):
    """The store is damaged or cannot be used; the program goes on without it."""


def default_directory() -> Path:
    """The user's cache directory for this package, or what DMUON_CACHE_DIR says."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen:
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("dmuon-megatron", appauthor=False))


@contextlib.contextmanager
def locked(path: str | Path, seconds: float) -> Iterator[None]:
    """Holds off other processes that ask for the same lock file.

    After `seconds`, or where locks do not work, it goes on without: what is done under it must be
    right without it, too.
    """
    import filelock

    lock = filelock.FileLock(path, timeout=seconds)
    try:
        lock.acquire()
    except (OSError, filelock.Timeout, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.release()


class Store:
    """Entries by key, kept between runs.

    Args:
        directory: Where the files are; default :func:`default_directory`. It need not exist.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = default_directory() if directory is None else Path(directory)
        self._said: set[str] = set()

    def path(self, kind: str, key: Mapping[str, Any]) -> Path:
        """File of a key.

        Args:
            kind: What is stored, for instance "cost"; letters, digits and dashes.
            key: JSON values that say what the entries hold for. Every value counts.
        """
        digest = hashlib.sha256(_text(key).encode()).hexdigest()[:24]
        return self.directory / f"v{VERSION}" / f"{kind}-{digest}.json"

    def load(self, kind: str, key: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of a key by name; empty if there are none or they cannot be read.

        Warns:
            StoreWarning: The file exists but cannot be read or is damaged; once per store.
        """
        path = self.path(kind, key)
        try:
            text = _persistently(lambda: path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            self._say("read", f"{path} cannot be read ({error}); going on without it")
            return {}
        entries = _entries(text, key)
        if entries is None:
            self._say("damage", f"{path} is damaged; it will be written anew")
            return {}
        return entries

    def update(
        self, kind: str, key: Mapping[str, Any], entries: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Adds entries to a key, over those of the same names, and keeps all others.

        Args:
            entries: JSON values by name.

        Returns:
            All entries of the key. If the disk cannot be written they are still returned.

        Raises:
            TypeError: A value is not JSON.

        Warns:
            StoreWarning: The store cannot be written; once per store.
        """
        path = self.path(kind, key)
        _text(dict(entries))
        try:
            _persistently(lambda: path.parent.mkdir(parents=True, exist_ok=True))
            with locked(f"{path}.lock", LOCK_SECONDS):
                merged = self.load(kind, key) | dict(entries)
                content = {"version": VERSION, "key": dict(key), "entries": merged}
                content["checksum"] = _checksum(merged)
                _persistently(lambda: _replace(path, _text(content)))
        except OSError as error:
            self._say(
                "write", f"{self.directory} cannot be written ({error}); results are not kept"
            )
            return self.load(kind, key) | dict(entries)
        return merged

    def _say(self, topic: str, message: str) -> None:
        """Warns once about each topic."""
        if topic not in self._said:
            self._said.add(topic)
            warnings.warn(f"dmuon-megatron's store: {message}", StoreWarning, stacklevel=3)


def _text(value: Any) -> str:
    """JSON in one spelling."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _checksum(entries: Mapping[str, Any]) -> str:
    """Guards against files that are JSON by accident."""
    return hashlib.sha256(_text(entries).encode()).hexdigest()[:16]


def _entries(text: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """Entries of a file, or None if it is damaged or of another key."""
    try:
        content = json.loads(text)
        entries = content["entries"]
        good = (
            isinstance(entries, dict)
            and content["version"] == VERSION
            and _text(content["key"]) == _text(key)
            and content["checksum"] == _checksum(entries)
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return entries if good else None


def _replace(path: Path, text: str) -> None:
    """Writes a file beside the path and moves it there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _persistently[T](operation: Callable[[], T]) -> T:
    """Repeats a file operation that fails, after growing pauses; the last failure is raised.

    A file that is not there stays so: that is an answer, except where a network file system says
    so of a file it has just replaced, so it is asked once more.
    """
    for attempt in range(ATTEMPTS):
        try:
            return operation()
        except FileNotFoundError:
            if attempt:
                raise
        except OSError:
            if attempt == ATTEMPTS - 1:
                raise
        time.sleep(PAUSE * 2**attempt)
    raise AssertionError("unreachable: the last attempt returns or raises")

"""The on-disk store: whole files, many writers, and disks that do not work."""

import errno
import json
import multiprocessing
import os
import random
import warnings
from pathlib import Path

import pytest

from dmuon_megatron import store as store_module
from dmuon_megatron.store import Store, StoreWarning

KEY = {"device": "H100", "torch": "2.14", "method": "gram", "dtype": "float16"}


def silent(function, *arguments):
    """Calls a function that must not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*arguments)


def test_entries_outlive_the_process_and_add_up(tmp_path):
    assert silent(Store(tmp_path).load, "cost", KEY) == {}
    assert silent(Store(tmp_path).update, "cost", KEY, {"a": 1, "b": 2}) == {"a": 1, "b": 2}
    assert silent(Store(tmp_path).update, "cost", KEY, {"b": 3, "c": 4}) == {"a": 1, "b": 3, "c": 4}
    assert silent(Store(tmp_path).load, "cost", KEY) == {"a": 1, "b": 3, "c": 4}


@pytest.mark.parametrize("name", list(KEY))
def test_every_part_of_the_key_tells_entries_apart(tmp_path, name):
    store = Store(tmp_path)
    store.update("cost", KEY, {"a": 1})
    assert store.load("cost", {**KEY, name: "other"}) == {}
    assert store.load("kernel", KEY) == {}
    assert store.load("cost", dict(reversed(KEY.items()))) == {"a": 1}


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "\x00" * len(text),
        lambda text: text.replace('"a":1', '"a":7'),
        lambda text: text.replace('"version":1', '"version":99'),
        lambda text: text.replace("H100", "A100"),
        lambda text: "[1, 2]",
        lambda text: "[" * 100_000,
    ],
    ids=["empty", "truncated", "zeros", "flipped", "version", "key", "list", "deep"],
)
def test_a_damaged_file_counts_as_empty_is_said_once_and_repaired(tmp_path, damage):
    store = Store(tmp_path)
    store.update("cost", KEY, {"a": 1})
    path = store.path("cost", KEY)
    path.write_text(damage(path.read_text()))
    with pytest.warns(StoreWarning, match="damaged") as caught:
        assert store.load("cost", KEY) == {}
        assert store.load("cost", KEY) == {}
        assert store.update("cost", KEY, {"b": 2}) == {"b": 2}
    assert len(caught) == 1
    assert silent(Store(tmp_path).load, "cost", KEY) == {"b": 2}


def test_a_file_that_is_not_text_counts_as_damaged(tmp_path):
    store = Store(tmp_path)
    store.update("cost", KEY, {"a": 1})
    store.path("cost", KEY).write_bytes(b"\xff\xfe\x00")
    with pytest.warns(StoreWarning):
        assert store.load("cost", KEY) == {}


def test_an_unreadable_file_is_said_once(tmp_path):
    store = Store(tmp_path)
    store.path("cost", KEY).mkdir(parents=True)
    with pytest.warns(StoreWarning) as caught:
        assert store.load("cost", KEY) == {}
        assert store.load("cost", KEY) == {}
    assert len(caught) == 1


def test_a_store_that_cannot_be_written_keeps_nothing_and_says_so_once(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    store = Store(blocked / "cache")
    with pytest.warns(StoreWarning) as caught:
        assert store.update("cost", KEY, {"a": 1}) == {"a": 1}
        assert store.update("cost", KEY, {"b": 2}) == {"b": 2}
    assert sum("written" in str(w.message) for w in caught) == 1


def test_a_read_only_store_still_gives_what_it_holds(tmp_path, monkeypatch):
    Store(tmp_path).update("cost", KEY, {"a": 1})

    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, "read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    store = Store(tmp_path)
    with pytest.warns(StoreWarning, match="cannot be written"):
        assert store.update("cost", KEY, {"b": 2}) == {"a": 1, "b": 2}
    assert silent(store.load, "cost", KEY) == {"a": 1}
    assert not list(tmp_path.glob("**/.*json*")), "a temporary file was left"


def test_locks_that_do_not_work_are_done_without(tmp_path, monkeypatch):
    filelock = pytest.importorskip("filelock")

    def refuse(self, *arguments, **options):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    store = Store(tmp_path)
    assert silent(store.update, "cost", KEY, {"a": 1}) == {"a": 1}
    assert silent(store.load, "cost", KEY) == {"a": 1}


def test_values_that_are_not_json_are_refused_before_anything_is_written(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(TypeError):
        store.update("cost", KEY, {"a": object()})
    with pytest.raises(ValueError, match="JSON"):
        store.update("cost", KEY, {"a": float("nan")})
    assert not list(tmp_path.iterdir())


def test_the_environment_moves_the_store(tmp_path, monkeypatch):
    monkeypatch.setenv("DMUON_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert Store().directory == tmp_path / "elsewhere"
    monkeypatch.delenv("DMUON_CACHE_DIR")
    assert "dmuon-megatron" in str(Store().directory)


def _write_many(directory, worker, flaky):
    """Adds ten entries one by one, on a disk that fails at random if `flaky`."""
    if flaky:
        store_module.PAUSE = 1e-4
        store_module.ATTEMPTS = 30
        dice = random.Random(worker)
        real_replace, real_read = os.replace, Path.read_text

        def fail():
            if dice.random() < 0.3:
                code = dice.choice([errno.ESTALE, errno.EBUSY, errno.ENOENT])
                raise OSError(code, os.strerror(code))

        def replace(*arguments, **options):
            fail()
            return real_replace(*arguments, **options)

        def read_text(self, *arguments, **options):
            fail()
            return real_read(self, *arguments, **options)

        os.replace, Path.read_text = replace, read_text
        warnings.simplefilter("ignore", StoreWarning)
    store = Store(directory)
    for i in range(10):
        merged = store.update("cost", KEY, {f"{worker}.{i}": i})
        assert merged[f"{worker}.{i}"] == i


@pytest.mark.parametrize("flaky", [False, True])
def test_many_writers_leave_a_whole_file(tmp_path, flaky):
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_write_many, args=(tmp_path, worker, flaky)) for worker in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 8
    entries = silent(Store(tmp_path).load, "cost", KEY)
    if not flaky:
        assert len(entries) == 80
    assert all(value == int(name.split(".")[1]) for name, value in entries.items())
    json.loads(Store(tmp_path).path("cost", KEY).read_text())

"""A1: batches of small files: few requests, and the answers that opening each would give."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slicefs.client.client import Client
from tests.posix.volumes import Volume, new_volume

COUNT = 300
BATCH = 100


@pytest.fixture
def on_redis(redis_url: str, tmp_path: Path) -> Iterator[Volume]:
    """A volume on Redis, clean in the end."""
    with new_volume(tmp_path / "vol", redis_url) as made:
        yield made


def fill(fs: Client, count: int = COUNT) -> dict[str, bytes]:
    """Files in three directories, of which one has a name that is no UTF-8."""
    made = {}
    for number in range(count):
        path = f"set/{number % 3}/{number:04}" + ("\udcff" if number == 7 else "")
        fs.makedirs(os.path.dirname(path), exist_ok=True)
        made[path] = b"%d" % number * (number % 40)
        with fs.open(path, "wb") as file:
            file.write(made[path])
    return made


def counted(fs: Client, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The verbs by which this thread asks the store from here on; background work is others'."""
    calls: list[str] = []
    here = threading.get_ident()
    store = fs.connection().meta.store

    def count(name: str) -> None:
        verb = getattr(store, name)

        def counting(*words: object) -> object:
            if threading.get_ident() == here:
                calls.append(name)
            return verb(*words)

        monkeypatch.setattr(store, name, counting)

    for name in ("read", "read_many", "read_linked", "read_rows", "read_short_rows", "scan"):
        count(name)
    return calls


def test_a_batch_asks_twice_and_what_is_known_not_at_all(
    on_redis: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(on_redis.meta, uid=0, gid=0) as fs:
        made = fill(fs)
    names = list(made)
    with Client(on_redis.meta, uid=0, gid=0) as fs:
        for folder in (0, 1, 2) * 2:  # what a first look-up brings is not vouched for
            fs.listdir(f"set/{folder}")
            fs.stat(f"set/{folder}")
        calls = counted(fs, monkeypatch)
        for begin in range(0, COUNT, BATCH):
            batch = names[begin : begin + BATCH]
            assert [bytes(each) for each in fs.read_many(batch)] == [made[n] for n in batch]
        # names are known from the listing, and inodes come many in one request
        assert calls == ["read_many"] * (COUNT // BATCH)
        assert [bytes(each) for each in fs.read_many(names)] == list(made.values())
        assert calls == ["read_many"] * (COUNT // BATCH)
        with Client(on_redis.meta, uid=0, gid=0) as other:
            with other.open(names[5], "wb") as file:
                file.write(b"anew" * 99)
            other.remove(names[6])
        assert bytes(fs.read_many([names[4], names[5]])[1]) == b"anew" * 99
        with pytest.raises(FileNotFoundError) as caught:
            fs.read_many(names)
        assert caught.value.filename == names[6]


def test_batches_see_what_is_written_here_and_not_stored(fs: Client) -> None:
    made = fill(fs, 12)
    names = list(made)
    with fs.open(names[3], "r+b", buffering=0) as file:
        file.seek(2)
        file.write(b"XYZ")  # not committed before `close`
        found = [bytes(each) for each in fs.read_many(names)]
    assert found[3] == b"33XYZ"
    assert found[4:] == list(made.values())[4:]


def test_batches_of_all_kinds_are_as_one_by_one(fs: Client) -> None:
    made = fill(fs, 8)
    with fs.open("long", "wb") as file:  # two blocks
        file.write(bytes(5 << 20))
        file.write(b"end")
    with fs.open("sparse", "wb") as file:
        file.seek(100)
        file.write(b"data")
    for part in (b"one", b"two"):
        with fs.open("appended", "ab") as file:  # two slices
            file.write(part)
    fs.symlink("set/1/0004", "link")
    fs.truncate("set/2/0005", 3)
    items = [*made, "long", "sparse", "appended", "link", "set/../set/1/0004", "/set/1/0004"]
    one_by_one = []
    for item in items:
        with fs.open(item, "rb") as file:
            one_by_one.append(file.read())
    assert [bytes(each) for each in fs.read_many(items)] == one_by_one
    parts = [("long", 4 << 20, -1), ("long", 1, 2), ("set/1/0004", 1, 3), ("set/1/0004", 90, 99)]
    assert [len(each) for each in fs.read_many(parts)] == [(1 << 20) + 3, 1, 2, 0]
    with pytest.raises(IsADirectoryError):
        fs.read_many([*made, "set"])


def test_batches_are_judged_for_the_caller(fs: Client, as_user: Callable[[int], Client]) -> None:
    made = fill(fs, 6)
    user = as_user(1000)
    assert [bytes(each) for each in user.read_many(list(made))] == list(made.values())
    fs.chmod("set/1/0004", 0o600)
    with pytest.raises(PermissionError) as caught:
        user.read_many(list(made))
    assert caught.value.filename == "set/1/0004"
    fs.chmod("set/1/0004", 0o644)
    fs.chmod("set/2", 0o644)  # which may be listed, and not searched
    with pytest.raises(PermissionError):
        user.read_many(list(made))

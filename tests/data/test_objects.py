"""Object stores: one contract for memory, directory and wrappers; then what is each one's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdata.obj_file import TMP_AGE_NS, TMP_DIR, FileObjects, _write_all
from fsdata.obj_mem import MemObjects
from fsdata.objects import ObjectInfo, ObjectStore, check_usable
from fsdata.wrap import Backoff, Metered, Prefixed, Retrying
from fsmeta.errors import ConfigError, ObjectMissing, Unavailable
from fsmeta.runtime import SystemRuntime
from tests.data.faults import FaultyObjects, no_space

RUNTIME = SystemRuntime()


class Clock(SystemRuntime):
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0.0
        self.slept: list[float] = []
        self.monotonic = lambda: self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds
        self.slept.append(seconds)


@pytest.fixture(params=["mem", "file", "prefixed", "metered", "retrying", "faulty"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    mem = MemObjects(RUNTIME)
    made: dict[str, ObjectStore] = {
        "mem": mem,
        "file": FileObjects(RUNTIME, str(tmp_path / "made" / "here")),
        "prefixed": Prefixed(mem, "volume/"),
        "metered": Metered(RUNTIME, mem),
        "retrying": Retrying(RUNTIME, mem),
        "faulty": FaultyObjects(RUNTIME, mem),
    }
    yield made[request.param]
    made[request.param].close()


def test_put_get_delete(store: ObjectStore) -> None:
    store.put("a/b/one", (b"he", bytearray(b"ll"), memoryview(b"o")))
    assert store.get("a/b/one") == b"hello"
    assert store.get("a/b/one", 1, 3) == b"el"
    assert store.get("a/b/one", 3) == b"lo"
    assert store.get("a/b/one", 3, 99) == b"lo"
    assert store.get("a/b/one", 9, 99) == b""
    store.put("a/b/one", (b"again",))
    assert store.get("a/b/one") == b"again"
    store.delete("a/b/one")
    store.delete("a/b/one")
    with pytest.raises(ObjectMissing):
        store.get("a/b/one")
    with pytest.raises(ObjectMissing):
        store.get_into("a/b/one", (memoryview(bytearray(9)),))
    assert store.head("a/b/one") is None


def test_get_into(store: ObjectStore) -> None:
    store.put("k", (b"0123456789",))
    front, rest = bytearray(4), bytearray(9)
    assert store.get_into("k", (memoryview(front), memoryview(rest))) == 10
    assert front + rest == b"0123456789\0\0\0"
    assert store.get_into("k", (memoryview(front),)) == 4


def test_head_and_list(store: ObjectStore) -> None:
    keys = ["a.b", "a/b", "a/c/d", "a0", "b/1", "b/10", "b/2"]
    for key in reversed(keys):
        store.put(key, (key.encode(),))
    assert [info.key for info in store.list("")] == keys
    assert [info.key for info in store.list("a")] == ["a.b", "a/b", "a/c/d", "a0"]
    assert [info.key for info in store.list("a/c")] == ["a/c/d"]
    assert [info.key for info in store.list("b/1")] == ["b/1", "b/10"]
    assert list(store.list("z")) == []
    head = store.head("a/c/d")
    assert head == next(store.list("a/c"))
    assert head is not None
    assert (head.key, head.size) == ("a/c/d", 5)
    assert abs(head.mtime_ns - RUNTIME.now_ns()) < 60 * 10**9
    store.sync(["a/c/d", "b/1"])
    store.sync(["gone/since"])


def test_a_good_store_is_usable(store: ObjectStore) -> None:
    check_usable(store)
    assert list(store.list("")) == []


def test_a_bad_store_is_not_usable() -> None:
    bad = FaultyObjects(RUNTIME, MemObjects(RUNTIME))
    bad.fail("put", 1)
    with pytest.raises(ConfigError, match="can't be written"):
        check_usable(bad)
    bad.flip_at = 5
    with pytest.raises(ConfigError, match="read back"):
        check_usable(bad)


def test_directory_hides_and_sweeps_temporary_files(tmp_path: Path) -> None:
    store = FileObjects(RUNTIME, str(tmp_path))
    store.put("x/y", (b"data",))
    old, new = tmp_path / TMP_DIR / "old", tmp_path / TMP_DIR / "new"
    old.write_bytes(b"torn")
    new.write_bytes(b"torn")
    past_ns = RUNTIME.now_ns() - 2 * TMP_AGE_NS
    os.utime(old, ns=(past_ns, past_ns))
    assert [info.key for info in store.list("")] == ["x/y"]
    FileObjects(RUNTIME, str(tmp_path))
    assert os.listdir(tmp_path / TMP_DIR) == ["new"]


def test_directory_writes_many_pieces(tmp_path: Path) -> None:
    store = FileObjects(RUNTIME, str(tmp_path))
    pieces = [b"%d," % n for n in range(3000)]
    store.put("k", pieces)
    assert store.get("k") == b"".join(pieces)
    assert os.listdir(tmp_path / TMP_DIR) == []


def test_directory_reports_trouble_as_unavailable(tmp_path: Path) -> None:
    store = FileObjects(RUNTIME, str(tmp_path / "root"))
    store.put("folder/k", (b"",))
    for broken in (
        lambda: store.put("folder/k/below", (b"",)),
        lambda: store.get("folder/k/below"),
        lambda: store.get("folder"),
        lambda: store.delete("folder"),
    ):
        with pytest.raises(Unavailable):
            broken()
    for key in ("../k", "/k", ".tmp/k", "a/../k"):
        with pytest.raises(ValueError, match="object key"):
            store.get(key)
    with pytest.raises(ConfigError, match="name a directory"):
        FileObjects(RUNTIME, str(tmp_path / "root" / "folder" / "k"))


def test_a_directory_that_has_gone_away(tmp_path: Path) -> None:
    """A put once said ObjectMissing, and a delete that there was nothing left to delete."""
    root, away = tmp_path / "root", tmp_path / "away"
    store = FileObjects(RUNTIME, str(root))
    store.put("folder/k", (b"data",))
    root.rename(away)
    for refused in (
        lambda: store.put("folder/new", (b"",)),
        lambda: store.get("folder/k"),
        lambda: store.get_into("folder/k", ()),
        lambda: store.delete("folder/k"),
        lambda: store.head("folder/k"),
        lambda: list(store.list("")),
        lambda: store.sync(["folder/k"]),
    ):
        with pytest.raises(Unavailable, match=f"directory {root} has gone away: mount its"):
            refused()
        assert not root.exists()
    root.mkdir()  # a mount point without its disk
    with pytest.raises(Unavailable, match="has gone away"):
        store.put("folder/new", (b"",))
    assert list(root.iterdir()) == []
    root.rmdir()
    away.rename(root)
    assert store.get("folder/k") == b"data"
    store.put("folder/new", (b"",))


def test_directory_passes_a_full_disk_on(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            _write_all(fd, [b"x"])
        assert isinstance(
            FileObjects(RUNTIME, str(tmp_path))._translate(caught.value, "k"), OSError
        )
    finally:
        os.close(fd)


def test_retrying_repeats_what_is_unavailable() -> None:
    clock = Clock()
    faulty = FaultyObjects(clock, MemObjects(clock))
    store = Retrying(clock, faulty, Backoff(1.0, 4.0, 100.0))
    faulty.fail("put", 5)
    store.put("k", (b"v",))
    for slept, longest in zip(clock.slept, (1, 2, 4, 4, 4), strict=True):
        assert longest / 2 <= slept <= longest
    faulty.fail("put", 1, no_space)
    with pytest.raises(OSError, match="injected"):
        store.put("k", (b"v",))
    with pytest.raises(ObjectMissing):
        store.get("other")
    faulty.fail("put", 10**9)
    begun = clock.at
    with pytest.raises(Unavailable):
        store.put("k", (b"v",))
    assert 90 < clock.at - begun <= 100


def test_retrying_continues_a_listing() -> None:
    clock = Clock()
    mem = MemObjects(clock)
    keys = [f"k{n}" for n in range(8)]
    for key in keys:
        mem.put(key, (b"",))

    class Breaking(FaultyObjects):
        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            for count, info in enumerate(super().list(prefix)):
                if count in (0, 5) and info.key not in failed:
                    failed.append(info.key)
                    raise Unavailable("listing broke off")
                yield info

    failed: list[str] = []
    store = Retrying(clock, Breaking(clock, mem))
    assert [info.key for info in store.list("")] == keys
    assert failed == ["k0", "k5"]


def test_metered_counts() -> None:
    clock = Clock()
    faulty = FaultyObjects(clock, MemObjects(clock))
    store = Metered(clock, faulty)
    store.put("k", (b"abc", b"de"))
    store.get("k", 1, 3)
    faulty.fail("put", 1)
    with pytest.raises(Unavailable):
        store.put("k", (b"x",))
    with pytest.raises(ObjectMissing):
        store.get("none")
    list(store.list(""))
    seen = store.snapshot()
    assert (seen["put_count"], seen["put_errors"], seen["put_bytes"]) == (2, 1, 5)
    assert (seen["get_count"], seen["get_errors"], seen["get_bytes"]) == (2, 0, 2)
    assert (seen["list_count"], seen["list_seconds"], seen["delete_count"]) == (1, 0, 0)

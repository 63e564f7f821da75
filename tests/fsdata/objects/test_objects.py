"""What is the own of object stores in memory and in directories, and of the wrappers."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from fsdata.objects import file as obj_file
from fsdata.objects.contract import Buffer, ObjectInfo, check_usable
from fsdata.objects.file import TMP_AGE_NS, TMP_DIR, FileObjects, _write_all
from fsdata.objects.mem import MemObjects
from fsdata.objects.wrappers import Backoff, Metered, Retrying
from fsmeta.errors import ConfigError, ObjectMissing, Refused, Unavailable
from fsmeta.runtime import Event, SystemRuntime
from tests.conftest import LogWatch
from tests.fsdata.faults import FaultyObjects, no_space
from tests.fsdata.world import BLOCK, World, pattern

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

    def event(self) -> Event:
        return Waits(self)


class Waits(threading.Event):
    """Waiting for it in vain takes the time of a Clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set() and timeout is not None:
            self._clock.sleep(timeout)
        return self.is_set()


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


def test_a_host_whose_clock_is_days_ahead_sweeps_nothing(tmp_path: Path) -> None:
    """The directory's clock says what is old; others are in the midst of putting."""
    FileObjects(RUNTIME, str(tmp_path))
    new = tmp_path / TMP_DIR / "new"
    new.write_bytes(b"half of it")
    ahead = SystemRuntime()
    ahead.now_ns = lambda: RUNTIME.now_ns() + 3 * TMP_AGE_NS
    FileObjects(ahead, str(tmp_path))
    assert os.listdir(tmp_path / TMP_DIR) == ["new"]


def test_a_put_whose_temporary_file_is_swept_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should the directory's clock itself have leapt by a day."""
    store = FileObjects(RUNTIME, str(tmp_path))
    write = obj_file._write_all
    swept: list[Path] = []

    def write_and_lose(fd: int, pieces: Sequence[Buffer]) -> None:
        write(fd, pieces)
        if not swept:
            (lost,) = (tmp_path / TMP_DIR).iterdir()
            lost.unlink()
            swept.append(lost)

    monkeypatch.setattr(obj_file, "_write_all", write_and_lose)
    with pytest.raises(Unavailable, match="temporary file"):
        store.put("x/y", (b"data",))
    store.put("x/y", (b"data",))
    assert store.get("x/y") == b"data"


def test_opened_while_another_process_puts(tmp_path: Path) -> None:
    """A temporary file that is renamed while old ones are looked for is nobody's fault."""
    writing = FileObjects(RUNTIME, str(tmp_path))
    stopping = threading.Event()

    def put() -> None:
        while not stopping.is_set():
            writing.put("x/y", (b"data",))

    thread = threading.Thread(target=put)
    thread.start()
    try:
        for _ in range(500):
            FileObjects(RUNTIME, str(tmp_path))
    finally:
        stopping.set()
        thread.join()


class Told:
    """Counts who said that they wait; its clock is later each time one looks."""

    def __init__(self) -> None:
        self.waits = 0
        self.at = self.later_s = 0.0
        self.runtime = SystemRuntime()
        self.runtime.tell(self)
        self.runtime.monotonic = self._look

    def _look(self) -> float:
        self.at += self.later_s
        return self.at

    def will_wait(self) -> None:
        self.waits += 1

    def await_input(self, descriptor: int) -> None:
        raise AssertionError(descriptor)


def test_reads_from_a_slow_disk_say_that_they_wait(tmp_path: Path) -> None:
    told = Told()
    store = FileObjects(told.runtime, str(tmp_path))
    store.put("k", (b"data",))

    def waits(later_s: float) -> int:
        """Of ten reads, after thirty."""
        told.later_s = later_s
        for n in range(40):
            if n == 30:
                told.waits = 0
            if n % 2:
                assert store.get("k") == b"data"
            else:
                assert store.get_into("k", (memoryview(bytearray(4)),)) == 4
        return told.waits

    assert [waits(later_s) for later_s in (0.0001, 0.008, 0.0001)] == [0, 10, 0]


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


def test_w4_nothing_is_repeated_for_a_client_that_leaves() -> None:
    clock = Clock()
    faulty = FaultyObjects(clock, MemObjects(clock))
    leaving = clock.event()
    store = Retrying(clock, faulty, Backoff(1.0, 4.0, 100.0), leaving)
    faulty.fail("put", 1)
    store.put("k", (b"v",))
    leaving.set()
    begun = clock.at
    faulty.fail("put", 1)
    with pytest.raises(Unavailable):
        store.put("k", (b"v",))
    store.put("k", (b"v",))
    assert clock.at == begun


def test_r3_who_leaves_gives_up_on_a_store_once() -> None:
    clock = Clock()
    faulty = FaultyObjects(clock, MemObjects(clock))
    leaving = clock.event()
    store = Retrying(clock, faulty, Backoff(1.0, 4.0, 100.0), leaving)
    store.give_up_together()
    faulty.fail("put", 3)
    store.put("k", (b"v",))
    assert not leaving.is_set()
    faulty.fail("put", 10**9)
    begun = clock.at
    for _ in range(9):
        with pytest.raises(Unavailable):
            store.put("k", (b"v",))
    assert 90 < clock.at - begun <= 100
    faulty.fail("put", 0)
    with pytest.raises(Unavailable):
        store.put("k", (b"v",))


def test_r3_who_leaves_tries_each_where_some_are_answered() -> None:
    clock = Clock()
    faulty = FaultyObjects(clock, MemObjects(clock))
    store = Retrying(clock, faulty, Backoff(1.0, 4.0, 100.0))
    store.give_up_together()
    faulty.fail("put", 10**9)
    with pytest.raises(Unavailable):
        store.put("k", (b"v",))
    faulty.fail("put", 0)
    store.put("k", (b"v",))
    faulty.fail("put", 1)
    with pytest.raises(Unavailable):
        store.put("k", (b"v",))
    store.put("k", (b"v",))


def test_o1_what_is_refused_is_not_repeated() -> None:
    clock = Clock()
    faulty = FaultyObjects(clock, MemObjects(clock))
    store = Retrying(clock, faulty)
    faulty.fail("put", 1, lambda: Refused("no such class"))
    with pytest.raises(Refused):
        store.put("k", (b"v",))
    faulty.fail("put", 1)
    store.put("k", (b"v",))
    assert store.repeats() == 1


def test_retrying_continues_a_listing() -> None:
    clock = Clock()
    mem = MemObjects(clock)
    keys = [f"k{n}" for n in range(8)]
    for key in keys:
        mem.put(key, (b"",))

    class Breaking(FaultyObjects):
        def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
            for count, info in enumerate(super().list(prefix, after)):
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


class Failing:
    """fsync(2) of a disk that could not write some pages, says so once and has them for clean.

    Other threads of this process may sync files of theirs meanwhile.
    """

    def __init__(self, fails: int, root: Path) -> None:
        self.fails = fails
        self._root = str(root)
        self._true = os.fsync

    def __call__(self, fd: int) -> None:
        if self.fails and os.readlink(f"/proc/self/fd/{fd}").startswith(self._root):
            self.fails -= 1
            raise OSError(errno.EIO, "simulated")
        self._true(fd)


def test_o4_a_failed_fsync_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request was repeated, and what the kernel says the second time was believed."""
    inner = FileObjects(RUNTIME, str(tmp_path))
    store = Retrying(RUNTIME, inner, Backoff(0.001, 0.001, 1.0))
    store.put("a/b", [b"bytes"])
    store.put("a/c", [b"bytes"])
    monkeypatch.setattr(os, "fsync", Failing(1, tmp_path))
    for _ in range(2):
        with pytest.raises(OSError, match=r"simulated|synced before") as caught:
            store.sync(["a/b"])
        assert caught.value.errno == errno.EIO
    store.sync(["a/c"])
    store.put("a/b", [b"bytes"])
    store.sync(["a/b"])
    monkeypatch.setattr(os, "fsync", Failing(1, tmp_path))
    with pytest.raises(OSError, match="simulated"):
        store.sync(["a/c"])
    store.delete("a/c")
    store.sync(["a/b", "a/c"])


@pytest.mark.parametrize("locked", [False, True])
def test_o4_blocks_that_could_not_be_synced_are_stored_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_watch: LogWatch, locked: bool
) -> None:
    log_watch.expect(
        "^WARNING fsdata.blocks.blocks: [12] blocks are stored again "
        "because one could not be synced"
    )
    world = World(locked=locked)
    files = FileObjects(RUNTIME, str(tmp_path))
    world.objects.inner = files
    writer = world.writer()
    data = pattern(BLOCK + 1000)
    writer.write(0, memoryview(data))
    writer.flush()
    with ExitStack() as stack:  # held open, or their numbers would be given again
        old = [stack.enter_context(path.open("rb")) for path in tmp_path.rglob("*_*")]
        monkeypatch.setattr(os, "fsync", Failing(1, tmp_path))
        writer.flush(durable=True)
        assert [os.fstat(file.fileno()).st_nlink for file in old] == [0, 0]
    assert world.content() == data
    monkeypatch.setattr(os, "fsync", Failing(9, tmp_path))
    writer.write(0, memoryview(b"more"))
    for _ in range(2):
        with pytest.raises(OSError, match=r"simulated|synced before"):
            writer.flush(durable=True)
    writer.flush()
    writer.discard()
    world.close()

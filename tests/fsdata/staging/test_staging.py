"""W1: the staging journal on a real disk: torn tails, flipped bits, what is kept and what goes."""

from __future__ import annotations

import errno
import os
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from fsdata.objects.contract import Buffer
from fsdata.objects.mem import MemObjects
from fsdata.staging import data_segments, journal
from fsdata.staging.data_segments import SEGMENT_BYTES, DataSegments, Staged
from fsdata.staging.disk import DirectoryDisk
from fsdata.staging.journal import Journal, recover
from fsdata.staging.staged_objects import StagedObjects
from fsmeta.errors import ObjectDamaged, Unavailable
from fsmeta.runtime import SystemRuntime
from tests.conftest import LogWatch

RUNTIME = SystemRuntime()
VOLUME = "0b0e"
JOURNAL = 77
SOON_S = 60.0
ENTRIES = [b"entry %d " % n * (n % 7 + 1) for n in range(1, 60)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DirectoryDisk]:
    made = DirectoryDisk(RUNTIME, str(tmp_path))
    yield made
    made.close()


def write_log(disk: DirectoryDisk, entries: list[bytes]) -> Journal:
    log = Journal(RUNTIME, disk, VOLUME, JOURNAL)
    for number, entry in enumerate(entries, 1):
        log.flush(log.append(number, entry))
    return log


def go_on(disk: DirectoryDisk, last: int) -> Journal:
    """The log of the next process."""
    found = recover(disk, VOLUME)
    assert found is not None
    log = Journal(RUNTIME, disk, VOLUME, JOURNAL)
    log.keep(found, last)
    return log


def test_a_log_comes_back(disk: DirectoryDisk) -> None:
    write_log(disk, ENTRIES).sync()
    found = recover(disk, VOLUME)
    assert found is not None
    assert (found.journal, found.first, found.payloads) == (JOURNAL, 1, ENTRIES)
    assert found.torn == found.damaged == 0
    assert recover(disk, "another volume") is None


def test_many_entries_go_in_one_write(disk: DirectoryDisk) -> None:
    log = Journal(RUNTIME, disk, VOLUME, JOURNAL)
    positions = [log.append(n, entry) for n, entry in enumerate(ENTRIES, 1)]
    log.flush(positions[-1])
    log.flush(positions[0])  # nothing is left to do
    found = recover(disk, VOLUME)
    assert found is not None
    assert found.payloads == ENTRIES


class Full(DirectoryDisk):
    """A disk that takes nothing while it is full."""

    full = True

    def write(self, name: str, offset: int, pieces: Sequence[Buffer]) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "simulated: no space left")
        super().write(name, offset, pieces)


def test_w4_what_a_full_disk_did_not_take_goes_when_it_is_published(tmp_path: Path) -> None:
    """Else each change of a mount whose disk is gone would be kept, and offered with the next."""
    disk = Full(RUNTIME, str(tmp_path))
    log = Journal(RUNTIME, disk, VOLUME, JOURNAL)
    for number, entry in enumerate(ENTRIES, 1):
        position = log.append(number, entry)
        with pytest.raises(OSError, match="no space left"):
            log.flush(position)
    log.forget(50)
    disk.full = False
    log.flush(position)
    found = recover(disk, VOLUME)
    assert found is not None
    assert (found.first, found.payloads) == (50, ENTRIES[49:])
    log.forget(100)  # nothing is queued
    log.flush(log.append(60, b"more"))
    disk.close()


@pytest.mark.parametrize("seed", range(30))
def test_a_torn_tail_is_a_prefix(disk: DirectoryDisk, seed: int) -> None:
    write_log(disk, ENTRIES)
    (name,) = disk.names()
    size = os.path.getsize(os.path.join(disk.place, name))
    kept = random.Random(seed).randrange(100, size)
    disk.cut(name, kept)
    found = recover(disk, VOLUME)
    assert found is not None
    count = len(found.payloads)
    assert found.payloads == ENTRIES[:count]
    assert found.damaged == 0
    again = recover(disk, VOLUME)  # what was torn has been cut off
    assert again is not None
    assert (again.payloads, again.torn) == (ENTRIES[:count], 0)


@pytest.mark.parametrize("seed", range(30))
def test_flipped_bits_leave_a_prefix(
    disk: DirectoryDisk, seed: int, caplog: pytest.LogCaptureFixture, log_watch: LogWatch
) -> None:
    write_log(disk, ENTRIES)
    (name,) = disk.names()
    path = os.path.join(disk.place, name)
    dice = random.Random(seed)
    at = dice.randrange(os.path.getsize(path))
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << dice.randrange(8)]))
    found = recover(disk, VOLUME)
    if found is None:  # its first record was hit: nobody knows whose it is
        assert at < 100
        assert "the head of log-" in caplog.text
        log_watch.expect("the head of log-")
        return
    assert found.payloads == ENTRIES[: len(found.payloads)]
    assert len(found.payloads) < len(ENTRIES)
    assert found.damaged or len(found.payloads) == len(ENTRIES) - 1


def test_files_go_when_all_in_them_is_published(
    disk: DirectoryDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "FILE_BYTES", 500)
    log = write_log(disk, ENTRIES)
    files = len(disk.names())
    assert files > 3
    log.trim(20)
    assert 1 < len(disk.names()) < files
    found = recover(disk, VOLUME)
    assert found is not None
    assert ENTRIES[-1] == found.payloads[-1]
    assert ENTRIES[19] in found.payloads, "not published yet"
    log.clear()
    assert disk.names() == []


@pytest.mark.parametrize("again", [False, True])
def test_w4_an_entry_that_can_not_be_published_keeps_its_own_file_only(
    disk: DirectoryDisk, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """One directory that is stuck kept all that others had published: the log had no bound."""
    monkeypatch.setattr(journal, "FILE_BYTES", 200)
    log = write_log(disk, ENTRIES)
    last = len(ENTRIES)
    if again:
        log = go_on(disk, last)
        log.flush(log.append(last + 1, b"more"))
    files = disk.names()
    assert len(files) > journal.LONG_FILES + 2
    assert log.is_long()
    log.trim_between([2, 20], 30)
    assert not log.is_long()
    left = recover(disk, VOLUME)
    assert left is not None
    assert not left.damaged
    assert {ENTRIES[1], ENTRIES[19], *ENTRIES[30:]} <= {*left.payloads}
    assert len(left.payloads) < last - 15
    log.trim_between([2, 20], last + again)
    log.sync()
    left = recover(disk, VOLUME)
    assert left is not None
    assert {ENTRIES[1], ENTRIES[19]} <= {*left.payloads}
    assert 0 < log.size <= len(disk.names()) * journal.FILE_BYTES <= 3 * journal.FILE_BYTES
    log = go_on(disk, last + again)
    log.flush(log.append(last + 2, b"last"))
    left = recover(disk, VOLUME)
    assert left is not None
    assert left.payloads[-1] == b"last"
    log.clear()
    assert disk.names() == []


def test_a_log_that_goes_on_begins_a_file_of_its_own(disk: DirectoryDisk) -> None:
    write_log(disk, ENTRIES)
    log = go_on(disk, len(ENTRIES))
    log.flush(log.append(len(ENTRIES) + 1, b"more"))
    log.sync()
    found = recover(disk, VOLUME)
    assert found is not None
    assert found.payloads == [*ENTRIES, b"more"]
    log.trim(len(ENTRIES) + 1)
    assert len(disk.names()) == 1


def test_a_file_without_entries_is_begun_anew(disk: DirectoryDisk) -> None:
    """Found by a simulated loss of power: it was listed twice, and removed under the second."""
    write_log(disk, ENTRIES[:1])
    (name,) = disk.names()
    disk.cut(name, os.path.getsize(os.path.join(disk.place, name)) - 1)
    found = recover(disk, VOLUME)
    assert found is not None
    assert found.payloads == []
    log = go_on(disk, 0)
    log.flush(log.append(1, b"anew"))
    log.trim(1)
    log.sync()
    found = recover(disk, VOLUME)
    assert found is not None
    assert found.payloads == [b"anew"]


@pytest.mark.parametrize("cut", [0, 3])
def test_a_file_that_lost_entries_takes_the_next_one_along(disk: DirectoryDisk, cut: int) -> None:
    """Zeros behind what it held do no harm: a loss of power leaves such. Found by simulation."""
    write_log(disk, ENTRIES)
    (name,) = disk.names()
    log = go_on(disk, len(ENTRIES))
    log.flush(log.append(len(ENTRIES) + 1, b"more"))
    size = os.path.getsize(os.path.join(disk.place, name))
    if cut:
        disk.cut(name, size - cut)
    else:
        disk.write(name, size, [bytes(100)])
    found = recover(disk, VOLUME)
    assert found is not None
    assert found.payloads == (ENTRIES[:-1] if cut else [*ENTRIES, b"more"])
    assert bool(found.damaged) is bool(cut)


def test_segments_go_with_their_objects(disk: DirectoryDisk) -> None:
    data = DataSegments(RUNTIME, disk)
    block = bytes(SEGMENT_BYTES // 3)
    spots = [data.put([block]) for _ in range(4)]
    assert len(disk.names()) == 2
    assert data.used() == 4 * len(block)
    assert data.read(spots[0]) == block
    for spot in spots[:3]:
        data.release(spot.segment)
    assert len(disk.names()) == 1
    data.release(spots[3].segment)
    data.clear()
    assert (disk.names(), data.used()) == ([], 0)


def test_segments_are_written_over(
    disk: DirectoryDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of what was in one before is taken for what is there now."""
    monkeypatch.setattr(data_segments, "SEGMENT_BYTES", 1000)
    data = DataSegments(RUNTIME, disk)
    data.spare_bytes = 2000
    old = [data.put([bytes([number]) * 900]) for number in range(4)]
    for spot in old:
        data.release(spot.segment)
    assert [file.stat().st_size for file in tmp_path.iterdir()] == [900] * 3, "two and the active"
    nodes = {file.stat().st_ino for file in tmp_path.iterdir()}
    new = [data.put([bytes([number]) * 300]) for number in range(10, 16)]
    data.sync()
    # the active one went, as there were enough
    assert {file.stat().st_ino for file in tmp_path.iterdir()} < nodes
    assert data.used() == 1800
    for number, spot in enumerate(new, 10):
        assert data.read(spot) == bytes([number]) * 300
    for spot in old:
        with pytest.raises(ObjectDamaged):
            data.read(spot)
    for spot in new:
        data.release(spot.segment)
    data.clear()
    assert list(tmp_path.iterdir()) == []
    assert data.used() == 0


@pytest.mark.parametrize("seed", range(10))
def test_w4_what_the_disk_holds_is_counted_as_it_comes_and_goes(
    disk: DirectoryDisk, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_segments, "SEGMENT_BYTES", 1000)
    data = DataSegments(RUNTIME, disk)
    data.spare_bytes = 5000
    dice = random.Random(seed)
    spots: list[data_segments.SegmentSpot] = []
    for _ in range(500):
        if spots and dice.random() < 0.5:
            data.release(spots.pop(dice.randrange(len(spots))).segment)
        elif dice.random() < 0.02:
            data.clear()
        else:
            spots.append(data.put([b"x" * dice.randrange(1, 400)]))
        sizes = [max(each.length, each.room) for each in data._segments.values()]
        assert data.used() == sum(sizes) + sum(size for _, size in data._spares)
    for spot in spots:
        data.release(spot.segment)
    data.clear()
    assert data.used() == 0
    assert disk.names() == []
    later = DataSegments(RUNTIME, disk)
    later.adopt(data_segments.SegmentSpot(7, 30, 12, 0))
    assert later.used() == 42


def test_w1_an_upload_takes_nothing_from_what_is_yet_to_be_taken_up(disk: DirectoryDisk) -> None:
    """A fast store had the first object, and its segment was removed with the others in it."""
    before = DataSegments(RUNTIME, disk)
    objects = {f"a/{number}": bytes([number]) * 1000 for number in range(3)}
    spots = {key: before.put([data]) for key, data in objects.items()}
    data = DataSegments(RUNTIME, disk)
    store = MemObjects(RUNTIME)
    staged = StagedObjects(RUNTIME, store, data)
    for key, spot in spots.items():
        assert staged.take_up(key, spot), key
        assert staged.await_empty(RUNTIME.monotonic() + SOON_S)
    assert {key: store.get(key) for key in objects} == objects
    data.sweep()
    assert (disk.names(), data.used()) == ([], 0)
    staged.close()


def test_other_bytes_are_never_uploaded(disk: DirectoryDisk, log_watch: LogWatch) -> None:
    log_watch.expect("^ERROR fsdata.staging.uploads: object a/b is lost")
    data = DataSegments(RUNTIME, disk)
    spot = data.put([b"right"])
    disk.write(disk.names()[0], spot.offset, [b"wrong"])
    with pytest.raises(ObjectDamaged):
        data.read(spot)
    store = MemObjects(RUNTIME)
    staged = StagedObjects(RUNTIME, store, data)
    with staged._cond:  # what was damaged between the write and the upload
        staged._uploads.enter("a/b", spot)
    assert staged.await_empty(RUNTIME.monotonic() + SOON_S)
    assert staged.is_lost("a/b")
    assert store.head("a/b") is None
    staged.close()


def test_a_lost_object_is_known_as_lost_once_it_counts_as_stored(
    disk: DirectoryDisk, log_watch: LogWatch
) -> None:
    """In between, the publisher took it for stored: `complete` came after data that were lost."""
    log_watch.expect("^ERROR fsdata.staging.uploads: object a/b is lost")
    data = DataSegments(RUNTIME, disk)
    spot = data.put([b"right"])
    disk.write(disk.names()[0], spot.offset, [b"wrong"])
    staged = StagedObjects(RUNTIME, MemObjects(RUNTIME), data)
    known: list[bool] = []

    class Watched(OrderedDict[str, Staged]):
        def __delitem__(self, key: str) -> None:
            super().__delitem__(key)
            known.append(staged.is_lost(key))

    staged._uploads.staged = staged._staged = staged._jobs._staged = Watched()
    with staged._cond:
        staged._uploads.enter("a/b", spot)
    assert staged.await_empty(RUNTIME.monotonic() + SOON_S)
    assert known == [True]
    staged.close()


class Gate(MemObjects):
    """Objects that are not taken until `open`."""

    def __init__(self) -> None:
        super().__init__(RUNTIME)
        self.open = RUNTIME.event()

    def put(self, key: str, pieces: object) -> None:
        if not self.open.wait(SOON_S):
            raise Unavailable("shut")
        super().put(key, pieces)  # type: ignore[arg-type]


def test_w3_put_returns_before_the_store_has_it(disk: DirectoryDisk) -> None:
    gate = Gate()
    staged = StagedObjects(RUNTIME, gate, DataSegments(RUNTIME, disk))
    staged.put("a/b", [b"one", b"two"])
    assert not staged.is_stored("a/b")
    assert staged.get("a/b") == b"onetwo"
    assert staged.get("a/b", 2, 4) == b"et"
    info = staged.head("a/b")
    assert info is not None
    assert info.size == 6
    gate.open.set()
    assert staged.await_empty(RUNTIME.monotonic() + SOON_S)
    assert gate.get("a/b") == staged.get("a/b") == b"onetwo"
    staged.close()


class Away(MemObjects):
    """Objects that nothing can be asked about once it is away."""

    def __init__(self) -> None:
        super().__init__(RUNTIME)
        self.away = False

    def sync(self, keys: Iterable[str]) -> None:
        if self.away:
            raise Unavailable("away")
        super().sync(keys)


def test_w4_fsync_asks_nothing_of_a_store_that_is_away(disk: DirectoryDisk) -> None:
    """It was EIO for what had been uploaded before; the simulation of an hour's outage met it."""
    store = Away()
    staged = StagedObjects(RUNTIME, store, DataSegments(RUNTIME, disk))
    staged.put("a/b", [b"uploaded"])
    assert staged.await_empty(RUNTIME.monotonic() + SOON_S)
    store.away = True
    staged.sync(["a/b"])
    staged.sync_waits = True
    with pytest.raises(Unavailable):
        staged.sync(["a/b"])
    staged.close()


def test_what_is_deleted_on_its_way_is_not_left(disk: DirectoryDisk) -> None:
    gate = Gate()
    staged = StagedObjects(RUNTIME, gate, DataSegments(RUNTIME, disk))
    for number in range(40):
        staged.put(f"a/{number}", [b"x" * 1000])
    for number in range(40):
        staged.delete(f"a/{number}")
    gate.open.set()
    assert staged.await_empty(RUNTIME.monotonic() + SOON_S)
    staged.close()
    assert list(gate.list("")) == []

"""W1, W3: what is synced on a staging disk, and what is said of it when a sync fails."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdata.objects.contract import Buffer
from fsdata.staging import data_segments
from fsdata.staging.data_segments import DataSegments
from fsdata.staging.disk import OPEN_MAX, DirectoryDisk
from fsdata.staging.journal import Journal, recover
from fsmeta.runtime import SystemRuntime

RUNTIME = SystemRuntime()


class Disk(DirectoryDisk):
    """A disk that remembers what was synced, and whose next write waits until it may go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(RUNTIME, str(path))
        self.synced: list[str] = []
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def write(self, name: str, offset: int, pieces: Sequence[Buffer]) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        super().write(name, offset, pieces)

    def sync(self, name: str) -> None:
        super().sync(name)
        self.synced.append(name)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    yield made
    made.close()


def test_w3_a_sync_while_an_object_is_written_is_not_its_own(disk: Disk) -> None:
    """The journal is synced each second; fsync(2) of what came meanwhile found nothing to do."""
    data = DataSegments(RUNTIME, disk)
    disk.go_on.clear()
    writer = threading.Thread(target=lambda: data.put([b"object"]))
    writer.start()
    assert disk.begun.wait(60)
    data.sync()  # nor does it miss a file that is not there yet
    disk.go_on.set()
    writer.join()
    disk.synced.clear()
    data.sync()
    assert disk.synced == ["data-00000001"]
    data.sync()
    assert len(disk.synced) == 1, "nothing has come since"


class Unsure(DirectoryDisk):
    """A disk whose next sync fails once, as the kernel says of pages it could not write."""

    fails = 0

    def sync(self, name: str) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError(errno.EIO, "simulated: not written, and forgotten")
        super().sync(name)


@pytest.fixture
def unsure(tmp_path: Path) -> Iterator[Unsure]:
    made = Unsure(RUNTIME, str(tmp_path))
    yield made
    made.close()


def test_w3_objects_that_were_not_synced_are_not_taken_for_synced(unsure: Unsure) -> None:
    data = DataSegments(RUNTIME, unsure)
    spot = data.put([b"object"])
    unsure.fails = 1
    for _ in range(3):  # the kernel says so once
        with pytest.raises(OSError, match="data-00000001 could not be synced"):
            data.sync()
    other = data.put([b"more"])
    assert other.segment != spot.segment, "nothing more goes to that file"
    with pytest.raises(OSError, match="data-00000001 could not be synced"):
        data.sync()
    data.release(spot.segment)  # the store has it
    data.sync()
    assert unsure.names() == ["data-00000002"]


def test_w3_entries_that_were_not_synced_are_not_taken_for_synced(unsure: Unsure) -> None:
    log = Journal(RUNTIME, unsure, "volume", 7)
    log.flush(log.append(1, b"one"))
    unsure.fails = 1
    for _ in range(3):
        with pytest.raises(OSError, match="log-0000000000000001 could not be synced"):
            log.sync()
    log.flush(log.append(2, b"two"))
    with pytest.raises(OSError, match="log-0000000000000001 could not be synced"):
        log.sync()
    assert not log.can_trim(1)
    log.trim(2)  # the store has the first one
    log.sync()
    found = recover(unsure, "volume")
    assert found is not None
    assert found.payloads == [b"two"]


def _open_below(place: Path) -> list[str]:
    """Which files of a directory this process has open."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{each}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
        if path.startswith(f"{place}/"):
            found.append(path)
    return found


def test_w4_staged_segments_do_not_each_keep_a_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each did: with 60 GiB staged no file could be opened any more, and uploads never went on."""
    monkeypatch.setattr(data_segments, "SEGMENT_BYTES", 1000)
    disk = DirectoryDisk(RUNTIME, str(tmp_path))
    data = DataSegments(RUNTIME, disk)
    spots = []
    for number in range(2 * OPEN_MAX):
        spots.append(data.put([b"%03d" % number * 300]))
        if number % 50 == 0:  # as each second
            data.sync()
    data.sync()
    assert len(disk.names()) == 2 * OPEN_MAX
    assert len(_open_below(tmp_path)) <= OPEN_MAX
    for number, spot in enumerate(spots):
        assert data.read(spot) == b"%03d" % number * 300
        assert len(_open_below(tmp_path)) <= OPEN_MAX
    disk.close()
    assert _open_below(tmp_path) == []


def test_w4_what_is_not_synced_stays_open(tmp_path: Path) -> None:
    """The kernel may forget that writing a file out has failed, once nobody has it open."""
    disk = DirectoryDisk(RUNTIME, str(tmp_path), open_max=2)
    for name in ("a", "b", "c", "d"):
        disk.write(name, 0, [b"bytes"])
    assert len(_open_below(tmp_path)) == 4
    for name in ("a", "b", "c"):
        disk.sync(name)
    disk.write("e", 0, [b"bytes"])
    disk.write("f", 0, [b"bytes"])
    still = {Path(each).name for each in _open_below(tmp_path)}
    assert still >= {"d", "e", "f"}
    disk.close()


def test_w4_without_descriptors_idle_files_are_closed(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections and caches may have all others of the process."""
    for name in ("a", "b"):
        disk.write(name, 0, [name.encode()])
        disk.sync(name)
    real = os.open

    def scarce(*args: Any, **more: Any) -> int:
        if len(_open_below(Path(disk.place))) > 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(*args, **more)

    monkeypatch.setattr(os, "open", scarce)
    disk.write("c", 0, [b"c"])
    disk.sync("c")
    assert disk.read("a", 0, 10) == b"a"


def test_w4_a_file_is_removed_while_it_is_read(disk: Disk) -> None:
    """Its descriptor, which the next file gets, is not taken away from who reads it."""
    disk.write("a", 0, [b"of a"])
    with disk._opened("a") as file:
        disk.remove("a")
        disk.write("b", 0, [b"of b"])
        assert os.pread(file.fd, 10, 0) == b"of a"
    assert [Path(each).name for each in _open_below(Path(disk.place))] == ["b"]

"""C1: what a cache disk has is read from there, in the ranges that are asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdata.blocks.read_plan import STEP_BYTES
from fsdata.disk_cache.directory.file_io import CacheFile, OsFile, OsFiles
from fsdata.format.block_v1 import Codec
from fsmeta.runtime import Event, SystemRuntime
from fsmeta.types import FRAME_BYTES, SliceId
from tests.conftest import LogWatch
from tests.fsdata.disk_world import BLOCK, RUNTIME, CacheWorld, cache_files, pattern, wait_for
from tests.fsdata.reads import fetch_ahead, read_block, read_packed

LOOKS = 50  # at pages that were forgotten


class Counted(OsFile):
    """A cache file that says what is done to it."""

    def __init__(self, fd: int, files: CountedFiles) -> None:
        super().__init__(fd)
        self._files = files

    def read(self, size: int, at: int) -> bytes:
        self._files.seen.append(("read", size))
        return super().read(size, at)

    def in_memory(self, at: int, size: int) -> bool:
        assert at >= 0
        self._files.seen.append(("look", size))
        return self._files.near


class CountedFiles(OsFiles):
    """Files that say what is done to them, and are in the kernel's memory or not."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.near = True  # the kernel keeps pages, or not, as it likes

    def open(self, path: str, write: bool = False) -> CacheFile:
        return Counted(os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC), self)

    def sizes(self, least: int) -> list[int]:
        """Reads of at least so many bytes since the last call."""
        found = [size for verb, size in self.seen if verb == "read" and size >= least]
        self.seen.clear()
        return found


@pytest.fixture
def world(tmp_path: Path) -> Iterator[CacheWorld]:
    """A block on the disk, none in memory."""
    made = CacheWorld([tmp_path], files=CountedFiles())
    made.put(1)
    assert made.right(1)
    made.settle()
    yield made
    made.close()


def reads_of(world: CacheWorld) -> CountedFiles:
    files = world.disks[0]._files
    assert isinstance(files, CountedFiles)
    return files


def test_a_stream_reads_what_it_asks_for(world: CacheWorld) -> None:
    """No block in memory, no byte from the store, and none twice from the disk."""
    files, fetched = reads_of(world), world.fetched()
    files.seen.clear()
    for begin in range(0, BLOCK, STEP_BYTES):
        end = begin + STEP_BYTES
        view = read_block(world.blocks, SliceId(1), BLOCK, 0, begin, end, whole=True)
        assert view == pattern(BLOCK)[begin:end]
    assert files.sizes(4096) == [STEP_BYTES] * (BLOCK // STEP_BYTES)
    assert world.memory.stats().blocks == 0
    assert world.fetched() == fetched


def test_a_stream_of_packed_blocks_reads_their_units(tmp_path: Path) -> None:
    world = CacheWorld([tmp_path], files=CountedFiles(), codec=Codec.LZ4)
    words = (b"some words that can be packed " * (BLOCK // 30 + 1))[:BLOCK]
    world.blocks.put_block(SliceId(1), 0, bytearray(words))
    assert world.read(1) == words
    world.settle()
    files = reads_of(world)
    files.seen.clear()
    for begin in range(0, BLOCK, STEP_BYTES):
        view = read_block(world.blocks, SliceId(1), BLOCK, 0, begin, begin + STEP_BYTES, whole=True)
        assert view == words[begin : begin + STEP_BYTES]
    assert 0 < sum(files.sizes(512)) < BLOCK // 4
    assert world.fetched() == 1
    world.close()


def test_pages_in_a_row_read_a_frame_twice(world: CacheWorld) -> None:
    """C3: the second page says that more will come; single ones leave nothing in memory."""
    files, data = reads_of(world), pattern(BLOCK)
    files.seen.clear()
    for at in (700_000, 100_000, 400_000):
        view = read_block(world.blocks, SliceId(1), BLOCK, 0, at, at + 4096)
        assert view == data[at : at + 4096]
    assert files.sizes(FRAME_BYTES) == [FRAME_BYTES] * 3
    assert world.memory.stats().bytes == 0
    for at in range(5 * FRAME_BYTES, 6 * FRAME_BYTES, 4096):
        view = read_block(world.blocks, SliceId(1), BLOCK, 0, at, at + 4096)
        assert view == data[at : at + 4096]
    assert files.sizes(FRAME_BYTES) == [FRAME_BYTES] * 2
    assert world.memory.stats().bytes == FRAME_BYTES


def test_small_steps_read_the_block_once(world: CacheWorld) -> None:
    fetched = world.fetched()
    for begin in range(0, BLOCK, STEP_BYTES // 4):
        end = begin + STEP_BYTES // 4
        view = read_block(world.blocks, SliceId(1), BLOCK, 0, begin, end, whole=True)
        assert view == pattern(BLOCK)[begin:end]
        view.release()
    assert world.blocks.stats().whole == 2, "one to have it on the disk"
    assert world.fetched() == fetched


def test_reading_ahead_is_for_what_is_not_in_memory(world: CacheWorld) -> None:
    files = reads_of(world)
    files.seen.clear()
    fetch_ahead(world.blocks, SliceId(1), BLOCK, 0)
    assert [verb for verb, _ in files.seen] == ["read", "look"], "its head, for its name"
    assert files.sizes(4096) == []
    assert world.memory.stats().blocks == 0
    world.put(2)
    fetch_ahead(world.blocks, SliceId(2), BLOCK, 0)
    assert world.memory.stats().blocks == 1, "what is on no disk is brought to memory"


def test_a_disk_that_has_to_be_waited_for_is_read_ahead(world: CacheWorld) -> None:
    """Its whole block, by threads of their own: streams don't wait for each range in turn."""
    fetched = world.fetched()
    reads_of(world).near = False
    fetch_ahead(world.blocks, SliceId(1), BLOCK, 0)
    assert world.memory.stats().blocks == 1
    assert world.right(1)
    assert world.fetched() == fetched


def test_the_kernel_tells_what_it_has_in_memory(tmp_path: Path) -> None:
    """A look at what is not in memory has the kernel bring it there, and says that it is there if
    the disk was quicker than the look: one that says "no" is a proof, one that says "yes" is none.
    """
    path = tmp_path / "file"
    path.write_bytes(bytes(BLOCK))
    fd = os.open(path, os.O_RDONLY)
    file = OsFile(fd)
    os.fsync(fd)
    assert file.read(BLOCK, 0) == bytes(BLOCK)
    assert file.in_memory(0, BLOCK)
    for _ in range(LOOKS):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if not file.in_memory(0, BLOCK):
            return
    pytest.skip("the file system keeps its pages, or does not tell")


def test_segments_are_read_in_part(world: CacheWorld) -> None:
    """Of a block of small files: the file's frames, without a look at the disk before."""
    files, fetched = reads_of(world), world.fetched()
    files.seen.clear()
    at = 300_000
    for _ in range(2):
        view = read_packed(world.blocks, SliceId(1), BLOCK, 0, at, at + 9)
        assert view == pattern(BLOCK)[at : at + 9]
    assert files.sizes(4096) == [FRAME_BYTES] * 2
    assert world.fetched() == fetched


def test_parts_are_read_as_quickly(world: CacheWorld) -> None:
    """Of a block that is there in parts: its frames, by one look at the disk."""
    files, at = reads_of(world), 700_000
    data = world.put(2)
    assert world.read(2, BLOCK, at, at + 9) == data[at : at + 9]
    world.settle()
    assert world.read(2, BLOCK, at + 9, at + 20) == data[at + 9 : at + 20]
    files.seen.clear()
    assert world.read(2, BLOCK, at + 9, at + 20) == data[at + 9 : at + 20]
    assert files.sizes(1) == [FRAME_BYTES, 4096], "the frame, and that the file is still the same"
    assert world.fetched() == 3


def test_a_copy_that_is_cut_short_is_none(world: CacheWorld, log_watch: LogWatch) -> None:
    """It is found out in the middle of a stream, whose file is open."""
    log_watch.expect("cache disk .* is suspect: .* bytes")
    (path,) = cache_files(Path(world.disks[0].place.root))
    fetched = world.fetched()
    for begin in range(0, BLOCK, STEP_BYTES):
        view = read_block(world.blocks, SliceId(1), BLOCK, 0, begin, begin + STEP_BYTES, whole=True)
        assert view == pattern(BLOCK)[begin : begin + STEP_BYTES]
        assert world.fetched() == fetched + (begin > 0)
        if begin == 0:
            os.truncate(path, BLOCK // 2)


def test_a_copy_that_is_evicted_is_asked_for_again(world: CacheWorld) -> None:
    fetched = world.fetched()
    assert (
        read_block(world.blocks, SliceId(1), BLOCK, 0, 0, STEP_BYTES) == pattern(BLOCK)[:STEP_BYTES]
    )
    world.disks[0].drop(*_place(world))
    assert world.right(1)
    assert world.fetched() == fetched + 1


def _place(world: CacheWorld) -> tuple[str, int]:
    (path,) = cache_files(Path(world.disks[0].place.root))
    return path.name, int(path.parent.name, 16)


class Waited(threading.Event):
    """An event that counts who has come to wait for it."""

    def __init__(self, arrivals: list[str]) -> None:
        super().__init__()
        self._arrivals = arrivals

    def wait(self, timeout: float | None = None) -> bool:
        self._arrivals.append(threading.current_thread().name)
        return super().wait(timeout)


class Joining(SystemRuntime):
    """Knows who has come to wait for another's fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: list[str] = []

    def event(self) -> Event:
        return Waited(self.joined)


@pytest.mark.parametrize(("at", "requests"), [(10, 1), (700_000, 2)])
def test_a_range_that_two_want_is_fetched_once(tmp_path: Path, at: int, requests: int) -> None:
    runtime = Joining()
    world = CacheWorld([tmp_path], runtime=runtime)
    data = world.put(1)
    world.objects.gate = RUNTIME.event()
    answers: list[bytes] = []

    def read() -> None:
        answers.append(world.read(1, BLOCK, at, at + 9))

    threads = [RUNTIME.spawn("reader", read) for _ in range(4)]
    wait_for(lambda: len(runtime.joined) == 3)
    assert world.number("misses_total") == 4 * requests
    world.objects.gate.set()
    for thread in threads:
        thread.join()
    assert answers == [data[at : at + 9]] * 4
    assert world.fetched() == requests
    assert world.read(1, BLOCK, at, at + 9) == data[at : at + 9]
    assert world.fetched() == requests
    world.close()

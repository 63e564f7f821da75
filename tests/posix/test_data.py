"""The bytes of files on a mount, against a bytearray: what fsx(1) does, and two mounts in turn."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fsmeta.types import CHUNK_BYTES
from tests.posix.conftest import Twins
from tests.posix.pages import PAGE, resident

OPS = 150
SPAN_BYTES = 300_000  # of the file, from its first byte in use on
SEEDS = 4


class Fsx:
    """One file and what it must hold; `begin` puts the action elsewhere in the file."""

    def __init__(
        self, path: Path, seed: int, begin: int, flags: int = os.O_RDWR | os.O_CREAT | os.O_EXCL
    ) -> None:
        self.path = path
        self._dice = random.Random(seed)
        self._begin = begin
        self._held = bytearray()  # from `begin` on; before it the file is a hole
        self._size = 0
        self._fd = os.open(path, flags)

    def close(self) -> None:
        os.close(self._fd)

    def run(self, count: int) -> None:
        """Do `count` random things."""
        many: tuple[Callable[[], None], ...] = (
            self.write,
            self.write,
            self.write,
            self.read,
            self.read,
            self.append,
            self.truncate,
            self.map,
            self.sync,
            self.sync,
            self.reopen,
        )
        for _ in range(count):
            self._dice.choice(many)()
            assert os.fstat(self._fd).st_size == self._size

    def _range(self) -> tuple[int, int]:
        """An offset behind `begin` and a length, mostly short."""
        dice = self._dice
        length = dice.choice((1, 5, 100, 4096, 5000, 40_000, dice.randrange(1, 90_000)))
        return dice.randrange(0, SPAN_BYTES), length

    def _put(self, pos: int, data: bytes) -> None:
        if pos > len(self._held):
            self._held.extend(bytes(pos - len(self._held)))
        self._held[pos : pos + len(data)] = data
        self._size = max(self._size, self._begin + len(self._held))

    def write(self) -> None:
        pos, length = self._range()
        data = self._dice.randbytes(length)
        assert os.pwrite(self._fd, data, self._begin + pos) == length
        self._put(pos, data)

    def append(self) -> None:
        """Through a descriptor of its own."""
        if self._size < self._begin or len(self._held) > SPAN_BYTES:
            return
        data = self._dice.randbytes(self._dice.randrange(1, 5000))
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        assert os.write(fd, data) == len(data)
        os.close(fd)
        self._put(len(self._held), data)

    def read(self) -> None:
        pos, length = self._range()
        found = os.pread(self._fd, length, self._begin + pos)
        assert found == self._held[pos : pos + length]

    def truncate(self) -> None:
        size = self._begin + self._dice.randrange(0, SPAN_BYTES)
        if self._dice.random() < 0.5:
            os.ftruncate(self._fd, size)
        else:
            os.truncate(self.path, size)
        held = size - self._begin
        del self._held[held:]
        self._held.extend(bytes(held - len(self._held)))
        self._size = size

    def map(self) -> None:
        """Change some bytes of the file in memory."""
        page = mmap.ALLOCATIONGRANULARITY
        first = self._begin // page * page
        if self._size <= first:
            return
        pos, length = self._range()
        data = self._dice.randbytes(length)[: max(0, len(self._held) - pos)]
        with mmap.mmap(self._fd, self._size - first, offset=first) as memory:
            at = self._begin - first + pos
            assert memory[at : at + length] == self._held[pos : pos + length]
            memory[at : at + len(data)] = data
            if self._dice.random() < 0.7:
                memory.flush()
        if data:
            self._put(pos, data)

    def sync(self) -> None:
        """Each makes a commit, and many make the chunk worth compacting."""
        for _ in range(self._dice.randrange(1, 8)):
            pos = self._dice.randrange(0, max(1, len(self._held)))
            data = self._dice.randbytes(7)
            os.pwrite(self._fd, data, self._begin + pos)
            self._put(pos, data)
            os.fsync(self._fd)
        pages = -(-len(self._held) // 4096) + (self._begin % 4096 > 0)
        assert os.fstat(self._fd).st_blocks * 512 <= pages * 4096  # never the hole before `begin`

    def reopen(self) -> None:
        before = os.fstat(self._fd)
        os.close(self._fd)
        self._fd = os.open(self.path, os.O_RDWR)
        after = os.fstat(self._fd)
        assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
        self.check(self.path)

    def check(self, path: Path) -> None:
        """The whole file, as `path` shows it."""
        with path.open("rb", buffering=0) as file:
            assert os.fstat(file.fileno()).st_size == self._size
            count = max(0, self._size - self._begin) + 1
            assert os.pread(file.fileno(), count, self._begin) == self._held
            if self._begin and self._size:
                assert not any(os.pread(file.fileno(), 5000, self._begin // 2))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("begin", [0, CHUNK_BYTES - SPAN_BYTES // 2])
def test_fsx(twins: Twins, seed: int, begin: int) -> None:
    path = twins.first / f"fsx{seed}-{begin}"
    fsx = Fsx(path, seed, begin)
    fsx.run(OPS)
    fsx.close()
    fsx.check(path)
    twins.settle(path.name)
    fsx.check(twins.second / path.name)  # close-to-open
    path.unlink()


def test_two_mounts_in_turn(twins: Twins) -> None:
    """Whoever opens sees what the last one who closed has written."""
    dice = random.Random(1)
    held = bytearray()
    for turn in range(40):
        root = twins.second if turn % 2 else twins.first
        fd = os.open(root / "turns", os.O_RDWR | os.O_CREAT)
        assert os.fstat(fd).st_size == len(held)
        assert os.pread(fd, len(held) + 1, 0) == held
        if turn % 7 == 6:
            del held[dice.randrange(0, len(held)) :]
            os.ftruncate(fd, len(held))
        pos = dice.randrange(0, len(held) + 5000)
        data = dice.randbytes(dice.randrange(1, 20_000))
        os.pwrite(fd, data, pos)
        held.extend(bytes(max(0, pos - len(held))))
        held[pos : pos + len(data)] = data
        os.close(fd)
        twins.settle("turns")
    (twins.first / "turns").unlink()


def test_a_copy_with_its_times_is_not_fetched(twins: Twins) -> None:
    """cp -p, tar -x: the kernel has the pages that were written, though mtime is another's."""
    size = 3 << 20
    source, path = twins.volume.folder / "source", twins.first / "copy"
    source.write_bytes(random.Random(3).randbytes(size))
    os.utime(source, (10**9, 10**9))
    subprocess.run(["cp", "-p", source, path], check=True)
    assert resident(path) == size // PAGE
    assert path.read_bytes() == source.read_bytes()
    os.utime(path, (1, 1))
    assert resident(path) == size // PAGE
    assert path.read_bytes() == source.read_bytes()
    before = _blocks_asked_for(twins)
    there = twins.second / path.name
    twins.settle(path.name)
    assert there.read_bytes() == source.read_bytes()
    assert _blocks_asked_for(twins) > before
    path.unlink()


def test_a_file_that_is_made_as_a_hole_is_not_fetched(twins: Twins) -> None:
    """ftruncate, then writes: as downloads and arrays in files are made."""
    path, data = twins.first / "filled", bytes(range(256)) * 4096
    with path.open("wb") as file:
        file.truncate(len(data))
        file.write(data)
    assert resident(path) == len(data) // PAGE
    assert path.read_bytes() == data
    path.unlink()


def _blocks_asked_for(twins: Twins) -> float:
    return twins.stat("cache_hits_total") + twins.stat("cache_misses_total")


def test_many_small_writes_are_compacted(twins: Twins) -> None:
    """Overwritten at random, each write committed: reads stay right while slices merge."""
    dice = random.Random(2)
    path = twins.first / "scattered"
    held = bytearray(100_000)
    path.write_bytes(held)
    before = twins.stat("chunks_compacted_total")
    with path.open("r+b", buffering=0) as file:
        for _ in range(300):
            pos = dice.randrange(0, len(held) - 100)
            held[pos : pos + 100] = dice.randbytes(100)
            os.pwrite(file.fileno(), held[pos : pos + 100], pos)
            os.fsync(file.fileno())
            at = dice.randrange(0, len(held))
            assert os.pread(file.fileno(), 3000, at) == held[at : at + 3000]
    twins.wait_until(lambda: twins.stat("chunks_compacted_total") > before)
    assert (twins.second / "scattered").read_bytes() == held
    path.unlink()

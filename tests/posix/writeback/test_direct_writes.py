"""W3: `--direct-writes`: what is written bypasses the kernel's pages, and nobody reads old ones."""

from __future__ import annotations

import mmap
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from fsclient.client.client import MountClient
from fsclient.kernel.contract import OpenOut
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino
from tests.posix.inproc import memory
from tests.posix.pages import PAGE, resident
from tests.posix.test_data import Fsx
from tests.posix.volumes import can_mount, new_volume
from tests.posix.writeback.test_writeback import Pair, new_pair
from tests.support.waiting import wait_until

FILES: Final = 4  # of fsx
OPS: Final = 120
WRITE: Final = os.O_CREAT | os.O_WRONLY | os.O_TRUNC


# --- who is direct -------------------------------------------------------------------------------


@pytest.fixture
def client(tmp_path: Path) -> Iterator[MountClient]:
    with new_pair(memory(), tmp_path / "staging") as pair:
        pair.mine.vfs.io.direct.writes = True
        yield pair.mine


@contextmanager
def opened(client: MountClient, ino: Ino, flags: int) -> Iterator[OpenOut]:
    handle = client.vfs.open(ROOT_CALLER, ino, flags)
    try:
        yield handle
    finally:
        client.vfs.release(ino, handle.fh)


def make(client: MountClient, name: bytes, flags: int) -> tuple[Ino, OpenOut]:
    entry, handle = client.vfs.create(ROOT_CALLER, ROOT_INO, name, 0o644, flags)
    assert entry.attr is not None
    return entry.attr.ino, handle


def test_w3_who_writes_from_the_begin_is_direct(client: MountClient) -> None:
    """Once it is closed, others have pages, which were true all the time."""
    for number, flags in enumerate((os.O_WRONLY, os.O_WRONLY | os.O_TRUNC)):
        ino, handle = make(client, b"made%d" % number, flags)
        assert handle.direct_io
        client.vfs.release(ino, handle.fh)
        with opened(client, ino, os.O_WRONLY | os.O_TRUNC) as emptied:
            assert emptied.direct_io
        for more in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_TRUNC):
            with opened(client, ino, more) as again:
                assert not again.direct_io
    ino, handle = make(client, b"both", os.O_RDWR)
    assert not handle.direct_io
    client.vfs.release(ino, handle.fh)


def test_w3_who_comes_while_it_is_written_is_direct_too(client: MountClient) -> None:
    """And what they have mapped is dropped when pages are used again."""
    ino, writer = make(client, b"f", os.O_WRONLY)
    reader = client.vfs.open(ROOT_CALLER, ino, os.O_RDONLY)
    both = client.vfs.open(ROOT_CALLER, ino, os.O_RDWR)
    assert (reader.direct_io, reader.keep_cache) == (both.direct_io, both.keep_cache)
    assert (reader.direct_io, reader.keep_cache) == (True, False)
    client.vfs.release(ino, writer.fh)
    with opened(client, ino, os.O_RDONLY) as third:
        assert third.direct_io, "one that was opened while it was written writes, too"
    client.vfs.release(ino, both.fh)
    with opened(client, ino, os.O_RDONLY) as third:
        assert (third.direct_io, third.keep_cache) == (False, False)
        client.vfs.read(ROOT_CALLER, ino, third.fh, 0, 1)
    with opened(client, ino, os.O_RDONLY) as third:
        assert (third.direct_io, third.keep_cache) == (False, True)
    client.vfs.release(ino, reader.fh)


def test_w3_who_comes_second_is_not(client: MountClient) -> None:
    """The kernel may have pages for the first."""
    ino, first = make(client, b"f", os.O_RDWR)
    with opened(client, ino, os.O_WRONLY | os.O_TRUNC) as writer:
        assert not writer.direct_io
        client.vfs.release(ino, first.fh)
        with opened(client, ino, os.O_WRONLY | os.O_TRUNC) as third:
            assert not third.direct_io
    with opened(client, ino, os.O_WRONLY | os.O_TRUNC) as alone:
        assert alone.direct_io


def test_w3_what_others_map_is_dropped_after_each_write(
    client: MountClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has dropped it before, and may have read it anew."""
    told: list[Ino] = []
    monkeypatch.setattr(client.vfs.coherence.notices, "stale_pages", told.append)
    ino, writer = make(client, b"f", os.O_WRONLY)
    _write(client, ino, writer)
    assert told == []
    reader = client.vfs.open(ROOT_CALLER, ino, os.O_RDONLY)
    _write(client, ino, writer)
    _write(client, ino, writer)
    assert told == [ino, ino]
    client.vfs.release(ino, writer.fh)
    with opened(client, ino, os.O_WRONLY) as usual:
        _write(client, ino, usual)
    assert told == [ino, ino]
    client.vfs.release(ino, reader.fh)


def _write(client: MountClient, ino: Ino, handle: OpenOut) -> None:
    assert client.vfs.write(ROOT_CALLER, ino, handle.fh, 0, memoryview(b"1")) == 1


def test_w3_without_the_option_nobody_is(tmp_path: Path) -> None:
    with new_pair(memory(), tmp_path / "staging") as pair:
        _require_pages(pair)


def _require_pages(pair: Pair) -> None:
    for client in (pair.mine, pair.theirs):
        ino, handle = make(client, b"f-%d" % id(client), os.O_WRONLY)
        assert not handle.direct_io
        client.vfs.release(ino, handle.fh)


# --- on a mount ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if not can_mount():
        pytest.skip("needs root and /dev/fuse")
    folder = tmp_path_factory.mktemp("direct") / "volume"
    with new_volume(folder, f"sqlite://{folder}/meta.db") as volume:
        staging = ("--staging-dir", str(folder / "staging"))
        yield volume.mount("mnt", "--writeback", "--direct-writes", *staging)


def _number(root: Path, name: str) -> float:
    found = re.search(rf"^(slicefs_)?{name} (\S+)$", (root / ".stats").read_text(), re.MULTILINE)
    assert found is not None, name
    return float(found[2])


def all_closed(root: Path) -> None:
    """Returns when the client has heard of each close(2), which the kernel tells it later."""
    wait_until(lambda: _number(root, "open_handles") == 0)


def test_w3_what_is_written_leaves_no_pages(root: Path) -> None:
    """Of a checkpoint; what is read afterwards does."""
    data = random.Random(1).randbytes(3 << 20)
    path = root / "checkpoint"
    for _ in range(2):  # made, and emptied
        path.write_bytes(data)
        assert path.stat().st_size == len(data)
        all_closed(root)
        assert resident(path) == 0
    assert path.read_bytes() == data
    assert resident(path) == len(data) // PAGE
    all_closed(root)
    with path.open("rb+") as file:
        file.write(b"new")
    assert path.read_bytes() == b"new" + data[3:]
    assert resident(path) == len(data) // PAGE
    path.unlink()


def test_w3_who_reads_while_it_is_written_sees_each_write(root: Path) -> None:
    """read(2), sendfile(2) and maps that were there before, in and behind their last page."""
    path, dice, held = root / "grown", random.Random(2), bytearray(b"0" * 10)
    writer = os.open(path, WRITE)
    os.ftruncate(writer, 8 * PAGE)
    reader = os.open(path, os.O_RDONLY)
    shared, private = (
        mmap.mmap(reader, 8 * PAGE, flags, mmap.PROT_READ)
        for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE)
    )
    os.ftruncate(writer, 0)  # maps stay
    os.write(writer, held)
    for _ in range(60):
        pos = dice.randrange(0, min(len(held) + 1, 7 * PAGE))
        data = dice.randbytes(dice.choice((1, 100, PAGE - pos % PAGE, PAGE)))
        assert shared[: len(held)] == private[: len(held)] == held
        assert os.pwrite(writer, data, pos) == len(data)
        held[pos : pos + len(data)] = data
        assert os.fstat(reader).st_size == path.stat().st_size == len(held)
        assert os.pread(reader, len(held) + 1, 0) == held
        for mapped in (shared, private):
            wait_until(lambda m=mapped: m[: len(held)] == held)  # type: ignore[misc]
        assert _sent(reader, len(held)) == held
    os.close(writer)
    all_are_true(root, path, held)
    shared.close()
    private.close()
    os.close(reader)
    path.unlink()


def _sent(fd: int, size: int) -> bytes:
    """A file as sendfile(2) reads it."""
    copy = os.memfd_create("copy")
    try:
        done = 0
        while done < size:
            done += os.sendfile(copy, fd, done, size - done)
        return os.pread(copy, size, 0)
    finally:
        os.close(copy)


def all_are_true(root: Path, path: Path, held: bytes | bytearray) -> None:
    """Whoever opens it now reads what was written."""
    wait_until(lambda: _number(root, "open_handles") <= 1)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as m:
        assert file.read() == m[:] == held


def test_w3_who_had_pages_before_reads_what_is_written(root: Path) -> None:
    """Then the kernel writes to them."""
    path = root / "before"
    path.write_bytes(b"a" * 3 * PAGE)
    all_closed(root)
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        assert memory[:] == b"a" * 3 * PAGE
        path.write_bytes(b"b" * 3 * PAGE)
        assert memory[:] == file.read() == b"b" * 3 * PAGE
        assert resident(path) == 3
        memory.close()
    path.unlink()


def test_w3_copies_and_holes(root: Path) -> None:
    """sendfile(2), copy_file_range(2), splice(2), fallocate(2) and truncate(2) of such a file."""
    source, path = root / "source", root / "copied"
    data = random.Random(3).randbytes(300_001)
    source.write_bytes(data)
    for copy in (_copy_range, _send, _splice, _shutil):
        copy(source, path, len(data))
        assert path.read_bytes() == data
    with path.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, 10 * PAGE)
        assert file.write(data) == len(data)
        os.ftruncate(file.fileno(), 1000)
        assert path.read_bytes() == data[:1000]
        os.pwrite(file.fileno(), b"end", 5000)
        assert path.read_bytes() == data[:1000] + bytes(4000) + b"end"
    path.unlink()
    source.unlink()


def _copying(call: Callable[[int, int, int], int]) -> Callable[[Path, Path, int], None]:
    def copy(source: Path, path: Path, size: int) -> None:
        with source.open("rb") as file, path.open("wb") as target:
            while size:
                size -= call(file.fileno(), target.fileno(), size)

    return copy


_copy_range = _copying(os.copy_file_range)
_send = _copying(lambda source, target, size: os.sendfile(target, source, None, size))


def _splice(source: Path, path: Path, size: int) -> None:
    out, into = os.pipe()
    try:
        with source.open("rb") as file, path.open("wb") as target:
            while size:
                moved = os.splice(file.fileno(), into, min(size, 1 << 16))
                size -= moved
                while moved:
                    moved -= os.splice(out, target.fileno(), moved)
    finally:
        os.close(out)
        os.close(into)


def _shutil(source: Path, path: Path, _size: int) -> None:
    shutil.copyfile(source, path)


class DirectFsx(Fsx):
    """Fsx through a descriptor for both, beside one that writes directly."""

    def __init__(self, path: Path, seed: int) -> None:
        self._direct = os.open(path, WRITE)
        super().__init__(path, seed, 0, os.O_RDWR)

    def write(self) -> None:
        if self._dice.random() < 0.4:
            super().write()
            return
        pos, length = self._range()
        data = self._dice.randbytes(length)
        assert os.pwrite(self._direct, data, pos) == length
        self._put(pos, data)

    def reopen(self) -> None:
        super().reopen()
        if self._dice.random() < 0.3:
            os.close(self._direct)
            self._direct = os.open(self.path, os.O_WRONLY)

    def close(self) -> None:
        super().close()
        os.close(self._direct)


@pytest.mark.parametrize("seed", range(FILES))
def test_w3_fsx_beside_a_direct_writer(root: Path, seed: int) -> None:
    fsx = DirectFsx(root / f"fsx{seed}", seed)
    fsx.run(OPS)
    fsx.close()
    fsx.check(fsx.path)
    all_closed(root)
    fsx.check(fsx.path)
    fsx.path.unlink()

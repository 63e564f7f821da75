"""C5: whole files on a cache disk: right, counted, evicted like the rest, none where in doubt."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdata.disk_cache.cache import DiskCache
from fsdata.disk_cache.directory.disk import Disk
from fsdata.disk_cache.directory.eviction import DiskLimits
from fsdata.disk_cache.directory.file_io import OsFiles
from fsdata.disk_cache.whole_files import WholeFiles
from fsdata.objects.mem import MemObjects
from fsdata.resources.memory_budget import MemoryBudget
from tests.conftest import LogWatch
from tests.fsdata.disk_world import MIB, RUNTIME, pattern, used_bytes

INO = 1 << 60 | 77
DATA = pattern(3 * MIB + 5, 1)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[DiskCache]:
    limits = DiskLimits(16 * MIB, free_ratio=0.0)
    disk = Disk(RUNTIME, OsFiles(), str(tmp_path / "disk"), "volume", limits)
    disk.place.prepare()
    made = DiskCache(RUNTIME, MemObjects(RUNTIME), [disk], MemoryBudget(RUNTIME, 64 * MIB))
    yield made
    made.close()


def _pieces() -> Iterator[bytes]:
    for at in range(0, len(DATA), 1 << 20):
        yield DATA[at : at + (1 << 20)]


def _content(whole: WholeFiles) -> bytes | None:
    fd = whole.open(INO, len(DATA))
    if fd is None:
        return None
    with os.fdopen(fd, "rb") as file:
        return file.read()


def _path(tmp_path: Path) -> Path:
    (path,) = tmp_path.rglob("whole-*")
    return path


def test_c5_a_file_is_plain_and_counted(cache: DiskCache, tmp_path: Path) -> None:
    whole = WholeFiles(RUNTIME, cache)
    assert _content(whole) is None
    assert whole.make(INO, len(DATA), _pieces())
    assert _content(whole) == DATA == _path(tmp_path).read_bytes()
    (member,) = cache.members
    assert member.disk.usage.seen == used_bytes(tmp_path / "disk") >= len(DATA)
    assert whole.make(INO, len(DATA), _pieces()), "as another mount may have, too"
    assert member.disk.usage.seen == used_bytes(tmp_path / "disk")


def test_c5_it_is_handed_out_once_it_was_verified(cache: DiskCache) -> None:
    assert WholeFiles(RUNTIME, cache).make(INO, len(DATA), _pieces())
    another = WholeFiles(RUNTIME, cache)
    assert _content(another) is None
    assert another.verify(INO, len(DATA))
    assert _content(another) == DATA
    assert not another.verify(INO, len(DATA) + 1)


@pytest.mark.parametrize("at", [0, 1 << 20, len(DATA) - 1])
def test_c5_a_flipped_bit_is_found(
    cache: DiskCache, tmp_path: Path, log_watch: LogWatch, at: int
) -> None:
    assert WholeFiles(RUNTIME, cache).make(INO, len(DATA), _pieces())
    with _path(tmp_path).open("r+b") as file:
        file.seek(at)
        file.write(bytes((DATA[at] ^ 1,)))
    another = WholeFiles(RUNTIME, cache)
    assert not another.verify(INO, len(DATA))
    assert not list(tmp_path.rglob("whole-*"))
    assert _content(another) is None
    log_watch.expect("is damaged")


def test_c5_what_was_cut_or_has_no_sum_is_none(cache: DiskCache, tmp_path: Path) -> None:
    whole = WholeFiles(RUNTIME, cache)
    assert whole.make(INO, len(DATA), _pieces())
    os.truncate(_path(tmp_path), 100)
    assert _content(whole) is None
    _path(tmp_path).write_bytes(DATA)
    os.removexattr(_path(tmp_path), "user.slicefs.whole")
    assert not WholeFiles(RUNTIME, cache).verify(INO, len(DATA))


def test_c5_what_is_not_whole_gets_no_name(cache: DiskCache, tmp_path: Path) -> None:
    whole = WholeFiles(RUNTIME, cache)
    assert not whole.make(INO, len(DATA) + 1, _pieces())

    def broken() -> Iterator[bytes]:
        yield DATA[:100]
        raise OSError(5, "the store fails")

    assert not whole.make(INO, len(DATA), broken())
    assert not list((tmp_path / "disk").rglob("*whole*"))
    assert not list((tmp_path / "disk" / "volume" / "tmp").iterdir())


def test_c5_a_file_without_room_is_not_kept(cache: DiskCache) -> None:
    assert not WholeFiles(RUNTIME, cache).make(INO, 17 * MIB, _pieces())


def test_c5_it_goes_when_room_is_needed(cache: DiskCache) -> None:
    whole = WholeFiles(RUNTIME, cache)
    for number in range(8):
        assert whole.make(INO + number, len(DATA), _pieces())
    (member,) = cache.members
    assert member.disk.eviction.evicted > 0
    assert member.disk.usage.seen <= 16 * MIB


def test_c5_without_its_disk_there_is_none(cache: DiskCache, tmp_path: Path) -> None:
    whole = WholeFiles(RUNTIME, cache)
    assert whole.make(INO, len(DATA), _pieces())
    shutil.rmtree(tmp_path / "disk")
    assert _content(whole) is None
    assert not whole.make(INO, len(DATA), _pieces())

"""Room on one cache disk: what is reserved counts, and what a shard lists is counted exactly."""

from __future__ import annotations

from pathlib import Path

from fsdata.disk_cache.directory.eviction import DiskLimits, Eviction
from fsdata.disk_cache.directory.file_io import OsFiles
from fsdata.disk_cache.directory.location import CacheLocation
from fsdata.disk_cache.directory.open_copies import OpenCopies
from tests.fsdata.disk_world import MIB, RUNTIME

SIZE = MIB // 4


def eviction(root: Path, kind: str = "lru") -> tuple[Eviction, CacheLocation]:
    files = OsFiles()
    place = CacheLocation(RUNTIME, files, str(root), "volume")
    place.prepare()
    copies = OpenCopies(RUNTIME, files, place, limit=4)
    return Eviction(RUNTIME, files, place, DiskLimits(MIB, 0.0, kind), copies), place


def test_what_is_reserved_counts_until_it_is_given_back(tmp_path: Path) -> None:
    room, _ = eviction(tmp_path, "none")
    assert room.missing(MIB) == 0
    assert room.take_room(MIB - SIZE)
    assert room.missing(SIZE + 1) == 1
    assert not room.take_room(SIZE + 1)
    assert room.full
    room.give_room(MIB - SIZE)
    assert room.take_room(SIZE + 1)
    assert not room.full, "the last addition counts"


def test_the_oldest_files_of_a_shard_go_for_room(tmp_path: Path) -> None:
    room, place = eviction(tmp_path)
    files = OsFiles()
    files.make_directory(place.folder(3))
    for number in range(4):
        path = place.path(f"n{number}", 3)
        files.create(path, (bytes(SIZE),)).touch((number + 1) * 10**9)
    room.look_through(3)
    assert place.usage.seen == MIB
    assert room.take_room(SIZE)
    assert room.evicted == 1
    assert {each.name for each in files.list(place.folder(3))} == {"n1", "n2", "n3"}

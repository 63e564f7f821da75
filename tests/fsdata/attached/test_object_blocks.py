"""Blocks of attached objects: what they are called, and what they hold."""

from __future__ import annotations

import errno
import gc
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from fsdata.attached.directory import ALLOWED_ENV, HostDirectory, file_etag
from fsdata.attached.object_blocks import ObjectBlocks, ShownObject
from fsdata.attached.objects import AttachedCaches, attached_caches
from fsdata.blocks.read_plan import RANDOM
from fsdata.disk_cache.directory.format import KEY_BYTES_MAX
from fsdata.format.block_v1 import decode
from fsdata.format.object_keys import object_key
from fsdata.objects.mem import MemObjects
from fsdata.resources.block_cache import BlockCache
from fsdata.resources.memory_budget import MemoryBudget
from fsmeta.errors import ObjectMissing
from fsmeta.runtime import SystemRuntime
from fsmeta.types import AttachedObject, SliceId
from tests.fsdata.disk_world import pattern

RUNTIME = SystemRuntime()
SIZE = 5_000_000
FOUND = AttachedObject("file://", "", "b", "k", "e")


class Place:
    """Where no byte is ever asked for."""

    on_disks = True

    def __init__(self, place: str) -> None:
        self.place = place

    def get(self, found: AttachedObject, begin: int, end: int) -> bytes:
        raise AssertionError((found, begin, end))

    def close(self) -> None:
        raise AssertionError


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[HostDirectory, AttachedObject]:
    """A directory with one file, and what is attached of it."""
    monkeypatch.setenv(ALLOWED_ENV, str(tmp_path))
    path = tmp_path / "k"
    path.write_bytes(pattern(SIZE))
    found = AttachedObject("file://", "", str(tmp_path), "k", file_etag(path.stat()))
    return HostDirectory(str(tmp_path)), found


def caches(objects: ObjectBlocks) -> AttachedCaches:
    budget = MemoryBudget(RUNTIME)
    return attached_caches(RUNTIME, objects, BlockCache(RUNTIME, budget), None)


def store() -> ObjectBlocks:
    return ObjectBlocks(RUNTIME, MemObjects(RUNTIME))


def test_an_id_names_all_that_decides_the_bytes() -> None:
    """Also where a word goes on where the one before it ends."""
    wholes, parts = caches(store()).kept
    same = ShownObject(Place("p"), FOUND, SIZE, wholes).id
    assert ShownObject(Place("p"), FOUND._replace(endpoint="", region="r"), SIZE, wholes).id == same
    others = {
        ShownObject(Place("q"), FOUND, SIZE, wholes).id,
        ShownObject(Place("p"), FOUND._replace(bucket="c"), SIZE, wholes).id,
        ShownObject(Place("p"), FOUND._replace(key="l"), SIZE, wholes).id,
        ShownObject(Place("p"), FOUND._replace(key="", bucket="bk"), SIZE, wholes).id,
        ShownObject(Place("p"), FOUND._replace(etag="f"), SIZE, wholes).id,
        ShownObject(Place("p"), FOUND, SIZE + 1, wholes).id,
        ShownObject(Place("p"), FOUND, SIZE, parts).id,
        same,
    }
    assert len(others) == 8
    assert min(others) > 1 << 64  # of no slice
    assert all(len(object_key(each, 1 << 20, 4 << 20)) <= KEY_BYTES_MAX for each in others)


def test_a_block_has_its_bytes_and_checksums(host: tuple[HostDirectory, AttachedObject]) -> None:
    objects = store()
    shown = objects.show(ShownObject(*host, SIZE, caches(objects).kept[0]))
    key = object_key(shown.id, 1, SIZE - (4 << 20))
    data = objects.get(key)
    assert decode(data) == pattern(SIZE)[4 << 20 :]
    assert objects.get(key, 5, 50) == data[5:50]
    assert objects.get_ranges(key, ((0, 9), (100, len(data) + 9))) == [data[:9], data[100:]]
    into = bytearray(len(data) + 5)
    assert objects.get_into(key, (memoryview(into)[:7], memoryview(into)[7:])) == len(data)
    assert into[: len(data)] == data


def test_an_object_is_known_while_it_is_read(host: tuple[HostDirectory, AttachedObject]) -> None:
    objects = store()
    blocks = caches(objects).kept[1]
    shown = objects.show(ShownObject(*host, SIZE, blocks))
    assert objects.show(ShownObject(*host, SIZE, blocks)) is shown
    key = object_key(shown.id, 0, 256 << 10)
    assert decode(objects.get(key)) == pattern(SIZE)[: 256 << 10]
    del shown
    gc.collect()
    with pytest.raises(ObjectMissing):
        objects.get(key)


def test_the_blocks_of_the_volume_are_its_stores() -> None:
    objects = store()
    key = object_key(SliceId((1 << 64) - 1), (1 << 32) - 1, 4 << 20)
    objects.put(key, (b"own",))
    assert objects.get(key) == b"own"
    objects.delete(key)
    assert objects.head(key) is None


def test_another_version_is_stale(
    host: tuple[HostDirectory, AttachedObject], tmp_path: Path
) -> None:
    objects = store()
    blocks = caches(objects).kept[0]
    shown = objects.show(ShownObject(*host, SIZE, blocks))
    assert blocks.read(shown.block_read(10, 20, RANDOM)) == pattern(SIZE)[10:20]
    (tmp_path / "k").write_bytes(pattern(SIZE, 2))
    assert blocks.read(shown.block_read(30, 40, RANDOM)) == pattern(SIZE)[30:40]  # from memory
    with pytest.raises(OSError, match="changed") as caught:
        blocks.read(shown.block_read(4 << 20, (4 << 20) + 9, RANDOM))
    assert caught.value.errno == errno.ESTALE


@given(st.integers(0, SIZE - 1), st.integers(1, SIZE), st.booleans())
def test_reads_of_blocks_join(begin: int, size: int, large: bool) -> None:
    wholes, parts = caches(store()).kept
    shown = ShownObject(Place("p"), FOUND, SIZE, wholes if large else parts)
    end = at = min(begin + size, SIZE)
    asked = set()
    at = begin
    while at < end:
        read = shown.block_read(at, end, RANDOM)
        assert read.key[1] * shown.blocks.block_bytes + read.begin == at
        assert 0 <= read.begin < read.end <= read.length <= shown.blocks.block_bytes
        asked.add(read.key[1])
        at += read.end - read.begin
    assert at == end
    assert {each.block for each in shown.requests(begin, end)} == asked

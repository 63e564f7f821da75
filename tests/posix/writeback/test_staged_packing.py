"""O6, W2: a client that writes back packs small files before they are stored; another one reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from fsclient.background import tidy_queue
from fsclient.client.client import MountClient
from fsclient.client.client_options import ClientOptions
from fsclient.client.given_parts import GivenParts
from fsclient.writeback import packer as staged_packer
from fsclient.writeback.writeback import WriteBack, WriteBackOptions
from fsdata.format.object_keys import object_key
from fsdata.objects.contract import Buffer
from fsdata.objects.mem import MemObjects
from fsdata.staging import coalesce
from fsdata.staging.data_segments import DataSegments, SegmentSpot
from fsmeta.schema import keys
from fsmeta.schema.segments import OpenSegment
from fsmeta.store.writes import Delete
from fsmeta.types import SliceKind
from tests.conftest import assert_clean
from tests.fsmeta.engines import change
from tests.posix.inproc import RUNTIME, Connect, format_volume, memory
from tests.sim.world.posix import Posix

FILES = 60
BELOW = 512 << 10
SOON_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files wait until a block is full or somebody waits, however slow this machine is."""
    monkeypatch.setattr(coalesce, "LINGER_S", 3600.0)


class Slow(MemObjects):
    """A store whose requests take a while, and that can be shut; it counts what it takes."""

    def __init__(self) -> None:
        super().__init__(RUNTIME)
        self.puts: list[str] = []
        self.open = RUNTIME.event()
        self.open.set()

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        assert self.open.wait(SOON_S), "nobody opened the store"
        RUNTIME.sleep(0.01)
        self.puts.append(key)
        super().put(key, pieces)


class Volume:
    """A volume in memory; `mine` writes back."""

    def __init__(self, staging: Path, limit: int = 1 << 30) -> None:
        self.connect: Connect = memory()
        format_volume(self.connect)
        self.objects = Slow()
        self.content: dict[bytes, bytes] = {}
        self.staging = staging
        back = WriteBackOptions(limit)
        self.options = ClientOptions(
            heartbeat_s=0.2, pack_below=BELOW, staging_dir=str(staging), writeback=back
        )
        self.start()

    def start(self) -> None:
        self.mine = MountClient(self.connect(), RUNTIME, self.options, GivenParts(self.objects))
        self.mine.start()
        self.me = Posix(self.mine.vfs)

    @property
    def back(self) -> WriteBack:
        assert self.mine.writeback is not None
        return self.mine.writeback

    @property
    def packer(self) -> staged_packer.StagedPacker:
        assert self.back.packer is not None
        return self.back.packer

    def write(self, count: int, size: int = 3000, data: bytes = b"") -> None:
        for number in range(count):
            path = b"/%03d" % number
            self.content[path] = data or os.urandom(size + number)
            file = self.me.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC)
            file.write(0, self.content[path])
            file.close()

    def settle(self) -> None:
        assert self.back.settle(None, SOON_S)

    def check(self, posix: Posix) -> None:
        for path, data in self.content.items():
            file = posix.open(path)
            assert file.read(0, 1 << 20) == data, path
            file.close()

    def staged(self) -> int:
        """Bytes on the staging disk."""
        sizes = []
        for each in self.staging.rglob("data-*"):
            with suppress(FileNotFoundError):  # gone meanwhile
                sizes.append(each.stat().st_size)
        return sum(sizes)

    def end(self) -> None:
        """Everybody sees all of it, and nothing is left over."""
        self.check(self.me)
        assert self.mine.stop()
        assert self.staged() == 0
        other = MountClient(
            self.connect(), RUNTIME, ClientOptions(pack_below=0), GivenParts(self.objects)
        )
        other.start()
        self.check(Posix(other.vfs))
        assert other.stop()
        store = self.connect()
        assert store.read_rows([keys.CLONES]) == [{}]
        assert_clean(store)


def test_o6_many_files_are_few_requests(tmp_path: Path) -> None:
    """And nobody packs them later."""
    volume = Volume(tmp_path)
    volume.write(FILES)
    volume.settle()
    assert len(volume.objects.puts) == 1
    assert volume.packer.packed == FILES
    volume.end()
    assert len(volume.objects.puts) == 1
    assert len(list(volume.objects.list("chunks/"))) == 1


def test_o6_what_was_just_written_is_not_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And memory lets go of it: nobody will look for it by that name."""
    volume = Volume(tmp_path)
    reads: list[SegmentSpot] = []
    read_range = DataSegments.read_range

    def noted(data: DataSegments, spot: SegmentSpot, begin: int, end: int) -> bytes:
        reads.append(spot)
        return read_range(data, spot, begin, end)

    monkeypatch.setattr(DataSegments, "read_range", noted)
    volume.write(FILES)
    volume.settle()
    assert volume.packer.packed == FILES
    assert reads == []
    assert volume.mine.cache.stats().blocks == 0
    volume.end()


def test_o6_what_memory_has_lost_is_read_back(tmp_path: Path) -> None:
    volume = Volume(tmp_path)
    volume.write(FILES)
    volume.mine.cache.shrink(1 << 30)
    volume.settle()
    assert volume.packer.packed == FILES
    volume.end()


def test_o6_who_waits_for_the_store_does_not_wait_for_company(tmp_path: Path) -> None:
    volume = Volume(tmp_path)
    volume.write(tidy_queue.MEMBERS_MIN - 1)
    RUNTIME.sleep(0.3)
    assert volume.objects.puts == []
    volume.settle()
    assert len(volume.objects.puts) == tidy_queue.MEMBERS_MIN - 1
    volume.end()


def test_o6_what_compresses_well_still_fits(tmp_path: Path) -> None:
    """A block holds so many bytes as they are, however few they are when stored."""
    volume = Volume(tmp_path)
    volume.write(FILES, data=bytes(BELOW))
    volume.settle()
    size = volume.mine.blocks.block_bytes
    assert len(volume.objects.puts) >= FILES * BELOW // size
    volume.end()


def test_o6_open_files_go_on_while_they_are_packed(tmp_path: Path) -> None:
    """A reader before, during and after; a writer whose further data come behind."""
    volume = Volume(tmp_path)
    volume.objects.open.clear()
    volume.write(FILES)
    reader = volume.me.open(b"/000")
    writer = volume.me.open(b"/001", os.O_RDWR)
    assert reader.read(0, 10) == volume.content[b"/000"][:10]
    writer.write(3000, b"more")
    writer.fsync()
    volume.objects.open.set()
    volume.settle()
    assert reader.read(5, 1000) == volume.content[b"/000"][5:1005]
    writer.write(100, b"even more")
    writer.close()
    data = bytearray(volume.content[b"/001"].ljust(3004, b"\0"))
    data[3000:3004] = b"more"
    data[100:109] = b"even more"
    volume.content[b"/001"] = bytes(data)
    volume.settle()
    RUNTIME.sleep(1.5)  # what was staged goes
    assert reader.read(0, 5000) == volume.content[b"/000"]
    reader.close()
    volume.end()


def test_o6_files_that_are_deleted_before_others_see_them(tmp_path: Path) -> None:
    """All but the last of a segment: it stays for that one."""
    volume = Volume(tmp_path)
    volume.objects.open.clear()
    volume.write(FILES)
    for number in range(FILES - 1):
        path = b"/%03d" % number
        volume.me.unlink(path)
        del volume.content[path]
    volume.objects.open.set()
    volume.settle()
    assert volume.packer.segments
    volume.end()


def test_o6_room_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was staged of packed files goes when they are published, and first where it is full."""
    segment = 1 << 20
    monkeypatch.setattr("fsdata.staging.data_segments.SEGMENT_BYTES", segment)
    volume = Volume(tmp_path, limit=4 * segment)
    volume.write(FILES, 400 << 10)
    assert volume.staged() <= 5 << 20
    volume.settle()
    deadline = RUNTIME.monotonic() + SOON_S
    while volume.staged() > 2 * segment:  # one that is written to, and one to be written over
        assert RUNTIME.monotonic() < deadline
        RUNTIME.sleep(0.05)
    assert volume.packer.packed > FILES / 2
    volume.end()


def test_o6_a_segment_that_was_left_to_the_leader_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if others had ended the session that opened it, between storing and publishing."""
    volume = Volume(tmp_path)
    volume.objects.open.clear()
    volume.write(FILES)
    meta = volume.mine.meta
    opened = meta.packing.open_segment
    lost: list[OpenSegment] = []

    def lose(segment: OpenSegment) -> None:
        opened(segment)
        if not lost:
            write = Delete(keys.CLONES, segment.field)
            volume.connect().commit(change(write))
            lost.append(segment)

    monkeypatch.setattr(meta.packing, "open_segment", lose)
    volume.objects.open.set()
    volume.settle()
    assert len(lost) == 1
    assert volume.packer.segments == 2
    inos = [volume.me.stat(path).ino for path in volume.content]
    listed = {volume.mine.meta.read_chunk(ino, 0)[0] for ino in inos}
    assert lost[0].id not in {each.id for each in listed}
    assert SliceKind.SEGMENT in {each.kind for each in listed}
    volume.mine.objects.delete(object_key(lost[0].id, 0, lost[0].size))  # as the leader does
    volume.end()

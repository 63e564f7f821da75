"""O6: one client in this process packs what it wrote, and packs anew what is left of it."""

from __future__ import annotations

import os
from math import inf

import pytest

from fsclient.background import leader, packer, tidy_queue
from fsclient.client.client import MountClient
from fsclient.client.client_options import ClientOptions
from fsclient.client.given_parts import GivenParts
from fsclient.upkeep.scrub import Scrub
from fsdata.objects.mem import MemObjects
from fsmeta.admin.snapshots import Taker
from fsmeta.schema import scan
from fsmeta.types import ROOT_CALLER, ROOT_INO, SliceKind
from tests.conftest import assert_clean
from tests.posix.inproc import RUNTIME, Connect, format_volume, memory
from tests.sim.world.posix import Posix

FILES = 40
OPTIONS = ClientOptions(heartbeat_s=0.1, pack_below=512 << 10)
ROUNDS_S = 60.0  # by then several deletion rounds are over


@pytest.fixture(autouse=True)
def swift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds and packing do not wait for long; what a test has written is taken together."""
    monkeypatch.setattr(leader, "NEWS_S", 0.1)
    monkeypatch.setattr(leader, "CLONES_EVERY_S", 0.1)
    monkeypatch.setattr(packer, "QUIET_S", 0.0)
    monkeypatch.setattr(packer, "LINGER_S", 0.3)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is packed but what the test itself packs."""
    monkeypatch.setattr(packer, "LINGER_S", 3600.0)


class Volume:
    """A volume in memory with one client, that packs."""

    def __init__(self) -> None:
        self.connect: Connect = memory()
        format_volume(self.connect)
        self.objects = MemObjects(RUNTIME)
        self.content: dict[bytes, bytes] = {}
        self.open()

    def open(self) -> None:
        self.client = MountClient(self.connect(), RUNTIME, OPTIONS, GivenParts(self.objects))
        self.client.start()
        self.posix = Posix(self.client.vfs)
        self.packer = self.client.background.packer

    def write(self, count: int, size: int = 3000) -> None:
        """So many files, which are packed together, however long that takes."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packer, "LINGER_S", 3600.0)
            self._write(count, size)

    def _write(self, count: int, size: int) -> None:
        for number in range(count):
            path = b"/%03d" % number
            self.content[path] = os.urandom(size + number)
            file = self.posix.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC)
            file.write(0, self.content[path])
            file.close()

    def unlink(self, path: bytes) -> None:
        self.posix.unlink(path)
        del self.content[path]

    def read(self, path: bytes) -> bytes:
        file = self.posix.open(path)
        try:
            return file.read(0, 1 << 20)
        finally:
            file.close()

    def check(self) -> None:
        for path, data in self.content.items():
            assert self.read(path) == data, path

    def keys(self) -> list[str]:
        return [info.key for info in self.objects.list("chunks/")]

    def wait_for_objects(self, count: int) -> None:
        """Until there are so many."""
        deadline = RUNTIME.monotonic() + ROUNDS_S
        while len(self.keys()) != count:
            assert RUNTIME.monotonic() < deadline, self.keys()
            RUNTIME.sleep(0.05)

    def end(self) -> None:
        self.check()
        assert self.client.stop()
        assert_clean(self.connect())


def test_packed_unasked_and_read_with_one_request() -> None:
    """O6."""
    volume = Volume()
    volume.write(FILES)
    volume.wait_for_objects(1)
    assert (volume.packer.packed, volume.packer.segments) == (FILES, 1)
    volume.check()
    assert volume.client.stop()
    volume.open()
    volume.check()
    assert volume.client.blocks.stats().whole == 1
    volume.end()


@pytest.mark.usefixtures("asked")
def test_open_files_are_packed_and_go_on() -> None:
    """O6: a file that is read, and one that grows, while they are packed."""
    volume = Volume()
    volume.write(FILES)
    reader = volume.posix.open(b"/000")
    assert reader.read(0, 10) == volume.content[b"/000"][:10]
    writer = volume.posix.open(b"/001", os.O_RDWR)
    writer.write(3000, b"more")
    volume.packer.finish(inf)
    assert reader.read(5, 1000) == volume.content[b"/000"][5:1005]
    writer.close()
    data = bytearray(volume.content[b"/001"])
    data[3000:3004] = b"more"
    volume.content[b"/001"] = bytes(data)
    volume.wait_for_objects(2)
    assert reader.read(0, 5000) == volume.content[b"/000"]
    reader.close()
    volume.end()


def test_what_is_left_of_a_segment_is_packed_anew() -> None:
    """O6: when more than half is gone."""
    volume = Volume()
    volume.write(FILES)
    volume.wait_for_objects(1)
    first = volume.keys()
    for number in range(FILES // 2 + 1):
        volume.unlink(b"/%03d" % number)
    deadline = RUNTIME.monotonic() + ROUNDS_S
    while volume.packer.segments < 2:
        assert RUNTIME.monotonic() < deadline
        RUNTIME.sleep(0.05)
    volume.wait_for_objects(1)
    assert volume.keys() != first
    volume.end()


def test_a_snapshot_keeps_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """O6, T2: what is packed and deleted is read in the snapshot, and goes with it."""
    volume = Volume()
    meta = volume.client.meta
    with monkeypatch.context() as patch:
        patch.setattr(packer, "LINGER_S", 3600.0)  # nothing is packed unasked
        volume.write(FILES)
        made = Taker(meta, ROOT_CALLER, RUNTIME.now_ns, lambda: False).take(ROOT_INO, b"one")
        assert made.changed == 0
        volume.packer.finish(inf)
    volume.wait_for_objects(FILES + 1)  # the snapshot has what was before
    later = Taker(meta, ROOT_CALLER, RUNTIME.now_ns, lambda: False).take(ROOT_INO, b"two")
    assert later.changed == 0
    content = dict(volume.content)
    for path in content:
        volume.unlink(path)
    volume.posix.rmdir(b"/.snapshots/one")
    volume.wait_for_objects(1)
    assert volume.client.stop()
    volume.open()
    for path, data in content.items():
        assert volume.read(b"/.snapshots/two" + path) == data, path
    volume.posix.rmdir(b"/.snapshots/two")
    volume.wait_for_objects(0)
    volume.end()


@pytest.mark.usefixtures("asked")
def test_few_files_and_large_ones_stay_as_they_are() -> None:
    """O6."""
    volume = Volume()
    volume.write(tidy_queue.MEMBERS_MIN - 1)
    volume.packer.finish(inf)
    volume.write(6, (512 << 10) + 1)
    volume.packer.finish(inf)
    assert volume.packer.segments == 0
    volume.end()


def test_scrub_reads_a_segment_once() -> None:
    """O6: but for those that several threads have in hand at once."""
    volume = Volume()
    volume.write(FILES)
    volume.wait_for_objects(1)
    store = volume.connect()
    scrub = Scrub(store, volume.objects, RUNTIME, volume.client.blocks.block_bytes, threads=1)
    inodes = [each for page in scan.pages(store) for each in page.inodes]
    pieces = [piece for each in inodes for piece in each.chunks.get(0, ())]
    assert {piece.kind for piece in pieces} == {SliceKind.SEGMENT}
    assert scrub.judge(inodes) == []
    assert scrub.totals.blocks <= 5
    (key,) = volume.keys()
    data = bytearray(volume.objects.get(key))
    data[100] ^= 1
    volume.objects.put(key, (bytes(data),))
    again = Scrub(store, volume.objects, RUNTIME, volume.client.blocks.block_bytes, threads=1)
    found = again.judge(inodes)
    assert {each.path for each in found} == {path.decode() for path in volume.content}
    data[100] ^= 1
    volume.objects.put(key, (bytes(data),))
    scrub.close()
    again.close()
    volume.end()

"""P6: requests answered without a verb say what the verb would, and leases hold for them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from fsclient.client.client import MountClient
from fsclient.fuse.dispatch.dispatch import Dispatcher
from fsclient.fuse.session.interrupt import Interrupts
from fsclient.fuse.session.stats import SlotStats
from fsclient.fuse.session.tap import ServedRequest
from fsclient.fuse.session.worker import Slot, Stop, Worker, receive_buffer
from fsclient.fuse.wire import abi
from fsclient.fuse.wire.protocol import Opcode
from fsclient.kernel.cache_leases import LONG_S
from fsclient.kernel.contract import FileLock
from fsclient.vfs.vfs import VFS
from fsmeta.meta.meta import Meta
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.txn import contended_dirs
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino, SetAttr
from tests.posix import inproc
from tests.posix.inproc import RUNTIME
from tests.posix.two_mounts.test_notices import Told
from tests.support.waiting import wait_until

CALLER = ROOT_CALLER._replace(checked=True)


@pytest.fixture
def backend() -> MemBackend:
    return MemBackend(RUNTIME)


@pytest.fixture
def client(backend: MemBackend) -> Iterator[MountClient]:
    with inproc.client(lambda: MemStore(backend, tracked=True)) as made:
        yield made


@pytest.fixture
def other(backend: MemBackend, client: MountClient) -> Iterator[Meta]:
    del client  # it makes the volume
    meta = Meta(MemStore(backend, tracked=True), RUNTIME)
    meta.sessions.open({"host": "other"})
    yield meta
    meta.sessions.close()


def made_directory(vfs: VFS, name: bytes = b"dir") -> Ino:
    attr = vfs.mkdir(CALLER, ROOT_INO, name, 0o755).attr
    assert attr is not None
    return attr.ino


def created(vfs: VFS, parent: Ino, name: bytes, flags: int = os.O_RDWR) -> tuple[Ino, int]:
    entry, opened = vfs.create(CALLER, parent, name, 0o644, flags)
    assert entry.attr is not None
    return entry.attr.ino, opened.fh


def test_p6_nothing_is_answered_without_a_kernel_to_be_told(client: MountClient) -> None:
    vfs = client.vfs
    directory = made_directory(vfs)
    assert not vfs.fast_lane.is_absent(directory, b"name")
    assert vfs.fast_lane.stat(directory) is None


def test_p6_absent_names(client: MountClient, other: Meta) -> None:
    vfs, lane = client.vfs, client.vfs.fast_lane
    vfs.coherence.start(Told())
    directory = made_directory(vfs)
    assert lane.is_absent(directory, b"name")
    created(vfs, directory, b"name")
    assert not lane.is_absent(directory, b"name")
    assert lane.is_absent(directory, b".swp")
    for name in (b".", b"..", b".snapshots", b"", b"n" * 256):
        assert not lane.is_absent(directory, name), name
    for name in (b".trash", b".stats", b".config"):
        assert not lane.is_absent(ROOT_INO, name), name
    other.create(ROOT_CALLER, directory, b"theirs", 0o100644)
    for name in (b"theirs", b"free"):
        assert not lane.is_absent(directory, name), "the row of the directory is leased no more"


def test_p6_absent_in_a_contended_directory_is_asked_for(
    client: MountClient, other: Meta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contended_dirs, "GAP_S", 3600.0)
    monkeypatch.setattr(contended_dirs, "BUSY_S", 3600.0)
    vfs = client.vfs
    vfs.coherence.start(Told())
    directory = made_directory(vfs)
    for number in range(3):
        other.create(ROOT_CALLER, directory, b"theirs%d" % number, 0o100644)
        created(vfs, directory, b"ours%d" % number)
    assert client.meta.cache.busy.has_dir(directory)
    assert not vfs.fast_lane.is_absent(directory, b"free")
    assert vfs.fast_lane.stat(directory) is None


def test_p6_attributes_are_those_of_the_verb(client: MountClient, other: Meta) -> None:
    vfs, lane = client.vfs, client.vfs.fast_lane
    told = Told()
    vfs.coherence.start(told)
    directory = made_directory(vfs)
    ino, fh = created(vfs, directory, b"file")
    for each in (directory, ino):
        found = lane.stat(each)
        assert found == vfs.getattr(CALLER, each, None)
        assert found is not None
        assert found.ttl == LONG_S
    vfs.write(CALLER, ino, fh, 0, memoryview(bytearray(b"data")))
    assert lane.stat(ino) is None, "it is written here"
    vfs.flush(CALLER, ino, fh)
    vfs.release(ino, fh)
    assert lane.stat(ino) == vfs.getattr(CALLER, ino, None)
    other.setattr(ROOT_CALLER, ino, SetAttr(mode=0o600))
    wait_until(lambda: ("inode", ino) in told.seen)
    assert lane.stat(ino) is None, "another mount has changed it"
    mode = vfs.getattr(CALLER, ino, None).attr.mode
    found = lane.stat(ino)
    assert found is not None
    assert found.attr.mode == mode == 0o100600
    vfs.unlink(CALLER, directory, b"file")
    assert lane.stat(ino) in (None, vfs.getattr(CALLER, ino, None))


def test_p6_handles_are_closed(client: MountClient) -> None:
    vfs, lane = client.vfs, client.vfs.fast_lane
    ino, fh = created(vfs, ROOT_INO, b"file")
    vfs.write(CALLER, ino, fh, 0, memoryview(bytearray(b"data")))
    assert not lane.flush(ino, fh), "what was written is to be stored"
    assert not lane.release(ino, fh)
    vfs.flush(CALLER, ino, fh)
    assert lane.flush(ino, fh)
    assert not lane.release(ino, fh), "a writer is to be ended"
    vfs.release(ino, fh)
    reading = vfs.open(CALLER, ino, os.O_RDONLY).fh
    assert b"".join(vfs.read(CALLER, ino, reading, 0, 10)) == b"data"
    assert lane.flush(ino, reading)
    assert lane.release(ino, reading)
    assert not lane.flush(ino, reading)
    assert not lane.release(ino, reading)
    listing = vfs.directories.opendir(CALLER, ROOT_INO).fh
    assert not lane.release(ROOT_INO, listing)
    vfs.directories.releasedir(ROOT_INO, listing)
    assert vfs.files.handle_count() == 0
    assert vfs.files.get(ino) is None


def test_p6_files_are_opened_as_the_verb_opens_them(client: MountClient, other: Meta) -> None:
    vfs, lane = client.vfs, client.vfs.fast_lane
    told = Told()
    vfs.coherence.start(told)
    ino, fh = created(vfs, ROOT_INO, b"file", os.O_RDWR)
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_TRUNC, os.O_DIRECT, os.O_NOATIME):
        assert lane.open(ino, flags) is None
    first = lane.open(ino, os.O_RDONLY)
    assert first is not None
    assert first.keep_cache
    assert first.no_flush
    vfs.write(CALLER, ino, fh, 0, memoryview(bytearray(b"data")))
    assert lane.open(ino, os.O_RDONLY) is None, "it is written here"
    vfs.flush(CALLER, ino, fh)
    vfs.release(ino, fh)
    vfs.release(ino, first.fh)
    assert vfs.files.handle_count() == 0
    other.setattr(ROOT_CALLER, ino, SetAttr(size=2))
    wait_until(lambda: ("inode", ino) in told.seen)
    assert lane.open(ino, os.O_RDONLY) is None, "another mount has changed it"
    vfs.getattr(CALLER, ino, None)
    second = lane.open(ino, os.O_RDONLY)
    assert second is not None
    assert not second.keep_cache, "pages show what it was"
    assert b"".join(vfs.read(CALLER, ino, second.fh, 0, 10)) == b"da"
    third = lane.open(ino, os.O_RDONLY)
    assert third is not None
    assert third.keep_cache
    assert lane.release(ino, second.fh)
    assert lane.release(ino, third.fh)
    vfs.xattrs.setflags(CALLER, ino, 0x10)
    assert lane.open(ino, os.O_RDONLY) is None
    vfs.xattrs.setflags(CALLER, ino, 0)
    vfs.unlink(CALLER, ROOT_INO, b"file")
    assert lane.open(ino, os.O_RDONLY) is None, "it has no name"
    assert vfs.files.handle_count() == 0


def test_p6_handles_of_locked_files_are_left_to_the_verb(client: MountClient) -> None:
    vfs, lane = client.vfs, client.vfs.fast_lane
    ino, fh = created(vfs, ROOT_INO, b"file")
    assert vfs.locks.setlk(fh, 7, FileLock(True, 0, 10, 1), False, 1, False)
    assert not lane.flush(ino, fh)
    assert not lane.release(ino, fh)
    vfs.flush(CALLER, ino, fh, 7)
    vfs.release(ino, fh)
    assert vfs.files.handle_count() == 0


class Alone:
    """The only worker there is."""

    reader = 0
    watched = True

    def watch(self) -> None: ...
    def take_turn(self, slot: int) -> None: ...
    def give_turn(self, slot: int) -> None: ...
    def is_surplus(self, slot: int) -> bool:
        return slot != self.reader


class Log:
    """Takes all requests."""

    floor_s = 0.0

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []

    def take(self, request: ServedRequest) -> None:
        self.taken.append((request.opcode, request.caller.uid))


class Served:
    """A worker on one end of a socket, the kernel's requests on the other."""

    def __init__(self, client: MountClient) -> None:
        self.kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours = ours
        self.interrupts = Interrupts(1)
        self.log = Log()
        self.stats = SlotStats(self.log)
        self.dispatcher = Dispatcher(client.vfs, quick=client.vfs.fast_lane)
        self._stop = Stop()
        worker = Worker(
            ours.fileno(),
            Slot(0, self.stats, receive_buffer(1 << 16)),
            Alone(),
            self.dispatcher,
            self.interrupts,
            RUNTIME.monotonic,
        )
        self._thread = threading.Thread(target=worker.run, args=(self._stop,), daemon=True)
        self._thread.start()

    def send(self, opcode: int, ino: Ino, body: bytes) -> None:
        size = abi.IN_BYTES + len(body)
        self.kernel.send(abi.IN_HEADER.pack(size, opcode, 77, ino, 5, 6, 7, 0) + body)

    def answer(self) -> bytes:
        return self.kernel.recv(1 << 16)[abi.OUT_BYTES :]

    def end(self) -> None:
        self._stop.requested = True
        self.send(Opcode.STATFS, ROOT_INO, b"")
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.kernel.close()
        self._ours.close()


def test_p6_what_is_answered_quickly_is_counted_and_logged(client: MountClient) -> None:
    client.vfs.coherence.start(Told())
    directory = made_directory(client.vfs)
    served = Served(client)
    try:
        served.send(Opcode.LOOKUP, directory, b"name\0")
        assert served.answer()[:8] == bytes(8), "no inode, and no errno"
        assert served.stats.served >= 1
        assert served.stats.counts[Opcode.LOOKUP] == 1
        wait_until(lambda: served.log.taken == [(Opcode.LOOKUP, 5)])
    finally:
        served.end()


def test_p6_a_lease_that_ends_before_its_answer_is_written_is_taken_back(
    client: MountClient, other: Meta
) -> None:
    """The kernel has heard of the name twice, and then is answered that there is none."""
    told, vfs = Told(), client.vfs
    served = Served(client)
    vfs.coherence.start(told, served.interrupts.under_way)
    directory = made_directory(vfs)
    looked, go_on = threading.Event(), threading.Event()
    lane = served.dispatcher.lanes[Opcode.LOOKUP]
    assert lane is not None
    quick = lane

    def slow(ino: Ino, view: memoryview, end: int) -> bytes | None:
        answer = quick(ino, view, end)
        looked.set()
        assert go_on.wait(60)
        return answer

    served.dispatcher.lanes[Opcode.LOOKUP] = slow
    news = ("entry", directory, b"name")
    try:
        served.send(Opcode.LOOKUP, directory, b"name\0")
        assert looked.wait(60)
        other.create(ROOT_CALLER, directory, b"name", 0o100644)
        wait_until(lambda: told.seen.count(news) == 2)
        go_on.set()
        assert served.answer()[:8] == bytes(8)
        wait_until(lambda: told.seen.count(news) >= 3)
    finally:
        go_on.set()
        served.end()


def test_p6_news_between_the_note_and_the_look_are_not_answered_over(
    client: MountClient, other: Meta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come where another thread has the directory read anew at once, so it is leased again."""
    vfs = client.vfs
    vfs.coherence.start(Told())
    directory = made_directory(vfs)
    real = vfs.coherence._names_of

    def names_of(parent: Ino) -> set[bytes]:
        names = real(parent)
        monkeypatch.setattr(vfs.coherence, "_names_of", real)
        other.create(ROOT_CALLER, directory, b"name", 0o100644)
        assert vfs.lookup(CALLER, directory, b"name").attr is not None
        return names

    monkeypatch.setattr(vfs.coherence, "_names_of", names_of)
    assert not vfs.fast_lane.is_absent(directory, b"name")

"""Bugs that were, each in the fewest steps that show it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest

from fsclient.files.handles.open_files import OpenFile
from fsclient.kernel import cache_leases, kernel_notices
from fsclient.kernel.contract import WriteHow
from fsmeta.check.check import check
from fsmeta.errors import Unavailable
from fsmeta.meta.meta import Meta
from fsmeta.store.contract import SCAN_PAGE, Page
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.types import ROOT_CALLER, ROOT_INO, Attr, Caller, Ino, SetAttr, Slice
from tests.conftest import LogWatch
from tests.posix import inproc
from tests.posix.inproc import RUNTIME
from tests.sim.world.posix import Posix
from tests.support.waiting import wait_until

FILE = 0o100644
STRANGER = Caller(60001, 60001)


@contextmanager
def _two_clients(tracked: bool = False) -> Iterator[tuple[Meta, Meta]]:
    """Two clients of one volume that are told nothing of each other, unless `tracked`."""
    backend = MemBackend(RUNTIME)
    inproc.format_volume(lambda: MemStore(backend))
    first, second = (Meta(MemStore(backend, tracked), RUNTIME) for _ in range(2))
    first.sessions.open({})
    second.sessions.open({})
    yield first, second
    assert check(first.store).problems == []


def _make(meta: Meta, name: bytes) -> Ino:
    return meta.create(ROOT_CALLER, ROOT_INO, name, FILE).ino


def _write(meta: Meta, ino: Ino, pos: int, size: int) -> Slice:
    piece = Slice(pos, meta.new_slice_id(), size, 0, size)
    meta.write_slices(ino, [(0, piece)], pos + size, RUNTIME.now_ns())
    return piece


def test_truncate_after_a_compaction_elsewhere() -> None:
    """A stale `used` less what fresh slices cover was negative: EIO; it is a conflict."""
    with _two_clients() as (first, second):
        ino = _make(first, b"f")
        old = [_write(first, ino, 0, 10), _write(first, ino, 100, 10)]
        new = Slice(0, second.new_slice_id(), 110, 0, 110)
        assert second.compact_chunk(ino, 0, old, [new])
        assert second.getattr(ROOT_CALLER, ino).used == 110  # the hole has become zeros
        assert first.setattr(ROOT_CALLER, ino, SetAttr(size=0)).after.used == 0


def test_unlink_of_what_is_gone() -> None:
    """A remembered name that leads to an inode without links made its count negative: EIO."""
    with _two_clients() as (first, second):
        ino = _make(first, b"f")
        second.unlink(ROOT_CALLER, ROOT_INO, b"f")
        first.forget_chunks([ino])  # the name is still remembered, the inode is not
        with pytest.raises(FileNotFoundError):
            first.unlink(ROOT_CALLER, ROOT_INO, b"f")


def test_slices_of_a_new_file_are_remembered() -> None:
    """An inode known to have nothing but what we wrote: appends to a chunk count, too."""
    with _two_clients(tracked=True) as (first, _):
        ino = _make(first, b"f")
        pieces = [_write(first, ino, 0, 10), _write(first, ino, 10, 10)]
        before = first.store.round_trips
        assert first.read_chunk(ino, 0) == pieces
        assert first.store.round_trips == before


def test_a_new_file_has_no_xattrs() -> None:
    """The kernel asks for security.capability before the first write: no round trip."""
    with _two_clients(tracked=True) as (first, second):
        ino = _make(first, b"f")
        before = first.store.round_trips
        for _ in range(2):
            with pytest.raises(OSError, match="no such attribute"):
                first.getxattr(ROOT_CALLER, ino, b"security.capability")
        checked = ROOT_CALLER._replace(checked=True)
        with pytest.raises(OSError, match="namespace") as caught:
            first.getxattr(checked, ino, b"system.other")
        assert caught.value.errno == errno.EOPNOTSUPP
        assert first.store.round_trips == before
        second.setxattr(ROOT_CALLER, ino, b"security.capability", b"x")
        assert first.getxattr(ROOT_CALLER, ino, b"security.capability") == b"x"


class _Shaky(MemStore):
    """Every other page of a listing is lost at first."""

    failing = True

    def scan(self, row: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> Page:
        self.failing = not self.failing
        if not self.failing:
            raise Unavailable("the network")
        return super().scan(row, cursor, min(limit, 3))


def test_listing_goes_on_after_errors() -> None:
    backend = MemBackend(RUNTIME)
    kinds = iter((MemStore, _Shaky, MemStore))  # of format, the client and the check
    with inproc.client(lambda: next(kinds)(backend)) as client:
        names = {b"f%d" % number for number in range(10)}
        for name in names:
            client.meta.create(ROOT_CALLER, ROOT_INO, name, FILE)
        fh = client.vfs.directories.opendir(ROOT_CALLER, ROOT_INO).fh
        found: list[bytes] = []
        cookies: list[int] = []
        more: Sequence[int] = [0]
        while more:
            page, more = client.vfs.directories.readdir(ROOT_CALLER, ROOT_INO, fh, more[-1], 4)
            found += [name for name, _, _ in page]
            cookies += more
        at = 5
        while at < len(found):
            page, more = client.vfs.directories.readdir(
                ROOT_CALLER, ROOT_INO, fh, cookies[at - 1], 100
            )
            assert [name for name, _, _ in page] == found[at : at + len(page)] != []
            at += len(page)
        client.vfs.directories.releasedir(ROOT_INO, fh)
        assert sorted(found) == sorted({b".", b"..", *names})


def test_stat_during_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes read before a commit and answered after it said that nothing was written."""
    with inproc.client(inproc.memory()) as client:
        vfs, meta = client.vfs, client.meta
        entry, opened = vfs.create(ROOT_CALLER, ROOT_INO, b"f", FILE, os.O_RDWR)
        assert entry.attr is not None
        ino = entry.attr.ino
        vfs.write(ROOT_CALLER, ino, opened.fh, 0, memoryview(b"12345"))
        getattr_ = meta.getattr

        def slow_getattr(caller: Caller, asked: Ino) -> Attr:
            attr = getattr_(caller, asked)
            monkeypatch.undo()
            vfs.flush(ROOT_CALLER, ino, opened.fh)
            return attr

        monkeypatch.setattr(meta, "getattr", slow_getattr)
        assert vfs.getattr(ROOT_CALLER, ino, None).attr.size == 5
        vfs.release(ino, opened.fh)


def test_what_has_been_purged_is_no_hole() -> None:
    """A client that lost its lease lost the files it held: zeros were read from them."""
    with inproc.client(inproc.memory()) as client:
        vfs, meta = client.vfs, client.meta
        entry, opened = vfs.create(ROOT_CALLER, ROOT_INO, b"f", FILE, os.O_RDWR)
        assert entry.attr is not None
        ino = entry.attr.ino
        vfs.write(ROOT_CALLER, ino, opened.fh, 0, memoryview(b"12345"))
        vfs.flush(ROOT_CALLER, ino, opened.fh)
        vfs.unlink(ROOT_CALLER, ROOT_INO, b"f")
        meta.deletion.purge([ino])
        with pytest.raises(OSError, match=rf"^\[Errno {errno.ESTALE}\]"):
            vfs.read(ROOT_CALLER, ino, opened.fh, 0, 5)
        vfs.release(ino, opened.fh)


def test_create_of_what_others_made_and_we_may_not_open() -> None:
    """Unknown groups may allow it: the kernel must look again. Without a kernel it is EACCES."""
    with inproc.client(inproc.memory()) as client:
        client.meta.setattr(ROOT_CALLER, ROOT_INO, SetAttr(mode=0o777))
        client.meta.create(ROOT_CALLER, ROOT_INO, b"f", 0o100600)
        client.meta.create(ROOT_CALLER, ROOT_INO, b"fifo", 0o010666)
        for caller, name, code in (
            (STRANGER, b"f", errno.EACCES),
            (STRANGER._replace(checked=True), b"f", errno.ESTALE),
            (STRANGER._replace(checked=True), b"fifo", errno.ESTALE),
        ):
            with pytest.raises(OSError, match=rf"^\[Errno {code}\]"):
                client.vfs.create(caller, ROOT_INO, name, FILE, os.O_RDWR)


def test_open_that_truncates_drops_setuid_in_one_verb() -> None:
    """Of an empty file, too, and when O_CREAT meets a file that others have made."""
    with inproc.client(inproc.memory()) as client:
        vfs = client.vfs
        ino = client.meta.create(ROOT_CALLER, ROOT_INO, b"f", 0o106777).ino
        flags = os.O_WRONLY | os.O_TRUNC
        for by_name in (False, True):
            client.meta.setattr(ROOT_CALLER, ino, SetAttr(mode=0o6777, mtime_ns=5))
            if by_name:
                opened = vfs.create(STRANGER, ROOT_INO, b"f", FILE, flags, kill_suid=True)[1]
            else:
                opened = vfs.open(STRANGER, ino, flags, kill_suid=True)
            attr = vfs.getattr(STRANGER, ino, None).attr
            assert attr.mode == 0o100777
            assert attr.mtime_ns > 5
            vfs.release(ino, opened.fh)


def test_a_write_drops_what_became_setuid_elsewhere() -> None:
    """The bit was looked at when the file was opened; the commit of what is written decides."""
    with inproc.client(inproc.memory()) as client:
        vfs, meta = client.vfs, client.meta
        ino = meta.create(ROOT_CALLER, ROOT_INO, b"f", 0o100777).ino
        fh = vfs.open(STRANGER, ino, os.O_RDWR).fh
        meta.setattr(ROOT_CALLER, ino, SetAttr(mode=0o4777))
        vfs.write(ROOT_CALLER, ino, fh, 0, memoryview(b"1"))
        vfs.flush(ROOT_CALLER, ino, fh)
        assert meta.getattr(ROOT_CALLER, ino).mode == 0o104777
        vfs.write(STRANGER, ino, fh, 0, memoryview(b"2"), WriteHow(kill_suid=True))
        assert vfs.getattr(STRANGER, ino, None).attr.mode == 0o100777
        assert meta.getattr(ROOT_CALLER, ino).mode == 0o104777  # as the content it was set for
        vfs.flush(STRANGER, ino, fh)
        assert meta.getattr(ROOT_CALLER, ino).mode == 0o100777
        vfs.release(ino, fh)


def test_what_is_setuid_after_a_write_stays_so() -> None:
    """write, fchmod, close, as install(1) does it; and root may write on."""
    with inproc.client(inproc.memory()) as client:
        vfs, meta = client.vfs, client.meta
        ino = meta.create(ROOT_CALLER, ROOT_INO, b"f", 0o100777).ino
        fh = vfs.open(STRANGER, ino, os.O_RDWR).fh
        vfs.write(STRANGER, ino, fh, 0, memoryview(b"2"), WriteHow(kill_suid=True))
        vfs.setattr(ROOT_CALLER, ino, SetAttr(mode=0o4755), None)
        vfs.write(ROOT_CALLER, ino, fh, 1, memoryview(b"3"))
        vfs.flush(STRANGER, ino, fh)
        assert meta.getattr(ROOT_CALLER, ino).mode == 0o104755
        vfs.release(ino, fh)


def test_dots_of_a_directory_that_is_known_whole() -> None:
    """Names are answered from memory there, and `.` and `..` are in no row."""
    kernel = ROOT_CALLER._replace(checked=True)
    with _two_clients(tracked=True) as (meta, _):
        made = meta.create(ROOT_CALLER, ROOT_INO, b"d", 0o40755).ino
        assert meta.lookup(kernel, made, b".").ino == made
        assert meta.lookup(kernel, made, b"..").ino == ROOT_INO
        with pytest.raises(FileNotFoundError):
            meta.lookup(kernel, made, b"...")


class _NoKernel:
    """A notifier that notes which names it was told to forget; `epoch`: it can forget all."""

    def __init__(self, epoch: bool) -> None:
        self.names: set[bytes] = set()
        self.stale: list[Ino] = []
        self.all = 0
        self._epoch = epoch

    def inval_inode(self, ino: Ino) -> None: ...

    def inval_pages(self, ino: Ino, begin: int, end: int) -> None: ...

    def inval_attr(self, ino: Ino) -> None:
        self.stale.append(ino)

    def reload(self, ino: Ino) -> None:
        self.inval_inode(ino)

    def inval_all(self) -> bool:
        self.all += self._epoch
        return self._epoch

    def inval_entry(self, parent: Ino, name: bytes) -> None:
        del parent
        self.names.add(name)


@pytest.mark.parametrize("epoch", [False, True])
def test_leases_of_absent_names_are_bounded(monkeypatch: pytest.MonkeyPatch, epoch: bool) -> None:
    monkeypatch.setattr(cache_leases, "LEASES_MAX", 10)
    notifier, backend = _NoKernel(epoch), MemBackend(RUNTIME)
    with inproc.client(lambda: MemStore(backend, tracked=True)) as made:
        made.vfs.coherence.start(notifier)
        made.meta.getattr(ROOT_CALLER, ROOT_INO)
        for number in range(50):
            with suppress(FileNotFoundError):
                made.vfs.lookup(ROOT_CALLER, ROOT_INO, b"absent%d" % number)
        wait_until(lambda: notifier.names or notifier.all)
        assert bool(notifier.names) != epoch
        assert bool(notifier.all) == epoch


def test_who_closed_a_setuid_file_finds_that_the_kernel_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread told it soon after; before that, others could still run the program as its owner."""
    told_too_late = kernel_notices.KernelNotices
    monkeypatch.setattr(told_too_late, "_run", lambda _self: None)
    notifier = _NoKernel(epoch=True)
    with inproc.client(inproc.memory()) as client:
        client.vfs.coherence.start(notifier)
        ino = client.meta.create(ROOT_CALLER, ROOT_INO, b"f", 0o104777).ino
        fh = client.vfs.open(STRANGER, ino, os.O_RDWR).fh
        client.vfs.write(STRANGER, ino, fh, 0, memoryview(b"1"), WriteHow(kill_suid=True))
        assert notifier.stale == []
        client.vfs.flush(STRANGER, ino, fh)
        assert notifier.stale == [ino]
        client.vfs.release(ino, fh)


def test_what_is_stored_is_no_error_where_the_kernel_can_not_be_told(log_watch: LogWatch) -> None:
    """close(2) failed, and the next one stored the same bytes a second time."""

    class Deaf(_NoKernel):
        def inval_attr(self, ino: Ino) -> None:
            raise OSError(errno.ENOMEM, f"no memory to tell of {ino}")

        def inval_inode(self, ino: Ino) -> None:
            self.stale.append(ino)

    log_watch.expect("the kernel is told later that inode")
    notifier = Deaf(epoch=True)
    with inproc.client(inproc.memory()) as client:
        client.vfs.coherence.start(notifier)
        ino = client.meta.create(ROOT_CALLER, ROOT_INO, b"f", 0o104777).ino
        fh = client.vfs.open(STRANGER, ino, os.O_RDWR | os.O_APPEND).fh
        client.vfs.write(
            STRANGER, ino, fh, 0, memoryview(b"1"), WriteHow(kill_suid=True, append=True)
        )
        client.vfs.flush(STRANGER, ino, fh)
        assert not client.vfs.files.file_handle(fh).file.dirty
        client.vfs.release(ino, fh)
        assert client.meta.getattr(ROOT_CALLER, ino).size == 1
        wait_until(lambda: notifier.stale == [ino])


def test_two_closes_at_once_store_what_maps_have_left() -> None:
    """A map's pages are written behind the flush of close(2), and stored when the last descriptor
    goes. Of two that went at once each took the other one for the last, and the bytes were lost.
    """
    with inproc.client(inproc.memory()) as client:
        posix, files = Posix(client.vfs), client.vfs.files
        first = posix.open(b"/f", os.O_CREAT | os.O_RDWR)
        second = posix.open(b"/f", os.O_RDWR)
        first.write(0, b"mapped")
        leave = files.leave

        def interrupted(fh: int) -> OpenFile | None:
            files.leave = leave  # type: ignore[method-assign]
            client.vfs.release(second.ino, second.fh)
            return leave(fh)

        files.leave = interrupted  # type: ignore[method-assign]
        client.vfs.release(first.ino, first.fh)
        assert posix.open(b"/f").read(0, 10) == b"mapped"


def test_an_open_that_is_refused_is_no_reason_to_lose_what_was_written() -> None:
    """Who closes while somebody else's open(2) is being refused is not the last one, who is."""
    with inproc.client(inproc.memory()) as client:
        posix, meta = Posix(client.vfs), client.meta
        file = posix.open(b"/f", os.O_CREAT | os.O_RDWR)
        file.write(0, b"mapped")
        refuse = meta.require

        def late(caller: Caller, attr: Attr, mask: int) -> None:
            client.vfs.release(file.ino, file.fh)
            refuse(caller, attr, mask)

        meta.require = late  # type: ignore[method-assign]
        with pytest.raises(PermissionError):
            client.vfs.open(STRANGER, file.ino, os.O_RDWR)
        meta.require = refuse  # type: ignore[method-assign]
        assert posix.open(b"/f").read(0, 10) == b"mapped"


def test_compaction_of_what_shows_no_data() -> None:
    """A hole was copied over all of a chunk: the slice that was to have its data is given back, or
    gc would wait for it for ever.
    """
    with inproc.client(inproc.memory()) as client:
        posix = Posix(client.vfs)
        file = posix.open(b"/f", os.O_CREAT | os.O_RDWR)
        for number in range(10):
            file.write(0, b"%d" % number)
            file.fsync()
        hole = posix.open(b"/hole", os.O_CREAT | os.O_RDWR)
        hole.truncate(100)
        assert hole.copy(file, 0, 0, 100) == 100
        client.background.compact(file.ino, 0)
        assert client.meta.read_chunk(file.ino, 0) == []
        last = client.meta.new_slice_id()
        client.meta.give_up_slices((last,))
        for _ in range(3):
            _, floor = client.meta.sessions.round_and_floor()
        assert floor > last
        hole.close()
        file.close()

"""READDIRPLUS: what names lead to, packed from the stored records, and only while it is so."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

import pytest

from fsclient.client.client import MountClient
from fsclient.fuse.wire import abi, listing, pack
from fsclient.kernel.contract import Entries, EntryOut
from fsclient.listings import dir_stream
from fsmeta.errors import Corrupt
from fsmeta.meta.meta import Meta
from fsmeta.schema import inode
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.types import ROOT_CALLER, ROOT_INO, Attr, Dentry, FileType, Ino, SetAttr
from tests.posix import inproc
from tests.posix.inproc import RUNTIME
from tests.posix.two_mounts.test_notices import Told

COUNT = 1500  # names: two pages
AT_ONCE = 200
ATTRS = (
    inode.new_attr(Ino(5), stat.S_IFREG | 0o644, (1, 2), ROOT_INO, 10**18),
    inode.new_attr(Ino(6), stat.S_IFDIR | 0o1777, (1, 2), ROOT_INO, -5),
    inode.new_attr(Ino(7), stat.S_IFBLK | 0o600, (0, 0), ROOT_INO, 7, rdev=0x801, mark=3),
    inode.new_attr(Ino(8), stat.S_IFREG, (1 << 31, 2), ROOT_INO, 10**18, mark=5)._replace(
        size=1 << 40, used=4097, nlink=3, atime_ns=1, mtime_ns=10**18 + 1, ctime_ns=2 * 10**18
    ),
    inode.new_attr(Ino(9), stat.S_IFREG | 0o640, (1, 2), ROOT_INO, 1)._replace(acl=4, flags=16),
)


def _record(attr: Attr) -> bytes:
    return inode.pack_attr(attr) + inode.pack_volatile(attr)


def _dentry(attr: Attr) -> Dentry:
    return Dentry(b"n" * int(attr.ino), attr.ino, attr.type)


def test_packed_from_records_is_what_is_packed_from_entries() -> None:
    names = [*map(_dentry, ATTRS), Dentry(b".", ROOT_INO, FileType.DIR)]
    joined, odd = inode.join([*map(_record, ATTRS), inode.NO_RECORD])
    assert odd == [2, 4]
    entries = {at: EntryOut(ATTRS[at], 3600.0, 1.5) for at in odd}
    told = pack_all(names, joined, entries)
    plain = b"".join(
        pack.entry_out(EntryOut(attr, 3600.0, 1.5)) + _dirent(_dentry(attr), at + 1)
        for at, attr in enumerate(ATTRS)
    )
    assert told == plain + bytes(abi.ENTRY_OUT.size) + _dirent(names[-1], len(names))


def pack_all(names: Sequence[Dentry], records: bytes, odd: dict[int, EntryOut]) -> bytes:
    entries = Entries(records, 3600.0, 1.5, odd)
    assert [each and each.attr for each in entries.each(names)] == [*ATTRS, None]
    return listing.dirents_plus(names, range(1, len(names) + 1), entries)


def _dirent(dentry: Dentry, cookie: int) -> bytes:
    return listing.dirents([dentry], [cookie], 1000)


@pytest.mark.parametrize("at", [0, 1, 27])
def test_a_record_that_is_corrupt_is_told_apart(at: int) -> None:
    """Neither its version nor its type is taken on trust, though nothing else looks at it."""
    record = bytearray(_record(ATTRS[0]))
    record[at] = 0xF0
    for wrong in (bytes(record), _record(ATTRS[0])[:-1], bytes(71)):
        joined, odd = inode.join([_record(ATTRS[1]), wrong])
        assert (joined, odd) == (_record(ATTRS[1]) + inode.NO_RECORD, [1])
        with pytest.raises(Corrupt):
            inode.unpack_record(Ino(5), wrong)


@pytest.fixture
def backend() -> MemBackend:
    return MemBackend(RUNTIME)


@pytest.fixture
def client(backend: MemBackend) -> Iterator[MountClient]:
    with inproc.client(lambda: MemStore(backend, tracked=True)) as made:
        made.vfs.coherence.start(Told())
        yield made


@pytest.fixture
def other(client: MountClient, backend: MemBackend) -> Iterator[Meta]:
    del client  # it makes the volume
    meta = Meta(MemStore(backend, tracked=True), RUNTIME)
    meta.sessions.open({"host": "other"})
    yield meta
    meta.sessions.close()


def _fits(names: Sequence[Dentry]) -> int:
    return min(len(names), AT_ONCE)


class Listing:
    """A listing with attributes of a directory of two pages, step by step."""

    def __init__(self, client: MountClient) -> None:
        self.vfs = client.vfs
        meta = client.meta
        self.ino = meta.create(ROOT_CALLER, ROOT_INO, b"d", stat.S_IFDIR | 0o777).ino
        for number in range(COUNT):
            meta.create(ROOT_CALLER, self.ino, b"%04d" % number, stat.S_IFREG | 0o644)
        meta.cache.forget()
        self.fh = self.vfs.directories.opendir(ROOT_CALLER, self.ino).fh
        self.cookie = 0
        self.told: dict[bytes, EntryOut | None] = {}

    def step(self) -> bool:
        names, cookies, entries = self.vfs.directories.readdirplus(
            ROOT_CALLER, self.ino, self.fh, self.cookie, _fits
        )
        assert not self.told.keys() & {name for name, _, _ in names}
        self.told.update(zip([name for name, _, _ in names], entries.each(names), strict=True))
        self.cookie = cookies[-1] if names else self.cookie
        return bool(names)

    def next_name(self) -> bytes:
        """A name that comes later, on a page that has been read."""
        names, _ = self.vfs.directories.readdir(ROOT_CALLER, self.ino, self.fh, self.cookie, 1)
        return names[0].name

    def finish(self) -> None:
        while self.step():
            pass
        self.vfs.directories.releasedir(self.ino, self.fh)


@pytest.mark.parametrize("ours", [True, False], ids=["by this mount", "by another"])
def test_a_name_that_leads_elsewhere_by_now(client: MountClient, other: Meta, ours: bool) -> None:
    """Its page was read before: with the trash on, or another name, the old inode is still there,
    and the kernel believed for an hour that it was the name's."""
    listing = Listing(client)
    listing.step()
    listing.step()
    name = listing.next_name()
    meta = client.meta if ours else other
    old = meta.lookup(ROOT_CALLER, listing.ino, name).ino
    new = meta.create(ROOT_CALLER, ROOT_INO, b"new", stat.S_IFREG | 0o600).ino
    meta.link(ROOT_CALLER, old, ROOT_INO, b"another name")
    if ours:
        client.vfs.rename(ROOT_CALLER, ROOT_INO, b"new", listing.ino, name, 0)
    else:
        other.unlink(ROOT_CALLER, listing.ino, name)
        other.link(ROOT_CALLER, new, listing.ino, name)
        client.meta.lookup(ROOT_CALLER, listing.ino, b"0000")  # the store vouches for names again
    listing.finish()
    entry = listing.told[name]
    assert entry is None or entry.attr is None or entry.attr.ino == new, "the file of before"
    assert len(listing.told) >= COUNT + 2
    assert sum(entry is not None for entry in listing.told.values()) > COUNT - 3


@pytest.mark.parametrize("ahead_from_s", [0.0, 1000.0], ids=["read ahead", "as it comes"])
def test_a_listing_asks_once_a_page(
    client: MountClient, monkeypatch: pytest.MonkeyPatch, ahead_from_s: float
) -> None:
    """Names, and what they lead to; the first answer brings what it tells only."""
    asked: list[int] = []
    monkeypatch.setattr(dir_stream, "AHEAD_FROM_S", ahead_from_s)
    listing = Listing(client)
    store = client.meta.store
    read_many = store.read_many

    def counted(rows: Sequence[bytes], fields: Sequence[bytes]) -> list[Sequence[bytes | None]]:
        asked.append(len(rows))
        return read_many(rows, fields)

    monkeypatch.setattr(store, "read_many", counted)
    listing.finish()
    assert (len(asked), sum(asked), asked[0]) == (3, COUNT, AT_ONCE - 2)
    assert sum(entry is not None for entry in listing.told.values()) == COUNT


def test_attributes_that_others_change_between_two_answers(
    client: MountClient, other: Meta
) -> None:
    listing = Listing(client)
    listing.step()
    listing.step()
    name = listing.next_name()
    ino = other.lookup(ROOT_CALLER, listing.ino, name).ino
    other.setattr(ROOT_CALLER, ino, SetAttr(mode=0o600))
    listing.finish()
    entry = listing.told[name]
    assert entry is not None
    assert entry.attr is not None
    assert entry.attr.mode & 0o777 == 0o600


def test_what_is_written_here_is_laid_over(client: MountClient) -> None:
    listing = Listing(client)
    listing.step()
    name = listing.next_name()
    ino = client.meta.lookup(ROOT_CALLER, listing.ino, name).ino
    fh = client.vfs.open(ROOT_CALLER, ino, os.O_RDWR).fh
    client.vfs.write(ROOT_CALLER, ino, fh, 0, memoryview(b"not stored yet"))
    listing.finish()
    entry = listing.told[name]
    client.vfs.release(ino, fh)
    assert entry is not None
    assert entry.attr is not None
    assert (entry.attr.size, entry.attr_ttl) == (14, 0.0)

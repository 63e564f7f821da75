"""The attributes that the kernel gets: the store's, with what is written here applied on top.

The kernel may cache nothing of a file that is being written here: it invalidates `st_blocks` when
it sends a write, and not when we commit it. `CacheLeases` says how long it may cache other files.
What is in the trash has no link, as if there were no trash: programs test it. What is in a snapshot
never changes, so it needs no lease: the kernel caches it for LASTING_S, on every engine.

Called by `VFS`, with attributes that have just been asked for. A file that was closed meanwhile is
asked for once more: they may be from before its last commit, and what was applied on top is gone.

Threading: any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from fsclient.files.handles.open_files import OpenFiles
from fsclient.kernel.cache_leases import LONG_S, SHORT_S, CacheLeases
from fsclient.kernel.contract import LASTING_S, Entries, EntryOut, Stat
from fsclient.vfs.lookup_counts import LookupCounts
from fsmeta.dentries import Dentries
from fsmeta.meta.meta import Meta
from fsmeta.schema.inode import NO_RECORD, join, unpack_record, versions
from fsmeta.schema.keys import inode_rows
from fsmeta.schema.snapshot_inos import SEALED_INO, SHELVES
from fsmeta.schema.trash import TRASH_INO, is_trash
from fsmeta.types import ROOT_CALLER, Attr, Ino


class AttrView:
    """Attributes and entries as this mount sees them."""

    def __init__(
        self, meta: Meta, files: OpenFiles, coherence: CacheLeases, lookups: LookupCounts
    ) -> None:
        self._meta = meta
        self._files = files
        self._coherence = coherence
        self._lookups = lookups

    def now(self) -> int:
        """To be asked before attributes are, and given along with them: what is new needs none."""
        return self._files.closings

    def _latest(self, attr: Attr, asked: int | None) -> tuple[Attr, bool]:
        """Attributes as this mount sees them, and whether the file is written here."""
        while True:
            file = self._files.get(attr.ino)
            if file is not None and file.writer is not None:
                return self._files.getattr(file), True
            if asked is None or not self._files.closed_since(attr.ino, asked):
                return attr, False
            asked = self.now()
            attr = self._meta.getattr(ROOT_CALLER, attr.ino)

    def stat(self, attr: Attr, asked: int | None = None) -> Stat:
        """The attributes of an inode."""
        if SEALED_INO <= attr.ino < SHELVES:
            return Stat(attr, LASTING_S)
        attr, written = self._latest(attr, asked)
        if attr.parent >= TRASH_INO:
            attr = _unlinked(attr)
        return Stat(attr, 0.0) if written else self._coherence.stat(attr)

    def entry(self, parent: Ino, name: bytes, attr: Attr, asked: int | None = None) -> EntryOut:
        """What `name` leads to; it counts as a lookup."""
        self._lookups.add(attr.ino)
        return self._entry(parent, name, attr, asked)

    def made(self, parent: Ino, name: bytes, attr: Attr) -> EntryOut:
        """`entry` of an inode that was just made: it is not open."""
        self._lookups.add(attr.ino)
        return self._coherence.entry(parent, name, attr)

    def unnamed(self, attr: Attr, asked: int) -> EntryOut:
        """An inode that was looked up by its number; it counts as a lookup."""
        self._lookups.add(attr.ino)
        shown, ttl = self.stat(attr, asked)
        return EntryOut(shown, 0.0, ttl)

    def _entry(self, parent: Ino, name: bytes, attr: Attr, asked: int | None) -> EntryOut:
        if SEALED_INO <= attr.ino < SHELVES:
            return self._sealed(parent, name, attr)
        attr, written = self._latest(attr, asked)
        if attr.parent >= TRASH_INO:  # since it was looked up
            attr = _unlinked(attr)
        entry = self._coherence.entry(parent, name, attr)
        return entry._replace(attr_ttl=0.0) if written else entry

    def _sealed(self, parent: Ino, name: bytes, attr: Attr) -> EntryOut:
        """The entry of an inode in a snapshot. The name of the snapshot itself may go."""
        if SEALED_INO <= parent < SHELVES:
            return EntryOut(attr, LASTING_S, LASTING_S)
        return self._coherence.entry(parent, name, attr)._replace(attr_ttl=LASTING_S)

    def absent(self, parent: Ino, name: bytes) -> EntryOut | None:
        """That a name leads nowhere; None where the kernel may not cache it."""
        if SEALED_INO <= parent < SHELVES:
            return EntryOut(None, LASTING_S, 0.0)
        granted = self._coherence.grant_absent(parent, name)
        return EntryOut(None, LONG_S, 0.0) if granted else None

    def entries(
        self, ino: Ino, names: Dentries, true: Dentries, following: Sequence[Ino] = ()
    ) -> Entries:
        """What names of directory `ino` lead to, as `DirectoryCalls.readdirplus` has it; `true` are
        those of which that may be told.

        Records that the kernel lacks are asked for here, together, and if there are any those of
        the inodes `following` as well, as far as they may be cached until they are listed.
        """
        wanted = self._coherence.unknown(ino, true)
        if not wanted or is_trash(ino):
            return Entries.none(len(names))
        asked = self.now()
        rows = inode_rows(wanted.inos)
        records = self._meta.attr_records(rows, following)
        if not all(records):  # gone meanwhile
            there = [at for at, record in enumerate(records) if record]
            wanted, records = wanted.pick(there), [records[at] for at in there]
            rows = inode_rows(wanted.inos)
        inos = wanted.inos
        self._lookups.add_all(inos)
        long: Collection[Ino] = inos
        special: set[Ino] = set()
        if SEALED_INO <= ino < SHELVES:  # nothing in a snapshot changes
            name_ttl = attr_ttl = LASTING_S
        else:
            name_ttl, long = self._coherence.entries(ino, wanted.names, inos, rows)
            attr_ttl = LONG_S if long else SHORT_S
            special = self._special(inos, long, asked)
        records = _spread(names, wanted, records)
        plain, at_odd = join(records)
        if special:
            at_odd = [at for at, each in enumerate(names.inos) if each in special or at in at_odd]
        odd: dict[int, EntryOut] = {}
        for at in at_odd:
            if records[at] == NO_RECORD:  # `.` and `..`, or another name of one that is told
                continue
            name, child, _ = names[at]
            attr = unpack_record(child, records[at])
            plainly = child not in special
            odd[at] = (
                EntryOut(attr, name_ttl, attr_ttl)
                if plainly
                else self._entry(ino, name, attr, asked)
            )
            records[at] = NO_RECORD
        entries = Entries(join(records).records if odd else plain, name_ttl, attr_ttl, odd)
        if not long:
            self._coherence.shortly(_versions(names.inos, entries))
        return entries

    def _special(self, inos: Sequence[Ino], long: Collection[Ino], asked: int) -> set[Ino]:
        """Those of `inos` whose records alone do not say what the kernel may be told."""
        special = set(self._files.open_among(inos))
        if self.now() != asked:
            special.update(child for child in inos if self._files.closed_since(child, asked))
        if long and long is not inos:
            special.update(child for child in inos if child not in long)
        return special


def _spread(names: Dentries, wanted: Dentries, records: list[bytes]) -> list[bytes]:
    """The records of the `wanted` ones, and NO_RECORD for all others of `names`."""
    lead = len(names) - len(wanted)
    if lead == 0:
        return records
    if names.names[lead:] == wanted.names:  # all but `.` and `..`
        return [NO_RECORD] * lead + records
    of = dict(zip(wanted.names, records, strict=True))
    return [of.get(name, NO_RECORD) for name in names.names]


def _versions(inos: Sequence[Ino], entries: Entries) -> Iterator[tuple[Ino, tuple[int, int]]]:
    """Mtime and size of the inodes that are about to be told."""
    for at, entry in entries.odd.items():
        if entry.attr is not None:
            yield inos[at], (entry.attr.mtime_ns, entry.attr.size)
    for ino, version in zip(inos, versions(entries.records), strict=True):
        if version is not None:
            yield ino, version


def _unlinked(attr: Attr) -> Attr:
    """What went to the trash has no link for programs that have it open; hours are as they are."""
    return attr if is_trash(attr.ino) else attr._replace(nlink=0)

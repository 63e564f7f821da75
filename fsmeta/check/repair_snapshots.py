"""Repairs what `check/snapshots` finds: shelves, table M, and snapshots' inodes without a name.

It is the part of `repair` for snapshots and follows its rules. Where a shelf and M differ, what can
be seen stays: a snapshot gets its name back, M lists what has a name. Counts in directories' flags
follow in `repair` itself, a pass later. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from fsmeta.check.findings import Findings, Known
from fsmeta.check.snapshots import UNLISTED, UNNAMED, UNREADABLE
from fsmeta.errors import Corrupt
from fsmeta.schema import inode, keys
from fsmeta.schema.snapshot_inos import (
    SEALED_INO,
    is_snapshot_dir,
    is_snapshot_ino,
    snapshot_dir_of,
    source_of,
)
from fsmeta.schema.snapshots import SNAPSHOTS, Snapshot, pack_snapshot, unpack_snapshot
from fsmeta.schema.trash import TRASH_INO
from fsmeta.store.contract import Store
from fsmeta.types import NO_PARENT, SPACE_UNIT_BYTES, Attr, FileType, Ino, is_name

Write = tuple[bytes, bytes | None, bytes | None]
Commit = Callable[..., None]  # some `Write`s at once

_ROOTS: Final = f"SELECT root FROM ({UNNAMED}) UNION SELECT root FROM ({UNLISTED}) ORDER BY root"
_NAMES_OF: Final = "SELECT source, name FROM shelved WHERE root = ? ORDER BY source, name"
_GONE: Final = "SELECT DISTINCT source FROM shelved WHERE source NOT IN (SELECT ino FROM inode)"
_CROSSING: Final = """
SELECT ino, parent, name FROM name
WHERE (ino >= :sealed AND ino < :trash) != (parent >= :sealed AND parent < :trash)
""".replace(":sealed", str(SEALED_INO)).replace(":trash", str(TRASH_INO))
_BELOW: Final = """
WITH RECURSIVE below(ino) AS (
    SELECT ? UNION SELECT n.ino FROM name n JOIN below b ON n.parent = b.ino)
SELECT COUNT(*), SUM(i.units) FROM below b JOIN inode i ON i.ino = b.ino
"""


class SnapshotLocation(NamedTuple):
    """A name on a shelf."""

    source: Ino
    name: bytes

    @property
    def row(self) -> bytes:
        """Of the shelf."""
        return keys.dir_row(snapshot_dir_of(self.source))


class Shelves:
    """What one check allows to be done about snapshots."""

    def __init__(self, notes: Findings, store: Store, commit: Commit, now_s: int) -> None:
        self._notes = notes
        self._store = store
        self._commit = commit
        self._now_s = now_s

    def mend(self) -> Iterator[str]:
        """Mend shelves and M; a line for each thing done."""
        for (field,) in self._notes.spill.rows(UNREADABLE):
            if len(field) != 8 or self._notes.inode(keys.id_of(field)) is None:
                self._commit((SNAPSHOTS, field, None))
                yield f"the record of a snapshot {field!r} was unreadable and of nothing: removed"
        for (root,) in self._notes.spill.rows(_ROOTS):
            yield from self._snapshot(Ino(root))
        for ino, parent, name in self._notes.spill.rows(_CROSSING):
            yield from self._crossing(Ino(ino), Ino(parent), name)
        for (source,) in self._notes.spill.rows(_GONE):
            yield from self._source(Ino(source))

    # --- a snapshot ------------------------------------------------------------------------------

    def _snapshot(self, root: Ino) -> Iterator[str]:
        """Let the shelf and M say the same of one."""
        names = [SnapshotLocation(Ino(s), n) for s, n in self._notes.spill.rows(_NAMES_OF, root)]
        record = self._record(root)
        if not self._is_there(root):
            if record is not None and not names:
                self._commit((SNAPSHOTS, keys.pack_u64(root), None))
                yield f"snapshot {record.name!r} of inode {record.source} is gone: forgotten"
        elif not names:
            if record is not None:
                yield from self._name(record)
        elif len(names) == 1:
            yield from self._list(root, names[0], record)
        elif record is not None and SnapshotLocation(record.source, record.name) in names:
            for each in names:
                if each != (record.source, record.name):
                    self._commit((each.row, each.name, None))
                    yield f"name {each.name!r} of snapshot {record.name!r} was one more: removed"

    def _record(self, root: Ino) -> Snapshot | None:
        """What M says of a root, if that can be read."""
        field = keys.pack_u64(root)
        value = self._store.read([(SNAPSHOTS, field)])[0]
        try:
            return None if value is None else unpack_snapshot(field, value)
        except Corrupt:
            return None

    def _is_there(self, root: Ino) -> bool:
        """Whether this can be the root of a snapshot, and is not being removed."""
        known = self._notes.inode(root)
        fits = (
            known is not None
            and known.is_dir
            and is_snapshot_ino(root)
            and not is_snapshot_dir(root)
        )
        return fits and not self._notes.has("clone", root)

    def _name(self, record: Snapshot) -> Iterator[str]:
        """A snapshot has its name again, or another where that is taken."""
        if not 0 < record.source < SEALED_INO:
            return
        place = SnapshotLocation(record.source, record.name)
        if self._store.read([(place.row, place.name)])[0] is not None or not is_name(place.name):
            place = place._replace(name=spare_name(record.root))
        self._commit(
            (place.row, place.name, keys.pack_dentry(FileType.DIR, record.root)),
            (SNAPSHOTS, keys.pack_u64(record.root), _packed(record, place)),
        )
        yield f"snapshot {place.name!r} of inode {place.source} had lost its name: it has it again"

    def _list(self, root: Ino, place: SnapshotLocation, record: Snapshot | None) -> Iterator[str]:
        """M says what the shelf says. When it was taken is lost, and whether it is of one moment,
        so none of it is said to be.
        """
        if record is None:
            self._notes.subdirs(root)  # has names found by their directory
            found = self._notes.spill.one(_BELOW, root)
            assert found is not None
            inodes, units = int(found[0]), int(found[1] or 0)
            space = units * SPACE_UNIT_BYTES
            record = Snapshot(root, place.source, place.name, 0, inodes, inodes, space)
        self._commit((SNAPSHOTS, keys.pack_u64(root), _packed(record, place)))
        yield f"snapshot {place.name!r} of inode {place.source} was not listed: it is"

    # --- what leads to snapshots, and in them ----------------------------------------------------

    def _crossing(self, ino: Ino, parent: Ino, name: bytes) -> Iterator[str]:
        """A name into a snapshot or out of one goes, if it is not all that leads to `ino`."""
        if is_snapshot_ino(ino) and not any(map(is_snapshot_ino, self._notes.names(ino))):
            known = self._notes.inode(ino)
            if known is None or self.home(known, ()) is None:
                return
        self._commit((keys.dir_row(parent), name, None))
        yield f"name {name!r} in inode {parent} crossed the border of a snapshot: removed"

    def _source(self, source: Ino) -> Iterator[str]:
        """A directory that is gone and has snapshots is made again, so that they are reached."""
        row = keys.inode_row(source)
        if not 0 < source < SEALED_INO or self._store.scan(row, limit=1).items:
            return
        attr = inode.new_attr(source, 0o40700, (0, 0), NO_PARENT, self._now_s * 10**9)
        self._commit(
            (row, keys.ATTR_FIELD, inode.pack_attr(attr)),
            (row, keys.VOLATILE_FIELD, inode.pack_volatile(attr)),
        )
        yield f"directory {source} was gone and its snapshots were not: made again"

    def home(self, known: Known, counted: Iterable[Ino]) -> Ino | None:
        """The directory in a snapshot, or the shelf, that an inode without a name says it is in."""
        for place in (known.parent, *sorted(counted)):
            if is_snapshot_dir(place):
                source = self._notes.inode(source_of(place))
                if known.is_dir and source is not None and source.is_dir:
                    return place
            elif is_snapshot_ino(place) and self._notes.has("tree", place):
                return place
        return None

    def bring_back(self, known: Known, attr: Attr, counted: Iterable[Ino]) -> Iterator[str]:
        """What no name leads to gets one where it was; a snapshot is listed a pass later."""
        place = self.home(known, counted)
        key = (keys.dir_row(place or NO_PARENT), spare_name(known.ino))
        if place is None or self._store.read([key])[0] is not None:
            return
        self._commit((*key, keys.pack_dentry(attr.type, known.ino)))
        yield f"inode {known.ino} had no name in its snapshot: it is {key[1]!r} in inode {place}"


def _packed(record: Snapshot, place: SnapshotLocation) -> bytes:
    return pack_snapshot(record._replace(source=place.source, name=place.name))


def spare_name(ino: Ino) -> bytes:
    """What an inode is called that has lost its name."""
    return b"#%d" % ino

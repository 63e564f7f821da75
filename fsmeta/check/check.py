"""Whether the metadata is consistent. Ends every test, and is the first half of `slicefs fsck`.

It reads every row once and notes what it must compare in tables that spill to disk, so memory does
not grow with the volume. `schema/keys` lists the invariants; `check/names`, `check/tables`,
`check/quotas`, `check/locks` and `check/snapshots` check them. The volume may be in use, but then
what changes meanwhile can be reported as a problem: `fsck` says so.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

from fsmeta.check.findings import KEPT_MAX, Findings, Problem, Stage
from fsmeta.check.kept_table import KeptAt
from fsmeta.check.locks import check_locks
from fsmeta.check.names import judge_names
from fsmeta.check.quotas import audit
from fsmeta.check.snapshots import audit as audit_snapshots, crosses
from fsmeta.check.spill_table import CACHE_BYTES, ID_MAX
from fsmeta.check.tables import Tables
from fsmeta.errors import Corrupt, NoVolume
from fsmeta.rules.settings import VolumeFormat, unpack_format
from fsmeta.schema import inode, keys as schema, slices as schema_slices
from fsmeta.schema.inode_rows import InodeRow, read_inodes
from fsmeta.schema.locks import GRANT_PREFIX, LOCK_PREFIX
from fsmeta.schema.scan import fields_of
from fsmeta.schema.snapshot_inos import is_snapshot_dir, source_of
from fsmeta.schema.snapshots import SNAPSHOTS
from fsmeta.schema.xattrs import XATTRS_FIELD, charged, cost_of, counted as counted_xattrs, is_xattr
from fsmeta.slices import covered, reserved_end
from fsmeta.store.contract import Store
from fsmeta.types import (
    CHUNK_BYTES,
    FLAG_ATTACHED,
    FLAG_BEYOND,
    NO_PARENT,
    Attr,
    FileType,
    Ino,
    SliceId,
    is_name,
)

ROWS_AT_ONCE: Final = 200
_TELL_EVERY: Final = 1000  # rows
_INODES: Final = "inodes"  # the phases of a check that is kept
_DIRS: Final = "directories"
_JUDGED: Final = "judged"
_FIELDS: Final = frozenset(
    {schema.ATTR_FIELD, schema.VOLATILE_FIELD, schema.LINK_FIELD, schema.HOME_FIELD}
    | {schema.NAMELESS_FIELD, schema.ORIGIN_FIELD, schema.OBJECT_FIELD, XATTRS_FIELD}
)

Progress = Callable[[str], None]  # called now and then with how far it is


def _silent(_text: str) -> None:
    """Ignore progress."""


class Checked(NamedTuple):
    """The outcome."""

    problems: list[Problem]  # the first KEPT_MAX
    problem_count: int
    inodes: int
    slices: int  # that files refer to
    dead: int  # slices that wait for deletion
    acls: int = 0  # records
    acls_used: int = 0  # of them, those that an inode names


class Examination:
    """One run over one store. What it has seen is in `notes` until it is closed."""

    def __init__(
        self,
        store: Store,
        progress: Progress = _silent,
        cache_bytes: int = CACHE_BYTES,
        kept: KeptAt | None = None,
    ) -> None:
        """`kept`: a file of notes, from which a run that was killed is gone on with."""
        self._store = store
        self._progress = progress
        self.identity = b""  # of the volume as it is, where notes are kept
        self._keeps = kept is not None
        self.notes = Findings(cache_bytes, kept)
        self.settings: VolumeFormat | None = None

    def __enter__(self) -> Examination:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget what was seen; idempotent."""
        self.notes.close()

    def slices(self) -> Iterator[tuple[SliceId, int]]:
        """Id and size of what files refer to, ascending."""
        return self.notes.slices()

    def dead(self) -> Iterator[tuple[SliceId, int]]:
        """Id and size of what waits for deletion, ascending."""
        return self.notes.dead()

    def run(self) -> Checked:
        """Read everything, then check. Raises: NoVolume, Unavailable; ENOSPC for the tables."""
        says_acls = self._check_format()
        if self._keeps:
            self.identity = identity_of(self._store)
            self.notes.spill.begin(self.identity)
        if self.notes.spill.place.phase != _JUDGED:
            self._read_and_judge(says_acls)
        return self._outcome()

    def _read_and_judge(self, says_acls: bool) -> None:
        notes = self.notes
        tables = Tables(self._store, notes)
        if notes.spill.place.phase != _DIRS:
            self._read_inodes()
        tables.read()
        self._read_acls(tables)
        count = 0
        for page in self._pages(schema.DIR_PREFIX, _DIRS):
            for row in page:
                self._read_dir(row)
                count += 1
                if count % _TELL_EVERY == 0:
                    self._progress(f"{count} directories read")
        self._progress("comparing names, links and slices")
        judge_names(notes)
        tables.judge(says_acls)
        tables.check_counters()
        self._check_locks()
        if self.settings is not None:
            audit(self._store, self.settings, notes)
        audit_snapshots(fields_of(self._store, SNAPSHOTS), notes)
        notes.spill.step(_JUDGED)

    def _outcome(self) -> Checked:
        notes = self.notes
        return Checked(
            list(islice(notes.problems(), KEPT_MAX)),
            notes.problem_count(),
            notes.count("inode"),
            notes.count_slices("used"),
            notes.count_slices("dropped"),
            notes.count("acl"),
            notes.acls_used(),
        )

    # --- reading ---------------------------------------------------------------------------------

    def _check_format(self) -> bool:
        """Whether F says that there are ACLs. Raises: NoVolume."""
        keys = [(schema.FORMAT, field) for field in (schema.FORMAT_FIELD, schema.HAS_ACLS)]
        value, says_acls = self._store.read(keys)
        if value is None:
            raise NoVolume
        try:
            self.settings = unpack_format(value)
            self.notes.epoch = self.settings.charged
        except Corrupt as error:
            self.notes.report(0, str(error))
        return says_acls is not None

    def _read_inodes(self) -> None:
        count = 0
        for page in self._pages(schema.INODE_PREFIX, _INODES):
            for batch in self._batches(page):
                for row, found in batch:
                    self._note_inode(row, found)
                count += len(batch)
                self._progress(f"{count} inodes read")
        self.notes.spill.step(_DIRS)

    def _note_inode(self, row: bytes, found: InodeRow) -> None:
        try:
            self._read_inode(row, found)
        except Corrupt as error:
            self.notes.unreadable += 1
            self.notes.report(schema.id_of(row), str(error))

    def _read_acls(self, tables: Tables) -> None:
        for page in self._pages(schema.ACL_PREFIX, length=5):
            for batch in self._batches(page):
                for row, found in batch:
                    tables.read_acl(row, found.fields)

    def _batches(self, rows: Sequence[bytes]) -> Iterator[list[tuple[bytes, InodeRow]]]:
        """What `rows` hold, ROWS_AT_ONCE of them by one request."""
        for begin in range(0, len(rows), ROWS_AT_ONCE):
            batch = rows[begin : begin + ROWS_AT_ONCE]
            yield list(zip(batch, read_inodes(self._store, batch), strict=True))

    def _pages(self, prefix: bytes, phase: str = "", length: int = 9) -> Iterator[list[bytes]]:
        """Rows of the kind; one may come twice. A kept `phase` goes on where it was."""
        place = self.notes.spill.place
        cursor: bytes | None = place.at if phase and place.phase == phase else b""
        while cursor is not None:
            page = self._store.scan_rows(prefix, cursor)
            known: list[bytes] = []
            for row in page.rows:
                if len(row) == length and (length != 9 or schema.id_of(row) <= ID_MAX):
                    known.append(row)
                else:
                    self.notes.report(0, f"row {row!r} is nothing we know")
            yield known
            cursor = page.cursor
            if phase and cursor is not None:
                self.notes.spill.step(phase, cursor)

    def _read_inode(self, row: bytes, found: InodeRow) -> None:
        notes, fields = self.notes, found.fields
        ino = Ino(schema.id_of(row))
        a, v = fields.get(schema.ATTR_FIELD), fields.get(schema.VOLATILE_FIELD)
        if a is None or v is None:
            notes.unreadable += 1
            notes.report(ino, f"lacks its {'v' if a else 'a'} record (has {sorted(fields)})")
            return
        attr = inode.unpack_inode(ino, a, v)
        _require_id(row, schema.ATTR_FIELD, attr.parent)
        used = charged(self._xattrs(row, found))
        counted: list[tuple[Ino, int]] = []
        for field, value in fields.items():
            if field[:1] == b"p" and len(field) == 9:
                parent = _require_id(row, field, schema.id_of(field))
                names = _require_id(row, field, schema.unpack_count(row, field, value))
                counted.append((Ino(parent), names))
            elif field[:1] == b"c" and len(field) == 5:
                used += self._read_chunk(row, attr, schema.id_of(field), value)
            elif field not in _FIELDS and not is_xattr(field):
                notes.report(ino, f"has a field {field!r} that is nothing we know")
        if used != attr.used:
            notes.report(ino, f"says {attr.used} bytes are used, its slices cover {used}")
        if stat.S_ISLNK(attr.mode) and len(fields.get(schema.LINK_FIELD, b"")) != attr.size:
            notes.report(ino, "is a symlink whose size is not its target's")
        self._check_attached(attr, fields)
        for parent, names in counted:
            notes.spill.add("counted", ino, parent, names)
        notes.add_inode(attr, self._home(ino, fields.get(schema.HOME_FIELD)))

    def _check_attached(self, attr: Attr, fields: Mapping[bytes, bytes]) -> None:
        """A file that shows an object names it and has no slices. Raises: Corrupt."""
        value = fields.get(schema.OBJECT_FIELD)
        if bool(attr.flags & FLAG_ATTACHED) != (value is not None):
            named = "names an object and is not attached" if value else "names no object"
            self.notes.report(attr.ino, f"{named}: attach it again")
        elif value is not None:
            inode.unpack_object(attr.ino, value)
            if any(field[:1] == b"c" for field in fields):
                self.notes.report(attr.ino, "shows an object and has slices")

    def _xattrs(self, row: bytes, found: InodeRow) -> int:
        """What the inode says that its extended attributes cost. Raises: Corrupt."""
        said, total = counted_xattrs(row, found.fields), cost_of(found.fields) + found.left_out
        if not 0 <= said <= total:
            ino = schema.id_of(row)
            self.notes.report(ino, f"counts {said} bytes of extended attributes, it has {total}")
            text = f"inode {ino} counts the bytes of its extended attributes"
            value = b"%d" % total if total else None
            self.notes.mend(Stage.TABLES, row, XATTRS_FIELD, value, text)
        return said

    def _read_chunk(self, row: bytes, attr: Attr, index: int, value: bytes) -> int:
        """Note a chunk's slices; the bytes that they cover."""
        ino, end = attr.ino, attr.size - index * CHUNK_BYTES
        listed = schema_slices.unpack_slices(ino, index, value)
        beyond = attr.flags & FLAG_BEYOND
        if end <= 0 and not (beyond and all(not each.stored for each in listed)):
            self.notes.report(ino, f"has {attr.size} bytes and something in chunk {index}")
        elif not beyond and schema_slices.has_reserved(value) and reserved_end(listed) > end:
            self.notes.report(ino, f"has {attr.size} bytes and reserves more in chunk {index}")
        for sid, size in {(s.id, s.size) for s in listed if s.stored}:
            _require_id(row, schema.chunk_field(index), sid)
            self.notes.spill.add("used", sid, ino, index, size)
        return covered(listed)

    def _home(self, ino: Ino, value: bytes | None) -> Ino:
        if value is None:
            return NO_PARENT
        if len(value) != 8 or schema.id_of(value) > ID_MAX:
            self.notes.report(ino, f"has a home {value!r} that is none")
            return NO_PARENT
        return Ino(schema.id_of(value))

    def _read_dir(self, row: bytes) -> None:
        notes = self.notes
        parent = Ino(schema.id_of(row))
        decoded = -1  # the row may have gone since it was listed
        for name, value in fields_of(self._store, row):
            decoded = max(decoded, 0)
            try:
                kind, ino = schema.unpack_dentry(row, name, value)
                _require_id(row, name, ino)
            except Corrupt as error:
                notes.unreadable += 1
                notes.report(parent, str(error))
                continue
            decoded = 1
            if is_snapshot_dir(parent):
                notes.spill.add("shelved", source_of(parent), name, ino)
            if crosses(parent, ino):
                notes.report(ino, f"is named {name!r} in {parent}, across the border of a snapshot")
            if not is_name(name) and not is_snapshot_dir(parent):
                notes.report(ino, f"is named {name!r} in {parent}, which can't be a name")
                notes.spill.add("misnamed", parent, name, ino, int(kind))
            self._note_name(parent, name, ino, kind)
        if decoded >= 0:
            notes.spill.add("dir", parent, decoded)

    def _note_name(self, parent: Ino, name: bytes, ino: Ino, kind: FileType) -> None:
        self.notes.spill.add("name", ino, parent, name, int(kind))

    def _check_locks(self) -> None:
        """Locks; a volume that is not in use has none."""
        notes = self.notes
        found = [
            sorted({row for page in self._pages(prefix) for row in page})
            for prefix in (LOCK_PREFIX, GRANT_PREFIX)
        ]
        before = notes.problem_count()
        check_locks(self._store, found[0], found[1], notes.report)
        if notes.problem_count() > before:
            for row in (*found[0], *found[1]):
                said = f"locks in row {row!r}: no session is there that could have them"
                notes.mend(Stage.TABLES, row, None, None, said)


def identity_of(store: Store) -> bytes:
    """What changes when a client joins, when files are made or when the store has gone back."""
    counters = sorted(fields_of(store, schema.COUNTERS))
    settings = sorted(fields_of(store, schema.FORMAT))
    return repr((store.history.store_epoch(), counters, settings)).encode()


def _require_id(row: bytes, field: bytes, number: int) -> int:
    """Raises: Corrupt where no volume hands out such an id, or has so many names."""
    if not 0 <= number <= ID_MAX:
        raise Corrupt(row, field, f"number {number}")
    return number


def check(store: Store, progress: Progress = _silent) -> Checked:
    """Read all metadata and check it. Raises: NoVolume."""
    with Examination(store, progress) as examination:
        return examination.run()

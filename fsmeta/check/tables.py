"""The part of `check` that reads the volume's tables, and checks slices, ACLs and counters by them.

For most problems with a field of a table there is one safe repair, which is noted with the problem.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from fsmeta.check.findings import USED_ACLS, Findings, Stage
from fsmeta.check.spill_table import ID_MAX, Row
from fsmeta.errors import Corrupt
from fsmeta.schema import keys as schema, slices
from fsmeta.schema.acl import unpack_record, without_mode
from fsmeta.schema.journal import HOLDER_FIELD, JOURNAL_PREFIX, unpack_holder
from fsmeta.schema.scan import fields_of
from fsmeta.schema.segments import PACKED, is_open_segment, unpack_members, unpack_open
from fsmeta.schema.sessions import unpack_session
from fsmeta.schema.trash import is_trash
from fsmeta.store.contract import FENCE_FIELD, Store
from fsmeta.types import FLAG_ATTACHED, FLAG_BEYOND, FLAGS, SNAPSHOTS_SHIFT, FileType, Ino

_NOBODY: Final = schema.pack_u64(0)  # a session that never was
_USES_MAX: Final = 1 << 48  # more than a store can hold records of
# a slice's uses, drops and promises are one more than its count; without any there is no count
_MISCOUNTED: Final = """
SELECT id, MAX(SUM(uses) - 1, 0), SUM(count) FROM (
    SELECT id, 1 AS uses, 0 AS count FROM used
    UNION ALL SELECT id, 1, 0 FROM dropped
    UNION ALL SELECT id, 1, 0 FROM opened
    UNION ALL SELECT id, 0, count FROM shared)
GROUP BY id HAVING MAX(SUM(uses) - 1, 0) != SUM(count)
"""
_TWO_SIZES: Final = "SELECT id, MAX(ino) FROM used GROUP BY id HAVING MIN(size) != MAX(size)"
_OF_NOBODY: Final = "SELECT id FROM packed WHERE id NOT IN (SELECT id FROM shared)"
_SPECIAL: Final = """
SELECT s.ino, s.type, s.flags, s.acl, s.passed, a.access, d.id
FROM special s LEFT JOIN acl a ON a.id = s.acl LEFT JOIN acl d ON d.id = s.passed
"""


class Tables:
    """Reads first, checks when everything else has been read."""

    def __init__(self, store: Store, notes: Findings) -> None:
        self._store = store
        self._notes = notes

    def _forget(self, row: bytes, field: bytes, what: str) -> None:
        """A field of a table that means nothing: a problem, and it may go."""
        self._notes.report(0, what)
        self._notes.mend(Stage.TABLES, row, field, None, f"{what}: removed")

    # --- reading ---------------------------------------------------------------------------------

    def read(self) -> None:
        """Note what the tables say."""
        self._read_ids(schema.TRASH, "hour", "an hour of the trash", is_trash)
        self._read_ids(schema.CLONES, "clone", "a clone that is being built", lambda _: True)
        self._read_orphans()
        for field, value in fields_of(self._store, schema.DEAD_SLICES):
            try:
                self._read_dead(field, value)
            except Corrupt as error:
                self._forget(schema.DEAD_SLICES, field, str(error))
        for field, value in fields_of(self._store, schema.SHARED_SLICES):
            try:
                self._read_shared(field, value)
            except Corrupt as error:
                self._forget(schema.SHARED_SLICES, field, f"shared slice {field!r}: {error}")
        for field, value in fields_of(self._store, PACKED):
            try:
                self._read_packed(field, value)
            except Corrupt as error:
                self._forget(PACKED, field, f"segment {field!r}: {error}")
        self._check_journals()
        self._check_sessions()
        self._check_background()

    def _read_ids(self, row: bytes, table: str, what: str, is_one: Callable[[int], bool]) -> None:
        for field, value in fields_of(self._store, row):
            if row == schema.CLONES and is_open_segment(field):
                self._read_open(field, value)
                continue
            number = schema.id_of(field) if len(field) == 8 else ID_MAX + 1
            if number > ID_MAX or not is_one(number):
                self._forget(row, field, f"{field!r} is listed as {what}")
                continue
            self._notes.spill.add(table, number)
            if row == schema.CLONES and len(value) != 8:
                self._notes.report(number, f"is {what}, by {value!r}")
                said = f"clone {number} belongs to no session: a mount will remove it"
                self._notes.mend(Stage.TABLES, row, field, _NOBODY, said)

    def _read_open(self, field: bytes, value: bytes) -> None:
        """A segment that is given to one file after the other."""
        try:
            segment = unpack_open(field, value)
            if segment.id > ID_MAX:
                raise Corrupt(schema.CLONES, field, "no slice")
        except Corrupt as error:
            self._forget(schema.CLONES, field, f"open segment {field!r}: {error}")
        else:
            self._notes.spill.add("opened", segment.id)

    def _read_orphans(self) -> None:
        for field, value in fields_of(self._store, schema.ORPHANS):
            if len(field) == 8 and len(value) == 8 and schema.id_of(field) <= ID_MAX:
                self._notes.spill.add("orphan", schema.id_of(field))
            else:
                what = f"orphan {field!r} since {value!r} can't be read"
                self._forget(schema.ORPHANS, field, what)

    def _read_dead(self, field: bytes, value: bytes) -> None:
        dead = slices.unpack_dead(field, value)
        if any(sid > ID_MAX for sid, _ in dead):
            raise Corrupt(schema.DEAD_SLICES, field, f"slices {dead}")
        for at, (sid, size) in enumerate(dead):
            self._notes.spill.add("dropped", sid, field, at, size)

    def _read_shared(self, field: bytes, value: bytes) -> None:
        if len(field) != 8 or schema.id_of(field) > ID_MAX:
            raise Corrupt(schema.SHARED_SLICES, field, "no slice")
        count = schema.unpack_count(schema.SHARED_SLICES, field, value)
        if abs(count) > _USES_MAX:
            raise Corrupt(schema.SHARED_SLICES, field, f"{count} uses")
        self._notes.spill.add("shared", schema.id_of(field), count)

    def _read_packed(self, field: bytes, value: bytes) -> None:
        if len(field) != 8 or schema.id_of(field) > ID_MAX:
            raise Corrupt(PACKED, field, "no slice")
        unpack_members(field, value)
        self._notes.spill.add("packed", schema.id_of(field))

    def read_acl(self, row: bytes, fields: dict[bytes, bytes]) -> None:
        """Note an ACL record."""
        number = schema.id_of(row)
        try:
            acl = unpack_record(number, fields.get(schema.ACL_FIELD))
        except Corrupt as error:
            self._notes.report(0, str(error))
            said = f"ACL {number} can't be read: removed"
            self._notes.mend(Stage.TABLES, row, None, None, said)
            return
        access = acl.mask is not None and acl == without_mode(acl)
        self._notes.spill.add("acl", number, int(access))
        if fields.keys() != {schema.ACL_FIELD}:
            self._notes.report(0, f"ACL {number} has fields {sorted(fields)}")
        for field in sorted(fields.keys() - {schema.ACL_FIELD}):
            said = f"ACL {number} had a field {field!r}: removed"
            self._notes.mend(Stage.TABLES, row, field, None, said)

    def _check_journals(self) -> None:
        for row in self._rows(JOURNAL_PREFIX):
            for field, value in fields_of(self._store, row):
                if field == HOLDER_FIELD:
                    try:
                        unpack_holder(row, value)
                    except Corrupt as error:
                        self._notes.report(0, str(error))
                elif field[:1] != b"p" or len(field) != 9 or len(value) != 8:
                    text = f"journal {row[1:].hex()} has a mark {field!r} of {value!r}"
                    self._notes.report(0, text)

    def _rows(self, prefix: bytes) -> Iterator[bytes]:
        cursor: bytes | None = b""
        while cursor is not None:
            page = self._store.scan_rows(prefix, cursor)
            yield from (row for row in page.rows if len(row) == 9)  # others are not the volume's
            cursor = page.cursor

    def _check_sessions(self) -> None:
        """A session that may commit is listed, so that deletion rounds wait for it."""
        for field, value in fields_of(self._store, schema.SESSIONS):
            try:
                unpack_session(field, value)
            except Corrupt as error:
                self._notes.report(0, str(error))
        for row in self._rows(schema.SESSION_PREFIX):
            key = (schema.SESSIONS, row[1:])  # both of one moment, for sessions come and go
            alive, listed = self._store.read([(row, FENCE_FIELD), key])
            if alive is not None and listed is None:
                what = f"row {row!r} lets a session commit that is not listed"
                self._notes.report(0, what)
                self._notes.mend(Stage.TABLES, row, None, None, f"{what}: removed")

    def _check_background(self) -> None:
        """The leader, and the numbers of rounds and of gc."""
        row = schema.BACKGROUND
        keys = [(row, schema.LEADER), (row, schema.ROUND), (row, schema.VOID)]
        leader, current, void, following = self._store.read(
            [*keys, (schema.COUNTERS, schema.NEXT_SLICE)]
        )
        if leader is not None and len(leader) != 8:
            self._forget(row, schema.LEADER, f"session {leader!r} leads")
        for field, value, instead in (
            (schema.ROUND, current, None),
            (schema.VOID, void, following),  # what gc may have deleted lies below that
        ):
            try:
                schema.unpack_count(row, field, value)
            except Corrupt as error:
                self._notes.report(0, str(error))
                said = f"{field.decode()} of the background work was {value!r}, and starts again"
                self._notes.mend(Stage.TABLES, row, field, instead, said)

    # --- checking --------------------------------------------------------------------------------

    def judge(self, says_acls: bool) -> None:
        """Compare what was noted."""
        spill = self._notes.spill
        for each in spill.rows(_MISCOUNTED):
            self._miscounted(*each)
        for (sid,) in spill.rows(_OF_NOBODY):
            self._forget(PACKED, schema.pack_u64(sid), f"segment {sid} has no file in it")
        self.judge_inodes()
        acls = self._notes.count("acl")
        if acls and not says_acls:
            self._notes.report(0, "there are ACLs, and F does not say so")
            said = "there are ACLs, and F says so now"
            self._notes.mend(Stage.TABLES, schema.FORMAT, schema.HAS_ACLS, b"1", said)
        if acls:
            self._unused_acls()

    def judge_inodes(self) -> None:
        """What inodes say of slices and ACLs; it needs no inode besides those that were noted."""
        for sid, ino in self._notes.spill.rows(_TWO_SIZES):
            self._notes.report(ino, f"slice {sid} has two sizes")
        for row in self._notes.spill.rows(_SPECIAL):
            self._check_special(row)

    def _unused_acls(self) -> None:
        """ACLs of no inode may go; then all users may make as many records as ever."""
        unused = f"SELECT id FROM acl WHERE id NOT IN ({USED_ACLS})"
        if self._notes.spill.one(f"{unused} LIMIT 1") is None:
            return
        for (number,) in self._notes.spill.rows(unused):
            said = f"ACL {number} is of no inode: removed"
            self._notes.mend(Stage.COUNTERS, schema.acl_row(number), None, None, said)
        if self._store.scan(schema.ACL_MAKERS, limit=1).items:
            said = "ACLs that users have made are counted again"
            self._notes.mend(Stage.COUNTERS, schema.ACL_MAKERS, None, None, said)

    def _miscounted(self, sid: int, found: int, counted: int) -> None:
        text = f"slice {sid} has {1 + found} uses and drops, {1 + counted} are counted"
        self._notes.report(0, text)
        value = b"%d" % found if found else None
        said = f"slice {sid} has {1 + found} uses and drops, and that many are counted now"
        self._notes.mend(Stage.NAMES, schema.SHARED_SLICES, schema.pack_u64(sid), value, said)

    def _check_special(self, row: Row) -> None:
        """ACLs and flags of an inode that has any."""
        ino, kind, flags, acl, passed, access, exists = row
        report = partial(self._notes.report, Ino(ino))
        if acl and not access:
            report(f"has access ACL {acl}, which is none")
        if passed and exists is None:
            report(f"has default ACL {passed}, which does not exist")
        if passed and kind != FileType.DIR:
            report("has a default ACL and is no directory")
        if acl and kind == stat.S_IFLNK >> 12:
            report("is a symlink with an ACL")
        if flags & ~_known_flags(kind) & ((1 << SNAPSHOTS_SHIFT) - 1):
            report(f"has flags {flags:#x}")

    def check_counters(self) -> None:
        """Usage, and what is handed out next."""
        try:
            self._check_usage()
            self._check_ids()
        except Corrupt as error:
            self._notes.report(0, str(error))

    def _check_ids(self) -> None:
        notes = self._notes
        highest = {
            schema.NEXT_INO: notes.highest_supplied(),
            schema.NEXT_SLICE: max(notes.highest("used", "id"), notes.highest("dropped", "id")),
        }
        for field, value in zip(
            highest, self._store.read([(schema.COUNTERS, field) for field in highest]), strict=True
        ):
            following = schema.unpack_count(schema.COUNTERS, field, value)
            if following <= highest[field]:
                text = f"the next {field.decode()} is {following}, there is one {highest[field]}"
                notes.report(0, text)

    def _check_usage(self) -> None:
        space, inodes = self._notes.usage()
        wanted = {schema.INODES: inodes, schema.SPACE: space}
        for field, value in zip(
            wanted, self._store.read([(schema.USAGE, field) for field in wanted]), strict=True
        ):
            count = schema.unpack_count(schema.USAGE, field, value)
            if count != wanted[field]:
                text = f"usage says {count} {field.decode()}, there are {wanted[field]}"
                self._notes.report(0, text)


def _known_flags(kind: int) -> int:
    """The flags that an inode of a type may have."""
    return FLAGS | FLAG_ATTACHED | FLAG_BEYOND if kind == FileType.REG else FLAGS

"""Is the metadata true to itself? Ends every test, and is the first half of `slicefs fsck`.

It reads every row and holds one small record per inode; the volume may be in use, but then what
changes meanwhile can be reported as a problem: `fsck` says so. The invariants are in `schema`.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fsmeta import schema
from fsmeta.errors import Corrupt, NoVolume
from fsmeta.slices import covered
from fsmeta.store import Store
from fsmeta.types import (
    CHUNK_BYTES,
    NO_PARENT,
    ROOT_INO,
    Attr,
    FileType,
    Ino,
    SliceId,
    SliceKind,
)
from fsmeta.volume import unpack_format

_ROWS_AT_ONCE = 200
_FIELDS = frozenset({schema.ATTR_FIELD, schema.VOLATILE_FIELD, schema.LINK_FIELD})


class Problem(NamedTuple):
    """Something that can't be: where, and what."""

    ino: int  # 0 where it is no inode's
    what: str

    def __str__(self) -> str:
        return f"inode {self.ino}: {self.what}" if self.ino else self.what


class _Inode(NamedTuple):
    """What the check remembers of an inode."""

    attr: Attr
    parents: dict[Ino, int]  # the `p` fields
    slices: list[tuple[SliceId, int]]


class Checked(NamedTuple):
    """The outcome: problems, and what the objects must be."""

    problems: list[Problem]
    inodes: int
    slices: dict[SliceId, int]  # id → size, of everything files refer to
    dead: dict[SliceId, int]  # of everything that waits for deletion


class _Check:
    """One run over one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.problems: list[Problem] = []
        self.inodes: dict[Ino, _Inode] = {}
        self.names: dict[Ino, dict[Ino, int]] = {}  # inode → directory → names
        self.subdirs: dict[Ino, int] = {}
        self.populated: set[Ino] = set()  # directories with names
        self.slices: dict[SliceId, int] = {}
        self.dead: dict[SliceId, int] = {}

    def report(self, ino: int, what: str) -> None:
        self.problems.append(Problem(ino, what))

    def run(self) -> Checked:
        self._check_format()
        for row, fields in self._rows(schema.INODE_PREFIX):
            self._guard(self._read_inode, row, fields)
        for row in self._row_names(schema.DIR_PREFIX):
            self._read_dir(row)
        orphans = self._read_orphans()
        for ino, inode in self.inodes.items():
            self._check_inode(ino, inode, ino in orphans)
        for ino in orphans - self.inodes.keys():
            self.report(ino, "is listed as an orphan and does not exist")
        self._check_tree(orphans)
        self._check_dead()
        self._check_counters()
        return Checked(self.problems, len(self.inodes), self.slices, self.dead)

    def _guard(
        self,
        read: Callable[[bytes, dict[bytes, bytes]], None],
        row: bytes,
        fields: dict[bytes, bytes],
    ) -> None:
        try:
            read(row, fields)
        except Corrupt as error:
            self.report(schema.id_of(row), str(error))

    # --- reading ---------------------------------------------------------------------------------

    def _row_names(self, prefix: bytes) -> Iterator[bytes]:
        cursor: bytes | None = b""
        seen: set[bytes] = set()
        while cursor is not None:
            page = self._store.scan_rows(prefix, cursor)
            for row in page.rows:
                if row in seen:
                    continue
                seen.add(row)
                if len(row) == 9:
                    yield row
                else:
                    self.report(0, f"row {row!r} is nothing we know")
            cursor = page.cursor

    def _rows(self, prefix: bytes) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
        batch: list[bytes] = []
        for row in self._row_names(prefix):
            batch.append(row)
            if len(batch) == _ROWS_AT_ONCE:
                yield from zip(batch, self._store.read_rows(batch), strict=True)
                batch = []
        if batch:
            yield from zip(batch, self._store.read_rows(batch), strict=True)

    def _fields(self, row: bytes) -> Iterator[tuple[bytes, bytes]]:
        cursor: bytes | None = b""
        seen: set[bytes] = set()
        while cursor is not None:
            page = self._store.scan(row, cursor)
            for field, value in page.items:
                if field not in seen:
                    seen.add(field)
                    yield field, value
            cursor = page.cursor

    def _read_inode(self, row: bytes, fields: dict[bytes, bytes]) -> None:
        ino = Ino(schema.id_of(row))
        a, v = fields.get(schema.ATTR_FIELD), fields.get(schema.VOLATILE_FIELD)
        if a is None or v is None:
            self.report(ino, f"lacks its {'v' if a else 'a'} record (has {sorted(fields)})")
            return
        attr = schema.unpack_inode(ino, a, v)
        parents: dict[Ino, int] = {}
        slices: list[tuple[SliceId, int]] = []
        used = 0
        for field, value in fields.items():
            if field[:1] == b"p" and len(field) == 9:
                parents[Ino(schema.id_of(field))] = schema.unpack_count(row, field, value)
            elif field[:1] == b"c" and len(field) == 5:
                index = schema.id_of(field)
                if index * CHUNK_BYTES >= attr.size:
                    self.report(ino, f"has {attr.size} bytes and something in chunk {index}")
                listed = schema.unpack_slices(ino, index, value)
                used += covered(listed)
                slices += [(s.id, s.size) for s in listed if s.kind is not SliceKind.HOLE]
            elif field not in _FIELDS and field[:1] != b"x":
                self.report(ino, f"has a field {field!r} that is nothing we know")
        if used != attr.used:
            self.report(ino, f"says {attr.used} bytes are used, its slices cover {used}")
        if stat.S_ISLNK(attr.mode) and len(fields.get(schema.LINK_FIELD, b"")) != attr.size:
            self.report(ino, "is a symlink whose size is not its target's")
        self.inodes[ino] = _Inode(attr, parents, slices)

    def _read_dir(self, row: bytes) -> None:
        parent = Ino(schema.id_of(row))
        if parent not in self.inodes:
            self.report(parent, "has names and does not exist")
            return
        if not self.inodes[parent].attr.is_dir:
            self.report(parent, "has names and is no directory")
        for name, value in self._fields(row):
            try:
                kind, ino = schema.unpack_dentry(row, name, value)
            except Corrupt as error:
                self.report(parent, str(error))
                continue
            self.populated.add(parent)
            counts = self.names.setdefault(ino, {})
            counts[parent] = counts.get(parent, 0) + 1
            if kind is FileType.DIR:
                self.subdirs[parent] = self.subdirs.get(parent, 0) + 1
            if ino not in self.inodes:
                self.report(ino, f"is named {name!r} in {parent} and does not exist")
            elif self.inodes[ino].attr.type is not kind:
                self.report(ino, f"is named {name!r} in {parent} with the wrong type")

    def _read_orphans(self) -> set[Ino]:
        orphans: set[Ino] = set()
        for field, value in self._fields(schema.ORPHANS):
            if len(field) == 8 and len(value) == 8:
                orphans.add(Ino(schema.id_of(field)))
            else:
                self.report(0, f"orphan {field!r} since {value!r} can't be read")
        return orphans

    # --- judging ---------------------------------------------------------------------------------

    def _check_inode(self, ino: Ino, inode: _Inode, orphan: bool) -> None:
        names = self.names.get(ino, {})
        count = sum(names.values())
        attr = inode.attr
        for sid, size in inode.slices:
            if self.slices.setdefault(sid, size) != size:
                self.report(ino, f"slice {sid} has two sizes")
        if attr.is_dir:
            self._check_directory(ino, attr, names, count, orphan)
            return
        if attr.nlink != count:
            self.report(ino, f"has {attr.nlink} links and {count} names")
        if orphan != (attr.nlink == 0):
            self.report(ino, f"has {attr.nlink} links and is {'' if orphan else 'not '}an orphan")
        if attr.parent == NO_PARENT and attr.nlink and inode.parents != names:
            self.report(ino, f"counts names {inode.parents}, there are {names}")
        if attr.parent != NO_PARENT and names != {attr.parent: 1}:
            self.report(ino, f"says its parent is {attr.parent}, its names are in {names}")

    def _check_directory(
        self, ino: Ino, attr: Attr, names: dict[Ino, int], count: int, orphan: bool
    ) -> None:
        if orphan:
            if count or attr.nlink or attr.parent or ino in self.populated:
                self.report(ino, "is an orphan directory that is still in use")
            return
        expected = 2 + self.subdirs.get(ino, 0)
        if attr.nlink != expected:
            self.report(ino, f"is a directory with {attr.nlink} links instead of {expected}")
        wanted = {} if ino == ROOT_INO else {attr.parent: 1}
        if names != wanted:
            self.report(ino, f"is a directory under {attr.parent} whose names are in {names}")

    def _check_dead(self) -> None:
        for field, value in self._fields(schema.DEAD_SLICES):
            try:
                dead = schema.unpack_dead(field, value)
            except Corrupt as error:
                self.report(0, str(error))
                continue
            for sid, size in dead:
                self.dead[sid] = size
                if sid in self.slices:
                    self.report(0, f"slice {sid} is in use and waits for deletion")

    def _check_tree(self, orphans: set[Ino]) -> None:
        """Each directory must lie under the root: a ring of directories has sound records."""
        reaches = {ROOT_INO}
        for start, inode in self.inodes.items():
            if not inode.attr.is_dir or start in orphans:
                continue
            way: list[Ino] = []
            above, seen = start, set[Ino]()
            while above not in reaches and above not in seen and above in self.inodes:
                way.append(above)
                seen.add(above)
                above = self.inodes[above].attr.parent
            if above in reaches:
                reaches.update(way)
            else:
                self.report(start, f"is not under the root: its way up ends at {above}")

    def _check_counters(self) -> None:
        try:
            self._check_usage()
            self._check_ids()
        except Corrupt as error:
            self.report(0, str(error))

    def _check_ids(self) -> None:
        """What is handed out next must not exist."""
        highest = {
            schema.NEXT_INO: max(self.inodes, default=0),
            schema.NEXT_SLICE: max(max(self.slices, default=0), max(self.dead, default=0)),
        }
        for field, value in zip(
            highest, self._store.read([(schema.COUNTERS, field) for field in highest]), strict=True
        ):
            following = schema.unpack_count(schema.COUNTERS, field, value)
            if following <= highest[field]:
                text = f"the next {field.decode()} is {following}, there is one {highest[field]}"
                self.report(0, text)

    def _check_usage(self) -> None:
        named = [each.attr for each in self.inodes.values() if each.attr.nlink]
        wanted = {schema.INODES: len(named), schema.SPACE: sum(attr.space for attr in named)}
        for field, value in zip(
            wanted, self._store.read([(schema.USAGE, field) for field in wanted]), strict=True
        ):
            count = schema.unpack_count(schema.USAGE, field, value)
            if count != wanted[field]:
                self.report(0, f"usage says {count} {field.decode()}, there are {wanted[field]}")

    def _check_format(self) -> None:
        value = self._store.read([(schema.FORMAT, schema.FORMAT_FIELD)])[0]
        if value is None:
            raise NoVolume
        try:
            unpack_format(value)
        except Corrupt as error:
            self.report(0, str(error))


def check(store: Store) -> Checked:
    """Read all metadata and judge it. Raises: NoVolume."""
    return _Check(store).run()

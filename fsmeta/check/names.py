"""The part of `check` that compares inodes with names: links, parents, orphans, the tree.

Inodes and all notes about them are read side by side, in order. Only the directories above a
directory are looked up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from fsmeta.check.findings import Findings, Known, Stage
from fsmeta.check.spill_table import Groups, Row
from fsmeta.schema import keys
from fsmeta.schema.snapshot_inos import SHELVES, is_snapshot_dir
from fsmeta.schema.trash import TRASH_INO, is_trash
from fsmeta.types import NO_PARENT, ROOT_INO, FileType, Ino

_REMEMBERED_MAX: Final = 10_000  # directories whose depth is kept at hand, 1 MB


def judge_names(notes: Findings) -> None:
    """Report what inodes and names say of each other that can't be."""
    judge = NamesCheck(notes)
    tree = DirTree(notes, _tops(notes))
    for known in notes.inodes():
        orphan = judge.inode(known)
        if known.is_dir and not orphan:
            tree.place(known)
    judge.end()


class NamesCheck:
    """Goes through the tables once."""

    def __init__(self, notes: Findings) -> None:
        self._notes = notes
        rows = notes.spill.rows
        query = "SELECT ino, parent, name, kind FROM name ORDER BY ino, parent, name"
        self._names = Groups(rows(query), self._no_inode)
        self._counted = Groups(rows("SELECT ino, parent, names FROM counted ORDER BY ino"))
        self._orphans = Groups(rows("SELECT ino FROM orphan ORDER BY ino"), self._no_orphan)
        self._clones = Groups(rows("SELECT ino FROM clone ORDER BY ino"), self._no_clone)
        self._dirs = Groups(rows("SELECT ino, decoded FROM dir ORDER BY ino"), self._no_directory)
        query = "SELECT parent, COUNT(*) FROM name WHERE kind = ? GROUP BY parent ORDER BY parent"
        self._subdirs = Groups(rows(query, FileType.DIR))

    def inode(self, known: Known) -> bool:
        """Judge one; whether it is listed as an orphan."""
        ino = known.ino
        found = self._names.of(ino)
        counted = self._counted.of(ino)
        orphan = bool(self._orphans.of(ino))
        building = bool(self._clones.of(ino))
        has_names = self._dirs.of(ino)
        for _, parent, name, kind in found:
            if kind != known.type:
                self._wrong_type(known, parent, name)
        names = dict(Counter(parent for _, parent, _, _ in found))
        if known.is_dir:
            subdirs = self._subdirs.of(ino)
            populated = bool(has_names and has_names[0][1])
            if orphan:
                self._orphan_dir(known, names, populated)
            else:
                self._links(known, subdirs[0][1] if subdirs else 0)
                self._special_dir(known, populated, building)
                self._judge_names_of_dir(known, names, building)
        else:
            if has_names:
                self._report(ino, "has names and is no directory")
            self._judge_file(known, names, {row[1]: row[2] for row in counted}, orphan)
        return orphan

    def _report(self, ino: int, what: str) -> None:
        self._notes.report(ino, what)

    def _judge_file(
        self, known: Known, names: dict[Ino, int], counted: dict[Ino, int], orphan: bool
    ) -> None:
        ino, nlink = known.ino, known.nlink
        count = sum(names.values())
        if nlink != count:
            self._report(ino, f"has {nlink} links and {count} names")
        if orphan != (nlink == 0):
            self._report(ino, f"has {nlink} links and is {'' if orphan else 'not '}an orphan")
        if known.parent != NO_PARENT:
            if names != {known.parent: 1}:
                self._report(ino, f"says its parent is {known.parent}, its names are in {names}")
        elif nlink:
            if counted != names:
                self._report(ino, f"counts names {counted}, there are {names}")
            if known.mark == self._notes.epoch != 0 and known.home not in names:
                self._report(ino, f"counts in {known.home}, where it has no name")

    def _orphan_dir(self, known: Known, names: dict[Ino, int], populated: bool) -> None:
        if names or known.nlink or known.parent or populated:
            self._report(known.ino, "is an orphan directory that is still in use")

    def _links(self, known: Known, subdirs: int) -> None:
        if known.nlink != 2 + subdirs:
            text = f"is a directory with {known.nlink} links instead of {2 + subdirs}"
            self._report(known.ino, text)

    def _special_dir(self, known: Known, populated: bool, building: bool) -> None:
        if is_trash(known.parent) and populated and not building:
            self._report(known.ino, "is a directory in the trash and not empty")
        if building and known.parent != TRASH_INO:
            self._report(known.ino, f"is a clone that is being built, under {known.parent}")

    def _judge_names_of_dir(self, known: Known, names: dict[Ino, int], building: bool) -> None:
        wanted = {} if known.ino == ROOT_INO or building else {known.parent: 1}
        if names != wanted:
            text = f"is a directory under {known.parent} whose names are in {names}"
            self._report(known.ino, text)

    def _wrong_type(self, known: Known, parent: Ino, name: bytes) -> None:
        self._report(known.ino, f"is named {name!r} in {parent} with the wrong type")
        said = f"name {name!r} in inode {parent}: its type is that of inode {known.ino} now"
        value = keys.pack_dentry(known.type, known.ino)
        self._notes.mend(Stage.NAMES, keys.dir_row(parent), name, value, said)

    # --- what is said of inodes that are not there -----------------------------------------------

    def _no_inode(self, row: Row) -> None:
        ino, parent, name, _ = row
        self._report(ino, f"is named {name!r} in {parent} and does not exist")
        said = f"name {name!r} in inode {parent} led to inode {ino}, which is gone: removed"
        self._notes.mend(Stage.NAMES, keys.dir_row(parent), name, None, said)

    def _no_orphan(self, row: Row) -> None:
        self._report(row[0], "is listed as an orphan and does not exist")
        said = f"orphan {row[0]} is gone: forgotten"
        self._notes.mend(Stage.NAMES, keys.ORPHANS, keys.pack_u64(row[0]), None, said)

    def _no_clone(self, row: Row) -> None:
        self._report(row[0], "is listed as a clone that is being built and does not exist")
        said = f"clone {row[0]} is gone: forgotten"
        self._notes.mend(Stage.NAMES, keys.CLONES, keys.pack_u64(row[0]), None, said)

    def _no_directory(self, row: Row) -> None:
        ino = row[0]
        if is_snapshot_dir(ino):
            return
        if not is_trash(ino):
            self._report(ino, "has names and does not exist")
        elif not self._notes.has("hour", ino):
            self._report(ino, "has names in the trash and is not listed")
            said = "an hour of the trash was not listed: it is, and will expire"
            never = keys.pack_u64(0)
            self._notes.mend(Stage.TABLES, keys.TRASH, keys.pack_u64(ino), never, said)

    def end(self) -> None:
        """There are no more inodes."""
        for groups in (self._names, self._orphans, self._clones, self._dirs):
            groups.end()


def _tops(notes: Findings) -> list[int]:
    """The root, and what stands beside it."""
    queries = "SELECT ino FROM hour", "SELECT ino FROM clone"
    shelves = f"SELECT ino FROM dir WHERE ino >= {SHELVES} AND ino < {TRASH_INO}"
    return [ROOT_INO, *(ino for each in (*queries, shelves) for (ino,) in notes.spill.rows(each))]


class DirTree:
    """Each directory must lie under one of `tops`: a ring of directories has sound records.

    How far below is noted for each, which lets `check/quotas` sum up from the leaves.
    """

    def __init__(self, notes: Findings, tops: Iterable[int]) -> None:
        self._notes = notes
        self._near: dict[int, int] = {}  # depths
        for ino in tops:
            self._put(ino, self._parent_of(ino), 0)

    def _parent_of(self, ino: int) -> Ino:
        known = self._notes.inode(ino)
        return NO_PARENT if known is None else known.parent

    def _put(self, ino: int, parent: int, depth: int) -> None:
        self._notes.spill.run("INSERT OR IGNORE INTO tree VALUES(?, ?, ?)", ino, parent, depth)
        if len(self._near) >= _REMEMBERED_MAX:
            self._near.clear()
        self._near[ino] = depth

    def _depth(self, ino: int) -> int | None:
        near = self._near.get(ino)
        if near is None:
            found = self._notes.spill.one("SELECT depth FROM tree WHERE ino = ?", ino)
            near = None if found is None else int(found[0])
        return near

    def place(self, known: Known) -> None:
        """Find the way up from a directory."""
        way: dict[int, int] = {}  # directories, with their parents
        above: Known | None = known
        ino = int(known.ino)
        depth = self._depth(ino)
        while depth is None and above is not None and ino not in way:
            way[ino] = above.parent
            ino = above.parent
            depth = self._depth(ino)
            above = self._notes.inode(ino) if depth is None else None
        if depth is None:
            self._notes.report(known.ino, f"is not under the root: its way up ends at {ino}")
            return
        for each, parent in reversed(way.items()):
            depth += 1
            self._put(each, parent, depth)

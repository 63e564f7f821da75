"""What a check has seen of a volume: tables in bounded memory, and the queries on them.

`check` fills them, its parts evaluate them, `repair` works by them. Memory is SQLite's cache,
whatever the volume holds (docs/design/deletion-gc-repair). One thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from fsmeta.check.kept_table import KeptAt, KeptTable
from fsmeta.check.spill_table import CACHE_BYTES, ID_MAX, SpillTable
from fsmeta.schema.snapshot_inos import SEALED_INO, SHELVES
from fsmeta.types import SPACE_UNIT_BYTES, Attr, FileType, Ino, SliceId

_SCRIPT: Final = """
CREATE TABLE inode(ino INTEGER PRIMARY KEY, type, nlink, parent, home, mark, uid, gid, units);
CREATE TABLE special(ino INTEGER PRIMARY KEY, type, flags, acl, passed);  -- with ACLs or flags
CREATE TABLE name(ino, parent, name, kind, PRIMARY KEY(ino, parent, name)) WITHOUT ROWID;
CREATE TABLE misnamed(parent, name, ino, kind, PRIMARY KEY(parent, name)) WITHOUT ROWID;
CREATE TABLE counted(ino, parent, names, PRIMARY KEY(ino, parent)) WITHOUT ROWID;  -- `p` fields
CREATE TABLE dir(ino INTEGER PRIMARY KEY, decoded);  -- rows of names; 1: some of them decode
CREATE TABLE orphan(ino INTEGER PRIMARY KEY);
CREATE TABLE hour(ino INTEGER PRIMARY KEY);
CREATE TABLE clone(ino INTEGER PRIMARY KEY);
CREATE TABLE shelved(source, name, root, PRIMARY KEY(source, name, root)) WITHOUT ROWID;
CREATE TABLE snapshot(source, name, root, PRIMARY KEY(source, name, root)) WITHOUT ROWID;  -- M
CREATE TABLE unread(field BLOB PRIMARY KEY) WITHOUT ROWID;  -- of M, does not decode
CREATE TABLE acl(id INTEGER PRIMARY KEY, access);
CREATE TABLE used(id, ino, chunk, size, PRIMARY KEY(id, ino, chunk, size)) WITHOUT ROWID;
CREATE TABLE dropped(id, field, at, size, PRIMARY KEY(id, field, at)) WITHOUT ROWID;
CREATE TABLE shared(id INTEGER PRIMARY KEY, count);
CREATE TABLE packed(id INTEGER PRIMARY KEY);
CREATE TABLE opened(id INTEGER PRIMARY KEY);  -- segments that further files will list
CREATE TABLE tree(ino INTEGER PRIMARY KEY, parent, depth);  -- directories that hang together
CREATE TABLE total(ino INTEGER PRIMARY KEY, units, inodes);  -- of what counts below one
CREATE TABLE book(field BLOB PRIMARY KEY, stored, sum) WITHOUT ROWID;  -- counters of quotas
CREATE TABLE listed(node BLOB PRIMARY KEY) WITHOUT ROWID;  -- nodes with limits
CREATE TABLE below(ino INTEGER PRIMARY KEY);  -- of a check by path: what it begins at, directories
CREATE TABLE queue(ino INTEGER PRIMARY KEY);  -- directories that it has not read yet
CREATE TABLE problem(number INTEGER PRIMARY KEY, ino, what, UNIQUE(ino, what));
CREATE TABLE remedy(number INTEGER PRIMARY KEY, stage, row, field, value, said,
                    UNIQUE(row, field));
"""
_UNITS_MAX: Final = 1 << 47  # of the longest file, twice; what a damaged record says adds up, too
KEPT_MAX: Final = 10_000  # problems that a report has; more are counted


class Stage(IntEnum):
    """When a remedy is due: names once no directory is missing, sums once all else is right."""

    TABLES = 0
    NAMES = 1
    COUNTERS = 2


class Problem(NamedTuple):
    """Something that can't be: where, and what."""

    ino: int  # 0 where it is no inode's
    what: str

    def __str__(self) -> str:
        return f"inode {self.ino}: {self.what}" if self.ino else self.what


class Known(NamedTuple):
    """What is remembered of an inode."""

    ino: Ino
    type: FileType
    nlink: int
    parent: Ino
    home: Ino  # the `h` field; NO_PARENT where there is none
    mark: int

    @property
    def is_dir(self) -> bool:
        """Whether this is a directory."""
        return self.type is FileType.DIR


class Remedy(NamedTuple):
    """A field as it must be, and what to say when it is written. No value: it goes; no field, the
    whole row goes."""

    row: bytes
    field: bytes | None
    value: bytes | None
    said: str


class Findings:
    """The tables."""

    def __init__(self, cache_bytes: int = CACHE_BYTES, kept: KeptAt | None = None) -> None:
        """Raises: ConfigError where `kept` is of something else."""
        if kept is None:
            self.spill = SpillTable(_SCRIPT, cache_bytes)
        else:
            self.spill = KeptTable(_SCRIPT, kept, cache_bytes)
        self.epoch = 0  # marks that count
        self.unreadable = 0  # records that don't decode and may lead to what seems lost

    def close(self) -> None:
        """Forget everything; idempotent."""
        self.spill.close()

    # --- what is wrong ---------------------------------------------------------------------------

    def report(self, ino: int, what: str) -> None:
        """Note a problem; once, however often it is met."""
        self.spill.run(
            "INSERT OR IGNORE INTO problem(ino, what) VALUES(?, ?)", min(ino, ID_MAX), what
        )

    def mend(
        self, stage: Stage, row: bytes, field: bytes | None, value: bytes | None, said: str
    ) -> None:
        """Note the one safe way to mend something. See `Remedy`."""
        self.spill.run(
            "INSERT OR IGNORE INTO remedy(stage, row, field, value, said) VALUES(?, ?, ?, ?, ?)",
            stage, row, field, value, said,
        )  # fmt: skip

    def problems(self) -> Iterator[Problem]:
        """All problems, in the order in which they were found."""
        for ino, what in self.spill.rows("SELECT ino, what FROM problem ORDER BY number"):
            yield Problem(ino, what)

    def problem_count(self) -> int:
        """How many there are."""
        return self._number("SELECT COUNT(*) FROM problem")

    def concerned(self) -> Iterator[Ino]:
        """Inodes with problems, ascending."""
        query = "SELECT DISTINCT ino FROM problem WHERE ino > 0 ORDER BY ino"
        return (Ino(ino) for (ino,) in self.spill.rows(query))

    def remedies(self, stage: Stage) -> Iterator[Remedy]:
        """What can be mended by writing a field."""
        query = "SELECT row, field, value, said FROM remedy WHERE stage = ? ORDER BY number"
        return (Remedy(*each) for each in self.spill.rows(query, stage))

    # --- inodes and names ------------------------------------------------------------------------

    def add_inode(self, attr: Attr, home: Ino) -> None:
        """An inode that decodes."""
        units = min(attr.space // SPACE_UNIT_BYTES, _UNITS_MAX)
        self.spill.add(
            "inode", attr.ino, attr.mode >> 12, attr.nlink, attr.parent, home, attr.mark,
            attr.uid, attr.gid, units,
        )  # fmt: skip
        if attr.acl or attr.default_acl or attr.flags:
            self.spill.add(
                "special", attr.ino, attr.mode >> 12, attr.flags, attr.acl, attr.default_acl
            )

    def inodes(self) -> Iterator[Known]:
        """All inodes that decode, ascending."""
        query = "SELECT ino, type, nlink, parent, home, mark FROM inode ORDER BY ino"
        for ino, kind, nlink, parent, home, mark in self.spill.rows(query):
            yield Known(ino, _TYPES[kind], nlink, parent, home, mark)

    def inode(self, ino: int) -> Known | None:
        """One inode, if it decodes."""
        query = "SELECT ino, type, nlink, parent, home, mark FROM inode WHERE ino = ?"
        found = self.spill.one(query, min(ino, ID_MAX))
        return None if found is None else Known(found[0], _TYPES[found[1]], *found[2:])

    def names(self, ino: int) -> dict[Ino, int]:
        """In which directories an inode has how many names."""
        query = "SELECT parent FROM name WHERE ino = ?"
        return dict(Counter(parent for (parent,) in self.spill.rows(query, ino)))

    def counted(self, ino: int) -> dict[Ino, int]:
        """What its `p` fields say of that."""
        return dict(self.spill.rows("SELECT parent, names FROM counted WHERE ino = ?", ino))

    def subdirs(self, ino: int) -> int:
        """How many directories have a name in a directory that `judge_names` has seen."""
        query = "SELECT COUNT(*) FROM name WHERE parent = ? AND kind = ?"
        self.spill.run("CREATE INDEX IF NOT EXISTS name_parent ON name(parent, kind)")
        return self._number(query, ino, FileType.DIR)

    def has(self, table: str, ino: int) -> bool:
        """Whether `orphan`, `hour`, `clone` or `dir` lists an inode."""
        return self.spill.one(f"SELECT 1 FROM {table} WHERE ino = ?", ino) is not None

    def is_populated(self, ino: int) -> bool:
        """Whether a directory has names."""
        return self.spill.one("SELECT 1 FROM dir WHERE ino = ? AND decoded", ino) is not None

    def usage(self) -> tuple[int, int]:
        """Space and number of the inodes that have names."""
        found = self.spill.one("SELECT SUM(units), COUNT(*) FROM inode WHERE nlink")
        assert found is not None
        return (found[0] or 0) * SPACE_UNIT_BYTES, found[1]

    def shelved(self, ino: int) -> int:
        """How many snapshots a directory has."""
        return self._number("SELECT COUNT(*) FROM shelved WHERE source = ?", ino)

    # --- slices ----------------------------------------------------------------------------------

    def slices(self) -> Iterator[tuple[SliceId, int]]:
        """Id and size of all that files refer to, ascending."""
        return self._slices("used")

    def dead(self) -> Iterator[tuple[SliceId, int]]:
        """Id and size of all that waits for deletion, ascending."""
        return self._slices("dropped")

    def user(self, sid: SliceId) -> Ino | None:
        """A file that refers to a slice."""
        row = self.spill.one("SELECT ino FROM used WHERE id = ?", sid)
        return None if row is None else Ino(int(row[0]))

    def _slices(self, table: str) -> Iterator[tuple[SliceId, int]]:
        query = f"SELECT id, MAX(size) FROM {table} GROUP BY id ORDER BY id"
        return ((SliceId(sid), size) for sid, size in self.spill.rows(query))

    def count(self, table: str) -> int:
        """Rows of a table."""
        return self._number(f"SELECT COUNT(*) FROM {table}")

    def count_slices(self, table: str) -> int:
        """Different slices in `used` or `dropped`."""
        return self._number(f"SELECT COUNT(*) FROM (SELECT 1 FROM {table} GROUP BY id)")

    def highest(self, table: str, column: str) -> int:
        """The largest value of a column; 0 where there is none."""
        return self._number(f"SELECT COALESCE(MAX({column}), 0) FROM {table}")

    def highest_supplied(self, table: str = "inode") -> int:
        """The largest number from the supply that is in an inode's, of those in `inode` or with a
        `problem`: an unreadable inode has one, too. Shelves and the trash have none."""
        query = f"SELECT COALESCE(MAX({_SUPPLIED}), 0) FROM {table} WHERE ino < ?"
        return self._number(query, SEALED_INO, SEALED_INO, SHELVES)

    def acls_used(self) -> int:
        """ACL records that an inode names."""
        return self._number(f"SELECT COUNT(*) FROM acl WHERE id IN ({USED_ACLS})")

    def _number(self, query: str, *values: int | bytes) -> int:
        found = self.spill.one(query, *values)
        assert found is not None
        return int(found[0])


USED_ACLS: Final = "SELECT acl FROM special UNION SELECT passed FROM special"
_SUPPLIED: Final = "CASE WHEN ino < ? THEN ino ELSE ino - ? END"
_TYPES: Final = {int(kind): kind for kind in FileType}

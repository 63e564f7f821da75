"""Whether the counters of quotas are right: the part of `check` that knows
docs/design/locks-permissions-quotas.

While there is accounting, the counters are the sums over inodes that have names and whose mark is
the current epoch: each counts at its owner, its group and every directory above it but the root;
above a file without `a.parent` is `h`, one of those that name it. When the count is complete, every
inode has that mark. `audit` sums up what `check` has noted of the inodes: what lies in each
directory first, then from the deepest directories up. What is in a snapshot counts nowhere there.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from fsmeta.check.findings import Findings, Stage
from fsmeta.errors import Corrupt
from fsmeta.rules import quota
from fsmeta.rules.settings import OFF, ON, VolumeFormat
from fsmeta.schema import keys
from fsmeta.schema.scan import fields_of
from fsmeta.schema.snapshot_inos import SEALED_INO
from fsmeta.schema.trash import TRASH_INO
from fsmeta.store.contract import Store
from fsmeta.store.writes import BESIDE
from fsmeta.types import ROOT_INO, SPACE_UNIT_BYTES, FileType, Ino

_NODE_BYTES: Final = {quota.DIR: 9, quota.USER: 5, quota.GROUP: 5}
_DIRS_AT_ONCE: Final = 100  # five values each
_UNSEALED: Final = f"ino NOT BETWEEN {SEALED_INO} AND {TRASH_INO - 1}"
_COUNTS: Final = f"mark = ? AND nlink AND {_UNSEALED}"  # which inodes count
_PLACE: Final = "CASE parent WHEN 0 THEN home ELSE parent END"
_IN_BOOK: Final = """
INSERT INTO book VALUES(?, NULL, ?) ON CONFLICT(field) DO UPDATE SET sum = excluded.sum
"""
_INTO_TOTAL: Final = """
INSERT INTO total SELECT ?, units, inodes FROM total WHERE ino = ?
ON CONFLICT(ino) DO UPDATE SET units = units + excluded.units, inodes = inodes + excluded.inodes
"""


def audit(store: Store, settings: VolumeFormat, notes: Findings) -> None:
    """Report what is wrong with the counters and limits."""
    for field, value in fields_of(store, keys.ACCOUNTS):
        notes.spill.add("book", field, value, None)
    for node, _ in fields_of(store, keys.LIMITED):
        notes.spill.add("listed", node)
    _audit_limits(notes)
    if settings.accounting == OFF:
        return
    if settings.accounting == ON:
        _audit_marks(settings.epoch, notes)
    _sum_up(settings.epoch, notes)
    _compare(notes)


def audit_below(store: Store, settings: VolumeFormat, notes: Findings) -> None:
    """The same for the directories of a check by path; users and groups need all inodes."""
    below = (ino for (ino,) in notes.spill.rows("SELECT ino FROM below ORDER BY ino"))
    while batch := [quota.dir_node(Ino(ino)) for ino in islice(below, _DIRS_AT_ONCE)]:
        fields = [field for node in batch for field in quota.node_fields(node)]
        wanted = [(keys.ACCOUNTS, field) for field in fields]
        values = store.read([*wanted, *((keys.LIMITED, node) for node in batch)])
        for field, value in zip(fields, values, strict=False):
            if value is not None:
                notes.spill.add("book", field, value, None)
        for node, value in zip(batch, values[len(fields) :], strict=True):
            if value is not None:
                notes.spill.add("listed", node)
    _audit_limits(notes)
    if settings.accounting == OFF:
        return
    if settings.accounting == ON:
        _audit_marks(settings.epoch, notes)
    _require_homes(settings.epoch, notes)
    _sum_up_dirs(settings.epoch, notes, "JOIN below USING(ino)")
    _compare(notes)


def _audit_marks(epoch: int, notes: Findings) -> None:
    query = f"SELECT ino, mark FROM inode WHERE mark != ? AND {_UNSEALED}"
    for ino, mark in notes.spill.rows(query, epoch):
        notes.report(ino, f"has mark {mark}, not the epoch's, {epoch}")


def _require_homes(epoch: int, notes: Findings) -> None:
    query = f"SELECT ino FROM inode WHERE {_COUNTS} AND parent = 0 AND home = 0 AND ino != ?"
    for (ino,) in notes.spill.rows(query, epoch, ROOT_INO):
        notes.report(ino, "has several names and no home")


def _sum_up(epoch: int, notes: Findings) -> None:
    spill = notes.spill
    _require_homes(epoch, notes)
    for column, node in (("uid", quota.user_node), ("gid", quota.group_node)):
        query = f"SELECT {column}, SUM(units), COUNT(*) FROM inode WHERE {_COUNTS} GROUP BY 1"
        for number, units, inodes in spill.rows(query, epoch):
            _book(notes, node(number), units, inodes)
    _sum_up_dirs(epoch, notes)


def _sum_up_dirs(epoch: int, notes: Findings, chosen: str = "") -> None:
    """What lies below each directory; `chosen` says of which that is known."""
    spill = notes.spill
    spill.run(
        f"INSERT INTO total SELECT {_PLACE} AS place, SUM(units), COUNT(*) FROM inode "
        f"WHERE {_COUNTS} GROUP BY place",
        epoch,
    )
    for ino, parent in spill.rows("SELECT ino, parent FROM tree WHERE depth ORDER BY depth DESC"):
        spill.run(_INTO_TOTAL, parent, ino)
    query = (
        "SELECT ino, t.units, inodes FROM total t JOIN inode USING(ino) "
        f"{chosen} WHERE type = ? AND ino != ?"
    )
    for ino, units, inodes in spill.rows(query, FileType.DIR, ROOT_INO):
        _book(notes, quota.dir_node(ino), units, inodes)


def _book(notes: Findings, node: bytes, units: int, inodes: int) -> None:
    notes.spill.run(_IN_BOOK, quota.space_field(node), units * SPACE_UNIT_BYTES)
    notes.spill.run(_IN_BOOK, quota.inodes_field(node), inodes)


def _compare(notes: Findings) -> None:
    for field, stored, total in notes.spill.rows("SELECT field, stored, sum FROM book"):
        if field.endswith(BESIDE):
            continue
        there = total or 0
        try:
            count = keys.unpack_count(keys.ACCOUNTS, field, stored)
        except Corrupt as error:
            what = str(error)
        else:
            if count == there:
                continue
            what = f"{shown(field)} says {count}, there are {there}"
        notes.report(0, what)
        value = b"%d" % there if there else None
        said = f"{shown(field)} is {there} now"
        notes.mend(Stage.COUNTERS, keys.ACCOUNTS, field, value, said)


def _audit_limits(notes: Findings) -> None:
    """Each limit is a number, of something that exists, and listed."""
    limited = "SELECT field, stored FROM book WHERE substr(field, -1) = ?"
    for field, value in notes.spill.rows(limited, BESIDE):
        node = field[: -len(BESIDE) - 1]
        try:
            keys.unpack_count(keys.ACCOUNTS, field, value)
        except Corrupt as error:
            notes.report(0, str(error))
            said = f"the limit of {shown(node)} can't be read: removed, set it again"
            notes.mend(Stage.TABLES, keys.ACCOUNTS, field, None, said)
            continue
        if notes.spill.one("SELECT 1 FROM listed WHERE node = ?", node) is None:
            notes.report(0, f"{shown(node)} is not listed as limited")
            said = f"{shown(node)} has a limit, and is listed now"
            notes.mend(Stage.TABLES, keys.LIMITED, node, b"1", said)
    for (node,) in notes.spill.rows("SELECT node FROM listed"):
        _audit_listed(notes, node)


def _audit_listed(notes: Findings, node: bytes) -> None:
    fields = quota.node_fields(node)[2:]
    query = "SELECT 1 FROM book WHERE field IN (?, ?)"
    if notes.spill.one(query, *fields) is None:
        notes.report(0, f"{shown(node)} is listed as limited")
        said = f"{shown(node)} has no limit, and is not listed any more"
        notes.mend(Stage.TABLES, keys.LIMITED, node, None, said)
    elif node[:1] == quota.DIR:
        known = notes.inode(keys.id_of(node)) if len(node) == 9 else None
        if known is None or not known.is_dir or not known.nlink:
            notes.report(0, f"{shown(node)} has a limit and is no directory")
            said = f"{shown(node)} is no directory: it has no limit any more"
            for field in fields:
                notes.mend(Stage.COUNTERS, keys.ACCOUNTS, field, None, said)
            notes.mend(Stage.COUNTERS, keys.LIMITED, node, None, said)


def shown(field: bytes) -> str:
    """A node or counter as people read it."""
    kind, size = field[:1], _NODE_BYTES.get(field[:1], 0)
    if not size or len(field) < size:
        return f"counter {field!r}"
    number = int.from_bytes(field[1:size], "big")
    word = {quota.DIR: "directory", quota.USER: "user", quota.GROUP: "group"}[kind]
    what = {b"s": "space of ", b"i": "inodes of "}.get(field[size : size + 1], "")
    return f"{what}{word} {number}"

"""The part of `check` for snapshots: whether directories and table M agree about them.

Their inodes are checked as all others are. What is checked here: whether shelves, M and the counts
in directories' flags name the same snapshots, and whether no name leads across their border.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fsmeta.check.findings import Findings
from fsmeta.check.spill_table import ID_MAX
from fsmeta.errors import Corrupt
from fsmeta.schema.snapshot_inos import SHELVES, is_snapshot_ino
from fsmeta.schema.snapshots import SNAPSHOTS, unpack_snapshot
from fsmeta.schema.trash import TRASH_INO
from fsmeta.types import SNAPSHOTS_SHIFT, FileType

UNNAMED: Final = "SELECT * FROM snapshot EXCEPT SELECT * FROM shelved"
UNLISTED: Final = "SELECT * FROM shelved EXCEPT SELECT * FROM snapshot"
UNREADABLE: Final = "SELECT field FROM unread"  # of M
_COUNTS: Final = f"""
WITH shown AS (SELECT source AS ino, COUNT(*) AS names FROM shelved GROUP BY source),
    said AS (SELECT ino, flags >> {SNAPSHOTS_SHIFT} AS count FROM special),
    holder AS (SELECT ino FROM shown UNION SELECT ino FROM said WHERE count)
SELECT h.ino, i.type, COALESCE(count, 0), COALESCE(names, 0)
FROM holder h JOIN inode i ON i.ino = h.ino
    LEFT JOIN said ON said.ino = h.ino LEFT JOIN shown ON shown.ino = h.ino
"""
_GONE: Final = "SELECT DISTINCT source FROM shelved WHERE source NOT IN (SELECT ino FROM inode)"


def crosses(parent: int, ino: int) -> bool:
    """Whether a name leads into a snapshot, or out of one."""
    return is_snapshot_ino(parent) != is_snapshot_ino(ino)


def audit(fields: Iterable[tuple[bytes, bytes]], notes: Findings) -> None:
    """Report what is wrong; `fields` of M."""
    for field, value in fields:
        try:
            found = unpack_snapshot(field, value)
            if not (0 <= found.source <= ID_MAX and found.root <= ID_MAX):
                raise Corrupt(SNAPSHOTS, field, f"source {found.source}")
        except Corrupt as error:
            notes.report(0, str(error))
            notes.spill.add("unread", field)
        else:
            notes.spill.add("snapshot", found.source, found.name, found.root)
    for source, name, root in notes.spill.rows(UNNAMED):
        notes.report(source, f"has no snapshot {name!r} with root {root}, but M says so")
    for source, name, root in notes.spill.rows(UNLISTED):
        notes.report(source, f"has a snapshot {name!r} with root {root} that M does not list")
    for ino, kind, count, there in notes.spill.rows(_COUNTS):
        if count != there:
            notes.report(ino, f"counts {count} snapshots, there are {there}")
        if count and (is_snapshot_ino(ino) or kind != FileType.DIR):
            notes.report(ino, "has snapshots and can't have any")
    for (source,) in notes.spill.rows(_GONE):
        notes.report(source, "has snapshots and does not exist")
    query = "SELECT ino FROM inode WHERE ino >= ? AND ino < ?"
    for (ino,) in notes.spill.rows(query, SHELVES, TRASH_INO):
        notes.report(ino, "is a shelf by its number, and has records")

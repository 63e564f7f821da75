"""What is known of a snapshot: the records of table M. `docs/FORMAT.md` is this page in prose.

    M            <root8>      msgpack: of what, called what, when; SNAPSHOT

Invariant (`check`): the snapshots in M are the names in the shelves, and a directory's flags count
the names on its shelf.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fsmeta.errors import Corrupt
from fsmeta.schema import keys
from fsmeta.types import Ino

SNAPSHOTS: Final = b"M"
SNAPSHOTS_MAX: Final = 10_000  # of a volume: making and listing read the whole table, about 2 MB


class Snapshot(NamedTuple):
    """A directory as it was."""

    root: Ino
    source: Ino
    name: bytes
    at_ns: int  # the moment it shows, by the clock of the client that made it
    changed: int  # inodes that are of another moment, because they changed; 0: it shows one moment
    inodes: int
    space: int  # bytes, as quotas count them


def pack_snapshot(snapshot: Snapshot) -> bytes:
    """The value of a snapshot in M."""
    record = snapshot._asdict()
    del record["root"]
    return keys.pack_map(record)


def unpack_snapshot(field: bytes, value: bytes) -> Snapshot:
    """Raises: Corrupt."""
    record = keys.unpack_map(SNAPSHOTS, field, value)
    numbers = [record.get(name) for name in ("source", "at_ns", "changed", "inodes", "space")]
    name = record.get("name")
    if len(field) != 8 or not isinstance(name, bytes) or any(type(n) is not int for n in numbers):
        raise Corrupt(SNAPSHOTS, field, f"not a snapshot: {record!r}")
    source, at_ns, changed, inodes, space = (n for n in numbers if isinstance(n, int))
    root = Ino(keys.id_of(field))
    return Snapshot(root, Ino(source), name, at_ns, changed, inodes, space)

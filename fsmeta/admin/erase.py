"""Erasing a volume's metadata from its store, and nothing else that the database holds.

Called by `slicefs destroy`. The settings and the counters of ids go last, so an interrupted run can
be repeated and still knows which volume it erases. Threading: one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fsmeta.rules.settings import VolumeFormat, require
from fsmeta.schema import keys
from fsmeta.schema.journal import JOURNAL_PREFIX
from fsmeta.schema.locks import GRANT_PREFIX, LOCK_PREFIX
from fsmeta.store.contract import Commit, Store
from fsmeta.store.writes import DeleteRow
from fsmeta.types import SliceId

_OPS: Final = 1000  # rows in one commit, as in a load; takes Redis 3 ms
_LAST: Final = (keys.COUNTERS, keys.FORMAT)
_LONG: Final = frozenset(
    {
        keys.INODE_PREFIX,
        keys.DIR_PREFIX,
        keys.SESSION_PREFIX,
        JOURNAL_PREFIX,
        LOCK_PREFIX,
        GRANT_PREFIX,
    }
)
_TABLES: Final = frozenset(b"SECUFOXKTRPZGYQqMaBb")
_LONG_BYTES: Final = 9  # a letter and an id of 8 bytes
_ACL_BYTES: Final = 5  # a letter and an id of 4 bytes
_INOS_LOADED: Final = 1 << 32  # `load` skips so many inode numbers


def settings_of(store: Store) -> VolumeFormat:
    """The settings of the volume in `store`. Raises: NoVolume."""
    return require(store.read([(keys.FORMAT, keys.FORMAT_FIELD)])[0])


def next_slice(store: Store) -> SliceId:
    """The first slice id that the volume has not handed out."""
    return SliceId(_counter(store, keys.NEXT_SLICE))


def is_loaded(store: Store) -> bool:
    """Whether this metadata was made from a dump or a backup: another copy may exist."""
    return _counter(store, keys.NEXT_INO) >= _INOS_LOADED


def _counter(store: Store, field: bytes) -> int:
    (value,) = store.read([(keys.COUNTERS, field)])
    return 1 if value is None else keys.unpack_count(keys.COUNTERS, field, value)


def is_own_row(row: bytes) -> bool:
    """Whether a volume can have a row of that name.

    Ids stay far below 2^48 above their base, so a text such as `idle-user` is never taken for one.
    """
    if len(row) == 1:
        return row[0] in _TABLES
    if row[:1] == keys.ACL_PREFIX:
        return len(row) == _ACL_BYTES and row[1] == 0
    return row[:1] in _LONG and len(row) == _LONG_BYTES and row[2] == 0


def erase(store: Store, progress: Callable[[int], object]) -> int:
    """Delete all rows of the volume but the settings and the counters; how many rows.

    Sessions go first: a client that is still there is refused from then on. Raises: StoreError.
    """
    count = 0
    for prefix in (keys.SESSION_PREFIX, b""):
        cursor: bytes | None = b""
        while cursor is not None:
            page = store.scan_rows(prefix, cursor)
            rows = [row for row in page.rows if is_own_row(row) and row not in _LAST]
            for begin in range(0, len(rows), _OPS):
                _delete(store, rows[begin : begin + _OPS])
            count += len(rows)
            progress(count)
            cursor = page.cursor
    return count


def erase_settings(store: Store) -> None:
    """Delete what `erase` has left: afterwards there is no volume."""
    _delete(store, list(_LAST))
    store.sync()


def _delete(store: Store, rows: list[bytes]) -> None:
    store.commit(Commit(None, b"", 0, (), (), [DeleteRow(row) for row in rows]))

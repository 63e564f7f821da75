"""Files that are about to be read whole: what that takes, for many at once.

Two requests bring all that is not known: one for names, one for attributes and first chunks; of
attached files a third one brings the objects. The answer for each file is of one moment, and
nothing relies on two of them being of the same.

Called by `Meta` inside a view. Threading: any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from fsmeta.ops.data.long_chunks import slices_of
from fsmeta.schema import inode, keys
from fsmeta.store.contract import Key, Store
from fsmeta.txn.cached_fields import MISSING
from fsmeta.txn.row_cache import RowCache
from fsmeta.types import FLAG_ATTACHED, AttachedObject, Attr, FileType, Ino, Slice

_TO_READ: Final = (*keys.ATTR_FIELDS, keys.chunk_field(0))


class WholeFile(NamedTuple):
    """A plain file and the slices of its first chunk."""

    attr: Attr
    slices: Sequence[Slice]
    shown: AttachedObject | None = None  # of an attached file, unless it has just been written


def find(store: Store, cache: RowCache, names: Sequence[Key]) -> list[WholeFile | None]:
    """The files at (row of a directory, name), in order; None where there is no plain file.

    Raises: Corrupt.
    """
    inos = _inos(store, cache, names)
    wanted = {ino: keys.inode_row(ino) for ino in inos if ino is not None}
    known: dict[Ino, Sequence[bytes | None] | None] = {
        ino: cache.several(row, _TO_READ) for ino, row in wanted.items()
    }
    unknown = [ino for ino, values in known.items() if values is None]
    if unknown:
        rows = [wanted[ino] for ino in unknown]
        mark = cache.mark()
        found = store.read_many(rows, _TO_READ)
        fresh = {
            row: dict(zip(_TO_READ, values, strict=True))
            for row, values in zip(rows, found, strict=True)
        }
        cache.fill_rows(mark, fresh, store.has_leases())
        known.update(zip(unknown, found, strict=True))
    files = [None if ino is None else _whole(ino, known[ino]) for ino in inos]
    shown = [file for file in files if file is not None and file.attr.flags & FLAG_ATTACHED]
    if not shown:
        return files
    objects = _objects(store, cache, {file.attr.ino for file in shown})
    return [
        file if file is None else file._replace(shown=objects.get(file.attr.ino)) for file in files
    ]


def _objects(store: Store, cache: RowCache, inos: set[Ino]) -> dict[Ino, AttachedObject]:
    """What attached files show. No client changes what one shows: it is replaced, or written."""
    values = {
        ino: cache.get(keys.inode_row(ino), keys.OBJECT_FIELD, need_vouched=True) for ino in inos
    }
    unknown = [ino for ino, value in values.items() if value is MISSING]
    if unknown:
        mark = cache.mark()
        rows = [keys.inode_row(ino) for ino in unknown]
        found = store.read_many(rows, (keys.OBJECT_FIELD,))
        fresh = {row: {keys.OBJECT_FIELD: value} for row, (value,) in zip(rows, found, strict=True)}
        cache.fill_rows(mark, fresh, store.has_leases())
        values.update((ino, value) for ino, (value,) in zip(unknown, found, strict=True))
    return {
        ino: inode.unpack_object(ino, value)
        for ino, value in values.items()
        if isinstance(value, bytes)
    }


def _inos(store: Store, cache: RowCache, names: Sequence[Key]) -> list[Ino | None]:
    """The inodes of those names that lead to plain files."""
    values = {key: cache.get(*key, need_vouched=True) for key in names}
    unknown = [key for key, value in values.items() if value is MISSING]
    if unknown:
        mark = cache.mark()
        busy = cache.busy.among(unknown)
        unknown.sort()  # the store wants those of one row together
        found = store.read(unknown, busy)
        rows: dict[bytes, dict[bytes, bytes | None]] = {}
        for (row, name), value in zip(unknown, found, strict=True):
            values[row, name] = rows.setdefault(row, {})[name] = value
        leased = store.has_leases()
        for row, fields in rows.items():
            cache.fill(mark, row, fields, leased and row not in busy)
    return [_ino(key, values[key]) for key in names]


def _ino(key: Key, value: object) -> Ino | None:
    if not isinstance(value, bytes):
        return None
    kind, ino = keys.unpack_dentry(*key, value)
    return ino if kind is FileType.REG else None


def _whole(ino: Ino, values: Sequence[bytes | None] | None) -> WholeFile | None:
    assert values is not None, "what was not known has been read"
    stable, volatile, chunk = values
    if stable is None or volatile is None:
        return None  # it was removed meanwhile
    return WholeFile(inode.unpack_inode(ino, stable, volatile), slices_of(ino, 0, chunk))

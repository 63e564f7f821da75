"""Pages of names, and the attributes, or more, of many inodes in one request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, cast

from fsmeta.dentries import Dentries
from fsmeta.ops.names.lookup import known_attr
from fsmeta.schema import inode, keys
from fsmeta.store.contract import SCAN_PAGE, Store
from fsmeta.txn.cached_fields import MISSING
from fsmeta.txn.row_cache import RowCache
from fsmeta.types import Attr, FileType, Ino

_FIRST_CHUNK: Final = keys.chunk_field(0)
_TO_READ: Final = (*keys.ATTR_FIELDS, _FIRST_CHUNK)  # what opening a file and reading it takes


class RowPart(NamedTuple):
    """Fields of a directory's row, and where those behind them begin."""

    fields: Mapping[bytes, bytes]
    cursor: bytes | None


def page(
    store: Store, cache: RowCache, row: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE
) -> RowPart:
    """A page of a directory's row, which is remembered; each name is true at some moment."""
    mark = cache.mark()
    found = store.scan(row, cursor, limit)
    fields = dict(found.items)
    cache.fill_page(mark, row, cursor, fields, found.cursor, store.has_leases())
    return RowPart(fields, found.cursor)


def attrs(store: Store, cache: RowCache, inos: Sequence[Ino]) -> dict[Ino, Attr]:
    """The attributes of those inodes that still exist; one request for all that are not known.

    Each is true by itself, at some moment; no commit relies on them.
    """
    rows = keys.inode_rows(inos)
    if not cache.has_any(rows):  # as in a directory that is listed first
        return _fetch_attrs(store, cache, inos, rows) if rows else {}
    found: dict[Ino, Attr] = {}
    unknown: list[Ino] = []
    for ino in inos:
        attr = known_attr(cache, ino)
        if attr is None:
            unknown.append(ino)
        else:
            found[ino] = attr
    if unknown:
        found.update(_fetch_attrs(store, cache, unknown, keys.inode_rows(unknown)))
    return found


def _fetch_attrs(
    store: Store, cache: RowCache, inos: Sequence[Ino], rows: Sequence[bytes]
) -> dict[Ino, Attr]:
    """`attrs` from the store; `rows` are those of `inos`."""
    found = zip(inos, _fetch(store, cache, rows), strict=True)
    return {ino: inode.unpack_record(ino, record) for ino, record in found if record}


def _fetch(store: Store, cache: RowCache, rows: Sequence[bytes]) -> list[bytes]:
    """The records of each row from the store, which are remembered; b"" where it has none."""
    mark = cache.mark()
    values = store.read_many(rows, keys.ATTR_FIELDS)
    joined = inode.join_each(values)
    if joined is not None:
        cache.fill_records(mark, rows, joined, store.has_leases())
        return joined
    fresh = {
        row: dict(zip(keys.ATTR_FIELDS, each, strict=True))
        for row, each in zip(rows, values, strict=True)
    }
    cache.fill_rows(mark, fresh, store.has_leases())
    return [b"".join([value or b"" for value in each]) for each in values]


def records(
    store: Store, cache: RowCache, rows: Sequence[bytes], ahead: Sequence[Ino] = ()
) -> list[bytes]:
    """The attribute records of inodes, `a` and `v` one behind the other; b"" of what is gone.

    One request for all that are not known. Where there is one, it asks for those that will be
    wanted next (`ahead`), too, if what it brings may be cached until then.
    """
    found = cache.attr_records(rows)
    if None not in found:
        return cast("list[bytes]", found)
    unknown = [row for row, record in zip(rows, found, strict=True) if record is None]
    further = cache.unleased(keys.inode_rows(ahead)) if ahead and store.has_leases() else ()
    brought = _fetch(store, cache, [*unknown, *further])
    if len(unknown) == len(rows):
        return brought[: len(rows)]
    values = iter(brought)
    return [next(values) if record is None else record for record in found]


def still_named(store: Store, row: bytes, names: Dentries) -> list[bool]:
    """Whether each name in a directory leads where it did when it was listed; one request."""
    values = store.read([(row, name) for name in names.names])
    listed = [keys.pack_dentry(kind, ino) for _, ino, kind in names]
    return [value == other for value, other in zip(values, listed, strict=True)]


def unread(cache: RowCache, names: Iterable[bytes | None]) -> list[bytes]:
    """The rows of those files among the values of names that can't be read without asking."""
    found = []
    for value in names:
        if value and value[0] == FileType.REG:
            row = keys.INODE_PREFIX + value[keys.DENTRY_INO_AT :]
            if cache.get(row, _FIRST_CHUNK, need_vouched=True) is MISSING:
                found.append(row)
    return found


def bring(store: Store, cache: RowCache, rows: Sequence[bytes]) -> None:
    """Remember of many files what opening and reading them takes; one request."""
    mark = cache.mark()
    values = store.read_many(rows, _TO_READ)
    fresh = {
        row: dict(zip(_TO_READ, found, strict=True))
        for row, found in zip(rows, values, strict=True)
    }
    cache.fill_rows(mark, fresh, store.has_leases())

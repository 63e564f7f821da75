"""Pages of names, and the attributes, or more, of many inodes in one request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from fsmeta.ops.names.lookup import known_attr
from fsmeta.schema import inode, keys
from fsmeta.store.contract import SCAN_PAGE, Page, Store
from fsmeta.txn.row_cache import MISSING, RowCache
from fsmeta.types import Attr, FileType, Ino

_FIRST_CHUNK: Final = keys.chunk_field(0)
_TO_READ: Final = (*keys.ATTR_FIELDS, _FIRST_CHUNK)  # what opening a file and reading it takes


def page(
    store: Store, cache: RowCache, row: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE
) -> Page:
    """A page of a directory's row, which is remembered; each name is true at some moment.

    No name is twice on one page.
    """
    mark = cache.mark()
    found = store.scan(row, cursor, limit)
    fields = dict(found.items)
    cache.fill_page(mark, row, cursor, fields, found.cursor, store.vouches())
    return Page(list(fields.items()), found.cursor)


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
    mark = cache.mark()
    values = store.read_many(rows, keys.ATTR_FIELDS)
    fresh: dict[bytes, dict[bytes, bytes | None]] = {
        row: {keys.ATTR_FIELD: a, keys.VOLATILE_FIELD: v}
        for row, (a, v) in zip(rows, values, strict=True)
    }
    cache.fill_rows(mark, fresh, store.vouches())
    unpack = inode.unpack_inode
    return {
        ino: unpack(ino, a, v)
        for ino, (a, v) in zip(inos, values, strict=True)
        if a is not None and v is not None
    }


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
    cache.fill_rows(mark, fresh, store.vouches())

"""readdirplus: pages of names, and the attributes of many inodes in one request."""

from __future__ import annotations

from collections.abc import Sequence

from fsmeta import schema
from fsmeta.cache import RowCache
from fsmeta.ops.lookup import known_attr
from fsmeta.store import SCAN_PAGE, Page, Store
from fsmeta.types import Attr, Ino


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
    rows = schema.inode_rows(inos)
    vouched = cache.vouched_among(rows)
    found: dict[Ino, Attr] = {}
    unknown: list[tuple[Ino, bytes]] = []
    for ino, row in zip(inos, rows, strict=True):
        attr = known_attr(cache, ino) if row in vouched else None
        if attr is None:
            unknown.append((ino, row))
        else:
            found[ino] = attr
    if unknown:
        found.update(_fetch_attrs(store, cache, unknown))
    return found


def _fetch_attrs(
    store: Store, cache: RowCache, wanted: Sequence[tuple[Ino, bytes]]
) -> dict[Ino, Attr]:
    """`attrs` of inodes and their rows, from the store."""
    mark = cache.mark()
    values = store.read_many([row for _, row in wanted], schema.ATTR_FIELDS)
    found: dict[Ino, Attr] = {}
    fresh: dict[bytes, dict[bytes, bytes | None]] = {}
    for (ino, row), (a, v) in zip(wanted, values, strict=True):
        fresh[row] = {schema.ATTR_FIELD: a, schema.VOLATILE_FIELD: v}
        if a is not None and v is not None:
            found[ino] = schema.unpack_inode(ino, a, v)
    cache.fill_rows(mark, fresh, store.vouches())
    return found

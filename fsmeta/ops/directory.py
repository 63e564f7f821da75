"""readdir: names in pages, and their attributes in one more request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsmeta import schema
from fsmeta.cache import Missing, RowCache
from fsmeta.store import Page, Store
from fsmeta.types import Attr, Dentry, Ino


def dentries(row: bytes, page: Page) -> list[Dentry]:
    """The names in a page of a directory's row. Raises: Corrupt."""
    found = []
    for name, value in page.items:
        kind, child = schema.unpack_dentry(row, name, value)
        found.append(Dentry(name, child, kind))
    return found


def attrs(store: Store, cache: RowCache, inos: Sequence[Ino]) -> dict[Ino, Attr]:
    """The attributes of those inodes that still exist; one request for all that are not known.

    Each is true by itself, at some moment; no commit relies on them.
    """
    rows = {ino: schema.inode_row(ino) for ino in inos}
    found: dict[Ino, Attr] = {}
    unknown: list[Ino] = []
    for ino, row in rows.items():
        a = cache.get(row, schema.ATTR_FIELD, True)
        v = cache.get(row, schema.VOLATILE_FIELD, True)
        if isinstance(a, Missing) or isinstance(v, Missing):
            unknown.append(ino)
        elif a is not None and v is not None:
            found[ino] = schema.unpack_inode(ino, a, v)
    if unknown:
        found.update(_fetch_attrs(store, cache, unknown, rows))
    return found


def _fetch_attrs(
    store: Store, cache: RowCache, inos: Sequence[Ino], rows: Mapping[Ino, bytes]
) -> dict[Ino, Attr]:
    mark = cache.mark()
    values = store.read([(rows[ino], field) for ino in inos for field in schema.ATTR_FIELDS])
    found: dict[Ino, Attr] = {}
    fresh: dict[bytes, dict[bytes, bytes | None]] = {}
    for ino, a, v in zip(inos, values[::2], values[1::2], strict=True):
        fresh[rows[ino]] = {schema.ATTR_FIELD: a, schema.VOLATILE_FIELD: v}
        if a is not None and v is not None:
            found[ino] = schema.unpack_inode(ino, a, v)
    cache.fill_rows(mark, fresh, store.vouches())
    return found

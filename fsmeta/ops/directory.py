"""readdir: names in pages, and their attributes in one more request."""

from __future__ import annotations

from collections.abc import Sequence

from fsmeta import schema
from fsmeta.store import SCAN_PAGE, Store
from fsmeta.transact import Txn
from fsmeta.types import Attr, Dentry, Ino


def names(
    store: Store, ino: Ino, cursor: bytes, limit: int = SCAN_PAGE
) -> tuple[list[Dentry], bytes | None]:
    """A page of a directory's names in no order, and the cursor of the next.

    A name there throughout is returned at least once, perhaps twice: the caller leaves out repeats.
    """
    row = schema.dir_row(ino)
    page = store.scan(row, cursor, limit)
    found = []
    for name, value in page.items:
        kind, child = schema.unpack_dentry(row, name, value)
        found.append(Dentry(name, child, kind))
    return found, page.cursor


def attrs(txn: Txn, inos: Sequence[Ino]) -> dict[Ino, Attr]:
    """The attributes of those inodes that still exist; one request."""
    keys = [key for ino in inos for key in schema.attr_keys(ino)]
    values = txn.get_many(keys)
    found = {}
    for at, ino in enumerate(inos):
        a, v = values[2 * at : 2 * at + 2]
        if a is not None and v is not None:
            found[ino] = schema.unpack_inode(ino, a, v)
    return found

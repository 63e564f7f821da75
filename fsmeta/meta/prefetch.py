"""Prefetch of metadata: names and inodes of directories whose files are opened.

`Meta` calls it after a cache miss, before it asks the store or after; `meta/prefetch_policy` says
how much to fetch. It works only where rows are leased.

Threading: any thread.
"""

from __future__ import annotations

from fsmeta.errors import StoreError
from fsmeta.meta.prefetch_policy import PrefetchPolicy
from fsmeta.ops.names import directory
from fsmeta.ops.names.lookup import known_attr
from fsmeta.schema import keys
from fsmeta.txn.retry import Transactor
from fsmeta.types import Ino


class MetadataPrefetch:
    """Asks for more than was asked for, where that will be wanted."""

    def __init__(self, transactor: Transactor) -> None:
        self._transactor = transactor
        self._store = transactor.store
        self._cache = transactor.cache
        self._crowds = PrefetchPolicy(self._read_names)
        self.opened = self._crowds.opened

    def missed_name(self, parent: Ino, remembered: bool) -> None:
        """A name in `parent` had to be asked for; `remembered`: some were known before."""
        if self._store.has_leases() and not self._cache.busy.has_dir(parent):
            self._crowds.missed(parent, remembered)

    def missed_inode(self, parent: Ino, ino: Ino) -> None:
        """`ino` in `parent` is not cached: perhaps read it now, together with further inodes."""
        if not self._store.has_leases():
            return
        at, count = self._crowds.ahead(parent)
        if not count:
            return
        names = self._cache.values(keys.dir_row(parent), at, count)
        if len(names) < count:
            self._crowds.passed(parent)
        rows = {keys.inode_row(ino), *directory.unread(self._cache, names)}
        if len(rows) > 1:
            self._transactor.view(
                lambda _txn: directory.bring(self._store, self._cache, list(rows))
            )

    def missed_chunk(self, ino: Ino) -> None:
        """The first chunk of a file has to be asked for: as `missed_inode`."""
        attr = known_attr(self._cache, ino)
        if attr is not None and attr.parent:
            self.missed_inode(attr.parent, ino)

    def _read_names(self, parent: Ino, cursor: bytes) -> bytes | None:
        """Remember a page of a directory's names, if the store can be asked just now."""
        row = keys.dir_row(parent)
        try:
            return directory.page(self._store, self._cache, row, cursor).cursor
        except StoreError:
            return None

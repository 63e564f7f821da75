"""What the kernel is told of inodes: the store's attributes, with what is written here laid over.

Of a file that is being written here the kernel may believe nothing: it invalidates `st_blocks` when
it sends a write, and not when we commit it. For how long it may believe the others, `CacheLeases`
says. What is in the trash has no link, as if there were no trash: programs test it.

Called by `VFS`, with attributes that have just been asked for. A file that was closed meanwhile is
asked for once more: they may be from before its last commit, and what was laid over is gone.

Threading: any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsclient.files.open_files import OpenFiles
from fsclient.kernel.cache_leases import CacheLeases
from fsclient.kernel.contract import EntryOut, Stat
from fsclient.vfs.lookup_counts import LookupCounts
from fsmeta.meta.meta import Meta
from fsmeta.schema.trash import TRASH_INO, is_trash
from fsmeta.types import ROOT_CALLER, Attr, Dentry, Ino


class AttrView:
    """Attributes and entries as this mount sees them."""

    def __init__(
        self, meta: Meta, files: OpenFiles, coherence: CacheLeases, lookups: LookupCounts
    ) -> None:
        self._meta = meta
        self._files = files
        self._coherence = coherence
        self._lookups = lookups

    def now(self) -> int:
        """To be asked before attributes are, and given along with them: what is new needs none."""
        return self._files.closings

    def _latest(self, attr: Attr, asked: int | None) -> tuple[Attr, bool]:
        """Attributes as this mount sees them, and whether the file is written here."""
        while True:
            file = self._files.get(attr.ino)
            if file is not None and file.writer is not None:
                return self._files.getattr(file), True
            if asked is None or not self._files.closed_since(attr.ino, asked):
                return attr, False
            asked = self.now()
            attr = self._meta.getattr(ROOT_CALLER, attr.ino)

    def stat(self, attr: Attr, asked: int | None = None) -> Stat:
        """The attributes of an inode."""
        attr, written = self._latest(attr, asked)
        if attr.parent >= TRASH_INO:
            attr = _unlinked(attr)
        return Stat(attr, 0.0) if written else self._coherence.stat(attr)

    def entry(self, parent: Ino, name: bytes, attr: Attr, asked: int | None = None) -> EntryOut:
        """What `name` leads to; it counts as a lookup."""
        self._lookups.add(attr.ino)
        return self._entry(parent, name, attr, asked)

    def unnamed(self, attr: Attr, asked: int) -> EntryOut:
        """An inode that was looked up by its number; it counts as a lookup."""
        self._lookups.add(attr.ino)
        shown, ttl = self.stat(attr, asked)
        return EntryOut(shown, 0.0, ttl)

    def _entry(self, parent: Ino, name: bytes, attr: Attr, asked: int | None) -> EntryOut:
        attr, written = self._latest(attr, asked)
        if attr.parent >= TRASH_INO:  # since it was looked up
            attr = _unlinked(attr)
        entry = self._coherence.entry(parent, name, attr)
        return entry._replace(attr_ttl=0.0) if written else entry

    def entries(self, ino: Ino, names: Sequence[Dentry]) -> Sequence[EntryOut | None]:
        """`FileSystem.entries`: attributes that the kernel lacks are asked for here, together."""
        unknown = self._coherence.unknown(ino, names)
        if not unknown or is_trash(ino):
            return [None] * len(names)
        asked = self.now()
        attrs = self._meta.attrs([child for _, child, _ in unknown])
        found = [(name, attrs[child]) for name, child, _ in unknown if child in attrs]
        self._lookups.add_all([attr.ino for _, attr in found])
        entries = self._coherence.entries(ino, found)
        inos = set(self._files.open_among(attrs))
        if self.now() != asked:
            inos.update(child for child in attrs if self._files.closed_since(child, asked))
        if inos:
            for name, attr in found:
                if attr.ino in inos:
                    entries[name] = self._entry(ino, name, attr, asked)
        return [entries.get(name) for name, _, _ in names]


def _unlinked(attr: Attr) -> Attr:
    """What went to the trash has no link for programs that have it open; hours are as they are."""
    return attr if is_trash(attr.ino) else attr._replace(nlink=0)

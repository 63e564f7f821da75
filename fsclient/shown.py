"""What the kernel is told of inodes: the store's attributes, with what is written here laid over.

Of a file that is being written here the kernel may believe nothing: it invalidates `st_blocks` when
it sends a write, and not when we commit it. For how long it may believe the others, `Coherence`
says.

Called by `VFS`, with attributes that have just been asked for. Threading: any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsclient.coherence import Coherence
from fsclient.filesystem import Entry, Stat
from fsclient.open_files import OpenFiles
from fsmeta.engine import Meta
from fsmeta.trash import is_trash
from fsmeta.types import Attr, Dentry, Ino


class Shown:
    """Attributes and entries as this mount sees them."""

    def __init__(self, meta: Meta, files: OpenFiles, coherence: Coherence) -> None:
        self._meta = meta
        self._files = files
        self._coherence = coherence

    def stat(self, attr: Attr) -> Stat:
        """The attributes of an inode."""
        file = self._files.get(attr.ino)
        if file is None or file.writer is None:
            return self._coherence.stat(attr)
        return Stat(self._files.getattr(file), 0.0)

    def entry(self, parent: Ino, name: bytes, attr: Attr) -> Entry:
        """What `name` leads to."""
        file = self._files.get(attr.ino)
        if file is None or file.writer is None:
            return self._coherence.entry(parent, name, attr)
        entry = self._coherence.entry(parent, name, self._files.getattr(file))
        return entry._replace(attr_ttl=0.0)

    def entries(self, ino: Ino, names: Sequence[Dentry]) -> Sequence[Entry | None]:
        """`FileSystem.entries`: attributes that the kernel lacks are asked for here, together."""
        unknown = self._coherence.unknown(ino, names)
        if not unknown or is_trash(ino):
            return [None] * len(names)
        attrs = self._meta.attrs([child for _, child, _ in unknown])
        found = [(name, attrs[child]) for name, child, _ in unknown if child in attrs]
        entries = self._coherence.entries(ino, found)
        for child in self._files.open_among(attrs):
            for name, attr in found:
                if attr.ino == child:
                    entries[name] = self.entry(ino, name, attr)
        return [entries.get(name) for name, _, _ in names]

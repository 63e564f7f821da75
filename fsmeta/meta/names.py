"""The verbs of `Meta` for names: look-ups, directories, and what makes and removes names.

Threading: any method from any thread.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import partial
from typing import Final

from fsmeta.dentries import Dentries
from fsmeta.meta.runner import VerbRunner
from fsmeta.ops.data import whole_files
from fsmeta.ops.data.whole_files import WholeFile
from fsmeta.ops.names import create, directory, link, lookup, remove, rename
from fsmeta.ops.names.create import NewNode
from fsmeta.ops.names.rename import DentryLocation, Renamed
from fsmeta.schema import keys
from fsmeta.types import Attr, Caller, Dentry, Ino

WHOLE_FILES_MAX: Final = 1024  # of one request, as of a listing's page
_new: Final = tuple.__new__  # makes a NamedTuple in half the time of its constructor


class NameVerbs(VerbRunner):
    """See the module."""

    def lookup(self, caller: Caller, parent: Ino, name: bytes) -> Attr:
        self.store.poll_invalidations()
        known = lookup.known_name(self.cache, parent, name) if caller.checked else None
        return known or self._lookup(caller, parent, name)

    def _lookup(self, caller: Caller, parent: Ino, name: bytes) -> Attr:
        """`lookup` that has to ask the store."""
        child = lookup.known_child(self.cache, parent, name) if caller.checked else None
        if child is not None:
            self._neighbours.missed_inode(parent, child)
            attr = self._attr_of(caller, child)
            if attr is not None and lookup.known_child(self.cache, parent, name) == child:
                return attr
        remembered = self.are_names_leased(parent)
        try:
            return self._view(lookup.lookup, caller, parent, name)
        finally:
            self._neighbours.missed_name(parent, remembered)

    def are_names_leased(self, ino: Ino) -> bool:
        """Whether the store reports each change of the names in directory `ino`."""
        return self.cache.is_leased(keys.dir_row(ino))

    def _attr_of(self, caller: Caller, child: Ino) -> Attr | None:
        """The inode of a known name, which the caller is about to open. None: it is gone."""
        try:
            return self._view(lookup.open_, caller, child)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return None

    def create(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int = 0, umask: int = 0
    ) -> Attr:
        """A new file, directory, fifo, socket or device, as the S_IFMT bits of `mode` say."""
        node = _new(NewNode, (self._inos.take(), mode, rdev, b"", umask))
        return self._run(create.create, caller, parent, name, node)

    def new_ino(self) -> Ino:
        """The number of an inode, for a file that is listed as open before it exists."""
        return Ino(self._inos.take())

    def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> Attr:
        node = NewNode(Ino(self._inos.take()), 0o120777, 0, target)
        return self._run(create.create, caller, parent, name, node)

    def unlink(self, caller: Caller, parent: Ino, name: bytes) -> Attr:
        return self._remove(remove.unlink, caller, parent, name)

    def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> Attr:
        return self._remove(remove.rmdir, caller, parent, name)

    def rename(
        self, caller: Caller, old: DentryLocation, new: DentryLocation, flags: int = 0
    ) -> Renamed:
        if not flags & rename.WHITEOUT:
            return self._remove(rename.rename, caller, old, new, flags)
        node = NewNode(Ino(self._inos.take()), rename.WHITEOUT_MODE)
        return self._remove(rename.rename, caller, old, new, flags, node)

    def link(self, caller: Caller, ino: Ino, parent: Ino, name: bytes) -> Attr:
        return self._run(link.link, caller, ino, parent, name)

    def readlink(self, caller: Caller, ino: Ino) -> bytes:
        return self._view(lookup.readlink, caller, ino)

    def names(self, ino: Ino, cursor: bytes | None = None) -> tuple[list[Dentry], bytes | None]:
        """`listed`, one by one."""
        found, following = self.listed(ino, cursor)
        return list(found), following

    def listed(self, ino: Ino, cursor: bytes | None = None) -> tuple[Dentries, bytes | None]:
        """A page of names in no order, and the next cursor.

        Without a cursor it is the first one, or all names where they are known; b"" begins the
        store's first. A name there throughout comes at least once, perhaps twice: leave that out.
        """
        self.store.poll_invalidations()
        row = keys.dir_row(ino)
        known = self.cache.complete(row) if cursor is None else None
        if known is not None:
            return keys.unpack_dentries(row, known), None
        page = self._looked_up(partial(directory.page, self.store, self.cache, row, cursor or b""))
        return keys.unpack_dentries(row, page.fields), page.cursor

    def attrs(self, inos: Sequence[Ino]) -> dict[Ino, Attr]:
        """Attributes of those that exist; one request."""
        return self._looked_up(partial(directory.attrs, self.store, self.cache, inos))

    def whole_files(self, files: Sequence[tuple[Ino, bytes]]) -> list[WholeFile | None]:
        """Plain files at (directory, name), with what reading them takes; two requests for many.

        None where there is no such file. Directory permissions are not checked. Raises: Corrupt.
        """
        self.store.poll_invalidations()
        names = [(keys.dir_row(parent), name) for parent, name in files]
        found: list[WholeFile | None] = []
        for begin in range(0, len(names), WHOLE_FILES_MAX):
            part = names[begin : begin + WHOLE_FILES_MAX]
            found += self._looked_up(partial(whole_files.find, self.store, self.cache, part))
        return found

    def attr_records(self, rows: Sequence[bytes], ahead: Sequence[Ino] = ()) -> list[bytes]:
        """See `directory.records`."""
        self.store.poll_invalidations()
        return self._looked_up(partial(directory.records, self.store, self.cache, rows, ahead))

    def still_named(self, ino: Ino, names: Dentries) -> list[bool]:
        """See `directory.still_named`."""
        return self._looked_up(partial(directory.still_named, self.store, keys.dir_row(ino), names))

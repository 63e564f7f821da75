"""Answers from what is leased, without a verb: what programs ask between two changes.

The transport asks here first. None or False says that the request has to take the usual way, which
checks it anew from the beginning, so rare cases are left to it: names in the trash and in
snapshots, files that are being written, contended directories, locks. The kernel has checked
permissions: these requests come from mounts with `default_permissions` only.

A grant is noted before its lease is looked at (`CacheLeases`). Invalidations that come after the
look, and before the answer reaches the kernel, find the grant and the request under way: the
notification of a name is then repeated once the request has been answered, and the kernel drops an
answer with attributes.

Threading: any thread.
"""

from __future__ import annotations

import os

from fsclient.files.file_io import FileIO
from fsclient.files.handles.open_files import OpenFiles
from fsclient.kernel.cache_leases import LONG_S, CacheLeases
from fsclient.kernel.contract import OpenOut, QuickAnswers, Stat
from fsclient.kernel.virtual import VirtualFiles
from fsmeta.errors import Corrupt
from fsmeta.meta.meta import Meta
from fsmeta.schema.snapshot_inos import SEALED_INO, SHELF_NAME
from fsmeta.schema.trash import TRASH_INO, TRASH_NAME
from fsmeta.types import NAME_MAX, Ino

_OURS = frozenset((b".", b"..", SHELF_NAME, TRASH_NAME))


class FastLane:
    """See the module."""

    def __init__(
        self,
        meta: Meta,
        io: FileIO,
        files: OpenFiles,
        coherence: CacheLeases,
        virtual: VirtualFiles,
    ) -> None:
        self._open = io.open_plainly
        self._hear = meta.store.poll_invalidations
        self._files = files
        self._leases = coherence
        self._is_virtual = virtual.has

    def is_absent(self, parent: Ino, name: bytes) -> bool:
        if parent >= SEALED_INO or not 0 < len(name) <= NAME_MAX:
            return False
        if name[0] == _DOT and (name in _OURS or self._is_virtual(name)):
            return False
        self._hear()
        return self._leases.grant_absent(parent, name)

    def stat(self, ino: Ino) -> Stat | None:
        if ino >= SEALED_INO:
            return None
        files = self._files
        closings = files.closings
        self._hear()
        try:
            attr = self._leases.grant_attr(ino)
        except Corrupt:
            return None  # the usual way finds it, too, and says so
        if attr is None or attr.parent >= TRASH_INO:
            return None
        file = files.get(ino)
        if (file is not None and file.writer is not None) or files.closings != closings:
            return None  # the store knows less than what was written here
        return Stat(attr, LONG_S)

    def open(self, ino: Ino, flags: int) -> OpenOut | None:
        if ino >= SEALED_INO or flags & _NOT_PLAIN:
            return None
        try:
            return self._open(ino)
        except Corrupt:
            return None

    def flush(self, ino: Ino, fh: int) -> bool:
        return ino < SEALED_INO and ino not in self._files.locked and self._files.is_clean(fh)

    def release(self, ino: Ino, fh: int) -> bool:
        return ino < SEALED_INO and ino not in self._files.locked and self._files.leave_clean(fh)


_DOT = ord(".")
# flags of open(2) that ask for more than to read; O_NOATIME is a word about the handle
_NOT_PLAIN = os.O_ACCMODE | os.O_TRUNC | os.O_APPEND | os.O_DIRECT | os.O_NOATIME
_CONFORMS: type[QuickAnswers] = FastLane

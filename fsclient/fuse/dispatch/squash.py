"""Squash: the file system checks requests in the name of another user (`mount --squash`).

With `default_permissions` the kernel checks permissions with the ids of the program, and lets root
through before it asks the file system. So a mount that squashes leaves that option out, and callers
come here unchecked: the rules in `fsmeta/rules/access` check them, as they do in a client without a
kernel. Two things that the kernel would remember are then taken from it:

- Names have no lifetime in answers, so each step of a path is a LOOKUP by the program that walks,
  and search permission is checked for it. Listings bring no attributes, which would be names, too.
- POSIX ACLs are not negotiated, because FUSE_POSIX_ACL turns `default_permissions` on.

Ids are mapped as nfsd does. Virtual files belong to the mount and not to the volume: their caller
keeps its ids. Threading: as the dispatcher's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

from fsclient.files.setid_bits import groups_of
from fsclient.fuse.dispatch.subdir import Serve, Served
from fsclient.fuse.wire.abi import ENTRY_OUT
from fsclient.fuse.wire.protocol import Opcode
from fsclient.kernel.contract import FIRST_VIRTUAL_INO
from fsmeta.types import Caller

NOBODY: Final = 65534  # `nobody` and nogroup of Debian; of nfsd, too
WHOM: Final = ("root", "all")
_ENTRIES: Final = frozenset(
    (
        Opcode.LOOKUP,
        Opcode.MKNOD,
        Opcode.MKDIR,
        Opcode.SYMLINK,
        Opcode.LINK,
        Opcode.CREATE,
        Opcode.TMPFILE,
    )
)
# fuse_entry_out: nodeid, generation, entry_valid, attr_valid, entry_valid_nsec, …
_SECONDS: Final = slice(16, 24)
_NANOSECONDS: Final = slice(32, 36)


class Squash(NamedTuple):
    """Which callers are mapped, and to which ids."""

    everyone: bool  # else root's alone
    uid: int = NOBODY
    gid: int = NOBODY

    def caller(self, caller: Caller) -> Caller:
        """The caller that the rules check in place of `caller`."""
        if self.everyone:
            return Caller(self.uid, self.gid, (), caller.pid)
        uid = self.uid if caller.uid == 0 else caller.uid
        gid = self.gid if caller.gid == 0 else caller.gid
        return Caller(uid, gid, ProcGroups(caller.pid, self.gid), caller.pid)


class ProcGroups(Collection[int]):
    """The supplementary groups of a thread: /proc is asked once, and where a group decides."""

    def __init__(self, pid: int, gid: int) -> None:
        """`gid` replaces the group of root."""
        self._pid = pid
        self._gid = gid
        self._known: frozenset[int] | None = None

    def _groups(self) -> frozenset[int]:
        if self._known is None:
            groups = groups_of(self._pid) or frozenset()  # of another namespace: none
            self._known = frozenset(group or self._gid for group in groups)
        return self._known

    def __contains__(self, gid: object) -> bool:
        return gid in self._groups()

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups())

    def __len__(self) -> int:
        return len(self._groups())


def served_squashed(serve: Serve, squash: Squash) -> Serve:
    """`serve` for a kernel that checks no permissions."""

    def serve_squashed(opcode: int, caller: Caller, ino: int, view: memoryview, end: int) -> Served:
        if ino >= FIRST_VIRTUAL_INO:
            return serve(opcode, caller._replace(checked=False), ino, view, end)
        answer = serve(opcode, squash.caller(caller), ino, view, end)
        if opcode in _ENTRIES and isinstance(answer, bytes):
            return _unnamed(answer)
        return answer

    return serve_squashed


def _unnamed(answer: bytes) -> bytes:
    """An answer that names an inode, without a lifetime of the name."""
    assert len(answer) >= ENTRY_OUT.size, "it begins with a fuse_entry_out"
    out = bytearray(answer)
    out[_SECONDS] = bytes(8)
    out[_NANOSECONDS] = bytes(4)
    return bytes(out)

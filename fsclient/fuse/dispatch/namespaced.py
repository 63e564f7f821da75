"""Ids of a mount in a user namespace: the kernel speaks in those of the namespace, volumes in the
host's.

Requests and answers are translated as they are on the wire, so neither the operations nor the file
system know of it, and other mounts pay nothing. Such a mount does without READDIRPLUS and the fast
lane, whose answers are packed elsewhere.

An owner that the namespace does not have is NOT_MAPPED; the kernel shows it as 65534 and lets no
process write to what it owns. Entries of an ACL for users and groups that are not in the namespace
are left out: the kernel would refuse the ACL as a whole.

Called by `Session`. Threading: as the dispatcher's.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from typing import Final

from fsclient.fuse.dispatch.subdir import Serve, Served
from fsclient.fuse.wire import abi
from fsclient.fuse.wire.parse import BODY
from fsclient.fuse.wire.protocol import Opcode
from fsmeta.schema.acl import ACCESS_XATTR, DEFAULT_XATTR
from fsmeta.types import Caller
from fsmeta.user_namespace import NOT_MAPPED, UserNamespace

_IDS: Final = Struct("=II")  # uid and gid lie side by side in each struct
_IN_ENTRY: Final = 108  # where they are in fuse_entry_out, with which fuse_create_out begins
# by opcode: where the ids of an answer are
_ANSWERS: Final[Mapping[int, int]] = {
    Opcode.LOOKUP: _IN_ENTRY,
    Opcode.MKNOD: _IN_ENTRY,
    Opcode.MKDIR: _IN_ENTRY,
    Opcode.SYMLINK: _IN_ENTRY,
    Opcode.LINK: _IN_ENTRY,
    Opcode.CREATE: _IN_ENTRY,
    Opcode.TMPFILE: _IN_ENTRY,
    Opcode.GETATTR: 84,
    Opcode.SETATTR: 84,
    Opcode.STATX: 52,
}
_IN_SETATTR: Final = BODY + 76
_SIZE: Final = Struct("=I")  # of the value, with which a SETXATTR begins and which ends it
_ACL_HEADER_BYTES: Final = 4
_ACL_ENTRY: Final = Struct("<HHI")  # tag, permissions, id
_ACL_USER: Final = 0x02
_ACL_GROUP: Final = 0x08


def served_in_namespace(serve: Serve, namespace: UserNamespace) -> Serve:
    """`serve` for a kernel that speaks in ids of `namespace`."""
    uids, gids = namespace

    def serve_inside(opcode: int, caller: Caller, ino: int, view: memoryview, end: int) -> Served:
        caller = caller._replace(
            uid=uids.outward(caller.uid),
            gid=gids.outward(caller.gid),
            groups=tuple(map(gids.outward, caller.groups)),
        )
        if opcode == Opcode.SETATTR and end >= _IN_SETATTR + _IDS.size:
            view = memoryview(bytearray(view[:end]))
            uid, gid = _IDS.unpack_from(view, _IN_SETATTR)
            _IDS.pack_into(view, _IN_SETATTR, uids.outward(uid), gids.outward(gid))
        elif opcode == Opcode.SETXATTR and _names_acl(view, end):
            view = memoryview(bytearray(view[:end]))
            begin = max(BODY, end - _SIZE.unpack_from(view, BODY)[0])
            view[begin:] = _acl_outward(bytes(view[begin:]), namespace)
        answer = serve(opcode, caller, ino, view, end)
        if not isinstance(answer, bytes):
            return answer
        at = _ANSWERS.get(opcode)
        if at is not None:
            out = bytearray(answer)
            uid, gid = _IDS.unpack_from(out, at)
            _IDS.pack_into(out, at, uids.inward(uid), gids.inward(gid))
            return bytes(out)
        if opcode == Opcode.GETXATTR and _names_acl(view, end):
            return _acl_inward(answer, namespace)
        return answer

    return serve_inside


def _names_acl(view: memoryview, end: int) -> bool:
    """Whether a request about an attribute is about an ACL."""
    body = bytes(view[BODY:end])
    return ACCESS_XATTR + b"\0" in body or DEFAULT_XATTR + b"\0" in body


def _acl_outward(value: bytes, namespace: UserNamespace) -> bytes:
    """An ACL that a program sets; what the namespace has not, the kernel has refused."""
    out = bytearray(value)
    for at in range(_ACL_HEADER_BYTES, len(value) - _ACL_ENTRY.size + 1, _ACL_ENTRY.size):
        tag, perm, named = _ACL_ENTRY.unpack_from(out, at)
        if tag in (_ACL_USER, _ACL_GROUP):
            ids = namespace.uids if tag == _ACL_USER else namespace.gids
            _ACL_ENTRY.pack_into(out, at, tag, perm, ids.outward(named))
    return bytes(out)


def _acl_inward(value: bytes, namespace: UserNamespace) -> bytes:
    """An ACL for programs in the namespace; a mere length stays what it is."""
    if (len(value) - _ACL_HEADER_BYTES) % _ACL_ENTRY.size or len(value) <= abi.GETXATTR_OUT.size:
        return value
    out = [value[:_ACL_HEADER_BYTES]]
    for tag, perm, named in _ACL_ENTRY.iter_unpack(value[_ACL_HEADER_BYTES:]):
        if tag in (_ACL_USER, _ACL_GROUP):
            ids = namespace.uids if tag == _ACL_USER else namespace.gids
            named = ids.inward(named)
            if named == NOT_MAPPED:
                continue
        out.append(_ACL_ENTRY.pack(tag, perm, named))
    return b"".join(out)

"""Ids of a user namespace: translated on the wire, both ways."""

from __future__ import annotations

import errno

from fsclient.fuse.dispatch.dispatch import Dispatcher
from fsclient.fuse.dispatch.namespaced import served_in_namespace
from fsclient.fuse.dispatch.subdir import Served
from fsclient.fuse.wire import abi
from fsclient.fuse.wire.protocol import FATTR_GID, FATTR_UID, Opcode
from fsmeta.schema.acl import ACCESS_XATTR, Acl, Named, pack_xattr
from fsmeta.types import ROOT_INO, Caller
from fsmeta.user_namespace import NOT_MAPPED, IdMap, IdRange, UserNamespace
from tests.fsclient.fuse.ramfs import RamFS

USERS = IdMap((IdRange(0, 1000, 1), IdRange(1, 100_000, 65536)))
GROUPS = IdMap((IdRange(0, 2000, 1), IdRange(1, 200_000, 65536)))
INSIDE = UserNamespace(USERS, GROUPS)


def ask(fs: RamFS, opcode: int, body: bytes, uid: int = 0, groups: tuple[int, ...] = ()) -> Served:
    serve = served_in_namespace(Dispatcher(fs).serve, INSIDE)
    request = abi.IN_HEADER.pack(abi.IN_BYTES + len(body), opcode, 2, 1, uid, 0, 9, 0) + body
    return serve(opcode, Caller(uid, 0, groups, 9, True), 1, memoryview(request), len(request))


def test_what_is_not_mapped_has_no_id() -> None:
    assert [USERS.outward(each) for each in (0, 1, 65536, 65537)] == [
        1000, 100_000, 165_535, NOT_MAPPED
    ]  # fmt: skip
    assert [USERS.inward(each) for each in (1000, 100_000, 0)] == [0, 1, NOT_MAPPED]


def test_makers_and_owners_are_translated() -> None:
    fs = RamFS()
    body = abi.MKDIR_IN.pack(0o755, 0) + b"made\0"
    answer = ask(fs, Opcode.MKDIR, body, uid=5, groups=(0, 7))
    assert isinstance(answer, bytes)
    assert abi.ENTRY_OUT.unpack(answer)[-5:-3] == (5, 0)
    assert fs.callers["mkdir"][:3] == (100_004, 2000, (2000, 200_006))
    shown = ask(fs, Opcode.GETATTR, abi.GETATTR_IN.pack(0, 0))
    assert isinstance(shown, bytes)
    assert abi.ATTR_OUT.unpack(shown)[-5:-3] == (NOT_MAPPED, NOT_MAPPED), "the root is the host's"


def test_chown_is_translated_both_ways() -> None:
    fs = RamFS()
    values = (FATTR_UID | FATTR_GID, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 4)
    answer = ask(fs, Opcode.SETATTR, abi.SETATTR_IN.pack(*values))
    assert isinstance(answer, bytes)
    assert abi.ATTR_OUT.unpack(answer)[-5:-3] == (3, 4)
    assert fs.nodes[ROOT_INO].attr[2:4] == (100_002, 200_003)


def test_entries_of_acls_are_translated_and_strangers_left_out() -> None:
    fs = RamFS()
    inside = pack_xattr(Acl(7, 5, 5, 0, (Named(False, 3, 4), Named(True, 4, 6))))
    outside = pack_xattr(Acl(7, 5, 5, 0, (Named(False, 100_002, 4), Named(True, 200_003, 6))))
    body = abi.SETXATTR_IN.pack(len(inside), 0, 0) + ACCESS_XATTR + b"\0" + inside
    assert ask(fs, Opcode.SETXATTR, body) == b""
    assert fs.nodes[ROOT_INO].xattrs == {ACCESS_XATTR: outside}
    get = abi.GETXATTR_IN.pack(4096) + ACCESS_XATTR + b"\0"
    assert ask(fs, Opcode.GETXATTR, get) == inside
    strange = pack_xattr(Acl(7, 5, 5, 0, (Named(False, 3, 4), Named(True, 200_003, 6))))
    fs.nodes[ROOT_INO].xattrs[ACCESS_XATTR] = strange
    assert ask(fs, Opcode.GETXATTR, get) == pack_xattr(Acl(7, 5, 5, 0, (Named(True, 4, 6),)))
    asked = ask(fs, Opcode.GETXATTR, abi.GETXATTR_IN.pack(0) + ACCESS_XATTR + b"\0")
    assert asked == abi.GETXATTR_OUT.pack(len(strange))


def test_errors_pass() -> None:
    assert ask(RamFS(), Opcode.LOOKUP, b"none\0") == errno.ENOENT

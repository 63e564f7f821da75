"""Corners of ACLs and of flags (P2): masks, groups, inheritance, removal, who may; chattr.

Written down by hand from acl(5) and chattr(1), so the model is held to them as all others are.
"""

from __future__ import annotations

import os
import stat
from errno import EACCES, EINVAL, ENODATA, ENOTTY, EOPNOTSUPP, EPERM
from typing import Final

from tests.model.acls import NO_ID, pack
from tests.model.corners import CREATE, FILE, Line, Shows, gives, no, ok, shows
from tests.model.inodes import (
    ACCESS_ACL,
    APPEND,
    DEFAULT_ACL,
    GROUP,
    GROUP_OBJ,
    IMMUTABLE,
    INHERITED,
    MASK,
    OTHER,
    USER,
    USER_OBJ,
)
from tests.model.ops import (
    ALICE,
    BOB,
    NOW,
    OMIT,
    RENAME_EXCHANGE,
    Access,
    Chmod,
    Chown,
    GetFlags,
    GetXattr,
    Link,
    Listdir,
    ListXattr,
    Mkdir,
    Mknod,
    Open,
    Read,
    RemoveXattr,
    Rename,
    Rmdir,
    SetFlags,
    SetXattr,
    Stat,
    Symlink,
    Truncate,
    Unlink,
    Utimens,
    Write,
)

OPEN_IMMUTABLE: Final = "flags_of_what_is_open"  # not on ext4, which refuses who has it open
BOTH: Final = 60100  # the group of Alice and Bob
_TAGS: Final = {"u": USER, "g": GROUP, "m": MASK, "o": OTHER}


def acl(text: str) -> bytes:
    """`u::7 u:60001:4 g::5 m::7 o::0` as the kernel has it."""
    entries = []
    for part in text.split():
        kind, who, perm = part.split(":")
        tag = {"u": USER_OBJ, "g": GROUP_OBJ}.get(kind, 0) if not who else 0
        entries.append((tag or _TAGS[kind], int(perm), int(who) if who else NO_ID))
    return pack(entries)


def sets(path: bytes, text: str, name: bytes = ACCESS_ACL) -> SetXattr:
    return SetXattr(path, name, acl(text))


def has(path: bytes, text: str, name: bytes = ACCESS_ACL) -> Line:
    return gives(acl(text), GetXattr(path, name))


def lacks(path: bytes, name: bytes = ACCESS_ACL) -> Line:
    return no(ENODATA, GetXattr(path, name))


_ALICES = "u::6 u:60001:6 g::4 m::6 o::0"
_PRIVATE = (ok(Open(0, b"/f", CREATE, 0o600)), ok(Write(0, 0, b"x")))
_DEFAULT = "u::7 u:60001:7 g::5 m::7 o::0"
_HEIR = (ok(Mkdir(b"/d", 0o755)), ok(sets(b"/d", _DEFAULT, DEFAULT_ACL)))

ACLS: dict[str, tuple[Line, ...]] = {
    "acl_named_user": (
        *_PRIVATE,
        no(EACCES, Read(b"/f"), ALICE),
        ok(sets(b"/f", _ALICES)),
        shows(Shows(perm=0o660), Stat(b"/f")),
        gives(b"x", Read(b"/f"), ALICE),
        ok(Write(b"/f", 0, b"y"), ALICE),
        no(EACCES, Read(b"/f"), BOB),
        no(EACCES, Access(b"/f", os.R_OK), BOB),
        ok(Access(b"/f", os.R_OK | os.W_OK), ALICE),
        gives((ACCESS_ACL,), ListXattr(b"/f"), BOB),
    ),
    "acl_mask_limits": (
        *_PRIVATE,
        ok(sets(b"/f", "u::6 u:60001:7 g::7 g:60200:7 m::4 o::0")),
        shows(Shows(perm=0o640), Stat(b"/f")),
        gives(b"x", Read(b"/f"), ALICE),
        no(EACCES, Write(b"/f", 0, b"y"), ALICE),
        gives(b"x", Read(b"/f"), BOB),
        no(EACCES, Write(b"/f", 0, b"y"), BOB),
    ),
    "acl_supplementary_groups": (
        *_PRIVATE,
        ok(sets(b"/f", f"u::6 g::0 g:{BOTH}:4 g:60200:6 m::6 o::0")),
        gives(b"x", Read(b"/f"), ALICE),
        no(EACCES, Write(b"/f", 0, b"y"), ALICE),
        ok(Write(b"/f", 0, b"y"), BOB),  # one of his groups may, so he may
        ok(sets(b"/f", f"u::6 g::0 g:{BOTH}:4 g:60200:2 m::6 o::0")),
        no(EACCES, Open(1, b"/f", os.O_RDWR), BOB),  # but none of them may both
    ),
    "acl_user_before_groups": (
        *_PRIVATE,
        ok(sets(b"/f", f"u::6 u:60001:0 g::6 g:{BOTH}:6 m::6 o::6")),
        no(EACCES, Read(b"/f"), ALICE),
        gives(b"x", Read(b"/f"), BOB),
        ok(Chown(b"/f", 60001, -1)),
        gives(b"x", Read(b"/f"), ALICE),  # the owner's entry comes first
    ),
    "acl_group_found_is_not_other": (
        *_PRIVATE,
        ok(sets(b"/f", f"u::6 g::4 g:{BOTH}:0 m::6 o::6")),
        no(EACCES, Read(b"/f"), ALICE),
        ok(sets(b"/f", "u::6 g::4 g:60200:0 m::6 o::6")),
        gives(b"x", Read(b"/f"), ALICE),
        no(EACCES, Read(b"/f"), BOB),
    ),
    "acl_empty_mask_is_no_acl": (  # Linux: without group bits nobody looks at the ACL
        *_PRIVATE,
        ok(sets(b"/f", "u::6 u:60001:6 g::6 m::0 o::4")),
        gives(b"x", Read(b"/f"), ALICE),
        no(EACCES, Write(b"/f", 0, b"y"), ALICE),
    ),
    "acl_chmod_is_mask": (
        *_PRIVATE,
        ok(sets(b"/f", _ALICES)),
        ok(Chmod(b"/f", 0o747)),
        has(b"/f", "u::7 u:60001:6 g::4 m::4 o::7"),
        no(EACCES, Write(b"/f", 0, b"y"), ALICE),
        ok(Chmod(b"/f", 0o670)),
        has(b"/f", "u::6 u:60001:6 g::4 m::7 o::0"),
        ok(Write(b"/f", 0, b"y"), ALICE),
    ),
    "acl_minimal_is_mode": (
        ok(FILE),
        ok(sets(b"/f", "u::7 g::5 o::1")),
        shows(Shows(perm=0o751), Stat(b"/f")),
        lacks(b"/f"),
        gives((), ListXattr(b"/f")),
        ok(sets(b"/f", "u::6 g::4 m::7 o::0")),
        shows(Shows(perm=0o670), Stat(b"/f")),
        has(b"/f", "u::6 g::4 m::7 o::0"),
    ),
    "acl_removed": (
        ok(FILE),
        ok(sets(b"/f", _ALICES)),
        ok(RemoveXattr(b"/f", ACCESS_ACL)),
        lacks(b"/f"),
        shows(Shows(perm=0o660), Stat(b"/f")),
        ok(RemoveXattr(b"/f", ACCESS_ACL)),
        ok(sets(b"/f", _ALICES)),
        ok(SetXattr(b"/f", ACCESS_ACL, pack([]))),
        lacks(b"/f"),
    ),
    "acl_who_may_set": (
        ok(Mkdir(b"/d", 0o777)),
        ok(Chmod(b"/d", 0o777)),
        ok(Open(0, b"/d/f", CREATE, 0o666), ALICE),
        no(EPERM, sets(b"/d/f", _ALICES), BOB),
        ok(sets(b"/d/f", _ALICES), ALICE),
        no(EPERM, RemoveXattr(b"/d/f", ACCESS_ACL), BOB),
        no(EPERM, sets(b"/d", _DEFAULT, DEFAULT_ACL), ALICE),
        gives(acl(_ALICES), GetXattr(b"/d/f", ACCESS_ACL), BOB),
    ),
    "acl_takes_setgid": (
        ok(Open(0, b"/f", CREATE, 0o755)),
        ok(Chown(b"/f", 60001, 60200)),
        ok(Chmod(b"/f", 0o2755)),
        ok(sets(b"/f", "u::7 u:60002:5 g::5 m::5 o::5"), ALICE),
        shows(Shows(perm=0o755), Stat(b"/f")),
        ok(Chmod(b"/f", 0o2755)),
        ok(sets(b"/f", "u::7 g::5 m::5 o::5")),
        shows(Shows(perm=0o2755), Stat(b"/f")),
    ),
    "acl_that_is_none": (
        ok(FILE),
        ok(Mkdir(b"/d")),
        no(EINVAL, SetXattr(b"/f", ACCESS_ACL, b"\2")),
        no(EOPNOTSUPP, SetXattr(b"/f", ACCESS_ACL, b"\1\0\0\0")),
        no(EINVAL, SetXattr(b"/f", ACCESS_ACL, acl(_ALICES)[:-1])),
        no(EINVAL, sets(b"/f", "u::6 u:60001:6 g::4 o::0")),  # no mask
        no(EINVAL, sets(b"/f", "u::6 g::4")),
        no(EINVAL, sets(b"/f", "u::6 g::4 o::8")),
        no(EINVAL, sets(b"/f", "g::4 u::6 o::0")),
        no(EINVAL, sets(b"/f", "u::6 u::6 g::4 o::0")),
        no(EINVAL, sets(b"/f", "u::6 g::4 m::4 m::4 o::0")),
        no(EINVAL, sets(b"/d", "u::6 u:60001:6 g::4 o::0", DEFAULT_ACL)),
        no(EACCES, sets(b"/f", _DEFAULT, DEFAULT_ACL)),
        ok(RemoveXattr(b"/f", DEFAULT_ACL)),
        shows(Shows(perm=0o644), Stat(b"/f")),
    ),
    "acl_of_special_files": (
        ok(FILE),
        ok(Symlink(b"f", b"/l")),
        ok(Mknod(b"/p", stat.S_IFIFO | 0o600)),
        no(EOPNOTSUPP, SetXattr(b"/l", ACCESS_ACL, acl(_ALICES), follow=False)),
        no(EOPNOTSUPP, GetXattr(b"/l", ACCESS_ACL, follow=False)),
        ok(sets(b"/p", _ALICES)),
        has(b"/p", _ALICES),
        ok(sets(b"/l", _ALICES)),
        has(b"/f", _ALICES),
    ),
    "acl_inherited": (
        *_HEIR,
        ok(Open(0, b"/d/f", CREATE, 0o666, umask=0o077)),
        has(b"/d/f", "u::6 u:60001:7 g::5 m::6 o::0"),
        shows(Shows(perm=0o660), Stat(b"/d/f")),
        lacks(b"/d/f", DEFAULT_ACL),
        ok(Mkdir(b"/d/s", 0o700, umask=0o777)),
        has(b"/d/s", "u::7 u:60001:7 g::5 m::0 o::0"),
        has(b"/d/s", _DEFAULT, DEFAULT_ACL),
        ok(Mknod(b"/d/p", stat.S_IFIFO | 0o777)),
        has(b"/d/p", _DEFAULT),
        ok(Symlink(b"f", b"/d/l")),
        no(EOPNOTSUPP, GetXattr(b"/d/l", ACCESS_ACL, follow=False)),
        ok(Link(b"/d/f", b"/g")),
        has(b"/g", "u::6 u:60001:7 g::5 m::6 o::0"),
        ok(Rename(b"/d/f", b"/h")),
        has(b"/h", "u::6 u:60001:7 g::5 m::6 o::0"),
    ),
    "acl_default_of_three": (
        ok(Mkdir(b"/d", 0o755)),
        ok(sets(b"/d", "u::7 g::5 o::0", DEFAULT_ACL)),
        ok(Open(0, b"/d/f", CREATE, 0o666, umask=0o077)),
        shows(Shows(perm=0o640), Stat(b"/d/f")),
        lacks(b"/d/f"),
        ok(Mkdir(b"/d/s", 0o777)),
        has(b"/d/s", "u::7 g::5 o::0", DEFAULT_ACL),
        lacks(b"/d/s"),
        ok(RemoveXattr(b"/d", DEFAULT_ACL)),
        ok(Open(0, b"/d/g", CREATE, 0o666, umask=0o077)),
        shows(Shows(perm=0o600), Stat(b"/d/g")),
    ),
    "acl_of_directories": (
        ok(Mkdir(b"/d", 0o700)),
        ok(Open(0, b"/d/f", CREATE, 0o644)),
        ok(sets(b"/d", "u::7 u:60001:7 u:60002:4 g::0 m::7 o::0")),
        gives((b"f",), Listdir(b"/d"), BOB),
        no(EACCES, Stat(b"/d/f"), BOB),
        ok(Stat(b"/d/f"), ALICE),
        ok(Mkdir(b"/d/s"), ALICE),
        ok(Rename(b"/d/s", b"/d/t"), ALICE),
        ok(Rmdir(b"/d/t"), ALICE),
        ok(Unlink(b"/d/f"), ALICE),
        ok(Chmod(b"/d", 0o750)),
        no(EACCES, Mkdir(b"/d/s"), ALICE),
    ),
    "acl_umask_without_default": (
        ok(Mkdir(b"/d", 0o777, umask=0o022)),
        shows(Shows(perm=0o755), Stat(b"/d")),
        ok(Mknod(b"/d/p", stat.S_IFIFO | 0o666, umask=0o027)),
        shows(Shows(perm=0o640), Stat(b"/d/p")),
    ),
    "acl_goes_with_what_was_removed": (
        ok(Open(0, b"/f", CREATE, 0o600)),
        ok(sets(b"/f", _ALICES)),
        ok(Unlink(b"/f")),
        ok(Open(1, b"/f", CREATE, 0o600)),
        lacks(b"/f"),
        no(EACCES, Read(b"/f"), ALICE),
    ),
}

_FIXED = (ok(FILE), ok(Write(0, 0, b"old")), ok(Chown(b"/f", 60001, 60001)))
_APPENDING = os.O_WRONLY | os.O_APPEND

FLAGS: dict[str, tuple[Line, ...]] = {
    "flags_shown": (
        ok(FILE),
        gives(0, GetFlags(b"/f")),
        ok(SetFlags(b"/f", INHERITED | APPEND)),
        gives(INHERITED | APPEND, GetFlags(b"/f"), ALICE),
        ok(SetFlags(b"/f", 0)),
        no(EOPNOTSUPP, SetFlags(b"/f", 1 << 31)),
        gives(0, GetFlags(b"/f")),
        ok(Mknod(b"/p", stat.S_IFIFO | 0o600)),
        no(ENOTTY, GetFlags(b"/p")),
    ),
    "flags_who_may": (
        *_FIXED,
        no(EPERM, SetFlags(b"/f", IMMUTABLE), ALICE),
        no(EPERM, SetFlags(b"/f", APPEND), ALICE),
        ok(SetFlags(b"/f", INHERITED), ALICE),
        no(EPERM, SetFlags(b"/f", 0), BOB),
        ok(SetFlags(b"/f", IMMUTABLE)),
        no(EPERM, SetFlags(b"/f", 0), ALICE),
        gives(IMMUTABLE, GetFlags(b"/f")),
    ),
    "flags_inherited": (
        ok(Mkdir(b"/d")),
        ok(SetFlags(b"/d", INHERITED | APPEND)),
        ok(Mkdir(b"/d/s")),
        ok(Open(0, b"/d/f", CREATE, 0o600)),
        gives(INHERITED, GetFlags(b"/d/s")),
        gives(INHERITED, GetFlags(b"/d/f")),
    ),
    "immutable_file": (
        *_FIXED,
        ok(Mkdir(b"/d")),
        ok(Open(1, b"/d/g", CREATE, 0o644)),
        ok(SetXattr(b"/f", b"user.a", b"1")),
        ok(SetFlags(b"/f", IMMUTABLE)),
        gives(b"old", Read(b"/f")),
        no(EPERM, Write(b"/f", 0, b"new")),
        no(EPERM, Open(2, b"/f", _APPENDING)),
        no(EPERM, Open(2, b"/f", os.O_WRONLY | os.O_TRUNC), ALICE),
        no(EPERM, Open(2, b"/f", CREATE, 0o644)),
        no(EPERM, Truncate(b"/f", 0)),
        no(EPERM, Chmod(b"/f", 0o600)),
        no(EPERM, Chmod(b"/f", 0o600), ALICE),
        no(EPERM, Chown(b"/f", 0, 0)),
        no(EPERM, Utimens(b"/f", NOW, NOW)),
        no(EPERM, Utimens(b"/f", 1, 1)),
        no(EPERM, SetXattr(b"/f", b"user.a", b"2")),
        no(EPERM, RemoveXattr(b"/f", b"user.a")),
        no(EPERM, sets(b"/f", _ALICES)),
        no(EPERM, RemoveXattr(b"/f", ACCESS_ACL)),
        gives(b"1", GetXattr(b"/f", b"user.a")),
        no(EPERM, Link(b"/f", b"/l")),
        no(EPERM, Rename(b"/f", b"/r")),
        no(EPERM, Rename(b"/d/g", b"/f")),
        no(EPERM, Rename(b"/d/g", b"/f", RENAME_EXCHANGE)),
        no(EPERM, Unlink(b"/f")),
        ok(SetFlags(b"/f", 0)),
        ok(Write(b"/f", 0, b"new")),
        ok(Unlink(b"/f")),
    ),
    "immutable_directory": (
        ok(Mkdir(b"/d")),
        ok(Mkdir(b"/d/s")),
        ok(Open(0, b"/d/f", CREATE, 0o644)),
        ok(SetFlags(b"/d", IMMUTABLE)),
        no(EPERM, Mkdir(b"/d/n")),
        no(EPERM, Mknod(b"/d/n", stat.S_IFIFO | 0o600)),
        no(EPERM, Symlink(b"x", b"/d/n")),
        no(EPERM, Open(1, b"/d/n", CREATE, 0o644)),
        no(EPERM, Unlink(b"/d/f")),
        no(EPERM, Rmdir(b"/d/s")),
        no(EPERM, Rename(b"/d/f", b"/d/g")),
        no(EPERM, Rename(b"/d/f", b"/g")),
        no(EPERM, Link(b"/d/f", b"/d/l")),
        no(EPERM, Rename(b"/d", b"/e")),
        no(EPERM, Chmod(b"/d", 0o777)),
        ok(Link(b"/d/f", b"/l")),  # what is in it may change
        ok(Write(b"/d/f", 0, b"x")),
        ok(Mkdir(b"/d/s/n")),
        gives((b"f", b"s"), Listdir(b"/d")),
    ),
    "append_only_file": (
        *_FIXED,
        ok(SetFlags(b"/f", APPEND)),
        no(EPERM, Write(b"/f", 0, b"new")),
        no(EPERM, Open(1, b"/f", os.O_RDWR)),
        no(EPERM, Open(1, b"/f", _APPENDING | os.O_TRUNC)),
        no(EPERM, Open(1, b"/f", os.O_RDONLY | os.O_TRUNC)),
        no(EPERM, Truncate(b"/f", 0)),
        ok(Open(1, b"/f", _APPENDING)),
        gives(4, Write(1, 0, b"+new")),
        gives(b"old+new", Read(b"/f")),
        no(EPERM, Truncate(1, 0)),
        no(EPERM, Truncate(0, 0)),
        no(EPERM, Chmod(b"/f", 0o600)),
        no(EPERM, Chown(b"/f", 0, 0)),
        no(EPERM, Utimens(b"/f", 1, 1)),
        no(EPERM, Utimens(b"/f", NOW, OMIT)),
        ok(Utimens(b"/f", NOW, NOW)),
        no(EPERM, SetXattr(b"/f", b"user.a", b"2")),
        no(EPERM, Link(b"/f", b"/l")),
        no(EPERM, Rename(b"/f", b"/r")),
        no(EPERM, Unlink(b"/f")),
    ),
    "append_only_directory": (
        ok(Mkdir(b"/d")),
        ok(Open(0, b"/d/f", CREATE, 0o644)),
        ok(Open(0, b"/f", CREATE, 0o644)),
        ok(SetFlags(b"/d", APPEND)),
        ok(Mkdir(b"/d/s")),
        ok(Open(1, b"/d/n", CREATE, 0o644)),
        ok(Link(b"/f", b"/d/l")),
        ok(Rename(b"/f", b"/d/r")),
        ok(Write(b"/d/f", 0, b"x")),
        no(EPERM, Unlink(b"/d/f")),
        no(EPERM, Rmdir(b"/d/s")),
        no(EPERM, Rename(b"/d/f", b"/d/g")),
        no(EPERM, Rename(b"/d/f", b"/d/n")),
        no(EPERM, Rename(b"/d/f", b"/g")),
        no(EPERM, Rename(b"/d", b"/e")),
        no(EPERM, Chmod(b"/d", 0o700)),
    ),
    OPEN_IMMUTABLE: (
        *_FIXED,
        ok(SetFlags(b"/f", IMMUTABLE)),
        ok(Write(0, 0, b"new")),
        ok(Truncate(0, 1)),
        gives(b"n", Read(b"/f")),
    ),
}

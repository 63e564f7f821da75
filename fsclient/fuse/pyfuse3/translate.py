"""Between pyfuse3's records and the file system's. Pure functions, but that they make records.

Called by the operations. pyfuse3 asks for HANDLE_KILLPRIV and not for its second version: the
kernel then leaves S_ISUID and S_ISGID to the file system and does not say which callers keep them.
Each chown of a file drops them, and a truncation by any user but root.
"""

from __future__ import annotations

from typing import Any, Final

from fsclient.fuse.wire.pack import BLOCK_SIZE_BYTES, GENERATION, statfs_fields
from fsclient.kernel.contract import EntryOut, OpenOut, Stat
from fsmeta.types import Attr, Caller, Dentry, SetAttr, StatFs

_NOTHING: Final = SetAttr()
_KILL_SUID: Final = SetAttr(kill_suid=True)


class Translator:
    """Makes records of pyfuse3."""

    def __init__(self, fuse: Any) -> None:
        self._new = fuse.EntryAttributes
        self._new_open = fuse.FileInfo
        self._new_statfs = fuse.StatvfsData

    def entry(self, entry: EntryOut) -> Any:
        """What a name leads to; inode 0 says that it leads nowhere."""
        attr, entry_ttl, attr_ttl = entry
        out = self._new()
        if attr is not None:
            _fill(out, attr)
        out.entry_timeout = entry_ttl
        out.attr_timeout = attr_ttl
        return out

    def stat(self, stat: Stat) -> Any:
        """The attributes of an inode."""
        out = self._new()
        _fill(out, stat.attr)
        out.attr_timeout = stat.ttl
        return out

    def dots(self, dentry: Dentry) -> Any:
        """`.` or `..` of a listing: the kernel takes nothing but the name, number and type."""
        out = self._new()
        out.st_ino = dentry[1]
        out.st_mode = 0o040000
        out.entry_timeout = out.attr_timeout = 0
        return out

    def opened(self, opened: OpenOut) -> Any:
        """An open file."""
        return self._new_open(opened.fh, opened.direct_io, opened.keep_cache)

    def statfs(self, usage: StatFs) -> Any:
        """statfs(2)."""
        out = self._new_statfs()
        (
            out.f_blocks,
            out.f_bfree,
            out.f_bavail,
            out.f_files,
            out.f_ffree,
            out.f_bsize,
            out.f_namemax,
            out.f_frsize,
        ) = statfs_fields(usage)
        out.f_favail = out.f_ffree
        return out


def _fill(out: Any, attr: Attr) -> None:
    out.st_ino = attr.ino
    out.generation = GENERATION
    out.st_mode = attr.mode
    out.st_nlink = attr.nlink
    out.st_uid = attr.uid
    out.st_gid = attr.gid
    out.st_rdev = attr.rdev
    out.st_size = attr.size
    out.st_blksize = BLOCK_SIZE_BYTES
    out.st_blocks = attr.space // 512
    out.st_atime_ns = attr.atime_ns
    out.st_mtime_ns = attr.mtime_ns
    out.st_ctime_ns = attr.ctime_ns


def wanted(attr: Any, fields: Any, caller: Caller) -> SetAttr:
    """What a SETATTR is to change.

    One that changes nothing comes before a write that drops S_ISUID, as in `dispatch/names`.
    """
    owner = fields.update_uid or fields.update_gid
    want = SetAttr(
        mode=attr.st_mode & 0o7777 if fields.update_mode else None,
        uid=attr.st_uid if fields.update_uid else None,
        gid=attr.st_gid if fields.update_gid else None,
        size=attr.st_size if fields.update_size else None,
        atime_ns=attr.st_atime_ns if fields.update_atime else None,
        mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        kill_suid=bool(owner or (fields.update_size and caller.uid != 0)),
    )
    return _KILL_SUID if want == _NOTHING and caller.uid != 0 else want

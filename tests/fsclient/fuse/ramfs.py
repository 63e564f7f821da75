# ruff: noqa: ARG002  (the methods have the signatures of the Protocol)
"""A file system in memory, to mount in tests: simple, correct, and slow where that is simpler.

One lock around everything; the kernel has judged permissions. `hooks` lets a test run code in front
of a method (raise an error, block until released); `lookups` counts what the kernel holds.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsclient.kernel.contract import (
    PLAIN_WRITE,
    Buffer,
    CopyRange,
    Entries,
    EntryOut,
    FileLock,
    FileSystem,
    Fits,
    OpenOut,
    SetAttr,
    Stat,
    WriteHow,
)
from fsclient.kernel.later import Later
from fsmeta.types import NO_PARENT, ROOT_INO, Attr, Caller, Dentry, Ino, StatFs

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
XATTR_CREATE = 1
XATTR_REPLACE = 2


def fail(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@dataclass
class Node:
    """An inode and everything in it."""

    attr: Attr
    data: bytearray = field(default_factory=bytearray)
    target: bytes = b""
    names: dict[bytes, Ino] = field(default_factory=dict)
    xattrs: dict[bytes, bytes] = field(default_factory=dict)


class RamFS:
    """See the module. `ttl` is how long the kernel may believe us."""

    def __init__(self, ttl: float = 0.0, negative_ttl: float = 0.0) -> None:
        self.ranges = self.locks = self.directories = self.xattrs = self  # no part is of its own
        self.ttl = ttl
        self.negative_ttl = negative_ttl
        self.opened = OpenOut(0)  # what open answers, but for the handle
        self.hooks: dict[str, Callable[[], None]] = {}
        self.calls: Counter[str] = Counter()
        self.callers: dict[str, Caller] = {}
        self.lookups: Counter[Ino] = Counter()
        self.handles: dict[int, Ino] = {}
        self.listings: dict[int, list[Dentry]] = {}  # by handle, as of its last rewind
        self._lock = threading.RLock()
        self._inos = itertools.count(2)
        self._fhs = itertools.count(1)
        self.nodes: dict[Ino, Node] = {}
        self._new_node(ROOT_INO, ROOT_INO, stat.S_IFDIR | 0o755, Caller(0, 0), 0)

    # helpers

    def _new_node(self, ino: Ino, parent: Ino, mode: int, caller: Caller, rdev: int) -> Node:
        now = time.time_ns()
        nlink = 2 if stat.S_ISDIR(mode) else 1
        attr = Attr(
            ino, mode, caller.uid, caller.gid, rdev, 0, parent, now, 0, nlink, 0, now, now, now
        )
        self.nodes[ino] = Node(attr)
        return self.nodes[ino]

    def _begin(self, verb: str, caller: Caller | None = None) -> None:
        self.calls[verb] += 1
        if caller is not None:
            self.callers[verb] = caller
        hook = self.hooks.get(verb)
        if hook is not None:
            hook()

    def _node(self, ino: Ino) -> Node:
        if ino not in self.nodes:
            raise fail(errno.ESTALE)
        return self.nodes[ino]

    def _child(self, parent: Ino, name: bytes) -> Node:
        names = self._node(parent).names
        if name not in names:
            raise fail(errno.ENOENT)
        return self._node(names[name])

    def _entry(self, node: Node) -> EntryOut:
        self.lookups[node.attr.ino] += 1
        return EntryOut(node.attr, self.ttl, self.ttl)

    def _changed(self, node: Node, **values: Any) -> None:
        node.attr = node.attr._replace(ctime_ns=time.time_ns(), **values)

    def _bind(self, parent: Ino, name: bytes, ino: Ino) -> None:
        into = self._node(parent)
        into.names[name] = ino
        self._changed(into, mtime_ns=time.time_ns())

    def _unbind(self, parent: Ino, name: bytes) -> None:
        out_of = self._node(parent)
        node = self._node(out_of.names.pop(name))
        self._changed(out_of, mtime_ns=time.time_ns())
        self._changed(node, nlink=0 if node.attr.is_dir else node.attr.nlink - 1)
        if node.attr.is_dir:
            self._changed(out_of, nlink=out_of.attr.nlink - 1)
        self._reap(node.attr.ino)

    def _reap(self, ino: Ino) -> None:
        node = self.nodes[ino]
        if node.attr.nlink == 0 and ino not in self.handles.values() and not self.lookups[ino]:
            del self.nodes[ino]

    def _make(self, parent: Ino, name: bytes, mode: int, caller: Caller, rdev: int = 0) -> Node:
        if name in self._node(parent).names:
            raise fail(errno.EEXIST)
        node = self._new_node(Ino(next(self._inos)), parent, mode, caller, rdev)
        self._bind(parent, name, node.attr.ino)
        if node.attr.is_dir:
            into = self._node(parent)
            self._changed(into, nlink=into.attr.nlink + 1)
        return node

    def _resize(self, node: Node, size: int) -> None:
        if size < len(node.data):
            del node.data[size:]
        else:
            node.data.extend(bytes(size - len(node.data)))
        self._changed(node, size=size, used=size, mtime_ns=time.time_ns())

    def _open(self, ino: Ino) -> OpenOut:
        fh = next(self._fhs)
        self.handles[fh] = ino
        return self.opened._replace(fh=fh)

    def _close(self, fh: int) -> None:
        ino = self.handles.pop(fh)
        if ino in self.nodes:
            self._reap(ino)

    # verbs

    def lookup(self, caller: Caller, parent: Ino, name: bytes) -> EntryOut:
        self._begin("lookup", caller)
        with self._lock:
            if name not in self._node(parent).names:
                if self.negative_ttl:
                    return EntryOut(None, self.negative_ttl, 0.0)
                raise fail(errno.ENOENT)
            return self._entry(self._child(parent, name))

    def forget(self, ino: Ino, lookups: int) -> None:
        self._begin("forget")
        with self._lock:
            self.lookups[ino] -= lookups
            assert self.lookups[ino] >= 0, (ino, lookups)
            if ino in self.nodes:
                self._reap(ino)

    def getattr(self, caller: Caller, ino: Ino, fh: int | None) -> Stat:
        self._begin("getattr", caller)
        return Stat(self._node(ino).attr, self.ttl)

    def setattr(self, caller: Caller, ino: Ino, want: SetAttr, fh: int | None) -> Stat:
        self._begin("setattr", caller)
        with self._lock:
            node = self._node(ino)
            if want.size is not None:
                self._resize(node, want.size)
            now = time.time_ns()
            wanted = {
                "mode": want.mode,
                "uid": want.uid,
                "gid": want.gid,
                "atime_ns": now if want.atime_now else want.atime_ns,
                "mtime_ns": now if want.mtime_now else want.mtime_ns,
            }
            values = {key: value for key, value in wanted.items() if value is not None}
            if "mode" in values:
                values["mode"] |= stat.S_IFMT(node.attr.mode)
            if want.kill_suid:
                values["mode"] = values.get("mode", node.attr.mode) & ~0o6000
            self._changed(node, **values)
            return Stat(node.attr, self.ttl)

    def readlink(self, caller: Caller, ino: Ino) -> bytes:
        self._begin("readlink", caller)
        return self._node(ino).target

    def mknod(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, rdev: int, umask: int = 0
    ) -> EntryOut:
        self._begin("mknod", caller)
        with self._lock:
            return self._entry(self._make(parent, name, mode & ~umask, caller, rdev))

    def mkdir(
        self, caller: Caller, parent: Ino, name: bytes, mode: int, umask: int = 0
    ) -> EntryOut:
        self._begin("mkdir", caller)
        with self._lock:
            return self._entry(self._make(parent, name, stat.S_IFDIR | mode & ~umask, caller))

    def symlink(self, caller: Caller, parent: Ino, name: bytes, target: bytes) -> EntryOut:
        self._begin("symlink", caller)
        with self._lock:
            node = self._make(parent, name, stat.S_IFLNK | 0o777, caller)
            node.target = target
            self._changed(node, size=len(target))
            return self._entry(node)

    def link(self, caller: Caller, ino: Ino, parent: Ino, name: bytes) -> EntryOut:
        self._begin("link", caller)
        with self._lock:
            node = self._node(ino)
            if name in self._node(parent).names:
                raise fail(errno.EEXIST)
            self._bind(parent, name, ino)
            self._changed(node, nlink=node.attr.nlink + 1, parent=NO_PARENT)
            return self._entry(node)

    def unlink(self, caller: Caller, parent: Ino, name: bytes) -> None:
        self._begin("unlink", caller)
        with self._lock:
            if self._child(parent, name).attr.is_dir:
                raise fail(errno.EISDIR)
            self._unbind(parent, name)

    def rmdir(self, caller: Caller, parent: Ino, name: bytes) -> None:
        self._begin("rmdir", caller)
        with self._lock:
            node = self._child(parent, name)
            if not node.attr.is_dir:
                raise fail(errno.ENOTDIR)
            if node.names:
                raise fail(errno.ENOTEMPTY)
            self._unbind(parent, name)

    def rename(
        self,
        caller: Caller,
        parent: Ino,
        name: bytes,
        new_parent: Ino,
        new_name: bytes,
        flags: int,
    ) -> None:
        self._begin("rename", caller)
        with self._lock:
            node = self._child(parent, name)
            over = self._node(new_parent).names.get(new_name)
            if flags & RENAME_EXCHANGE:
                self._node(parent).names[name] = self._child(new_parent, new_name).attr.ino
                self._node(new_parent).names[new_name] = node.attr.ino
                return
            if over is not None and flags & RENAME_NOREPLACE:
                raise fail(errno.EEXIST)
            if over is not None:
                if self._node(over).names:
                    raise fail(errno.ENOTEMPTY)
                self._unbind(new_parent, new_name)
            del self._node(parent).names[name]
            self._bind(new_parent, new_name, node.attr.ino)

    def create(
        self,
        caller: Caller,
        parent: Ino,
        name: bytes,
        mode: int,
        flags: int,
        kill_suid: bool = False,
        umask: int = 0,
    ) -> tuple[EntryOut, OpenOut]:
        self._begin("create", caller)
        with self._lock:
            node = self._make(parent, name, stat.S_IFREG | stat.S_IMODE(mode) & ~umask, caller)
            return self._entry(node), self._open(node.attr.ino)

    def open(self, caller: Caller, ino: Ino, flags: int, kill_suid: bool = False) -> OpenOut:
        self._begin("open", caller)
        with self._lock:
            if flags & os.O_TRUNC:
                self._resize(node := self._node(ino), 0)
                mode = node.attr.mode & ~0o6000 if kill_suid else node.attr.mode
                node.attr = node.attr._replace(mode=mode)
            return self._open(ino)

    def begin_open(self, *words: Any, **more: Any) -> OpenOut:
        return self.open(*words, **more)

    def read(
        self, caller: Caller, ino: Ino, fh: int, offset: int, size: int, past_pages: bool = False
    ) -> Sequence[Buffer]:
        self._begin("read", caller)
        assert self.handles[fh] == ino
        with self._lock:
            return [bytes(self._node(ino).data[offset : offset + size])]

    def write(
        self,
        caller: Caller,
        ino: Ino,
        fh: int,
        offset: int,
        data: memoryview,
        how: WriteHow = PLAIN_WRITE,
    ) -> int:
        self._begin("write", caller)
        assert self.handles[fh] == ino
        with self._lock:
            node = self._node(ino)
            end = offset + len(data)
            if end > len(node.data):
                self._resize(node, end)
            node.data[offset:end] = data
            mode = node.attr.mode & ~0o6000 if how.kill_suid else node.attr.mode
            self._changed(node, mode=mode, mtime_ns=time.time_ns())
            return len(data)

    def read_virtual(self, ino: Ino, fh: int, offset: int, size: int) -> Sequence[Buffer]:
        raise AssertionError("there are no virtual files")

    def written_past_pages(
        self, ino: Ino, fh: int, offset: int, size: int, o_direct: bool
    ) -> Later[None] | None:
        return None

    def flush(self, caller: Caller, ino: Ino, fh: int, owner: int = 0) -> None:
        self._begin("flush", caller)

    def getlk(self, ino: Ino, owner: int, lock: FileLock) -> FileLock | None:
        self._begin("getlk")
        return None

    def setlk(
        self, fh: int, owner: int, lock: FileLock, flock: bool, request: int, wait: bool
    ) -> bool:
        self._begin("setlk")
        return True

    def unlock(self, fh: int, owner: int, lock: FileLock, flock: bool) -> None:
        self._begin("unlock")

    def cancel(self, request: int) -> bool:
        return False

    def fsync(self, caller: Caller, ino: Ino, fh: int, data_only: bool) -> None:
        self._begin("fsync", caller)

    def release(self, ino: Ino, fh: int) -> None:
        self._begin("release")
        with self._lock:
            self._close(fh)

    def tmpfile(
        self, caller: Caller, parent: Ino, mode: int, flags: int, umask: int = 0
    ) -> tuple[EntryOut, OpenOut]:
        raise fail(errno.ENOSYS)

    def fallocate(
        self, caller: Caller, ino: Ino, fh: int, mode: int, offset: int, length: int
    ) -> None:
        raise fail(errno.ENOSYS)

    def lseek(self, caller: Caller, ino: Ino, fh: int, offset: int, whence: int) -> int:
        raise fail(errno.ENOSYS)

    def copy_file_range(self, caller: Caller, ino: Ino, copy: CopyRange) -> int:
        raise fail(errno.ENOSYS)

    def opendir(self, caller: Caller, ino: Ino) -> OpenOut:
        self._begin("opendir", caller)
        with self._lock:
            return self._open(ino)._replace(keep_cache=False)

    def readdir(
        self, caller: Caller, ino: Ino, fh: int, cookie: int, at_most: int
    ) -> tuple[Sequence[Dentry], Sequence[int]]:
        self._begin("readdir", caller)
        with self._lock:
            if cookie == 0:
                self.listings[fh] = self._listing(ino)
            names = self.listings[fh][cookie : cookie + at_most]
            return names, range(cookie + 1, cookie + len(names) + 1)

    def _listing(self, ino: Ino) -> list[Dentry]:
        node = self._node(ino)
        named = [(b".", ino), (b"..", node.attr.parent or ino), *node.names.items()]
        return [Dentry(name, child, self._node(child).attr.type) for name, child in named]

    def readdirplus(
        self, caller: Caller, ino: Ino, fh: int, cookie: int, fits: Fits
    ) -> tuple[Sequence[Dentry], Sequence[int], Entries]:
        names, cookies = self.readdir(caller, ino, fh, cookie, 1000)
        names = names[: fits(names)]
        return names, cookies[: len(names)], Entries.of(self._entries(names))

    def _entries(self, names: Sequence[Dentry]) -> Sequence[EntryOut | None]:
        self._begin("entries")
        with self._lock:
            return [
                None
                if name in (b".", b"..") or child not in self.nodes
                else self._entry(self.nodes[child])
                for name, child, _ in names
            ]

    def syncfs(self) -> Later[None]:
        return Later(lambda take: take(lambda: None))

    def fsyncdir(self, caller: Caller, ino: Ino, fh: int) -> None:
        self._begin("fsyncdir", caller)

    def releasedir(self, ino: Ino, fh: int) -> None:
        self._begin("releasedir")
        with self._lock:
            self._close(fh)

    def statfs(self, caller: Caller, ino: Ino) -> StatFs:
        self._begin("statfs", caller)
        return StatFs(sum(node.attr.space for node in self.nodes.values()), 0, len(self.nodes), 0)

    def access(self, caller: Caller, ino: Ino, mask: int) -> None:
        self._begin("access", caller)

    def setxattr(
        self,
        caller: Caller,
        ino: Ino,
        name: bytes,
        value: bytes,
        flags: int,
        kill_sgid: bool = False,
    ) -> None:
        self._begin("setxattr", caller)
        xattrs = self._node(ino).xattrs
        if flags & XATTR_CREATE and name in xattrs:
            raise fail(errno.EEXIST)
        if flags & XATTR_REPLACE and name not in xattrs:
            raise fail(errno.ENODATA)
        xattrs[name] = value

    def question(self, caller: Caller, ino: Ino, name: bytes) -> Later[bytes] | None:
        return None

    def getxattr(self, caller: Caller, ino: Ino, name: bytes) -> bytes:
        self._begin("getxattr", caller)
        if name not in self._node(ino).xattrs:
            raise fail(errno.ENODATA)
        return self._node(ino).xattrs[name]

    def listxattr(self, caller: Caller, ino: Ino) -> list[bytes]:
        self._begin("listxattr", caller)
        return list(self._node(ino).xattrs)

    def removexattr(self, caller: Caller, ino: Ino, name: bytes) -> None:
        self._begin("removexattr", caller)
        if self._node(ino).xattrs.pop(name, None) is None:
            raise fail(errno.ENODATA)

    def getflags(self, caller: Caller, ino: Ino) -> int:
        self._begin("getflags", caller)
        return self._node(ino).attr.flags

    def setflags(self, caller: Caller, ino: Ino, flags: int) -> None:
        self._begin("setflags", caller)
        self._changed(self._node(ino), flags=flags)


_CONFORMS: Callable[[], FileSystem] = RamFS

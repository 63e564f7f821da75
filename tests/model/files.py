"""The model's verbs on open files and their bytes: do_open(), vfs_read(), vfs_write(), truncate."""

from __future__ import annotations

import errno
import os
import stat

from tests.model import acls
from tests.model.inodes import (
    APPEND,
    IMMUTABLE,
    STICKY,
    Inode,
    R,
    W,
    X,
    fail,
    require,
    without_privileges,
)
from tests.model.ops import KEEP_SIZE, PUNCH_HOLE, Slot, Target, User
from tests.model.tree import Handle, LastKind, Tree, Walk


def reach(tree: Tree, user: User, file: Target, follow: bool = True) -> Inode:
    """The inode behind a path or a slot."""
    if isinstance(file, bytes):
        return Walk(tree, user).end(file, follow)
    return _handle(tree, user, file).inode


def _handle(tree: Tree, user: User, slot: Slot) -> Handle:
    handle = tree.handles.get((user, slot))
    return handle or fail(errno.EBADF)


def open_slot(
    tree: Tree, user: User, slot: Slot, path: bytes, flags: int, mode: int, umask: int = 0
) -> None:
    tree.handles.pop((user, slot), None)
    tree.handles[user, slot] = open_(tree, user, path, flags, mode, umask)


def close(tree: Tree, user: User, slot: Slot) -> None:
    _handle(tree, user, slot)
    del tree.handles[user, slot]


def open_(tree: Tree, user: User, path: bytes, flags: int, mode: int = 0, umask: int = 0) -> Handle:
    """open(2)."""
    if flags & os.O_CREAT:
        inode, created = _open_or_create(tree, user, path, flags, mode, umask)
    else:
        inode, created = Walk(tree, user).end(path, follow=not flags & os.O_NOFOLLOW), False
        if flags & os.O_DIRECTORY and not inode.is_dir:
            fail(errno.ENOTDIR)
    if not created:
        _may_open(tree, user, inode, flags)
        if flags & os.O_TRUNC and inode.is_reg:
            _resize(tree, user, inode, 0)
    access = flags & os.O_ACCMODE
    return Handle(inode, access != os.O_WRONLY, access != os.O_RDONLY, bool(flags & os.O_APPEND))


def _open_or_create(
    tree: Tree, user: User, path: bytes, flags: int, mode: int, umask: int
) -> tuple[Inode, bool]:
    """open_last_lookups() with O_CREAT: symlinks to nowhere are created through."""
    walk = Walk(tree, user)
    last = walk.parent(path)
    stay = flags & (os.O_EXCL | os.O_NOFOLLOW)
    while True:
        if last.kind is LastKind.NORM and last.slash:
            fail(errno.EISDIR)
        inode = walk.find(last)
        if inode is None:
            require(user, last.parent, W | X)
            made = tree.make(user, last.parent, last.name, stat.S_IFREG | stat.S_IMODE(mode))
            acls.born(last.parent, made, umask)
            return made, True
        if not inode.is_link or stay:
            break
        last = walk.follow(last, inode)
    if flags & os.O_EXCL:
        fail(errno.EEXIST)
    if inode.is_dir:
        fail(errno.EISDIR)
    _may_create_in_sticky(tree, user, last.parent, inode)
    return inode, False


def _may_create_in_sticky(tree: Tree, user: User, parent: Inode, inode: Inode) -> None:
    """O_CREAT of what others put into a shared sticky directory; root is no exception.

    Mind that only files and FIFOs have a sysctl: for sockets and symlinks the rule always holds.
    """
    level = {stat.S_IFREG: tree.sysctls.regular, stat.S_IFIFO: tree.sysctls.fifos}.get(inode.kind)
    if not parent.mode & STICKY or level == 0 or inode.uid in (parent.uid, user.uid):
        return
    if parent.mode & 0o002 or (parent.mode & 0o020 and level is not None and level >= 2):
        fail(errno.EACCES)


def _may_open(tree: Tree, user: User, inode: Inode, flags: int) -> None:
    """may_open(), and what opening anything but files and directories says."""
    if inode.is_link:
        fail(errno.ELOOP)
    access = flags & os.O_ACCMODE
    wants = (R if access != os.O_WRONLY else 0) | (W if access != os.O_RDONLY else 0)
    if flags & os.O_TRUNC:
        wants |= W
    if inode.is_dir and wants & W:
        fail(errno.EISDIR)
    require(user, inode, wants)
    acls.may_open(inode, access != os.O_RDONLY, bool(flags & os.O_APPEND), bool(flags & os.O_TRUNC))
    if inode.is_reg or inode.is_dir:
        return
    if not stat.S_ISFIFO(inode.mode):
        fail(errno.ENXIO)
    if access == os.O_WRONLY and not _has_reader(tree, inode):
        fail(errno.ENXIO)


def _has_reader(tree: Tree, fifo: Inode) -> bool:
    return any(handle.inode is fifo and handle.readable for handle in tree.handles.values())


def read(tree: Tree, user: User, file: Target, offset: int, size: int) -> bytes:
    """pread(2)."""
    if isinstance(file, bytes):
        handle = open_(tree, user, file, os.O_RDONLY)
    else:
        handle = _handle(tree, user, file)
    if offset < 0:
        fail(errno.EINVAL)
    if stat.S_ISFIFO(handle.inode.mode):
        fail(errno.ESPIPE)
    if not handle.readable:
        fail(errno.EBADF)
    if handle.inode.is_dir:
        fail(errno.EISDIR)
    return bytes(handle.inode.data[offset : offset + size])


def write(tree: Tree, user: User, file: Target, offset: int, data: bytes) -> int:
    """pwrite(2); O_APPEND wins over `offset` on Linux."""
    if isinstance(file, bytes):
        handle = open_(tree, user, file, os.O_WRONLY)
    else:
        handle = _handle(tree, user, file)
    if offset < 0:
        fail(errno.EINVAL)
    inode = handle.inode
    if stat.S_ISFIFO(inode.mode):
        fail(errno.ESPIPE)
    if not handle.writable:
        fail(errno.EBADF)
    if data:
        begin = len(inode.data) if handle.append else offset
        if begin > len(inode.data):
            inode.data.extend(bytes(begin - len(inode.data)))
        inode.data[begin : begin + len(data)] = data
        _changed(tree, user, inode)
    return len(data)


def _changed(tree: Tree, user: User, inode: Inode) -> None:
    tree.touch(inode)
    if user.uid != 0:
        inode.mode = without_privileges(user, inode)


def _resize(tree: Tree, user: User, inode: Inode, size: int) -> None:
    del inode.data[size:]
    inode.data.extend(bytes(size - len(inode.data)))
    _changed(tree, user, inode)


def truncate(tree: Tree, user: User, file: Target, size: int) -> None:
    """truncate(2) of a path, ftruncate(2) of a slot."""
    handle = None if isinstance(file, bytes) else _handle(tree, user, file)
    if size < 0:
        fail(errno.EINVAL)
    if isinstance(file, bytes):
        inode = Walk(tree, user).end(file)
        if inode.is_dir:
            fail(errno.EISDIR)
        if not inode.is_reg:
            fail(errno.EINVAL)
        require(user, inode, W)
        acls.may_open(inode, writes=False, appends=False, truncates=True)
    else:
        inode = reach(tree, user, file)
        if not inode.is_reg or not (handle and handle.writable):
            fail(errno.EINVAL)
        acls.may_open(inode, writes=False, appends=False, truncates=True)
    if isinstance(file, bytes) and size == inode.size:  # POSIX: marked only if the size changes
        inode.mode = inode.mode if user.uid == 0 else without_privileges(user, inode)
    else:
        _resize(tree, user, inode, size)


def fallocate(tree: Tree, user: User, slot: Slot, mode: int, offset: int, length: int) -> None:
    """fallocate(2) as vfs_fallocate() judges it, without the space; tmpfs has no ZERO_RANGE."""
    handle = _handle(tree, user, slot)
    if offset < 0 or length <= 0:
        fail(errno.EINVAL)
    if mode not in (0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE):
        fail(errno.EOPNOTSUPP)
    if not handle.writable:
        fail(errno.EBADF)
    inode = handle.inode
    if inode.flags & IMMUTABLE or (inode.flags & APPEND and mode & PUNCH_HOLE):
        fail(errno.EPERM)
    if stat.S_ISFIFO(inode.mode):
        fail(errno.ESPIPE)
    end = offset + length
    if mode & PUNCH_HOLE:
        hidden = len(inode.data[offset:end])
        inode.data[offset : offset + hidden] = bytes(hidden)
    elif not mode & KEEP_SIZE:
        inode.data.extend(bytes(max(0, end - len(inode.data))))
    _changed(tree, user, inode)

"""The model's verbs on names: the do_*at() and vfs_*() functions of fs/namei.c, in their order."""

from __future__ import annotations

import errno
import stat

from fsmeta.types import PATH_MAX
from tests.model.acls import born, require_mutable
from tests.model.inodes import STICKY, Inode, W, X, fail, linkable, may_delete, require
from tests.model.ops import RENAME_EXCHANGE, RENAME_NOREPLACE, User
from tests.model.tree import Last, LastKind, Tree, Walk


def _create(tree: Tree, user: User, path: bytes, directory: bool = False) -> Last:
    """filename_create(): a name that is free; the right to use it is checked later."""
    walk = Walk(tree, user)
    last = walk.parent(path)
    if last.kind is not LastKind.NORM or walk.find(last) is not None:
        fail(errno.EEXIST)
    if last.slash and not directory:
        fail(errno.ENOENT)
    return last


def mkdir(tree: Tree, user: User, path: bytes, mode: int, umask: int = 0) -> None:
    """mkdir(2)."""
    last = _create(tree, user, path, directory=True)
    require(user, last.parent, W | X)
    mode &= 0o777 | STICKY
    born(last.parent, tree.make(user, last.parent, last.name, stat.S_IFDIR | mode), umask)


def mknod(tree: Tree, user: User, path: bytes, mode: int, rdev: int, umask: int = 0) -> None:
    """mknod(2)."""
    kind = stat.S_IFMT(mode) or stat.S_IFREG
    if kind == stat.S_IFDIR:
        fail(errno.EPERM)
    device = kind in (stat.S_IFCHR, stat.S_IFBLK)
    if not device and kind not in (stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK):
        fail(errno.EINVAL)
    last = _create(tree, user, path)
    require(user, last.parent, W | X)
    whiteout = kind == stat.S_IFCHR and rdev == 0
    if device and not whiteout and user.uid != 0:
        fail(errno.EPERM)
    inode = tree.make(user, last.parent, last.name, kind | stat.S_IMODE(mode))
    born(last.parent, inode, umask)
    inode.rdev = rdev if device else 0


def symlink(tree: Tree, user: User, target: bytes, path: bytes) -> None:
    """symlink(2)."""
    if not target:
        fail(errno.ENOENT)
    if len(target) >= PATH_MAX:
        fail(errno.ENAMETOOLONG)
    last = _create(tree, user, path)
    require(user, last.parent, W | X)
    tree.make(user, last.parent, last.name, stat.S_IFLNK | 0o777).target = target


def link(tree: Tree, user: User, old: bytes, new: bytes) -> None:
    """link(2): symlinks are linked, not followed."""
    inode = Walk(tree, user).end(old, follow=False)
    last = _create(tree, user, new)
    if tree.sysctls.hardlinks and not linkable(user, inode):
        fail(errno.EPERM)
    require(user, last.parent, W | X)
    require_mutable(inode)
    if inode.is_dir:
        fail(errno.EPERM)
    last.parent.entries[last.name] = inode
    inode.nlink += 1
    tree.touch(last.parent)
    tree.touch_ctime(inode)


def _drop(tree: Tree, parent: Inode, name: bytes) -> None:
    """Remove a name; a directory is known to be empty."""
    inode = parent.entries.pop(name)
    if inode.is_dir:
        inode.nlink = 0
        parent.nlink -= 1
    else:
        inode.nlink -= 1
    tree.touch(parent)
    tree.touch_ctime(inode)


def unlink(tree: Tree, user: User, path: bytes) -> None:
    """unlink(2)."""
    walk = Walk(tree, user)
    last = walk.parent(path)
    if last.kind is not LastKind.NORM:
        fail(errno.EISDIR)
    inode = walk.find(last)
    if inode is None:
        fail(errno.ENOENT)
    if last.slash:
        fail(errno.EISDIR if inode.is_dir else errno.ENOTDIR)
    may_delete(user, last.parent, inode, as_dir=False)
    _drop(tree, last.parent, last.name)


RMDIR_ODD = {
    LastKind.DOT: errno.EINVAL,
    LastKind.DOTDOT: errno.ENOTEMPTY,
    LastKind.ROOT: errno.EBUSY,
}


def rmdir(tree: Tree, user: User, path: bytes) -> None:
    """rmdir(2)."""
    walk = Walk(tree, user)
    last = walk.parent(path)
    if last.kind is not LastKind.NORM:
        fail(RMDIR_ODD[last.kind])
    inode = walk.find(last)
    if inode is None:
        fail(errno.ENOENT)
    may_delete(user, last.parent, inode, as_dir=True)
    if inode.entries:
        fail(errno.ENOTEMPTY)
    _drop(tree, last.parent, last.name)


def rename(tree: Tree, user: User, old: bytes, new: bytes, flags: int) -> None:
    """renameat2(2) with RENAME_NOREPLACE and RENAME_EXCHANGE."""
    exchange = bool(flags & RENAME_EXCHANGE)
    if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE) or (exchange and flags & RENAME_NOREPLACE):
        fail(errno.EINVAL)
    old_walk, new_walk = Walk(tree, user), Walk(tree, user)
    source_at = old_walk.parent(old)
    target_at = new_walk.parent(new)
    if source_at.kind is not LastKind.NORM:
        fail(errno.EBUSY)
    if target_at.kind is not LastKind.NORM:
        fail(errno.EEXIST if flags & RENAME_NOREPLACE else errno.EBUSY)
    source = old_walk.find(source_at)
    if source is None:
        fail(errno.ENOENT)
    target = new_walk.find(target_at)
    if target is not None and flags & RENAME_NOREPLACE:
        fail(errno.EEXIST)
    _check_rename_shape(source_at, source, target_at, target, exchange)
    if source is target:
        return
    _check_rename_rights(user, source_at, source, target_at, target, exchange)
    if target is not None and not exchange and target.entries:
        fail(errno.ENOTEMPTY)
    _move(tree, source_at, source, target_at, target, exchange)


def _check_rename_shape(
    source_at: Last, source: Inode, target_at: Last, target: Inode | None, exchange: bool
) -> None:
    """What the kernel says before it looks at any right."""
    if exchange:
        if target is None:
            fail(errno.ENOENT)
        if target_at.slash and not target.is_dir:
            fail(errno.ENOTDIR)
    if not source.is_dir and (source_at.slash or (target_at.slash and not exchange)):
        fail(errno.ENOTDIR)
    if source_at.parent is target_at.parent:
        return
    if source.contains(target_at.parent):
        fail(errno.EINVAL)
    if target is not None and target.contains(source_at.parent):
        fail(errno.EINVAL if exchange else errno.ENOTEMPTY)


def _check_rename_rights(
    user: User,
    source_at: Last,
    source: Inode,
    target_at: Last,
    target: Inode | None,
    exchange: bool,
) -> None:
    may_delete(user, source_at.parent, source, source.is_dir)
    if target is None:
        require(user, target_at.parent, W | X)
    else:
        may_delete(user, target_at.parent, target, target.is_dir if exchange else source.is_dir)
    if source_at.parent is not target_at.parent:  # ".." changes
        if source.is_dir:
            require(user, source, W)
        if exchange and target is not None and target.is_dir:
            require(user, target, W)


def _move(
    tree: Tree,
    source_at: Last,
    source: Inode,
    target_at: Last,
    target: Inode | None,
    exchange: bool,
) -> None:
    if target is not None and not exchange:
        _drop(tree, target_at.parent, target_at.name)
    del source_at.parent.entries[source_at.name]
    _adopt(target_at, source, source_at.parent)
    if exchange and target is not None:
        _adopt(source_at, target, target_at.parent)
        tree.touch_ctime(target)
    tree.touch(source_at.parent, target_at.parent)
    tree.touch_ctime(source)


def _adopt(place: Last, inode: Inode, parent: Inode) -> None:
    """Give `inode`, until now in `parent`, the name at `place`."""
    place.parent.entries[place.name] = inode
    if inode.is_dir:
        inode.parent = place.parent
        parent.nlink -= 1
        place.parent.nlink += 1

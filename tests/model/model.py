"""The reference file system: what Linux answers on tmpfs, and so what SliceFS must answer.

`ModelFS.run` is the only entry. The verbs are functions of (tree, user, arguments): names in
`names.py`, open files and their bytes in `files.py`, attributes in `attributes.py`.
"""

from __future__ import annotations

import errno
import os
from copy import deepcopy
from typing import assert_never

from tests.model import acls, attributes, files, names, ops as o
from tests.model.inodes import DEFAULT_ACL, FIXED, R, fail, require
from tests.model.ops import Op, Result, User, Value
from tests.model.tree import Sysctls, Tree, Walk


class ModelFS:
    """A file system of dicts. Not for several threads."""

    def __init__(self, sysctls: Sysctls | None = None, flags_last: bool = False) -> None:
        """`flags_last`: as on a FUSE mount, whose kernel judges all it knows, and not flags."""
        self.tree = Tree(sysctls or Sysctls())
        self._flags_last = flags_last
        self.times_open = False  # whether POSIX leaves the times after the last operation open

    def run(self, user: User, op: Op) -> Result:
        """Do `op` as `user`."""
        self.tree.clock += 1
        if not isinstance(op, o.Stamp):
            self.times_open = attributes.leaves_times_open(self.tree, user, op)
        if self._flags_last:
            refused = self._refused(user, op)
            if refused is not None:
                return refused
        try:
            return Result(0, _perform(self.tree, user, op))
        except OSError as error:
            return Result(error.errno or errno.EIO)

    def _refused(self, user: User, op: Op) -> Result | None:
        """What a kernel that knows no flags answers by itself."""
        inodes = {handle.inode for handle in self.tree.handles.values()}
        inodes.update(inode for _, inode in self.tree.paths())
        if not any(inode.flags & FIXED for inode in inodes):
            return None
        tree, copies = deepcopy((self.tree, inodes))
        for inode in copies:
            inode.flags &= ~FIXED
        try:
            _perform(tree, user, op)
            if isinstance(op, o.SetXattr | o.RemoveXattr) and op.name == DEFAULT_ACL:
                is_dir = Walk(tree, user).end(op.path, op.follow).is_dir
                return None if is_dir else Result(0)  # nothing to remove: nobody is asked
        except OSError as error:
            if not _is_servers(op, error.errno):
                if isinstance(op, o.Open):
                    self.tree.handles.pop((user, op.slot), None)  # closed before that
                return Result(error.errno or errno.EIO)
        return None


def _is_servers(op: Op, code: int | None) -> bool:
    """Whether an errno comes from what a FUSE kernel does not know: the file system decides."""
    if isinstance(op, o.SetXattr | o.RemoveXattr) and op.name not in attributes.ACLS:
        return code in (errno.EEXIST, errno.ENODATA, errno.EOPNOTSUPP) or op.name == b"user."
    return code == errno.ENOTEMPTY


def _perform(tree: Tree, user: User, op: Op) -> Value:
    match op:
        case o.Mkdir() | o.Rmdir() | o.Mknod() | o.Symlink() | o.Link() | o.Unlink() | o.Rename():
            _change_names(tree, user, op)
        case o.Open(slot, path, flags, mode, umask):
            files.open_slot(tree, user, slot, path, flags, mode, umask)
        case o.Close(slot):
            files.close(tree, user, slot)
        case o.Read(file, offset, size):
            return files.read(tree, user, file, offset, size)
        case o.Write(file, offset, data):
            return files.write(tree, user, file, offset, data)
        case o.Truncate(file, size):
            files.truncate(tree, user, file, size)
        case o.Fallocate(slot, mode, offset, length):
            files.fallocate(tree, user, slot, mode, offset, length)
        case o.SetXattr() | o.GetXattr() | o.ListXattr() | o.RemoveXattr():
            return _xattr(tree, user, op)
        case o.GetFlags(path):
            return acls.get_flags(files.open_(tree, user, path, os.O_RDONLY).inode)
        case o.SetFlags(path, flags):
            inode = files.open_(tree, user, path, os.O_RDONLY).inode
            acls.set_flags(tree, user, inode, flags)
        case o.Stamp(path):
            inode = Walk(tree, user).end(path, follow=False)
            return o.StampValue(inode.number, inode.mtime, inode.ctime)
        case _:
            return _attribute(tree, user, op)
    return None


def _change_names(
    tree: Tree,
    user: User,
    op: o.Mkdir | o.Rmdir | o.Mknod | o.Symlink | o.Link | o.Unlink | o.Rename,
) -> None:
    match op:
        case o.Mkdir(path, mode, umask):
            names.mkdir(tree, user, path, mode, umask)
        case o.Rmdir(path):
            names.rmdir(tree, user, path)
        case o.Mknod(path, mode, rdev, umask):
            names.mknod(tree, user, path, mode, rdev, umask)
        case o.Symlink(target, path):
            names.symlink(tree, user, target, path)
        case o.Link(old, new):
            names.link(tree, user, old, new)
        case o.Unlink(path):
            names.unlink(tree, user, path)
        case o.Rename(old, new, flags):
            names.rename(tree, user, old, new, flags)
        case _:
            assert_never(op)


def _attribute(
    tree: Tree,
    user: User,
    op: o.Chmod | o.Chown | o.Utimens | o.Stat | o.Access | o.Listdir | o.Readlink,
) -> Value:
    match op:
        case o.Chmod(file, mode):
            attributes.chmod(tree, user, file, mode)
        case o.Chown(path, uid, gid, follow):
            attributes.chown(tree, user, Walk(tree, user).end(path, follow), uid, gid)
        case o.Utimens(path, atime, mtime, follow):
            return attributes.utimens(tree, user, path, atime, mtime, follow)
        case o.Stat(file, follow):
            return attributes.stat_of(files.reach(tree, user, file, follow))
        case o.Access(path, mask):
            require(user, Walk(tree, user).end(path), mask)
        case o.Listdir(path):
            inode = Walk(tree, user).end(path)
            if not inode.is_dir:
                fail(errno.ENOTDIR)
            require(user, inode, R)
            return tuple(sorted(inode.entries))
        case o.Readlink(path):
            inode = Walk(tree, user).end(path, follow=False)
            return inode.target if inode.is_link else fail(errno.EINVAL)
        case _:
            assert_never(op)
    return None


def _xattr(
    tree: Tree, user: User, op: o.SetXattr | o.GetXattr | o.ListXattr | o.RemoveXattr
) -> Value:
    if not isinstance(op, o.ListXattr):
        attributes.check_xattr(op)
    inode = Walk(tree, user).end(op.path, op.follow)
    match op:
        case o.SetXattr(_, name, value, flags):
            attributes.setxattr(tree, user, inode, name, value, flags)
        case o.GetXattr(_, name):
            return attributes.getxattr(user, inode, name)
        case o.ListXattr():
            return attributes.list_xattrs(inode)
        case o.RemoveXattr(_, name):
            attributes.removexattr(tree, user, inode, name)
        case _:
            assert_never(op)
    return None

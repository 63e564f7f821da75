"""rename(2) and renameat2(2): RENAME_NOREPLACE, _EXCHANGE and _WHITEOUT included.

A directory can't end up under itself, however many clients move directories at once: the walk from
the new parent to the root reads every `a` record on the way, and the commit checks them all.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Final, NamedTuple

from fsmeta.ops.names.attach import REPLACEMENT, require_shown
from fsmeta.ops.names.create import NewNode, put_new
from fsmeta.ops.names.remove import drop_dir, drop_name, move_parent_count, require_removable
from fsmeta.rules import access, quota
from fsmeta.rules.context import (
    Env,
    FoundInode,
    check_name,
    fetch,
    find,
    get_parent,
    get_stable,
    put_dentry as put_name,
    require,
    require_unsealed,
    touch_dir,
)
from fsmeta.schema import inode, keys
from fsmeta.schema.trash import TRASH_INO
from fsmeta.txn.txn import Txn
from fsmeta.types import FLAG_ATTACHED, NO_PARENT, ROOT_INO, Attr, FileType, Ino

NOREPLACE: Final = 1
EXCHANGE: Final = 2
WHITEOUT: Final = 4
WHITEOUT_MODE: Final = 0o020000  # a device 0/0 that can't be opened: overlayfs hides a name by it
_FLAGS: Final = (0, NOREPLACE, EXCHANGE, WHITEOUT, WHITEOUT | NOREPLACE)


class DentryLocation(NamedTuple):
    """A name in a directory."""

    parent: Ino
    name: bytes


class Renamed(NamedTuple):
    """What moved, and what had the new name before (after an exchange: what has the old one)."""

    moved: Attr
    replaced: Attr | None


def rename(
    txn: Txn,
    env: Env,
    old: DentryLocation,
    new: DentryLocation,
    flags: int,
    whiteout: NewNode | None = None,
) -> Renamed:
    """Move the name `old` to `new`; what was there is replaced, or trades places (EXCHANGE).

    Out of the trash it may go, not into it. With WHITEOUT the old name leads to `whiteout` then.
    Raises: ENOENT, EEXIST, EISDIR, ENOTDIR, ENOTEMPTY, EINVAL, EACCES, EPERM, EDQUOT, and
    EBUSY where a replacement of an attached file is not for what is there.
    """
    if flags not in _FLAGS or bool(flags & WHITEOUT) != (whiteout is not None):
        raise OSError(errno.EINVAL, f"rename flags {flags:#x}")
    if new.parent >= TRASH_INO or (old.parent >= TRASH_INO and flags not in (0, NOREPLACE)):
        raise OSError(errno.EPERM, "only deleting puts something into the trash")
    require_unsealed(old.parent)
    require_unsealed(new.parent)
    within = old.parent == new.parent
    fetch(txn, (old.parent,) if within else (old.parent, new.parent), (old, new))
    old_dir = get_parent(txn, env, old.parent, access.EXECUTE)
    new_dir = old_dir if within else get_parent(txn, env, new.parent, access.EXECUTE)
    check_name(old.name)
    check_name(new.name)
    source = find(txn, *old)
    if source is None:
        raise OSError(errno.ENOENT, "no such name")
    target = find(txn, *new)
    if flags & NOREPLACE and target is not None:
        raise OSError(errno.EEXIST, "the new name exists")
    if flags == EXCHANGE and target is None:
        raise OSError(errno.ENOENT, "nothing to exchange with")
    if target is not None and source.attr.flags & FLAG_ATTACHED:
        _require_replaceable(txn, target, old.name)
    if not within:
        _require_no_loop(txn, source, target, old, new, flags)
    if target is not None and target.attr.ino == source.attr.ino:
        return Renamed(source.attr, None)
    require_removable(txn, env, old_dir, source.attr)
    if target is None:
        require(txn, env, new_dir, access.WRITE | access.EXECUTE)
    else:
        require_removable(txn, env, new_dir, target.attr)
    if flags == EXCHANGE:
        assert target is not None
        return _exchange(txn, env, source, target, old, new)
    renamed = _replace(txn, env, source, target, old, new)
    if whiteout is not None:
        put_new(txn, env, old_dir, old.parent, old.name, whiteout)
    else:
        txn.delete(keys.dir_row(old.parent), old.name)
    return renamed


def _require_replaceable(txn: Txn, target: FoundInode, name: bytes) -> None:
    """An attached file called `name` replaces another file. Raises: EBUSY."""
    if name.startswith(REPLACEMENT):
        require_shown(txn, target.attr, name)


def _require_no_loop(
    txn: Txn,
    source: FoundInode,
    target: FoundInode | None,
    old: DentryLocation,
    new: DentryLocation,
    flags: int,
) -> None:
    """Raises: EINVAL where a directory would come to lie under itself, ENOTEMPTY as Linux does."""
    if source.type is FileType.DIR and _is_under(txn, new.parent, source.attr.ino):
        raise OSError(errno.EINVAL, "a directory can't move into itself")
    if target is None or target.type is not FileType.DIR:
        return
    if _is_under(txn, old.parent, target.attr.ino):
        code = errno.EINVAL if flags == EXCHANGE else errno.ENOTEMPTY
        raise OSError(code, "the target contains the source")


def _is_under(txn: Txn, directory: Ino, ancestor: Ino) -> bool:
    seen: set[Ino] = set()
    while directory not in seen:
        if directory == ancestor:
            return True
        if directory == ROOT_INO:
            return False
        seen.add(directory)
        directory = get_stable(txn, directory).parent
        if directory == NO_PARENT:
            raise OSError(errno.ENOENT, "a directory above has been removed")
    raise keys.corrupt(directory, keys.ATTR_FIELD, "directories form a loop")


def _replace(
    txn: Txn,
    env: Env,
    source: FoundInode,
    target: FoundInode | None,
    old: DentryLocation,
    new: DentryLocation,
) -> Renamed:
    """What the old name leads to then is for the caller to say."""
    is_dir = source.type is FileType.DIR
    if target is not None:
        if is_dir and target.type is not FileType.DIR:
            raise OSError(errno.ENOTDIR, "the new name is not a directory")
        if not is_dir and target.type is FileType.DIR:
            raise OSError(errno.EISDIR, "the new name is a directory")
    replaced = None
    if target is not None:  # first: what it leaves free may be what a limit needs
        replaced = (
            drop_dir(txn, env, target.attr, *new)
            if is_dir
            else drop_name(txn, env, target.attr, *new)
        )
    moved, counted = _move(txn, env, source, old, new)
    _recount(txn, env, (counted,))
    gone = 1 if is_dir and target is not None else 0
    if old.parent == new.parent:
        touch_dir(txn, old.parent, env.now_ns, -gone)
    else:
        touch_dir(txn, old.parent, env.now_ns, -1 if is_dir else 0)
        touch_dir(txn, new.parent, env.now_ns, (1 if is_dir else 0) - gone)
    return Renamed(moved, replaced)


def _exchange(
    txn: Txn,
    env: Env,
    source: FoundInode,
    target: FoundInode,
    old: DentryLocation,
    new: DentryLocation,
) -> Renamed:
    moved, counted = _move(txn, env, source, old, new)
    back, also = _move(txn, env, target, new, old)
    _recount(txn, env, (counted, also))
    if old.parent == new.parent:
        touch_dir(txn, old.parent, env.now_ns)
    else:
        delta = (target.type is FileType.DIR) - (source.type is FileType.DIR)
        touch_dir(txn, old.parent, env.now_ns, delta)
        touch_dir(txn, new.parent, env.now_ns, -delta)
    return Renamed(moved, back)


class _Counted(NamedTuple):
    """An inode that counts in another directory from now on."""

    attr: Attr
    old: Ino
    new: Ino


def _recount(txn: Txn, env: Env, moves: Iterable[_Counted | None]) -> None:
    """Move usage along; what leaves first may be what a limit needs."""
    known = [each for each in moves if each is not None]
    for each in known:
        quota.leave(txn, env, each.attr, each.old, each.new)
    for each in known:
        quota.arrive(txn, env, each.attr, each.old, each.new)


def _move(
    txn: Txn, env: Env, found: FoundInode, old: DentryLocation, new: DentryLocation
) -> tuple[Attr, _Counted | None]:
    """Give the inode its new name; the old one is the caller's to delete or to give away.

    Returns its new attributes, and what is to be counted elsewhere.
    Raises: EACCES where a directory changes its `..` and the caller may not write to it.
    """
    attr = found.attr
    put_name(txn, new.parent, new.name, found.type, attr.ino)
    row = keys.inode_row(attr.ino)
    moved = attr._replace(ctime_ns=env.now_ns)
    if attr.is_dir:  # names made in it meanwhile change its times and links, and nothing here
        txn.drop_check(row, keys.VOLATILE_FIELD)
    counted = None
    if old.parent != new.parent:
        if attr.is_dir:
            require(txn, env, attr, access.WRITE)
        if attr.parent == NO_PARENT:
            left = move_parent_count(txn, attr.ino, old.parent, -1)
            move_parent_count(txn, attr.ino, new.parent, +1)
            if not left and quota.counts_in(txn, env, attr, old.parent):
                quota.settle(txn, env, attr.ino, new.parent)
                counted = _Counted(attr, old.parent, new.parent)
        else:
            counted = _Counted(attr, old.parent, new.parent)
            moved = moved._replace(parent=new.parent)
            if old.parent >= TRASH_INO:
                txn.delete(row, keys.ORIGIN_FIELD)
            txn.put(row, keys.ATTR_FIELD, inode.pack_attr(moved))
    txn.merge(row, keys.VOLATILE_FIELD, inode.ctime_parts(env.now_ns))
    return moved, counted

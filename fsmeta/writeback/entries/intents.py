"""Intents: what each verb that can be held back was called with, one type for each.

An intent is the tuple of its verb's arguments, after `txn` and `env`: as such an entry's record in
the journal has it, and the verb is run with it again. Made by `log_entry`, from a `Call`.

Threading: none; immutable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from fsmeta.ops.data.ranges import Span
from fsmeta.ops.names.create import NewNode
from fsmeta.ops.names.rename import EXCHANGE, DentryLocation
from fsmeta.types import Caller, FileType, Ino, SetAttr, Slice, SliceId


class CreateIntent(NamedTuple):
    """mknod(2), mkdir(2), symlink(2), open(2) with O_CREAT."""

    parent: Ino
    name: bytes
    node: NewNode

    @property
    def makes_dir(self) -> bool:
        """Whether the new inode is a directory."""
        return FileType.of_mode(self.node.mode) is FileType.DIR


class UnlinkIntent(NamedTuple):
    """unlink(2)."""

    parent: Ino
    name: bytes


class RmdirIntent(NamedTuple):
    """rmdir(2)."""

    parent: Ino
    name: bytes


class RenameIntent(NamedTuple):
    """renameat2(2); one without a whiteout may end before it, as in the journal."""

    old: DentryLocation
    new: DentryLocation
    flags: int
    whiteout: NewNode | None = None


class LinkIntent(NamedTuple):
    """link(2)."""

    ino: Ino
    parent: Ino
    name: bytes


class SetAttrIntent(NamedTuple):
    """chmod(2), chown(2), truncate(2), utimensat(2)."""

    ino: Ino
    want: SetAttr


class SetFlagsIntent(NamedTuple):
    """FS_IOC_SETFLAGS."""

    ino: Ino
    flags: int


class SetXattrIntent(NamedTuple):
    """setxattr(2)."""

    ino: Ino
    name: bytes
    value: bytes
    flags: int
    kill_sgid: bool


class RemoveXattrIntent(NamedTuple):
    """removexattr(2)."""

    ino: Ino
    name: bytes


class WriteIntent(NamedTuple):
    """Slices that are in the store, or will be, and what they make of a file."""

    ino: Ino
    batch: Sequence[tuple[int, Slice]]
    length: int
    mtime_ns: int
    unprivileged: Caller | None


class FallocateIntent(NamedTuple):
    """fallocate(2); one that reserves nothing may end before `reserves`, as in the journal."""

    mode: int
    span: Span
    reserves: bool = False


Intent: TypeAlias = (
    CreateIntent | UnlinkIntent | RmdirIntent | RenameIntent | LinkIntent
    | SetAttrIntent | SetFlagsIntent | SetXattrIntent | RemoveXattrIntent
    | WriteIntent | FallocateIntent
)  # fmt: skip

_KINDS: Final[dict[str, type[Intent]]] = {
    "create": CreateIntent,
    "unlink": UnlinkIntent,
    "rmdir": RmdirIntent,
    "rename": RenameIntent,
    "link": LinkIntent,
    "setattr": SetAttrIntent,
    "setflags": SetFlagsIntent,
    "setxattr": SetXattrIntent,
    "removexattr": RemoveXattrIntent,
    "write": WriteIntent,
    "fallocate": FallocateIntent,
}


def intent_of(name: str, args: Sequence[Any]) -> Intent:
    """The intent of the verb `name`. Raises: TypeError where it takes other arguments."""
    return _KINDS[name](*args)


def plain(intent: Intent) -> tuple[Any, ...]:
    """The arguments as the journal has them."""
    if isinstance(intent, RenameIntent) and intent.whiteout is None:
        return tuple(intent[:-1])
    if isinstance(intent, FallocateIntent) and not intent.reserves:
        return tuple(intent[:-1])
    return tuple(intent)


class Subjects(NamedTuple):
    """Which inodes decide where a verb belongs in the order of things."""

    parents: tuple[Ino, ...]  # directories in which names change
    inos: tuple[Ino, ...]  # inodes that are changed by number
    names: tuple[DentryLocation, ...]  # names that must lead where they did


def subjects(intent: Intent) -> Subjects:
    """What a verb works on."""
    if isinstance(intent, CreateIntent):
        return Subjects((intent.parent,), (), ())
    if isinstance(intent, UnlinkIntent | RmdirIntent):
        name = DentryLocation(intent.parent, intent.name)
        return Subjects((intent.parent,), (), (name,))
    if isinstance(intent, RenameIntent):
        old, new = intent.old, intent.new
        names = (old, new) if intent.flags == EXCHANGE else (old,)
        return Subjects((old.parent, new.parent), (), names)
    if isinstance(intent, LinkIntent):
        return Subjects((intent.parent,), (intent.ino,), ())
    if isinstance(intent, FallocateIntent):
        return Subjects((), (intent.span.ino,), ())
    return Subjects((), (intent.ino,), ())


def slices_of(intent: Intent) -> list[tuple[SliceId, int]]:
    """The slices, (id, size), whose blocks a verb relies on."""
    if not isinstance(intent, WriteIntent):
        return []
    return [(each.id, each.size) for _, each in intent.batch if each.stored]

"""Where operations come from: choices made against the model's state, so that few are wasted.

A `Picker` is a source of small numbers. `Dice` draws them from a seed, for soak loops and the
simulation; `Tape` reads them from a list, for Hypothesis, which shrinks the list. Each choice is an
index into what exists in the model at that moment: directories, files, names, users. The result is
a list of `Step` with literal paths, so a failing list can be cut down step by step.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from hypothesis import strategies

from tests.model import ops as o
from tests.model.acls import NO_ID, pack
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
    SGID,
    USER,
    USER_OBJ,
    Inode,
)
from tests.model.model import ModelFS
from tests.model.ops import NOW, OMIT, ROOT, USERS, Op, Step, Target
from tests.model.tree import Sysctls, Walk

T = TypeVar("T")

SLOTS = 3
_SMALL_TREE = 12  # below so many names, creation is preferred
LONGEST = b"n" * 255
_USERS = (*USERS, ROOT, ROOT)
_NAMES = (b"a", b"b", b"c", b"d", b"e", b"\xff\xfe\n", LONGEST)
_MODES = (0o755, 0o777, 0o700, 0o644, 0o600, 0o070, 0o007, 0o111, 0, 0o1777, 0o2775, 0o2755)
_FILE_MODES = (0o644, 0o666, 0o600, 0o000, 0o4755, 0o2755, 0o6777, 0o2644, 0o060, 0o004)
_IDS = (-1, 0, 60001, 60002, 60100, 60200)
_TIMES = (NOW, OMIT, 0, 1, 10**18 + 123_456_789, 4 * 10**18)
_SIZES = (0, 1, 5, 4096, 5000, 70_000)
_XATTRS = (
    b"user.a",
    b"user.b",
    b"user.a",
    b"user.b",
    b"user." + b"x" * 250,
    b"user.",
    b"other.a",
    b"",
    b"u" * 256,
)
_ACLS = (ACCESS_ACL, ACCESS_ACL, DEFAULT_ACL)
_FLAGS = (0, 0, 0, APPEND, IMMUTABLE, INHERITED, APPEND | 0x80, 1 << 31)
_UMASKS = (0, 0, 0, 0o022, 0o077, 0o777)
_ALLOCATIONS = (0, o.KEEP_SIZE, o.PUNCH_HOLE | o.KEEP_SIZE, o.PUNCH_HOLE)
_DEVICE = os.makedev(4000, 7)  # no driver has it
_OPEN_EXTRAS = (
    0,
    os.O_CREAT,
    os.O_CREAT | os.O_EXCL,
    os.O_TRUNC,
    os.O_CREAT | os.O_TRUNC,
    os.O_APPEND,
    os.O_NOFOLLOW,
    os.O_DIRECTORY,
    os.O_CREAT | os.O_NOFOLLOW,
)


class Picker(Protocol):
    """A source of choices."""

    def below(self, bound: int) -> int:
        """A number in [0, bound); 0 is the plainest choice."""


class Dice:
    """Choices that follow from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, bound: int) -> int:
        return int(self._random() * bound)


class Tape:
    """Choices read from a list; zeros after its end."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = iter(numbers)

    def below(self, bound: int) -> int:
        return next(self._numbers, 0) % bound


class Generator:
    """Makes steps that suit the state they have led to."""

    def __init__(self, sysctls: Sysctls | None = None, fuse: bool = False) -> None:
        """With `fuse`, nothing that depends on groups of which FUSE does not tell its server."""
        self.model = ModelFS(sysctls)
        self._fuse = fuse

    def step(self, picker: Picker) -> Step:
        """The next step; the model has taken it."""
        user = _USERS[picker.below(len(_USERS))]
        step = Step(user, self._decided(_Choice(self.model, picker).op()))
        self.model.run(*step)
        return step

    def _decided(self, op: Op) -> Op:
        """`op`, or another one where the answer is a matter of taste or of mount options.

        Opening a device depends on `nodev`. A truncate(2) to the size that a file has changes its
        mtime on ext4 and not on tmpfs. S_ISGID without group execute goes when somebody writes who
        is not in the file's group.
        """
        if self._fuse:
            op = self._known_to_fuse(op)
        if not isinstance(op, o.Open | o.Read | o.Write | o.Truncate) or not o.paths_of(op):
            return op
        path = o.paths_of(op)[0]
        try:
            inode = Walk(self.model.tree, ROOT).end(path)
        except OSError:
            return op
        if isinstance(op, o.Truncate):
            return op._replace(size=op.size + 1) if inode.size == op.size else op
        device = stat.S_ISCHR(inode.mode) or stat.S_ISBLK(inode.mode)
        return o.Stat(path) if device else op

    def _known_to_fuse(self, op: Op) -> Op:
        """`op`, or another one where the answer depends on what FUSE does not tell.

        It knows no flags when it judges access(2). What takes group execute from a file must not
        leave S_ISGID behind: a chmod, a umask, a default ACL, an ACL.
        """
        tree = self.model.tree
        if isinstance(op, o.Open | o.Mknod | o.Chmod):
            keeps = op.mode & 0o010
            if not isinstance(op, o.Chmod):
                inherits = any(inode.default for _, inode in tree.paths())
                keeps = keeps and not op.umask and not inherits
            return op if keeps else op._replace(mode=op.mode & ~SGID)
        if isinstance(op, o.Access | o.SetXattr):
            try:
                inode = Walk(tree, ROOT).end(op.path)
            except OSError:
                return op
            if isinstance(op, o.Access):
                untold = bool(inode.flags & IMMUTABLE)
            else:
                untold = op.name == ACCESS_ACL and inode.is_reg and bool(inode.mode & SGID)
            return o.Stat(op.path) if untold else op
        return op


class _Choice:
    """One operation in the making."""

    def __init__(self, model: ModelFS, picker: Picker) -> None:
        self._below = picker.below
        self._paths = list(model.tree.paths())

    def op(self) -> Op:
        small = len(self._paths) < _SMALL_TREE and self.chance(60)
        return self.one(_CREATORS if small else _MAKERS)(self)

    def one(self, choices: Sequence[T]) -> T:
        return choices[self._below(len(choices))]

    def chance(self, percent: int) -> bool:
        return self._below(100) >= 100 - percent

    def _existing(self, wanted: Callable[[Inode], bool]) -> bytes:
        """Mostly something that `wanted` likes."""
        liked = [path for path, inode in self._paths if wanted(inode)]
        if not liked or self.chance(10):
            return self.one(self._paths)[0]
        return self.one(liked)

    def _dressed(self, path: bytes) -> bytes:
        """`path`, now and then written in an odd way."""
        if not self.chance(12):
            return path
        name = os.path.basename(path)
        return self.one(
            (
                path + b"/",
                path + b"/.",
                path + b"/..",
                path + b"//" + self.one(_NAMES),
                path + b"/../" + name,
                path.replace(b"/", b"//"),
                path + b"/" + b"n" * 256,
                path + b"/missing/x",
                path.lstrip(b"/"),
                b"/" + LONGEST * 17,
            )
        )

    def directory(self) -> bytes:
        return self._dressed(self._existing(lambda inode: inode.is_dir))

    def file(self) -> bytes:
        return self._dressed(self._existing(lambda inode: inode.is_reg))

    def any(self) -> bytes:
        return self._dressed(self._existing(lambda inode: inode is not self._paths[0][1]))

    def name(self) -> bytes:
        """A name that may or may not be taken."""
        parent = self._existing(lambda inode: inode.is_dir)
        return self._dressed(os.path.join(parent, self.one(_NAMES)))

    def either(self) -> bytes:
        return self.any() if self._below(2) else self.name()

    def slot(self) -> int:
        return self._below(SLOTS)

    def target(self) -> Target:
        return self.file() if self._below(2) else self.slot()

    def data(self) -> bytes:
        return bytes([97 + self._below(26)]) * self.one((1, 3, 10, 4096, 0, 5000))

    def umask(self) -> int:
        return self.one(_UMASKS)

    def acl(self) -> bytes:
        """The value of an ACL; now and then not a valid one."""
        entries = [(USER_OBJ, self.one((7, 6, 0)), NO_ID)]
        if self.chance(50):
            entries.append((USER, self._below(8), self.one((60001, 60002))))
        entries.append((GROUP_OBJ, self.one((7, 5, 0)), NO_ID))
        if self.chance(50):
            entries.append((GROUP, self._below(8), self.one((60100, 60200, 60001))))
        if len(entries) > 2 or self.chance(20):
            entries.append((MASK, self.one((7, 7, 6, 5, 1, 0)), NO_ID))
        entries.append((OTHER, self.one((0, 5, 7)), NO_ID))
        if not self.chance(8):
            return pack(entries)
        odd = self._below(len(entries))
        return self.one(
            (
                b"",
                pack([]),
                pack(entries[:odd] + entries[odd + 1 :]),
                pack(entries[::-1]),
                pack([*entries, entries[odd]]),
                pack(entries)[:-1],
                b"\3" + pack(entries)[1:],
                pack([(tag, perm + 8 * (tag == OTHER), who) for tag, perm, who in entries]),
                pack([*entries, (64, 7, NO_ID)]),
                b"\2",
            )
        )

    def symlink_target(self) -> bytes:
        path = self.either()
        return self.one((path, path[1:], os.path.basename(path), b"../" + path[1:], b".", b""))


def _open(c: _Choice) -> Op:
    flags = c.one((os.O_RDWR, os.O_RDONLY, os.O_WRONLY)) | c.one(_OPEN_EXTRAS)
    path = c.name() if flags & os.O_CREAT else c.file()
    return o.Open(c.slot(), path, flags, c.one(_FILE_MODES), c.umask())


def _mknod(c: _Choice) -> Op:
    kinds = (stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK, 0, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFDIR)
    kind = c.one(kinds)
    device = kind in (stat.S_IFCHR, stat.S_IFBLK)
    return o.Mknod(c.name(), kind | c.one(_FILE_MODES), _DEVICE if device else 0, c.umask())


def _chown(c: _Choice) -> Op:
    """Never (-1, -1): FUSE does not pass that on."""
    uid = c.one(_IDS)
    return o.Chown(c.any(), uid, c.one(_IDS[1:] if uid == -1 else _IDS), not c.chance(30))


def _setxattr(c: _Choice) -> Op:
    flags = c.one((0, 0, os.XATTR_CREATE, os.XATTR_REPLACE, 4))
    return o.SetXattr(c.any(), c.one(_XATTRS), c.data()[:10], flags, not c.chance(20))


def _setacl(c: _Choice) -> Op:
    name = c.one(_ACLS)
    path = c.directory() if name == DEFAULT_ACL else c.any()
    return o.SetXattr(path, name, c.acl(), 0, not c.chance(10))


def _setflags(c: _Choice) -> Op:
    return o.SetFlags(c.any(), c.one(_FLAGS))


def _rename(c: _Choice) -> Op:
    flags = c.one((0, 0, 0, o.RENAME_NOREPLACE, o.RENAME_EXCHANGE, 3))
    return o.Rename(c.any(), c.either(), flags)


def _create(c: _Choice) -> Op:
    flags = c.one((0, os.O_EXCL, os.O_TRUNC)) | os.O_CREAT | os.O_RDWR
    return o.Open(c.slot(), c.name(), flags, c.one(_FILE_MODES), c.umask())


_CREATORS: tuple[Callable[[_Choice], Op], ...] = (
    lambda c: o.Mkdir(c.name(), c.one(_MODES), c.umask()),
    lambda c: o.Mkdir(c.name(), c.one(_MODES)),
    _create,
    _create,
    lambda c: o.Write(c.slot(), c.one(_SIZES), c.data()),
    lambda c: o.Link(c.file(), c.name()),
    lambda c: o.Symlink(c.symlink_target(), c.name()),
    lambda c: o.SetXattr(c.file(), c.one(_XATTRS[:2]), c.data()[:10]),
    _setacl,
    _mknod,
)
_MAKERS: tuple[Callable[[_Choice], Op], ...] = (
    lambda c: o.Mkdir(c.name(), c.one(_MODES)),
    lambda c: o.Mkdir(c.name(), c.one(_MODES)),
    _open,
    _open,
    _open,
    lambda c: o.Write(c.target(), c.one(_SIZES), c.data()),
    lambda c: o.Write(c.target(), c.one(_SIZES), c.data()),
    lambda c: o.Read(c.target(), c.one(_SIZES), c.one(_SIZES)),
    lambda c: o.Close(c.slot()),
    lambda c: o.Truncate(c.target(), c.one((0, 3, 5000, 70_000, -1))),
    lambda c: o.Fallocate(c.slot(), c.one(_ALLOCATIONS), c.one(_SIZES), c.one(_SIZES)),
    lambda c: o.Unlink(c.any()),
    lambda c: o.Unlink(c.file()),
    lambda c: o.Rmdir(c.directory()),
    _rename,
    _rename,
    _rename,
    _rename,
    lambda c: o.Link(c.any(), c.name()),
    lambda c: o.Link(c.file(), c.name()),
    lambda c: o.Symlink(c.symlink_target(), c.name()),
    lambda c: o.Readlink(c.any()),
    _mknod,
    lambda c: o.Chmod(c.any() if c.chance(80) else c.slot(), c.one(_MODES + _FILE_MODES)),
    lambda c: o.Chmod(c.directory(), c.one(_MODES)),
    _chown,
    _chown,
    lambda c: o.Utimens(c.any(), c.one(_TIMES), c.one(_TIMES), not c.chance(20)),
    lambda c: o.Stat(c.either() if c.chance(80) else c.slot(), bool(c.chance(50))),
    lambda c: o.Access(c.any(), c.one((os.R_OK, os.W_OK, os.R_OK | os.W_OK, os.F_OK))),
    lambda c: o.Listdir(c.directory()),
    _setxattr,
    lambda c: o.GetXattr(c.any(), c.one(_XATTRS), not c.chance(20)),
    lambda c: o.ListXattr(c.any(), not c.chance(20)),
    lambda c: o.RemoveXattr(c.any(), c.one(_XATTRS), not c.chance(20)),
    _setacl,
    _setacl,
    lambda c: o.GetXattr(c.any(), c.one(_ACLS), not c.chance(10)),
    lambda c: o.RemoveXattr(c.any(), c.one(_ACLS), not c.chance(10)),
    _setflags,
    lambda c: o.GetFlags(c.either()),
)


def steps_of_seed(
    seed: int, count: int, sysctls: Sysctls | None = None, fuse: bool = False
) -> list[Step]:
    """`count` steps that follow from `seed`."""
    generator, dice = Generator(sysctls, fuse), Dice(seed)
    return [generator.step(dice) for _ in range(count)]


def steps_of_numbers(
    numbers: Sequence[Sequence[int]], sysctls: Sysctls | None = None, fuse: bool = False
) -> list[Step]:
    """One step for each list of numbers."""
    generator = Generator(sysctls, fuse)
    return [generator.step(Tape(some)) for some in numbers]


def step_lists(
    max_steps: int = 60, sysctls: Sysctls | None = None, fuse: bool = False
) -> strategies.SearchStrategy[list[Step]]:
    """The same for Hypothesis: dropping a list drops a step, smaller numbers are plainer steps."""
    number = strategies.integers(0, 255)
    some = strategies.lists(number, min_size=4, max_size=14)
    return strategies.lists(some, min_size=1, max_size=max_steps).map(
        lambda numbers: steps_of_numbers(numbers, sysctls, fuse)
    )

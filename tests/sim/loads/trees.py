"""Each actor in a directory of its own, step by step against the reference model.

Every answer must be the model's. An actor whose call had no answer (a crash, an ended session)
stops; later the tree must be the model's with or without that call, and files that had bytes
nobody was promised may show any of them.
"""

from __future__ import annotations

import copy
import os
import random

from fsmeta.errors import StoreError
from tests.model import ops as o
from tests.model.fsdriver import FsDriver
from tests.model.model import ModelFS
from tests.model.ops import ROOT, Op, Result
from tests.model.tree import Sysctls
from tests.sim.loads import Load
from tests.sim.world.cluster import BLOCK, Node

SLOTS = 2
NAMES = (b"a", b"b", b"c")
SIZES = (1, 100, 5000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK)
OFFSETS = (0, 0, 50, 4000, BLOCK, 2 * BLOCK - 7)
FLAGS = (os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_TRUNC, os.O_WRONLY | os.O_APPEND)
CREATE = os.O_CREAT | os.O_RDWR
VERBS = (
    *("open", "create", "create", "write", "write", "write", "read", "read", "close"),
    *("truncate", "mkdir", "unlink", "rmdir", "rename", "rename", "link", "stat", "list"),
)
PAUSE_S = 0.4


class Own:
    """One actor's directory: the model of it, and the call whose fate is not known."""

    def __init__(self, base: bytes) -> None:
        self.base = base
        self.model = ModelFS(Sysctls())
        self.model.run(ROOT, o.Mkdir(base))
        self.doubt: Op | None = o.Mkdir(base)
        self.dirty: set[int] = set()  # inodes of the model with bytes nobody was promised

    def choose(self, dice: random.Random) -> Op:
        """The next operation, suited to what there is."""
        paths = [item for item in self.model.tree.paths() if item[0] != b"/"]
        dirs = [path for path, inode in paths if inode.is_dir]
        files = [path for path, inode in paths if inode.is_reg] or [self.base + b"/a"]
        name = os.path.join(dice.choice(dirs), dice.choice(NAMES))
        some, slot = dice.choice([*(path for path, _ in paths[1:]), name]), dice.randrange(SLOTS)
        target = dice.choice((slot, slot, dice.choice(files)))
        offset, size = dice.choice(OFFSETS), dice.choice(SIZES)
        match dice.choice(VERBS):
            case "open":
                return o.Open(slot, dice.choice(files), dice.choice(FLAGS))
            case "create":
                return o.Open(slot, name, CREATE | dice.choice((0, os.O_EXCL, os.O_TRUNC)))
            case "write":
                return o.Write(target, offset, dice.randbytes(16) * (size // 16 + 1))
            case "read":
                return o.Read(target, offset, size)
            case "close":
                return o.Close(slot)
            case "truncate":
                return o.Truncate(target, dice.choice((0, offset, size)))
            case "mkdir":
                return o.Mkdir(name)
            case "unlink":
                return o.Unlink(some)
            case "rmdir":
                return o.Rmdir(dice.choice([*dirs[1:], name]))
            case "rename":
                flags = dice.choice((0, 0, o.RENAME_NOREPLACE, o.RENAME_EXCHANGE))
                return o.Rename(some, name, flags)
            case "link":
                return o.Link(some, name)
            case "list":
                return o.Listdir(dice.choice(dirs))
            case _:
                return o.Stat(some)

    def step(self, driver: FsDriver, op: Op) -> None:
        """Do `op` on both and compare. Raises: StoreError, and then `doubt` stays."""
        open_files, paths = self.model.tree.handles, dict(self.model.tree.paths())
        held = open_files.get((ROOT, op.slot)) if isinstance(op, o.Open | o.Close) else None
        closed = {held.inode.number} if held else set()
        touched = set()
        if isinstance(op, o.Open | o.Write | o.Truncate):
            file = op.path if isinstance(op, o.Open) else op.file
            handle = None if isinstance(file, bytes) else open_files.get((ROOT, file))
            inode = paths.get(file) if isinstance(file, bytes) else handle and handle.inode
            touched = {inode.number} if inode else set()
        before = set(self.dirty)
        self.doubt = op
        self.dirty |= touched
        got, expected = driver.run(ROOT, op), self.model.run(ROOT, op)
        assert got == expected, _story(op, got, expected)
        self.doubt = None
        if isinstance(op, o.Write) and not isinstance(op.file, bytes):
            return
        flushed = not isinstance(op, o.Open) or op.flags & os.O_TRUNC
        self.dirty = before - closed - (touched if flushed and not got.errno else set())

    def compare(self, driver: FsDriver, model: ModelFS) -> None:
        """The tree of `driver` is the model's, but for bytes nobody was promised."""
        for path, inode in model.tree.paths():
            if path == b"/":
                continue
            ops: list[Op] = [o.Stat(path)]
            if inode.is_dir:
                ops.append(o.Listdir(path))
            elif inode.number not in self.dirty:
                ops.append(o.Read(path, 0, inode.size + 1))
            for op in ops:
                expected, got = model.run(ROOT, op), driver.run(ROOT, op)
                if inode.number in self.dirty:
                    expected, got = _without_size(expected), _without_size(got)
                assert got == expected, _story(op, got, expected)


def _without_size(result: Result) -> Result:
    value = result.value
    return (
        result._replace(value=value._replace(size=0)) if isinstance(value, o.StatValue) else result
    )


def _story(op: Op, got: Result, expected: Result) -> str:
    return f"{str(op)[:200]}\n  answered {str(got)[:200]}\n  expected {str(expected)[:200]}"


class Trees:
    """See the module."""

    def __init__(self) -> None:
        self._own: list[Own] = []

    def prepare(self, node: Node) -> None:
        """Nothing: each actor makes its own directory."""

    def act(self, node: Node, dice: random.Random, turns: int) -> None:
        own = Own(b"/tree%d" % len(self._own))
        self._own.append(own)
        driver = FsDriver(node.client.vfs)
        try:
            assert driver.run(ROOT, o.Mkdir(own.base)).errno == 0
            own.doubt = None
            for _ in range(turns):
                own.step(driver, own.choose(dice))
                if dice.random() < 0.2:
                    node.process.sleep(dice.random() * PAUSE_S)
            for slot in range(SLOTS):
                own.step(driver, o.Close(slot))
            own.compare(driver, own.model)
        except StoreError:
            self._give_up(driver)

    @staticmethod
    def _give_up(driver: FsDriver) -> None:
        """The rest of the tree waits for `check`; what is open is closed as a kernel would."""
        for slot in range(SLOTS):
            try:
                driver.run(ROOT, o.Close(slot))
            except StoreError:
                pass  # the bytes were in doubt already

    def check(self, node: Node) -> None:
        for own in self._own:
            driver = FsDriver(node.client.vfs)
            born = own.doubt != o.Mkdir(own.base)
            if not born and driver.run(ROOT, o.Stat(own.base)).errno:
                continue
            try:
                own.compare(driver, own.model)
            except AssertionError:
                if own.doubt is None:
                    raise
                model = copy.deepcopy(own.model)
                model.run(ROOT, own.doubt)
                own.compare(driver, model)


def _conforms(load: Trees) -> Load:
    return load

"""P6: kernels that keep what they are told, drop inodes, and send FORGET after they looked again.

A file has one writer, who moves its mtime on. What a kernel believes may be no older than news may
be late, however its LOOKUPs and FORGETs pass each other on their way.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from math import inf
from typing import Final

from fsclient.kernel.cache_leases import SHORT_S
from fsclient.kernel.contract import Notifier
from fsclient.vfs.vfs import VFS
from fsmeta.errors import StoreError
from fsmeta.runtime import Runtime
from fsmeta.types import ROOT_CALLER, Attr, Ino, SetAttr
from tests.sim.loads import Load
from tests.sim.world.cluster import Node, Promise
from tests.sim.world.posix import Posix

DIRECTORY: Final = b"/believed"
FILES: Final = 4
PAUSE_S: Final = 0.3
FORGET_S: Final = 0.5  # how late a FORGET is read at most
SLACK_S: Final = SHORT_S + 1.0  # what is believed without a promise; threads of the process


class _Held:
    """An inode in a kernel."""

    def __init__(self) -> None:
        self.lookups = 0
        self.attr: Attr | None = None
        self.until = -inf


class Kernel:
    """A node's kernel: it keeps attributes of inodes, and looks each name up anew.

    As in Linux, an answer to what was asked before a notification is not believed after it.
    """

    def __init__(self, fs: VFS, runtime: Runtime) -> None:
        self._fs = fs
        self._runtime = runtime
        self._held: dict[Ino, _Held] = {}
        self._version: Counter[Ino] = Counter()  # of attributes, as `fuse_inode.attr_version`

    def stat(self, ino: Ino, parent: Ino, name: bytes) -> Attr:
        """The attributes by which a program goes."""
        held = self._held.get(ino)
        if held is not None and held.attr is not None and self._runtime.monotonic() < held.until:
            return held.attr
        version = self._version[ino]
        if held is not None and held.lookups % 2:  # now this, now that
            quick = self._fs.fast_lane.stat(ino)
            attr, ttl = quick or self._fs.getattr(ROOT_CALLER, ino, None)
        else:
            found, _, ttl = self._fs.lookup(ROOT_CALLER, parent, name)
            assert found is not None
            attr = found
            held = self._held.setdefault(ino, _Held())
            held.lookups += 1
        if self._version[ino] == version:
            self._learn(held, attr, ttl)
        return attr

    def setattr(self, ino: Ino, want: SetAttr) -> None:
        attr, ttl = self._fs.setattr(ROOT_CALLER, ino, want, None)
        self._version[ino] += 1
        if ino in self._held:
            self._learn(self._held[ino], attr, ttl)

    def _learn(self, held: _Held, attr: Attr, ttl: float) -> None:
        held.attr, held.until = attr, self._runtime.monotonic() + ttl

    def reclaim(self, ino: Ino, late_s: float) -> None:
        """Drop an inode; the file system reads of it later."""
        held = self._held.pop(ino, None)
        if held is None:
            return

        def forget() -> None:
            self._runtime.sleep(late_s)
            self._fs.forget(ino, held.lookups)

        self._runtime.spawn("forget", forget)

    def inval_inode(self, ino: Ino) -> None:
        self.inval_attr(ino)

    def reload(self, ino: Ino) -> None:
        self.inval_attr(ino)

    def inval_pages(self, ino: Ino, begin: int, end: int) -> None:
        del begin, end
        self.inval_attr(ino)

    def inval_attr(self, ino: Ino) -> None:
        self._version[ino] += 1
        if ino in self._held:
            self._held[ino].until = -inf

    def inval_entry(self, parent: Ino, name: bytes) -> None: ...

    def inval_all(self) -> bool:
        return True


class Believers:
    """See the module."""

    def __init__(self) -> None:
        self._kernels: dict[Node, Kernel] = {}
        self._parent = Ino(0)
        self._inos: list[Ino] = []
        self._mtimes = [Promise() for _ in range(FILES)]  # in seconds
        self._unowned = list(range(FILES))

    def prepare(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        posix.mkdir(DIRECTORY)
        self._parent = posix.stat(DIRECTORY).ino
        for number in range(FILES):
            posix.open(DIRECTORY + b"/f%d" % number, os.O_CREAT | os.O_WRONLY).close()
            self._inos.append(posix.stat(DIRECTORY + b"/f%d" % number).ino)

    def _kernel_of(self, node: Node) -> Kernel:
        if node not in self._kernels:
            self._kernels[node] = Kernel(node.client.vfs, node.process)
            node.client.vfs.coherence.start(self._kernels[node])
        return self._kernels[node]

    def act(self, node: Node, dice: random.Random, turns: int) -> None:
        kernel = self._kernel_of(node)
        mine = self._unowned.pop() if self._unowned else None
        for _ in range(turns):
            number = dice.randrange(FILES)
            deed = dice.random()
            try:
                if deed < 0.3:
                    kernel.reclaim(self._inos[number], dice.random() * FORGET_S)
                elif deed < 0.5 and mine is not None:
                    if not self._write(kernel, node, mine):
                        mine = None
                else:
                    self._read(kernel, node, number)
            except StoreError:
                continue
            node.process.sleep(dice.random() * PAUSE_S)

    def _write(self, kernel: Kernel, node: Node, number: int) -> bool:
        """False where the change may come later, even after another one."""
        value = self._mtimes[number].value + 1
        try:
            kernel.setattr(self._inos[number], SetAttr(mtime_ns=value * 10**9))
        except StoreError:
            return False
        self._mtimes[number].raise_to(value, node.now())
        return True

    def _read(self, kernel: Kernel, node: Node, number: int) -> None:
        least = self._mtimes[number].by(node.informed() - SLACK_S)
        attr = kernel.stat(self._inos[number], self._parent, b"f%d" % number)
        seen = attr.mtime_ns // 10**9
        assert seen >= least, f"file {number} is at {least}, and {node.name} believes {seen}"

    def check(self, node: Node) -> None:
        node.process.sleep(SLACK_S)
        for each, kernel in self._kernels.items():
            if not each.crashed:
                for number in range(FILES):
                    self._read(kernel, each, number)


_CONFORMS: tuple[type[Load], type[Notifier]] = (Believers, Kernel)

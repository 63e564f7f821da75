"""T2: snapshots and clones of a tree that others change all the time, by clients that may die.

Writers make each number in `a` before they make it in `b`, and remove it from `b` first, so at any
moment all that is in `b` is in `a`. A snapshot that says it is of one moment must say so, too, and
say it again later. A clone is of no moment, but whole or not there.
"""

from __future__ import annotations

import errno
import random

from fsmeta.admin import snapshots
from fsmeta.admin.clones import CloneBuilder
from fsmeta.admin.snapshots import Taker
from fsmeta.errors import StoreError
from fsmeta.schema.snapshot_inos import snapshot_dir_of
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino
from tests.sim.loads import Load
from tests.sim.world.cluster import Node
from tests.sim.world.posix import Posix

TOP, FIRST, SECOND = b"/top", b"/top/a", b"/top/b"
PAUSE_S = 2.0  # so that some of the snapshots are of one moment


class Snaps:
    """See the module."""

    def __init__(self) -> None:
        self._actors = 0
        self._numbers = 0
        self._top = Ino(0)
        self._kept: dict[Ino, tuple[frozenset[bytes], frozenset[bytes]]] = {}  # root → a, b

    def prepare(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        for path in (TOP, FIRST, SECOND):
            while not posix.exists(path):
                try:
                    posix.mkdir(path)
                except (StoreError, FileExistsError):
                    pass
        self._top = posix.stat(TOP).ino

    def act(self, node: Node, dice: random.Random, turns: int) -> None:
        self._actors += 1
        takes = self._actors
        for turn in range(turns):
            try:
                if takes % 2 and turn % 2:
                    self._take(node, dice, b"%d-%d" % (takes, turn))
                else:
                    self._write(Posix(node.client.vfs), dice)
            except (StoreError, FileNotFoundError, FileExistsError):
                pass  # what became of it is open, and both rules hold
            except OSError as error:  # others took us for dead
                assert error.errno in (errno.ECANCELED, errno.ESTALE), error
            node.process.sleep(dice.random() * PAUSE_S)

    def _write(self, posix: Posix, dice: random.Random) -> None:
        self._numbers += 1
        name = b"/%d" % self._numbers
        for directory in (FIRST, SECOND):
            posix.mkdir(directory + name)
        if dice.random() < 0.7:
            return
        for directory in (SECOND, FIRST):
            posix.rmdir(directory + name)

    def _take(self, node: Node, dice: random.Random, name: bytes) -> None:
        meta, process = node.client.meta, node.process
        if dice.random() < 0.2:
            CloneBuilder(meta, ROOT_CALLER, True, lambda: False).build(self._top, ROOT_INO, name)
            return
        taker = Taker(meta, ROOT_CALLER, process.now_ns, lambda: False)
        made = taker.take(self._top, name)
        shown = self._shown(node, made.root)
        if made.changed == 0:
            assert shown[1] <= shown[0], f"{name!r} shows no moment that there was: {shown}"
        self._kept[made.root] = shown
        if dice.random() < 0.3:
            self._kept.pop(made.root)
            snapshots.remove(meta, ROOT_CALLER, snapshot_dir_of(self._top), name)

    def _shown(self, node: Node, root: Ino) -> tuple[frozenset[bytes], frozenset[bytes]]:
        meta = node.client.meta
        found = []
        for name in (b"a", b"b"):
            ino = meta.lookup(ROOT_CALLER, root, name).ino
            names, cursor = meta.names(ino)
            shown = {each.name for each in names}
            while cursor is not None:
                names, cursor = meta.names(ino, cursor)
                shown.update(each.name for each in names)
            found.append(frozenset(shown))
        return found[0], found[1]

    def check(self, node: Node) -> None:
        """What was seen once is still so, and one that is taken in peace is of one moment; then all
        goes, as the cluster demands.
        """
        meta = node.client.meta
        last = Taker(meta, ROOT_CALLER, node.process.now_ns, lambda: False).take(self._top, b"last")
        assert last.changed == 0
        self._kept[last.root] = self._shown(node, last.root)
        for each in snapshots.listing(meta):
            if each.root in self._kept:
                assert self._shown(node, each.root) == self._kept.pop(each.root), each
            snapshots.remove(meta, ROOT_CALLER, snapshot_dir_of(self._top), each.name)
        assert not self._kept, "snapshots that were answered are gone"


def _conforms(load: Snaps) -> Load:
    return load

"""O6: actors make, rewrite, grow, delete and copy many small files, and read each other's.

No two versions of any files have the same bytes, so a part of a segment that is shown in a wrong
place is noticed. An actor knows what its files hold; of others it may read any version that there
was, or an empty file. After an error whose outcome is open it makes that file anew.
"""

from __future__ import annotations

import os
import random

from fsmeta.errors import StoreError
from tests.sim.loads import Load
from tests.sim.world.cluster import Node
from tests.sim.world.posix import Posix

FILES = 12  # of an actor
SIZES = (40, 300, 900, 2500, 6000)
PAUSE_S = 1.5


class Smalls:
    """See the module."""

    def __init__(self) -> None:
        self._actors = 0
        self._versions = 0
        self._held: dict[bytes, bytes | None] = {}  # None: not known
        self._issued: dict[bytes, list[bytes]] = {}

    def prepare(self, node: Node) -> None:
        """Nothing: each actor makes its files."""

    def act(self, node: Node, dice: random.Random, turns: int) -> None:
        self._actors += 1
        mine = [b"/small%d-%d" % (self._actors, number) for number in range(FILES)]
        posix = Posix(node.client.vfs)
        for path in mine:
            self._do(posix, dice, path, 0)
        for _ in range(turns):
            if dice.random() < 0.4:
                self._look(posix, dice.choice(list(self._issued)))
            else:
                self._do(posix, dice, dice.choice(mine), dice.randrange(6))
            if dice.random() < 0.4:
                node.process.sleep(dice.random() * PAUSE_S)

    def _do(self, posix: Posix, dice: random.Random, path: bytes, what: int) -> None:
        known = self._held.get(path)
        self._held[path] = None  # until it is known
        try:
            if known is None:
                if posix.exists(path):
                    posix.unlink(path)
                known = b""
            if what == 5:
                if posix.exists(path):
                    posix.unlink(path)
                known = b""
            else:
                known = self._change(posix, dice, path, known, what)
        except StoreError:
            return
        except FileNotFoundError:
            assert not known, path
            known = b""
        self._held[path] = known

    def _change(
        self, posix: Posix, dice: random.Random, path: bytes, known: bytes, what: int
    ) -> bytes:
        """Write the file, or read it; what it holds."""
        if what == 4 and known:
            file = posix.open(path)
            try:
                assert file.read(0, 10_000) == known, path
            finally:
                file.close()
            return known
        grows = what == 3 and known != b""
        self._versions += 1
        new = b"%07d|" % self._versions * (dice.choice(SIZES) // 8)
        flags = os.O_RDWR | os.O_CREAT | (0 if grows else os.O_TRUNC)
        held = known + new if grows else new
        self._issued.setdefault(path, [b""]).append(held)
        file = posix.open(path, flags)
        try:
            file.write(len(known) if grows else 0, new)
            if dice.random() < 0.2:
                file.fsync()
        finally:
            file.close()
        return held

    def _look(self, posix: Posix, path: bytes) -> None:
        """Read somebody's file."""
        try:
            file = posix.open(path)
            try:
                got = file.read(0, 20_000)
            finally:
                file.close()
        except (StoreError, FileNotFoundError):
            return
        issued = self._issued[path]
        assert any(each.startswith(got) for each in issued), (path, got[:40], len(got))

    def check(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        for path, held in self._held.items():
            if held:
                file = posix.open(path)
                assert file.read(0, 20_000) == held, path
                file.close()


def _conforms(load: Smalls) -> Load:
    return load

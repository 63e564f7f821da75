"""P4, T2: actors copy ranges between files of their own and from one that all know, and reserve.

Each knows what its files hold; after an error whose outcome is open it begins that file anew. That
every slice goes when its last user does, and not before, is judged with the cluster.
"""

from __future__ import annotations

import os
import random

from fsmeta.errors import StoreError
from fsmeta.ops.data.ranges import KEEP_SIZE, ZERO_RANGE
from tests.fsdata.world import pattern
from tests.sim.loads import Load
from tests.sim.world.cluster import BLOCK, Node
from tests.sim.world.posix import File, Posix

OWN = 3  # files of an actor
SPAN = 3 * BLOCK
BASE = pattern(SPAN, 13)
BASE_PATH = b"/base"
PAUSE_S = 0.5


class Shares:
    """See the module."""

    def __init__(self) -> None:
        self._actors = 0
        self._held: dict[bytes, bytearray | None] = {}  # None: not known

    def prepare(self, node: Node) -> None:
        while not self._make(Posix(node.client.vfs)):
            pass

    @staticmethod
    def _make(posix: Posix) -> bool:
        try:
            file = posix.open(BASE_PATH, os.O_CREAT | os.O_RDWR)
            try:
                file.write(0, BASE)
            finally:
                file.close()
        except StoreError:
            return False
        return True

    def act(self, node: Node, dice: random.Random, turns: int) -> None:
        self._actors += 1
        mine = [b"/share%d-%d" % (self._actors, number) for number in range(OWN)]
        posix = Posix(node.client.vfs)
        for _ in range(turns):
            path = dice.choice(mine)
            try:
                self._step(posix, dice, path, dice.choice([*mine, BASE_PATH]))
            except StoreError:
                self._held[path] = None
            except FileNotFoundError:
                assert not self._held.get(path), path
                self._held.pop(path, None)
            if dice.random() < 0.2:
                node.process.sleep(dice.random() * PAUSE_S)

    def _step(self, posix: Posix, dice: random.Random, path: bytes, source: bytes) -> None:
        known = self._held.get(path)
        if known is None or dice.random() < 0.1:
            self._held[path] = None
            if posix.exists(path):
                posix.unlink(path)
            posix.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR).close()
            known = self._held[path] = bytearray()
        held: bytearray = bytearray(known)
        self._held[path] = None  # until it is known
        file = posix.open(path, os.O_RDWR)
        try:
            self._change(posix, dice, file, held, path, source)
            size = max(1, len(held))
            at = dice.randrange(size)
            assert file.read(at, size) == held[at:], path
        finally:
            file.close()
        self._held[path] = held

    def _change(
        self,
        posix: Posix,
        dice: random.Random,
        file: File,
        held: bytearray,
        path: bytes,
        source: bytes,
    ) -> None:
        what = dice.randrange(7)
        begin, at, length = (dice.randrange(SPAN) for _ in range(3))
        if what < 3:
            content = BASE if source == BASE_PATH else self._held.get(source)
            if content is None or source == path:
                return
            other = posix.open(source)
            try:
                done = other.copy(file, begin, at, length)
            finally:
                other.close()
            want = content[begin : begin + length]
            assert done == len(want), (path, source)
            _put(held, at, want)
        elif what == 3:
            file.write(at, BASE[: length % 5000])
            _put(held, at, BASE[: length % 5000])
        elif what == 4:
            file.punch(at, length + 1)
            hidden = len(held[at : at + length + 1])
            held[at : at + length + 1] = bytes(hidden)
        elif what == 5:
            mode = dice.choice((0, KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE))
            file.reserve(mode, at, length + 1)
            if mode & ZERO_RANGE:
                held[at : at + length + 1] = bytes(len(held[at : at + length + 1]))
            if not mode & KEEP_SIZE:
                held.extend(bytes(max(0, at + length + 1 - len(held))))
        else:
            file.truncate(at)
            del held[at:]
            held.extend(bytes(at - len(held)))

    def check(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        for path, held in self._held.items():
            if held is not None:
                file = posix.open(path)
                assert file.read(0, SPAN * 3) == held, path
                file.close()


def _put(held: bytearray, at: int, data: bytes | bytearray) -> None:
    if data:
        held.extend(bytes(max(0, at - len(held))))
        held[at : at + len(data)] = data


def _conforms(load: Shares) -> Load:
    return load

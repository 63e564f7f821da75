"""P4: several clients append records to the same files.

A record that was stored is in its file exactly once, another one at most once; each is whole, and
those of one actor are in their order.
"""

from __future__ import annotations

import os
import random
import struct
from collections import Counter

from fsmeta.errors import StoreError
from tests.fsdata.world import pattern
from tests.sim.loads import Load
from tests.sim.world.cluster import BLOCK, Node
from tests.sim.world.posix import Posix

FILES = 2
SIZES = (0, 1, 700, 5000, BLOCK + 1)
PATTERN = pattern(BLOCK + 1, 11)
PAUSE_S = 0.8
_HEAD = struct.Struct("<4sIII")  # magic, actor, number, bytes that follow
_MAGIC = b"REC!"


class Appends:
    """See the module."""

    def __init__(self) -> None:
        self._actors = 0
        self._issued: dict[bytes, set[tuple[int, int]]] = {}
        self._stored: dict[bytes, set[tuple[int, int]]] = {}

    def prepare(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        for number in range(FILES):
            path = b"/appends%d" % number
            self._issued[path], self._stored[path] = set(), set()
            while not self._make(posix, path):
                pass

    @staticmethod
    def _make(posix: Posix, path: bytes) -> bool:
        try:
            posix.open(path, os.O_CREAT | os.O_WRONLY).close()
        except StoreError:
            return False
        return True

    def act(self, node: Node, dice: random.Random, turns: int) -> None:
        self._actors += 1
        actor, number = self._actors, 0
        posix = Posix(node.client.vfs)
        while turns > 0:
            path = dice.choice(list(self._issued))
            waiting: set[tuple[int, int]] = set()
            turns -= 1
            try:
                file = posix.open(path, os.O_WRONLY | os.O_APPEND)
                try:
                    for _ in range(dice.randrange(1, 6)):
                        number, turns = number + 1, turns - 1
                        size = dice.choice(SIZES)
                        self._issued[path].add((actor, number))
                        head = _HEAD.pack(_MAGIC, actor, number, size)
                        file.append(head + PATTERN[:size])
                        waiting.add((actor, number))
                        if dice.random() < 0.3:
                            file.fsync()
                            self._stored[path] |= waiting
                        if dice.random() < 0.3:
                            node.process.sleep(dice.random() * PAUSE_S)
                finally:
                    file.close()
                self._stored[path] |= waiting
            except StoreError:
                pass

    def check(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        for path, issued in self._issued.items():
            file = posix.open(path)
            content = file.read(0, file.size())
            file.close()
            found = Counter(_records(content))
            assert not [each for each, count in found.items() if count > 1], path
            assert found.keys() <= issued, path
            lost = self._stored[path] - found.keys()
            assert not lost, (path, sorted(lost))
            for actor in {actor for actor, _ in found}:
                numbers = [number for who, number in found if who == actor]
                assert numbers == sorted(numbers), (path, actor)


def _records(content: bytes) -> list[tuple[int, int]]:
    """Actor and number of each, in order."""
    out: list[tuple[int, int]] = []
    at = 0
    while at < len(content):
        magic, actor, number, size = _HEAD.unpack_from(content, at)
        assert magic == _MAGIC, f"no record at {at}"
        at += _HEAD.size
        assert content[at : at + size] == PATTERN[:size], f"a torn record at {at}"
        at += size
        out.append((actor, number))
    return out


def _conforms(load: Appends) -> Load:
    return load

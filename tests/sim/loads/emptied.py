"""M6: records that are written to files which others empty, compact and read meanwhile.

Some files are appended to, in others each actor has a place of its own. A record is there at most
once. What was in the file when somebody emptied it does not come back: what was stored by then, or
what another client had read by then. What was written after that, and stored, is there.
"""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from math import inf

from fsmeta.errors import ObjectMissing, StoreError
from fsmeta.types import Ino
from tests.fsdata.world import pattern
from tests.sim.loads import Load
from tests.sim.world.cluster import BLOCK, Node
from tests.sim.world.posix import File, Posix

FILES = 4
SIZES = (64, 700, BLOCK + 1)
PAUSE_S = 1.0
TRIES = 4  # to have stored what was written
LATE_S = 1.0  # what a network has kept back arrives
_HEAD = struct.Struct("<4sII")  # magic, actor, number
_MAGIC = b"EMP!"
_PATTERN = pattern(BLOCK + 1, 13)

_Record = tuple[int, int]  # actor and number


class _Emptied:
    """One file, and what is known of its records."""

    def __init__(self, path: bytes, appended: bool, size: int) -> None:
        self.path = path
        self.appended = appended
        self.size = size  # of a record
        self.ino = Ino(0)
        self.stored: dict[_Record, float] = {}  # since when they were being written
        self.seen: set[_Record] = set()  # by clients that had not written them
        self.gone: set[_Record] = set()
        self.emptied = -inf  # when somebody has tried to last

    def record(self, record: _Record) -> bytes:
        return _HEAD.pack(_MAGIC, *record) + _PATTERN[: self.size - _HEAD.size]

    def found(self, content: bytes) -> list[_Record]:
        """The records that are whole, in order."""
        out = []
        for at in range(0, len(content), self.size):
            each = content[at : at + self.size]
            if any(each):
                magic, actor, number = _HEAD.unpack_from(each)
                assert magic == _MAGIC, (self.path, at)
                assert each == self.record((actor, number)), (self.path, at)
                out.append((actor, number))
        return out


class Emptied:
    """See the module."""

    def __init__(self, dice: random.Random) -> None:
        self._files = [
            _Emptied(b"/emptied%d" % number, number % 2 == 0, dice.choice(SIZES))
            for number in range(FILES)
        ]
        self._homes: dict[int, Node] = {}  # of actors

    def prepare(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        for each in self._files:
            file = posix.open(each.path, os.O_CREAT | os.O_RDWR)
            each.ino = file.ino
            file.close()

    def act(self, node: Node, dice: random.Random, turns: int) -> None:
        actor = len(self._homes)
        self._homes[actor] = node
        number = 0
        for _ in range(turns):
            each = dice.choice(self._files)
            verb = dice.choice(("write", "write", "write", "empty", "compact", "read", "read"))
            try:
                if verb == "write":
                    number += 3
                    records = [(actor, number + step) for step in range(dice.randrange(1, 4))]
                    self._write(node, dice, each, records)
                elif verb == "empty":
                    self._empty(node, each)
                elif verb == "compact":
                    node.client.background.compact(each.ino, 0)
                else:
                    self._read(node, each)
            except ObjectMissing:
                if verb == "read":
                    raise
            except StoreError:
                pass
            node.process.sleep(dice.random() * PAUSE_S)

    def _write(
        self, node: Node, dice: random.Random, each: _Emptied, records: list[_Record]
    ) -> None:
        begun = node.now()
        flags = os.O_WRONLY | (os.O_APPEND if each.appended else 0)
        file = Posix(node.client.vfs).open(each.path, flags)
        try:
            for record in records:
                if each.appended:
                    file.append(each.record(record))
                else:
                    file.write(record[0] * each.size, each.record(record))
                node.process.sleep(dice.random() * PAUSE_S)
            if self._is_stored(node, dice, file):
                each.stored.update(dict.fromkeys(records, begun))
        finally:
            file.close()

    @staticmethod
    def _is_stored(node: Node, dice: random.Random, file: File) -> bool:
        """fsync(2), again and again, as some programs do."""
        for _ in range(TRIES):
            try:
                file.fsync()
            except StoreError:
                node.process.sleep(dice.choice((0.1, 1, 20)) * dice.random())
                continue
            return True
        return False

    def _empty(self, node: Node, each: _Emptied) -> None:
        there = each.seen | each.stored.keys()
        try:
            file = Posix(node.client.vfs).open(each.path, os.O_WRONLY | os.O_TRUNC)
        finally:
            each.emptied = node.now()
        each.gone |= there
        file.close()

    def _read(self, node: Node, each: _Emptied) -> None:
        file = Posix(node.client.vfs).open(each.path)
        try:
            content = file.read(0, file.size())
        finally:
            file.close()
        whole = len(content) // each.size * each.size
        found = each.found(content[:whole])
        each.seen |= {record for record in found if self._homes[record[0]] is not node}

    def check(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        for each in self._files:
            file = posix.open(each.path)
            content = file.read(0, file.size())
            file.close()
            assert not each.appended or len(content) % each.size == 0, each.path
            found = Counter(each.found(content))
            assert not [record for record, count in found.items() if count > 1], each.path
            assert not each.gone & found.keys(), (each.path, "came back")
            for record, when in each.stored.items():
                if when > each.emptied + LATE_S and not self._is_there(each, record, found):
                    raise AssertionError((each.path, record, when, "is lost"))

    @staticmethod
    def _is_there(each: _Emptied, record: _Record, found: Counter[_Record]) -> bool:
        """Whether a record is in a file, or one that was written over it."""
        actor, number = record
        if each.appended:
            return record in found
        return any(who == actor and later >= number for who, later in found)


def _conforms(load: Emptied) -> Load:
    return load

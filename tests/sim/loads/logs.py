"""One writer appends to a log; others read it. What a log holds at a place is known beforehand.

A reader sees a beginning of what was written, as long at least as what was durable when it opened
the file; after a crash that is all that may be left of it.
"""

from __future__ import annotations

import os
import random

from fsmeta.errors import StoreError
from tests.fsdata.world import pattern
from tests.sim.loads import Load
from tests.sim.world.cluster import BLOCK, Node, Promise
from tests.sim.world.posix import File, Posix

SIZES = (1, 700, 5000, BLOCK - 3, BLOCK, 2 * BLOCK + 1)
PATTERN = pattern(1 << 20, 7)
READ = 150_000  # bytes of one read
PAUSE_S = 0.8


class _Log:
    """A log: `issued` bytes may be in it, `durable` ones must be."""

    def __init__(self, number: int) -> None:
        self.path = b"/log%d" % number
        self.shift = 1009 * number  # each log has other bytes
        self.issued = 0
        self.durable = Promise()

    def bytes(self, begin: int, end: int) -> bytes:
        return PATTERN[begin + self.shift : end + self.shift]


class Logs:
    """See the module."""

    def __init__(self) -> None:
        self._logs: list[_Log] = []

    def prepare(self, node: Node) -> None:
        """Nothing: each writer makes its log."""

    def act(self, node: Node, dice: random.Random, turns: int) -> None:
        if not self._logs or dice.random() < 0.5:
            self._write(node, dice, turns)
        else:
            self._read(node, dice, turns)

    def _write(self, node: Node, dice: random.Random, turns: int) -> None:
        posix = Posix(node.client.vfs)
        log = _Log(len(self._logs))
        self._logs.append(log)
        while turns > 0:
            floor = log.durable.value  # nobody else writes it, so no news are needed
            try:
                file = posix.open(log.path, os.O_CREAT | os.O_RDWR)
            except StoreError:
                turns -= 1
                continue
            turns = self._append(node, dice, turns, log, file, floor)

    def _append(
        self, node: Node, dice: random.Random, turns: int, log: _Log, file: File, floor: int
    ) -> int:
        """One open of the log; how many turns are left."""
        try:
            try:
                end = file.size()
                assert floor <= end <= log.issued, (log.path, floor, end, log.issued)
                for _ in range(dice.randrange(1, 8)):
                    turns -= 1
                    end = self._append_one(node, dice, log, file, end)
                    if dice.random() < 0.3:
                        node.process.sleep(dice.random() * PAUSE_S)
            finally:
                file.close()
            log.durable.raise_to(end, node.now())
        except StoreError:
            turns -= 1
        return turns

    def _append_one(self, node: Node, dice: random.Random, log: _Log, file: File, end: int) -> int:
        size = dice.choice(SIZES)
        if end + size + log.shift > len(PATTERN):
            return end
        log.issued = max(log.issued, end + size)
        file.write(end, log.bytes(end, end + size))
        end += size
        if dice.random() < 0.3:
            file.fsync()
            log.durable.raise_to(end, node.now())
        begin = dice.randrange(end)
        assert file.read(begin, READ) == log.bytes(begin, min(end, begin + READ)), log.path
        return end

    def _read(self, node: Node, dice: random.Random, turns: int) -> None:
        posix = Posix(node.client.vfs)
        while turns > 0:
            log = dice.choice(self._logs)
            floor = log.durable.by(node.informed())
            try:
                file = posix.open(log.path)
                try:
                    for _ in range(dice.randrange(1, 5)):
                        turns -= 1
                        begin = dice.randrange(max(1, log.issued))
                        self._judge(log, begin, file.read(begin, READ), floor)
                        node.process.sleep(dice.random() * PAUSE_S)
                finally:
                    file.close()
            except FileNotFoundError:
                assert not floor, log.path
                turns -= 1
            except StoreError:
                turns -= 1

    @staticmethod
    def _judge(log: _Log, begin: int, got: bytes, floor: int) -> None:
        assert got == log.bytes(begin, begin + len(got)), f"wrong bytes in {log.path!r} at {begin}"
        end = begin + len(got)
        assert end <= max(begin, log.issued), log.path
        assert end >= min(floor, begin + READ), f"{log.path!r} ends at {end}, {floor} were durable"

    def check(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        for log in self._logs:
            if not log.durable.value and not posix.exists(log.path):
                continue
            file = posix.open(log.path)
            for begin in range(0, log.issued + 1, READ):
                self._judge(log, begin, file.read(begin, READ), log.durable.value)
            file.close()


def _conforms(load: Logs) -> Load:
    return load

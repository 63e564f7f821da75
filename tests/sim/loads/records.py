"""Files of records, rewritten in place and read by all clients, while others compact them.

Each record has one writer. A record is one small cell again and again, a cell says which file,
record and version it is of. A reader must find versions that are not older than what was durable
when it opened the file, and a client must find what it has itself written.
"""

from __future__ import annotations

import os
import random
import struct

from fsmeta.errors import ObjectMissing, StoreError
from fsmeta.types import CHUNK_BYTES, Ino
from tests.sim.loads import Load
from tests.sim.world.cluster import BLOCK, Node, Promise
from tests.sim.world.posix import File, Posix

_CELL = struct.Struct(">HHI")  # file, record, version
ZERO = bytes(_CELL.size)
FILES = 2
RECORDS = 5
SIZES = (64, 4096, 20_000, BLOCK + 8)
BASES = (0, 0, CHUNK_BYTES - 3 * 4096)  # the last makes records of 4096 lie in two chunks
PAUSE_S = 0.6


class _Record:
    """What one record has been, and is."""

    def __init__(self) -> None:
        self.states = [ZERO]
        self.durable = (
            Promise()
        )  # index of the state that every later open must see, or a newer one
        self.owner: object = None  # the actor that writes it


class _RecordFile:
    """One file."""

    def __init__(self, number: int, dice: random.Random) -> None:
        self.number = number
        self.path = b"/records%d" % number
        self.size = dice.choice(SIZES) // _CELL.size * _CELL.size
        self.base = dice.choice(BASES)
        self.records = [_Record() for _ in range(RECORDS)]
        self.ino = Ino(0)

    def at(self, record: int) -> int:
        return self.base + record * self.size

    def chunks(self) -> range:
        return range(self.base // CHUNK_BYTES, self.at(RECORDS) // CHUNK_BYTES + 1)

    def judge(self, record: int, data: bytes, floor: int) -> None:
        """`data` is what was read of a record; states before `floor` are too old."""
        data += bytes(self.size - len(data))
        allowed = self.records[record].states[floor:]
        if data == allowed[-1] * (self.size // _CELL.size):
            return
        cells = {data[at : at + _CELL.size] for at in range(0, self.size, _CELL.size)}
        wrong = cells - set(allowed)
        assert not wrong, (
            f"{self.path!r} record {record} has {sorted(cells)}, "
            f"states are {allowed} from {floor} of {self.records[record].states}"
        )


class Records:
    """See the module."""

    def __init__(self, dice: random.Random) -> None:
        self._files = [_RecordFile(number, dice) for number in range(FILES)]

    def prepare(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        for each in self._files:
            file = posix.open(each.path, os.O_CREAT | os.O_RDWR)
            each.ino = file.ino
            file.close()

    def act(self, node: Node, dice: random.Random, turns: int) -> None:
        posix = Posix(node.client.vfs)
        actor = object()
        while turns > 0:
            each = dice.choice(self._files)
            floors = [record.durable.by(node.informed()) for record in each.records]
            try:
                file = posix.open(each.path, os.O_RDWR)
            except StoreError:
                turns -= 1
                continue
            session = _Session(node, actor, dice, each, file, floors)
            turns -= session.run()

    def check(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        for each in self._files:
            file = posix.open(each.path)
            for number, record in enumerate(each.records):
                each.judge(number, file.read(each.at(number), each.size), record.durable.value)
            file.close()


class _Session:
    """What one actor does between open and close of a file."""

    def __init__(
        self,
        node: Node,
        actor: object,
        dice: random.Random,
        file: _RecordFile,
        handle: File,
        floors: list[int],
    ) -> None:
        self._node = node
        self._actor = actor
        self._dice = dice
        self._file = file
        self._handle = handle
        self._floors = floors  # the oldest state of each record that may be read
        self._unsynced: dict[int, int] = {}

    def run(self) -> int:
        """How many turns it took."""
        turns = self._dice.randrange(1, 8)
        try:
            try:
                for _ in range(turns):
                    self._turn()
                    if self._dice.random() < 0.4:
                        self._node.process.sleep(self._dice.random() * PAUSE_S)
            finally:
                begun = dict(self._unsynced)
                self._handle.close()
            self._synced(begun)
        except ObjectMissing:
            raise
        except StoreError:
            pass
        return turns

    def _turn(self) -> None:
        verb = self._dice.choice(("read", "read", "write", "write", "write", "sync", "compact"))
        number = self._dice.randrange(RECORDS)
        if verb == "write":
            self._write(number)
        elif verb == "sync":
            begun = dict(self._unsynced)
            self._handle.fsync()
            self._synced(begun)
        elif verb == "compact":
            self._compact()
        else:
            data = self._handle.read(self._file.at(number), self._file.size)
            self._file.judge(number, data, self._floors[number])

    def _write(self, number: int) -> None:
        file = self._file
        record = file.records[number]
        record.owner = record.owner or self._actor
        if record.owner != self._actor:
            return
        cell = _CELL.pack(file.number, number, len(record.states))
        record.states.append(cell)
        self._handle.write(file.at(number), cell * (file.size // _CELL.size))
        self._floors[number] = self._unsynced[number] = len(record.states) - 1

    def _synced(self, begun: dict[int, int]) -> None:
        for number, version in begun.items():
            record = self._file.records[number]
            record.durable.raise_to(version, self._node.now())

    def _compact(self) -> None:
        try:
            for index in self._file.chunks():
                self._node.client.background.compact(self._file.ino, index)
        except ObjectMissing:
            pass  # another client's compaction was quicker


def _conforms(load: Records) -> Load:
    return load

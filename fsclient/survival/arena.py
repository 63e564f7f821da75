"""The arena: a small log of records in shared memory, which outlives the process that writes it.

The supervisor owns the memfd; a worker maps it, and the next worker reads what the last one left. A
record sets the value of a key or drops it. The log has two halves: once most of one half is dead,
what lives is copied to the other half, and one word says which half is valid and how long it is.

A record is whole in memory before that word is published, so a worker may be killed at any moment;
each record has a CRC besides. The first bytes name the format: a worker of another format refuses.

Threading: any thread; one lock, a leaf.
"""

from __future__ import annotations

import mmap
import os
from struct import Struct
from typing import Final
from zlib import crc32

from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime

ARENA_BYTES: Final = 512 << 20  # of addresses; memory is taken as it is used
FORMAT: Final = 1
_MAGIC: Final = b"sfsarena"
_HEAD: Final = Struct("=8sI")  # magic format
_WORD: Final = Struct("=Q")  # the half in bit 63, below it the end of its log
_WORD_AT: Final = 64
_RECORD: Final = Struct("=IIHH")  # crc value_bytes key_bytes kind
_BEGIN: Final = mmap.PAGESIZE  # of the first half
_HALF_BIT: Final = 1 << 63
_SET: Final = 1
_DROP: Final = 2
_TIDY_BYTES: Final = 32 << 20  # a shorter log is not worth copying
_COPIED_BYTES: Final = 4096  # shorter data are put together with what comes before them

Piece = bytes | bytearray | memoryview


class ArenaFull(Exception):
    """There is no room for a record, although the log holds only what lives."""


def _foreign(form: int) -> ConfigError:
    return ConfigError(
        f"the last worker left state of format {form}, this version reads {FORMAT}: "
        "unmount and mount again"
    )


class Arena:
    """Keys and values in the shared memory of `fd`."""

    @staticmethod
    def require_format(fd: int) -> None:
        """Raises: ConfigError where the last worker's version writes another format than ours."""
        head = os.pread(fd, _HEAD.size, 0)
        if head != bytes(_HEAD.size) and head != _HEAD.pack(_MAGIC, FORMAT):
            raise _foreign(_HEAD.unpack(head)[1])

    def __init__(self, fd: int, runtime: Runtime) -> None:
        """Read what is there. Raises: ConfigError where the format is not ours."""
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size)
        self._half_bytes = (size - _BEGIN) // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        self._lock = runtime.lock()
        self._half = 0  # guarded by _lock, as all below
        self._end = 0
        self._places: dict[bytes, tuple[int, int]] = {}  # where the record of a key is, its length
        self._live = 0  # bytes of those records
        magic, form = _HEAD.unpack_from(self._map)
        if magic == bytes(len(_MAGIC)):
            _HEAD.pack_into(self._map, 0, _MAGIC, FORMAT)
        elif (magic, form) != (_MAGIC, FORMAT):
            raise _foreign(form)
        self._read()

    @property
    def live_bytes(self) -> int:
        """How much the records take that are valid."""
        return self._live

    def room(self) -> int:
        """How many bytes of records there is room for."""
        return self._half_bytes - self._live

    def items(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """Keys that begin with `prefix`, and their values, in the order in which they were set."""
        with self._lock:
            found = [
                (place, key) for key, (place, _) in self._places.items() if key.startswith(prefix)
            ]
            return [(key, self._value(place)) for place, key in sorted(found)]

    def put(self, key: bytes, head: bytes, data: Piece = b"") -> None:
        """Set the value of `key` to `head` and `data`. Raises: ArenaFull."""
        size = _RECORD.size + len(key) + len(head) + len(data)
        with self._lock:
            place = self._place(size)
            try:
                self._write(place, _SET, key, head, data)
            except BaseException:
                self._end = place - self._base()  # no gap: a reader would stop there
                raise
            self._forget(key)
            self._places[key] = place, size
            self._live += size
            self._publish()

    def drop(self, key: bytes) -> None:
        """`key` has no value any more."""
        with self._lock:
            if key not in self._places:
                return
            self._forget(key)
            try:
                place = self._place(_RECORD.size + len(key))
            except ArenaFull:
                self._copy()  # which leaves the key out
                return
            self._write(place, _DROP, key, b"", b"")
            self._publish()

    def close(self) -> None:
        """Unmap the memory; it stays for others."""
        self._map.close()

    # --- the log; callers hold the lock ----------------------------------------------------------

    def _base(self) -> int:
        return _BEGIN + self._half * self._half_bytes

    def _place(self, size: int) -> int:
        """Room for a record at the end of the log."""
        if self._end > _TIDY_BYTES and self._live < self._end // 2:
            self._copy()
        if self._end + size > self._half_bytes and self._live < self._end:
            self._copy()
        if self._end + size > self._half_bytes:
            raise ArenaFull(f"no room for {size} bytes")
        place = self._base() + self._end
        self._end += size
        return place

    def _write(self, place: int, kind: int, key: bytes, head: bytes, data: Piece) -> None:
        if len(data) <= _COPIED_BYTES:  # one copy into the map takes less than four
            body = b"".join((key, head, data))
            record = _RECORD.pack(crc32(body), len(body) - len(key), len(key), kind) + body
            self._map[place : place + len(record)] = record
            return
        crc = crc32(data, crc32(head, crc32(key)))
        _RECORD.pack_into(self._map, place, crc, len(head) + len(data), len(key), kind)
        at = place + _RECORD.size
        for piece in (key, head, data):
            self._map[at : at + len(piece)] = piece
            at += len(piece)

    def _publish(self) -> None:
        _WORD.pack_into(self._map, _WORD_AT, self._half * _HALF_BIT | self._end)

    def _forget(self, key: bytes) -> None:
        found = self._places.pop(key, None)
        if found is not None:
            self._live -= found[1]

    def _copy(self) -> None:
        """Move what lives to the other half, in order, and give the memory of this one back."""
        old = self._base()
        self._half = 1 - self._half
        at = self._base()
        for key, (place, size) in sorted(self._places.items(), key=lambda item: item[1]):
            self._map[at : at + size] = self._map[place : place + size]
            self._places[key] = at, size
            at += size
        self._end = at - self._base()
        self._publish()
        self._map.madvise(mmap.MADV_REMOVE, old, self._half_bytes)

    def _value(self, place: int) -> bytes:
        _, size, key_bytes, _ = _RECORD.unpack_from(self._map, place)
        begin = place + _RECORD.size + key_bytes
        return self._map[begin : begin + size]

    def _read(self) -> None:
        """Find the records that the last worker has published."""
        (word,) = _WORD.unpack_from(self._map, _WORD_AT)
        self._half, end = word >> 63, word & ~_HALF_BIT
        at, stop = self._base(), self._base() + end
        while at < stop:
            crc, value_bytes, key_bytes, kind = _RECORD.unpack_from(self._map, at)
            size = _RECORD.size + key_bytes + value_bytes
            body = self._map[at + _RECORD.size : at + size]
            if at + size > stop or crc32(body) != crc:
                raise ConfigError("what the last worker left is damaged: unmount and mount again")
            key = body[:key_bytes]
            self._forget(key)
            if kind == _SET:
                self._places[key] = at, size
                self._live += size
            at += size
        self._end = end

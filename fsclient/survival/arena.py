"""The arena: a small log of records in shared memory, which outlives the process that writes it.

The supervisor owns the memfd; a worker maps it, and the next worker reads what the last one left. A
record sets the value of a key or drops it. The log has two halves: once most of one half is dead,
what lives is copied to the other half, and one word says which half is valid and how long it is.
Data of more than a page lie outside the log (`Segments`), and the record says where.

A record is whole in memory before that word is published, so a worker may be killed at any moment;
each record has a CRC besides. Data of a record that was dropped may be written over, so a reader
looks at them only when it knows which records are valid. The first bytes name the format: a worker
of another format refuses.

Threading: any thread; one lock, a leaf.
"""

from __future__ import annotations

import mmap
import os
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from fsdata.resources.crc import crc32c
from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime

ARENA_BYTES: Final = 512 << 20  # of addresses; memory is taken as it is used
FORMAT: Final = 3
_MAGIC: Final = b"sfsarena"
_HEAD: Final = Struct("=8sI")  # magic format
_WORD: Final = Struct("=Q")  # the half in bit 63, below it the end of its log
_WORD_AT: Final = 64
_RECORD: Final = Struct("=IIHH")  # crc value_bytes key_bytes kind
_BEGIN: Final = mmap.PAGESIZE  # of the first half
_HALF_BIT: Final = 1 << 63
_SET: Final = 1
_DROP: Final = 2
_SET_FAR: Final = 3  # the value ends with data that lie elsewhere, at _FAR
_FAR: Final = Struct("=QII")  # place bytes crc32c
_LOG_BYTES: Final = 96 << 20  # of both halves; of a small arena three quarters
_TIDY_BYTES: Final = 32 << 20  # a shorter log is not worth copying
SEGMENT_BYTES: Final = 8 << 20
FREE_KEPT: Final = 1  # free segments that keep their memory while nothing is written
_COPIED_BYTES: Final = 4096  # shorter data are put together with what comes before them

Piece = bytes | bytearray | memoryview


class _ValidRecord(NamedTuple):
    """Where a valid record is."""

    place: int
    size: int
    far: tuple[int, int] | None = None  # where its data are, and how many


class ArenaFull(Exception):
    """There is no room for a record, although the log holds only what lives."""


def _foreign(form: int) -> ConfigError:
    return ConfigError(
        f"the last worker left state of format {form}, this version reads {FORMAT}: "
        "unmount and mount again"
    )


def _damaged() -> ConfigError:
    return ConfigError("what the last worker left is damaged: unmount and mount again")


class Segments:
    """Memory for the data of large records: segments that are used again when they are free.

    Data go one behind another into a segment of 8 MiB. Once none of them is valid any more it is
    free, and the one that became free last is taken next: its memory is in use already, and memory
    that is new costs three times as much as the copy. Free segments keep their memory until `tidy`
    finds that so many were not in use at a time.

    Writes are dropped about in the order in which they came, so segments become free in turn. One
    small write that stays keeps its whole segment; where none is free data go into the log.
    """

    def __init__(self, memory: mmap.mmap, begin: int, end: int) -> None:
        """The part `begin..end` of a map."""
        self._map = memory
        self._begin = begin
        self._live = [0] * ((end - begin) // SEGMENT_BYTES)  # valid bytes of each
        self._free: list[int] = []  # the last one is taken next
        self._warm = 0  # the last so many of them keep their memory
        self._most = 0  # that were in use at a time since `tidy`
        self._current = -1  # the one that is being filled
        self._filled = 0

    def start(self) -> None:
        """All that is valid has been claimed: what is free holds no memory."""
        self._free = [at for at, live in enumerate(self._live) if not live]
        for segment in self._free:
            self._give_back(segment)
        self._free.reverse()

    def room(self) -> int:
        """Bytes of free segments."""
        return len(self._free) * SEGMENT_BYTES

    def place(self, size: int) -> int | None:
        """Where `size` bytes can be written, as offset of the map; None where there is no room."""
        if size > SEGMENT_BYTES:
            return None
        if self._current < 0 or self._filled + size > SEGMENT_BYTES:
            if not self._free:
                return None
            self._current, self._filled = self._free.pop(), 0
            self._warm = max(0, self._warm - 1)
            self._most = max(self._most, self._used())
        place = self._begin + self._current * SEGMENT_BYTES + self._filled
        self._filled += size
        self._live[self._current] += size
        return place

    def claim(self, place: int, size: int) -> None:
        """These bytes are valid, as an earlier process has left them."""
        self._live[(place - self._begin) // SEGMENT_BYTES] += size

    def drop(self, place: int, size: int) -> None:
        """They are not any more, and no reader will take them for valid."""
        segment = (place - self._begin) // SEGMENT_BYTES
        self._live[segment] -= size
        if self._live[segment]:
            return
        if segment == self._current:
            self._filled = 0
        else:
            self._release(segment)

    def tidy(self) -> None:
        """Free segments give their memory back, as far as they were not needed since the last time.

        To be called every few seconds: a stream of writes takes and frees segments all the time.
        """
        used = self._used()
        kept = max(FREE_KEPT, self._most - used)
        while self._warm > kept:
            self._give_back(self._free[-self._warm])
            self._warm -= 1
        self._most = used

    def _used(self) -> int:
        return len(self._live) - len(self._free)

    def _release(self, segment: int) -> None:
        self._free.append(segment)
        self._warm += 1

    def _give_back(self, segment: int) -> None:
        at = self._begin + segment * SEGMENT_BYTES
        self._map.madvise(mmap.MADV_REMOVE, at, SEGMENT_BYTES)


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
        log_bytes = min(_LOG_BYTES, (size - _BEGIN) // 4 * 3)
        self._half_bytes = log_bytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
        self._segments = Segments(self._map, _BEGIN + 2 * self._half_bytes, size)
        self._lock = runtime.lock()
        self._half = 0  # guarded by _lock, as all below
        self._end = 0
        self._places: dict[bytes, _ValidRecord] = {}
        self._live = 0  # bytes of those records in the log
        self._far = 0  # and in segments
        magic, form = _HEAD.unpack_from(self._map)
        if magic == bytes(len(_MAGIC)):
            _HEAD.pack_into(self._map, 0, _MAGIC, FORMAT)
        elif (magic, form) != (_MAGIC, FORMAT):
            raise _foreign(form)
        self._read()

    @property
    def live_bytes(self) -> int:
        """How much the records take that are valid."""
        return self._live + self._far

    def room(self) -> int:
        """How many bytes of records there is room for."""
        return self._half_bytes - self._live + self._segments.room()

    def items(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """Keys that begin with `prefix`, and their values, in the order in which they were set."""
        with self._lock:
            found = [
                (record, key) for key, record in self._places.items() if key.startswith(prefix)
            ]
            found.sort(key=lambda item: item[0].place)
            return [(key, self._value(record)) for record, key in found]

    def put(self, key: bytes, head: bytes, data: Piece = b"") -> None:
        """Set the value of `key` to `head` and `data`. Raises: ArenaFull."""
        with self._lock:
            kind, far = _SET, None
            at = self._segments.place(len(data)) if len(data) > _COPIED_BYTES else None
            if at is not None:
                self._map[at : at + len(data)] = data
                kind, far = _SET_FAR, (at, len(data))
                head += _FAR.pack(at, len(data), crc32c(data))
                data = b""
            try:
                self._append(kind, key, head, data, far)
            except BaseException:
                if far is not None:
                    self._segments.drop(*far)
                raise

    def _append(
        self, kind: int, key: bytes, head: bytes, data: Piece, far: tuple[int, int] | None
    ) -> None:
        """Write and publish a record that sets a value."""
        size = _RECORD.size + len(key) + len(head) + len(data)
        place = self._place(size)
        try:
            self._write(place, kind, key, head, data)
        except BaseException:
            self._end = place - self._base()  # no gap: a reader would stop there
            raise
        before = self._take(key)
        self._places[key] = _ValidRecord(place, size, far)
        self._live += size
        self._far += 0 if far is None else far[1]
        self._publish()
        self._free(before)

    def drop(self, key: bytes) -> None:
        """`key` has no value any more."""
        with self._lock:
            if key not in self._places:
                return
            before = self._take(key)
            try:
                place = self._place(_RECORD.size + len(key))
            except ArenaFull:
                self._copy()  # which leaves the key out
            else:
                self._write(place, _DROP, key, b"", b"")
                self._publish()
            self._free(before)

    def tidy(self) -> None:
        """Give memory back that was not needed lately; to be called every few seconds."""
        with self._lock:
            self._segments.tidy()

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

    def _take(self, key: bytes) -> _ValidRecord | None:
        """The record of a key, which is valid no more once another one is published."""
        found = self._places.pop(key, None)
        if found is not None:
            self._live -= found.size
            self._far -= 0 if found.far is None else found.far[1]
        return found

    def _free(self, record: _ValidRecord | None) -> None:
        """It is valid no more for any reader: what it had in segments may be written over."""
        if record is not None and record.far is not None:
            self._segments.drop(*record.far)

    def _copy(self) -> None:
        """Move what lives to the other half, in order, and give the memory of this one back."""
        old = self._base()
        self._half = 1 - self._half
        at = self._base()
        for key, record in sorted(self._places.items(), key=lambda item: item[1].place):
            self._map[at : at + record.size] = self._map[record.place : record.place + record.size]
            self._places[key] = record._replace(place=at)
            at += record.size
        self._end = at - self._base()
        self._publish()
        self._map.madvise(mmap.MADV_REMOVE, old, self._half_bytes)

    def _value(self, record: _ValidRecord) -> bytes:
        _, size, key_bytes, _ = _RECORD.unpack_from(self._map, record.place)
        begin = record.place + _RECORD.size + key_bytes
        if record.far is None:
            return self._map[begin : begin + size]
        at, far_bytes = record.far
        return self._map[begin : begin + size - _FAR.size] + self._map[at : at + far_bytes]

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
                raise _damaged()
            key = body[:key_bytes]
            self._take(key)
            if kind != _DROP:
                far = _FAR.unpack_from(body, len(body) - _FAR.size) if kind == _SET_FAR else None
                self._places[key] = _ValidRecord(at, size, far and far[:2])
                self._live += size
                self._far += far[1] if far else 0
            at += size
        self._end = end
        self._claim()

    def _claim(self) -> None:
        """Look at the data in segments, now that it is known which are valid."""
        for record in self._places.values():
            if record.far is not None:
                place, size = record.far
                crc = _FAR.unpack_from(self._map, record.place + record.size - _FAR.size)[2]
                if crc32c(self._map[place : place + size]) != crc:
                    raise _damaged()
                self._segments.claim(place, size)
        self._segments.start()

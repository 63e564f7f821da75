"""The log of a journal: entries one behind the other, each with its length and CRC.

Entries are put in order under the caller's lock (`append`) and written by the first thread that
calls `flush`: many go in one write, and one fsync does for many. A file is removed when all its
entries are published, in a long log also one between others: an entry that can't be published keeps
its own. Every file begins with a header that names the journal.

What a crash leaves is read up to the first entry that is not whole: what comes behind was never
acknowledged, or the disk is damaged.

Threading: any method from any thread. Lock order: `_syncing`, `_writing`, `_lock`.
"""

from __future__ import annotations

import errno
import logging
import struct
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgpack

from fsdata.resources.crc import crc32c
from fsdata.staging import data_segments
from fsdata.staging.disk import StagingDisk
from fsmeta.errors import StoreError
from fsmeta.runtime import Runtime

log = logging.getLogger(__name__)

PREFIX: Final = "log-"
ASIDE: Final = "aside-"  # prefix of the files of a journal that is not taken up
VERSION: Final = 1
FILE_BYTES: Final = 4 << 20  # 20,000 entries; a file goes when the last of them is published
LONG_FILES: Final = 8  # of a log in which files between others are worth a look
KEPT: Final = 1 << 62  # "where the last file ends" while that is an earlier process's
ENTRY_BYTES_MAX: Final = 16 << 20  # longer is damage
MAGIC: Final = b"SfJe"
_HEAD: Final = struct.Struct("<4sII")  # MAGIC, length, CRC-32C of the payload


class Header(NamedTuple):
    """How each file of a log begins."""

    volume: str  # uuid
    journal: int
    first: int  # sequence of the first entry in this file
    behind: str  # the file before it
    behind_bytes: int  # where that ended


class FoundRecord(NamedTuple):
    """What was left of a log."""

    journal: int
    first: int  # sequence of the first entry that can be
    payloads: list[bytes]
    torn: int  # bytes that were being written
    damaged: int  # bytes that were entries once
    tail: str  # the last file with entries
    tail_bytes: int  # and where it ends
    volume: str

    def with_file(
        self, name: str, records: list[bytes], end: int, size: int, had_more: bool
    ) -> FoundRecord:
        """Also what is left of one more file, which had whole records behind `end` or had not."""
        return self._replace(
            payloads=self.payloads + records[1:],
            torn=self.torn + (0 if had_more else size - end),
            damaged=self.damaged + (size - end if had_more else 0),
            tail=name if len(records) > 1 else self.tail,
            tail_bytes=end if len(records) > 1 else self.tail_bytes,
        )


class Journal:
    """The log of one journal, which this process writes."""

    def __init__(self, runtime: Runtime, disk: StagingDisk, volume: str, journal: int) -> None:
        self._disk = disk
        self._volume = volume
        self._journal = journal
        self._lock = runtime.lock()
        self._queue: deque[tuple[int, bytes]] = deque()  # guarded by _lock: sequence, record
        self._appended = 0  # guarded by _lock
        self._writing = runtime.lock()
        self._written = 0  # guarded by _writing, as below: positions up to this are in the file
        self._files: list[tuple[str, int]] = []  # names, and the last sequence in each
        self._offset = 0  # where the last file ends
        self._tail = ("", 0)  # the last file that is complete, and where it ends
        self._syncing = runtime.lock()
        self._synced = 0  # guarded by _syncing
        self._unsynced: set[str] = set()  # files; guarded by _writing, as is _doubtful
        # Files that a sync failed for: the next may succeed, and what this one lost stay lost.
        self._doubtful: set[str] = set()
        self._has_removed = False  # files, since the names were synced; guarded by _syncing
        self._looked = ""  # the last file when `trim_between` was last called

    def keep(self, found: FoundRecord, last: int) -> None:
        """Go on behind what an earlier process left, whose last entry was `last` at most.

        A file that begins behind it has no entry, and goes. Raises: OSError.
        """
        self._tail = found.tail, found.tail_bytes
        names = [name for name in self._disk.names() if name.startswith(PREFIX)]
        for name in [name for name in names if int(name[len(PREFIX) :], 16) > last]:
            self._disk.remove(name)
            names.remove(name)
        self._has_removed = True  # which of its removals that process synced is unknown
        self._files = [(name, last) for name in names]
        self._unsynced = set(names)  # what that process synced is unknown
        self._appended = self._written = int(bool(names))
        self._offset = KEPT

    def append(self, sequence: int, payload: bytes) -> int:
        """Put an entry behind all earlier ones; the position to flush to."""
        with self._lock:
            self._queue.append((sequence, _record(payload)))
            self._appended += 1
            return self._appended

    def flush(self, position: int) -> None:
        """Return when everything up to `position` is written. Raises: OSError."""
        with self._writing:
            if self._written < position:
                self._write()

    def _write(self) -> None:
        """Write what is queued; where that fails it stays queued. `_writing` is held."""
        with self._lock:
            batch = list(self._queue)
        if self._offset >= FILE_BYTES or not self._files or self._is_doubted(*self._files[-1]):
            self._begin(batch[0][0])
        name, _ = self._files[-1]
        records = b"".join([record for _, record in batch])
        self._disk.write(name, self._offset, [records])
        self._offset += len(records)
        self._files[-1] = name, batch[-1][0]
        self._unsynced.add(name)
        self._written += len(batch)
        with self._lock:
            for _ in batch:
                self._queue.popleft()

    def _is_doubted(self, name: str, last: int) -> bool:
        """Whether a file that has entries is to get no more."""
        return name in self._doubtful and int(name[len(PREFIX) :], 16) <= last

    def _begin(self, first: int) -> None:
        if self._files and self._offset != KEPT:
            self._tail = self._files[-1][0], self._offset
        header = {
            "v": VERSION,
            "volume": self._volume,
            "journal": self._journal,
            "first": first,
            "behind": list(self._tail),
        }
        payload = msgpack.packb(header)
        record = _record(payload)
        name = f"{PREFIX}{first:016x}"
        self._disk.write(name, 0, [record])
        self._files.append((name, first - 1))
        self._offset = len(record)

    def sync(self) -> None:
        """Make all that was appended survive a loss of power.

        Raises: OSError; then until all that was in a file that it failed for is published.
        """
        with self._lock:
            position = self._appended
        with self._syncing:
            if self._synced >= position:
                return
            with self._lock:
                position = self._appended
            self.flush(position)
            with self._writing:
                names, self._unsynced = self._unsynced, set()
                there = {name for name, _ in self._files}
                self._doubtful &= there
            for name in sorted(names & there):
                try:
                    self._disk.sync(name)
                except OSError as error:
                    log.debug("%s was not synced: %s", name, error)
                    with self._writing:
                        self._doubtful.add(name)
            self._sync_removals()
            if self._doubtful:
                raise OSError(errno.EIO, f"{min(self._doubtful)} could not be synced")
            self._synced = position

    def _sync_removals(self) -> None:
        """A file that comes back may hold less than the next one says it did, which does not count
        then. `_syncing` is held. Raises: OSError.
        """
        if self._has_removed:
            self._disk.sync_names()
            self._has_removed = False

    def can_trim(self, first_waiting: int) -> bool:
        """Whether `trim` would remove anything."""
        files = self._files
        return len(files) > 1 and files[0][1] < first_waiting

    def trim(self, first_waiting: int) -> None:
        """Everything below this sequence is published: remove files that hold nothing else."""
        with self._syncing, self._writing:
            while len(self._files) > 1 and self._files[0][1] < first_waiting:
                self._has_removed = True
                self._disk.remove(self._files.pop(0)[0])

    @property
    def size(self) -> int:
        """About how many bytes of the disk it takes: full files, and what the last one has."""
        files, offset = len(self._files), self._offset
        return (files - 1) * FILE_BYTES + min(offset, FILE_BYTES) if files else 0

    def is_long(self) -> bool:
        """Whether `trim_between` may gain something; once for each file that is begun."""
        files = self._files
        return len(files) > LONG_FILES and files[-1][0] != self._looked

    def trim_between(self, waiting: Sequence[int], upto: int) -> None:
        """Of the entries up to `upto` those in `waiting`, ascending, are not published: remove the
        files that hold others only."""
        with self._syncing, self._writing:
            self._looked = self._files[-1][0]
            firsts = [int(name[len(PREFIX) :], 16) for name, _ in self._files]
            for file, first, end in zip([*self._files], firsts, firsts[1:], strict=False):
                waits = bisect_left(waiting, first) < bisect_left(waiting, end)
                if not waits and end <= upto + 1:
                    self._has_removed = True
                    self._disk.remove(file[0])
                    self._files.remove(file)

    def forget(self, first_waiting: int) -> None:
        """What is queued below this sequence is published: it need not be written any more.

        For a disk that takes nothing: the queue would grow as long as it fails.
        """
        with self._writing, self._lock:
            while self._queue and self._queue[0][0] < first_waiting:
                self._queue.popleft()
                self._written += 1

    def clear(self) -> None:
        """Everything is published, and nothing comes any more: no file is left, nor comes back.

        Raises: OSError; then some may.
        """
        with self._syncing, self._writing:
            while self._files:
                self._has_removed = True
                self._disk.remove(self._files.pop(0)[0])
            self._sync_removals()


def set_aside(disk: StagingDisk, journal: int) -> str:
    """Give all files of a journal names that no journal has; how those begin. Raises: OSError."""
    prefix = f"{ASIDE}{journal:016x}-"
    for name in disk.names():
        if name.startswith((PREFIX, data_segments.PREFIX)):
            disk.rename(name, prefix + name)
    return prefix


def recover(disk: StagingDisk, volume: str) -> FoundRecord | None:
    """What is left of the log in a directory; None where there is none, or it is another volume's.

    What is no whole entry is cut off; so is all behind a file that does not hold what the next one
    says it held. Raises: StoreError, OSError.
    """
    found: FoundRecord | None = None
    ends: dict[str, int] = {}
    broken = False
    for name in [name for name in disk.names() if name.startswith(PREFIX)]:
        data = disk.read(name, 0, FILE_BYTES + ENTRY_BYTES_MAX)
        records, end = _parse(data)
        header = _parse_header(records[0]) if records else None
        if header is not None and not broken:
            broken = ends.get(header.behind, header.behind_bytes) < header.behind_bytes
        if header is None or broken:
            records, end = [], 0
        if end < len(data):
            disk.cut(name, end) if end else disk.remove(name)
        if header is None and found is None and _has_record(data, 0):
            log.error(
                "staging journal: the head of %s is damaged; the changes in its %d bytes are lost",
                name,
                len(data),
            )
        if header is not None and found is None:
            found = FoundRecord(header.journal, header.first, [], 0, 0, name, 0, header.volume)
        if found is not None:
            found = found.with_file(name, records, end, len(data), _has_record(data, end))
        ends[name] = end
    return found if found is not None and found.volume == volume else None


def _parse(data: bytes) -> tuple[list[bytes], int]:
    """The whole records that a file begins with, and where the last of them ends."""
    records: list[bytes] = []
    at = 0
    while (payload := _payload(data, at)) is not None:
        records.append(payload)
        at += _HEAD.size + len(payload)
    return records, at


def _payload(data: bytes, at: int) -> bytes | None:
    """What the record at `at` says; None where there is no whole one."""
    if at + _HEAD.size > len(data):
        return None
    magic, length, crc = _HEAD.unpack_from(data, at)
    payload = data[at + _HEAD.size : at + _HEAD.size + length]
    if magic != MAGIC or not length or len(payload) != length or crc32c(payload) != crc:
        return None
    return payload


def _has_record(data: bytes, at: int) -> bool:
    """Whether a whole record comes anywhere behind `at`: then what is there was not the end."""
    while (at := data.find(MAGIC, at)) >= 0:
        if _payload(data, at) is not None:
            return True
        at += 1
    return False


def _record(payload: bytes) -> bytes:
    return _HEAD.pack(MAGIC, len(payload), crc32c(payload)) + payload


def _parse_header(payload: bytes) -> Header:
    """Raises: StoreError."""
    try:
        fields: dict[str, Any] = msgpack.unpackb(payload)
        if fields["v"] != VERSION:
            raise StoreError(f"a staging journal of version {fields['v']}: upgrade slicefs")
        behind, size = fields["behind"]
        return Header(fields["volume"], fields["journal"], fields["first"], behind, size)
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"a staging journal's header does not decode: {error}") from error

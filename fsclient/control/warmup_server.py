"""What `slicefs warmup` asks of a mount, through the xattr `user.slicefs.warm`.

That name alone tells what caches there are. `….VERB.BEGIN.END` does something with the bytes
`BEGIN..END` of a file and answers when it is done, or after STEP_S with the place to go on from.
Both are answered by the VFS as JSON, not stored and not listed. The kernel lets only callers ask
that may read the file, and reading it would fill the caches just as well; cached data that other
users read too is removed only for root and the file's owner.

There are no jobs: a command that no longer asks has stopped. Cached data is not fetched again, so a
new command that asks from the start goes on where the last one was.

Threading: any method from any thread; `_lock` is a leaf.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeAlias

from fsdata.attached.objects import AttachedObjects
from fsdata.blocks.warmup import Warming, WarmupRequest
from fsdata.disk_cache.cache import DiskCache, Fill
from fsdata.format.geometry import block_ranges
from fsdata.resources.read_epoch import ReadEpoch
from fsmeta.errors import ObjectDamaged, ObjectMissing, StoreError
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime
from fsmeta.slices import resolve
from fsmeta.types import CHUNK_BYTES, FLAG_ATTACHED, ROOT_CALLER, Attr, Caller, Ino

WARM_XATTR: Final = b"user.slicefs.warm"
STEP_S: Final = 1.0  # a thread that serves is taken for so long, and for one block more
AT_ONCE: Final = 32  # requests: half of the threads that serve stay for programs
ANSWER_BYTES: Final = 128  # os.getxattr has room for so much at first, and else asks twice
TRIES: Final = 3  # compaction moves what is being fetched; it can't overtake us so often

_NAME: Final = re.compile(
    re.escape(WARM_XATTR) + rb"(?:\.(disk|memory|both|meta|check|evict)\.(\d{1,19})\.(\d{1,19}))?"
)


class Why(StrEnum):
    """Why something is not in the cache that should be."""

    ROOM = "room"
    DISK = "disk"
    MISSING = "missing"
    CHANGED = "changed"
    BUCKET = "bucket"
    DAMAGED = "damaged"
    STORE = "store"


_WHY: Final = {Fill.NO_ROOM: Why.ROOM, Fill.NO_DISK: Why.DISK}


class _BucketUnreadable(Exception):
    """The mount can't read what an attached file shows."""


class _BlockRange(NamedTuple):
    """Bytes of a file that lie in one block."""

    begin: int  # in the file
    end: int
    wanted: WarmupRequest
    parts: Sequence[WarmupRequest] = ()  # smaller blocks with bytes of it


class _Tally:
    """What became of the bytes of a request; those of the file count, not of the blocks."""

    def __init__(self, begin: int) -> None:
        self.next: int | None = begin
        self.busy = False
        self.counts: dict[str, int] = {}
        self.disks: dict[int, int] = {}
        self.why = ""

    def add(self, name: str, size: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + size

    def fail(self, size: int, why: Why) -> None:
        self.add("failed", size)
        self.why = self.why or why.value

    def packed(self) -> bytes:
        shown: dict[str, Any] = {"next": self.next, **self.counts}
        if self.busy:
            shown["busy"] = 1
        if self.why:
            shown["why"] = self.why
        if self.disks:
            shown["disks"] = self.disks
        return json.dumps(shown, separators=(",", ":")).encode()


_Act: TypeAlias = Callable[[_BlockRange, _Tally], None]


class Warmer:
    """Answers for the caches of a mount."""

    def __init__(
        self,
        runtime: Runtime,
        meta: Meta,
        epoch: ReadEpoch,
        warming: Warming,
        disks: DiskCache | None,
        attached: AttachedObjects,
    ) -> None:
        self._runtime = runtime
        self._meta = meta
        self._block_bytes = meta.format.block_bytes
        self._epoch = epoch
        self._warming = warming
        self._disks = disks
        self._attached = attached
        self._lock = runtime.lock()
        self._requests = 0  # guarded by _lock
        self._acts: dict[str, _Act] = {
            "disk": self._to_disk,
            "memory": self._to_memory,
            "both": self._to_both,
            "check": self._check,
            "evict": self._evict,
        }

    def answer(self, caller: Caller, ino: Ino, name: bytes) -> bytes:
        """The value of an xattr whose name begins with WARM_XATTR.

        Raises: ENODATA, EISDIR, EPERM, ESTALE, Unavailable.
        """
        found = _NAME.fullmatch(name)
        if found is None:
            raise OSError(errno.ENODATA, "no such attribute")
        if found[1] is None:
            return self._tell()
        verb, begin, end = found[1].decode(), int(found[2]), int(found[3])
        attr = self._meta.getattr(ROOT_CALLER, ino)
        if attr.is_dir:
            raise OSError(errno.EISDIR, "is a directory")
        if verb == "evict" and caller.uid not in (0, attr.uid):
            raise OSError(errno.EPERM, "not yours")
        tally = _Tally(begin)
        with self._admitted() as admitted:
            if not admitted:
                tally.busy = True
            elif verb == "meta":
                self._know(ino, begin, min(end, attr.size), tally)
            else:
                self._runtime.will_wait()
                end = min(end, attr.size)
                with self._epoch.reading():
                    try:
                        self._step(ino, end, self._acts[verb], tally)
                    except _BucketUnreadable:
                        tally.fail(end - (tally.next or 0), Why.BUCKET)
                        tally.next = None
        return tally.packed()

    def _tell(self) -> bytes:
        """What caches there are."""
        shown: dict[str, Any] = {"disks": []}
        if self._disks is not None:
            numbers = self._disks.numbers()
            shown = {
                "disks": [each.disk.place.root for each in self._disks.members],
                "aside": int(numbers["disk_cache_disks_aside"]),
                "bytes": int(numbers["disk_cache_bytes"]),
                "limit": int(numbers["disk_cache_limit_bytes"]),
                "evictions": int(numbers["disk_cache_evictions_total"]),
            }
        return json.dumps(shown).encode()

    @contextmanager
    def _admitted(self) -> Iterator[bool]:
        """Whether there are not too many requests."""
        with self._lock:
            admitted = self._requests < AT_ONCE
            self._requests += admitted
        try:
            yield admitted
        finally:
            with self._lock:
                self._requests -= admitted

    def _chunks(self, ino: Ino, begin: int, end: int) -> Iterator[int]:
        """The chunks with slices of a part of a file: of a sparse one not every one."""
        first, last = begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)
        if last - first <= 1:
            yield from range(first, last)
            return
        for index in self._meta.ranges.chunks(ino):
            if first <= index < last:
                yield index

    def _know(self, ino: Ino, begin: int, end: int, tally: _Tally) -> None:
        """Have the slices of a file among what this mount knows."""
        for index in self._chunks(ino, begin, end):
            self._meta.read_chunk(ino, index)
        tally.next = None

    def _step(self, ino: Ino, end: int, act: _Act, tally: _Tally) -> None:
        """Do something with each block from `tally.next` on, as far as one comes in STEP_S."""
        give_up = self._runtime.monotonic() + STEP_S
        for turn in range(TRIES):
            if self._walk(ino, end, act, tally, give_up, last=turn == TRIES - 1):
                return

    def _walk(
        self, ino: Ino, end: int, act: _Act, tally: _Tally, give_up: float, last: bool
    ) -> bool:
        """Whether that is all for now; False where the slices have changed, unless it is the last.

        An object that is gone belonged to older slices, or it is lost.
        """
        for part in self._parts(ino, tally.next or 0, end):
            tally.next = part.begin
            try:
                act(part, tally)
            except ObjectMissing:
                self._meta.forget_chunks([ino])
                if not last and next(self._parts(ino, part.begin, end), None) != part:
                    return False
                tally.fail(part.end - part.begin, Why.MISSING)
            if tally.busy or tally.why == Why.STORE.value:
                return True
            tally.next = part.end
            if self._runtime.monotonic() >= give_up:
                return True
        tally.next = None
        return True

    def _parts(self, ino: Ino, begin: int, end: int) -> Iterator[_BlockRange]:
        """The blocks that a part of a file shows, in order."""
        attr = self._meta.getattr(ROOT_CALLER, ino)
        if attr.flags & FLAG_ATTACHED:
            yield from self._parts_of_object(attr, begin, end)
            return
        for index in self._chunks(ino, begin, end):
            base = index * CHUNK_BYTES
            for segment in resolve(self._meta.read_chunk(ino, index)):
                at = max(begin, base + segment.pos)
                size = min(end, base + segment.end) - at
                piece = segment.slice
                if size <= 0 or piece is None:
                    continue
                off = segment.off + at - base - segment.pos
                for block, first, stop, _ in block_ranges(piece, off, size, self._block_bytes):
                    yield _BlockRange(
                        at, at + stop - first, WarmupRequest(piece.id, piece.size, block)
                    )
                    at += stop - first

    def _parts_of_object(self, attr: Attr, begin: int, end: int) -> Iterator[_BlockRange]:
        """The same of an attached file; none where no disk may have them.

        Raises: _BucketUnreadable.
        """
        try:
            shown = self._attached.warmed(attr.ino, attr.size)
        except OSError as error:
            if error.errno == errno.ENODATA:
                return  # it has just got bytes of its own
            if error.errno != errno.EIO:
                raise
            raise _BucketUnreadable from error
        if shown is None:
            return
        for wanted in shown.whole.requests(begin, end):
            first = wanted.block * shown.whole.blocks.block_bytes
            stop = min(first + shown.whole.blocks.block_bytes, end, attr.size)
            parts = tuple(shown.parts.requests(first, stop))
            yield _BlockRange(max(begin, first), stop, wanted, parts)

    # --- what is done with a block ---------------------------------------------------------------

    def _to_disk(self, part: _BlockRange, tally: _Tally) -> None:
        self._bring(part, tally, (self._warming.to_disk,))

    def _to_memory(self, part: _BlockRange, tally: _Tally) -> None:
        self._bring(part, tally, (self._warming.to_memory,))

    def _to_both(self, part: _BlockRange, tally: _Tally) -> None:
        self._bring(part, tally, (self._warming.to_disk, self._warming.to_memory))

    def _bring(
        self, part: _BlockRange, tally: _Tally, ways: tuple[Callable[[WarmupRequest], Fill], ...]
    ) -> None:
        """Raises: ObjectMissing, _BucketUnreadable."""
        size = part.end - part.begin
        try:
            fills = [way(part.wanted) for way in ways]
        except ObjectDamaged:
            tally.fail(size, Why.DAMAGED)
            return
        except ObjectMissing:
            raise
        except (OSError, StoreError) as error:
            if isinstance(error, OSError) and error.errno == errno.ESTALE:
                tally.fail(size, Why.CHANGED)
            elif part.wanted.blocks is not None:  # not the store that other files are in
                raise _BucketUnreadable from error
            else:
                tally.why = Why.STORE.value
            return
        worst = max(fills, key=lambda fill: (fill in _WHY, fill is Fill.BUSY, fill))
        if worst is Fill.BUSY:
            tally.busy = True
        elif worst in _WHY:
            tally.fail(size, _WHY[worst])
        else:
            tally.add("fetched" if worst is Fill.MADE else "there", size)

    def _check(self, part: _BlockRange, tally: _Tally) -> None:
        size = part.end - part.begin
        where = self._warming.where(part.wanted)
        tally.add("data", size)
        on_disk = 0
        if where.copy is not None:
            on_disk = size if where.copy.whole else min(size, where.copy.bytes)
            tally.disks[where.copy.disk] = tally.disks.get(where.copy.disk, 0) + on_disk
        if where.memory:
            tally.add("memory", size)
        tally.add("cached", size if where.memory else on_disk)

    def _evict(self, part: _BlockRange, tally: _Tally) -> None:
        tally.add("evicted", sum(map(self._warming.evict, (part.wanted, *part.parts))))

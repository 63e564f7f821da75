"""One directory of the disk cache: finds, adds and removes the cache files of one volume.

    DIR/UUID/SHARD/NAME      cache files (`disk_cache/format`); SHARD is three hexadecimal digits

The rest of the directory is that of `disk_cache/directory`.

`DiskCache` calls it and judges its OSErrors. Bytes are not verified here but by `BlockStore`.

Threading: any method from any thread. `_lock` guards the table of open files and is a leaf; one of
`_stripes`, and the lock of `usage`, is held across I/O to this disk, by threads that only write it.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from fsdata.disk_cache import usage
from fsdata.disk_cache.directory import CacheLocation
from fsdata.disk_cache.file_io import CacheFile, CacheFiles, Listed
from fsdata.disk_cache.format import (
    EXTENTS_MAX,
    HEAD_BYTES,
    RANGES_BASE,
    BadFile,
    Extents,
    add_extent,
    covers,
    pack_ranges,
    pack_whole,
    parse,
    read_head,
)
from fsdata.objects.contract import Buffer
from fsmeta.runtime import Runtime

OPEN_MAX: Final = 128  # descriptors kept for each disk: more than readers use at a time
TOUCH_S: Final = 300.0  # a file's mtime tells when it was used, no finer than this
PAGE_BYTES: Final = 4096  # what files take on a disk is rounded up to this
SLACK_BYTES_MAX: Final = 64 << 20  # evicted beyond what is needed: one look for many additions
SLACK_SHARE: Final = 64  # and no more than 1/64 of the capacity
EVICT_SHARE: Final = 8  # a shard loses an eighth at a time, so that others lose their oldest, too
TRIES: Final = 3  # others may change a file of ranges while it is read
STRIPES: Final = 16  # files of ranges changed at a time
EVICTIONS: Final = ("none", "2-random", "lru")
_OUR_FAULT: Final = (errno.EMFILE, errno.ENFILE)


class DiskLimits(NamedTuple):
    """What a volume may take of one disk."""

    capacity_bytes: int
    free_ratio: float = 0.1  # of the disk, space and inodes, that stays free
    eviction: str = "2-random"
    expire_s: float = 0.0  # files not used for so long go; 0: never
    open_files: int = OPEN_MAX  # kept open


class DiskUsage(NamedTuple):
    """What is here of an object."""

    whole: bool
    bytes: int


class OpenedCopy(NamedTuple):
    """A cache file that is open, and what its head says."""

    file: CacheFile
    base: int
    size: int
    extents: Extents | None
    head: bytes  # as it was when that was read off it
    until: float  # when it is to be touched


class Disk:
    """The cache of one volume in one directory."""

    def __init__(
        self, runtime: Runtime, files: CacheFiles, root: str, volume: str, limits: DiskLimits
    ) -> None:
        self.place = CacheLocation(runtime, files, root, volume)
        self.limits = limits
        self.evicted = 0
        self.full = False  # the last addition found no room
        self._runtime = runtime
        self._files = files
        self._base = self.place.base
        self._cursor = -1  # the shard that was looked through last for room
        self.usage = self.place.usage
        self._lock = runtime.lock()
        self._open: OrderedDict[str, OpenedCopy] = OrderedDict()  # guarded by _lock
        self._inflight = 0  # guarded by _lock: bytes being written that `usage` does not know yet
        self._stripes = [runtime.lock() for _ in range(STRIPES)]

    def _path(self, name: str, shard: int) -> str:
        return f"{self._folder(shard)}/{name}"

    def _folder(self, shard: int) -> str:
        return f"{self._base}/{shard:03x}"

    # --- reading ---------------------------------------------------------------------------------

    def read(
        self, name: str, shard: int, begin: int, end: int | None, quick: bool = False
    ) -> bytes | None:
        """Bytes `begin..end` of an object, fewer past its end; None where they are not here.

        `quick`: None as well where that needs a look at the disk. Raises: OSError, BadFile.
        """
        for _ in range(TRIES):
            found = self._find(name, shard)
            if found is not None and found.extents is not None:
                found = self._with_range(found, name, shard, begin, end, quick)
            if found is None:
                return None
            stop = found.size if end is None else end
            if found.extents is None:
                stop = min(stop, found.size)
            size = max(0, stop - begin)
            if quick and not found.file.in_memory(found.base + begin, size):
                return None
            data = found.file.read(size, found.base + begin)
            if self._is_still(found, name):
                if len(data) != size:
                    raise BadFile(f"{len(data)} bytes instead of {size}")
                return data
        return None

    def read_into(self, name: str, shard: int, pieces: Sequence[memoryview]) -> int | None:
        """Fill `pieces` from an object's start; None where it is not here as a whole.

        Raises: OSError, BadFile.
        """
        for _ in range(TRIES):
            found = self._find(name, shard)
            if found is not None and found.extents is not None:
                found = self._reopen(name, shard)  # another mount may have all of it by now
            if found is None or found.extents is not None:
                return None
            got = found.file.read_into(pieces, found.base)
            if self._is_still(found, name):
                if got != min(found.size, sum(map(len, pieces))):
                    raise BadFile(f"{got} bytes of {found.size}")
                return got
        return None

    def is_near(self, name: str, shard: int) -> bool:
        """Whether all of an object is here, in the kernel's memory. Raises: OSError, BadFile."""
        found = self._find(name, shard)
        whole = found is not None and found.extents is None
        return found is not None and whole and found.file.in_memory(found.base, found.size)

    def _is_still(self, found: OpenedCopy, name: str) -> bool:
        """Whether what was read is what the head says: asked afterwards, so nothing comes between.

        Objects have checksums and no names: only this tells one from another.
        """
        if found.file.read(len(found.head), 0) == found.head:
            return True
        self.forget(name)
        return False

    def extents(self, name: str, shard: int) -> Extents:
        """The parts of an object that are here; none for what is here as a whole, or not at all.

        Raises: OSError, BadFile.
        """
        found = self._reopen(name, shard)
        return () if found is None else found.extents or ()

    def holding(self, name: str, shard: int, use: bool) -> DiskUsage:
        """What is here of an object; `use`: it counts as used now. Nothing is kept open.

        Raises: OSError, BadFile.
        """
        try:
            file = self._files.open(self._path(name, shard))
        except FileNotFoundError:
            return DiskUsage(False, 0)
        head, _ = read_head(file.read, name.encode())
        if use:
            self._touch(file)
        if head.extents is None:
            return DiskUsage(True, head.size)
        return DiskUsage(False, sum(end - begin for begin, end in head.extents))

    def _with_range(
        self, found: OpenedCopy, name: str, shard: int, begin: int, end: int | None, quick: bool
    ) -> OpenedCopy | None:
        """A file of ranges that has `begin..end`; others may have added it since it was opened."""
        if end is not None and covers(found.extents or (), begin, end):
            return found
        if quick:
            return None
        again = self._reopen(name, shard)
        if again is None or again.extents is None:
            return again
        return again if end is not None and covers(again.extents, begin, end) else None

    def _find(self, name: str, shard: int) -> OpenedCopy | None:
        """A cache file, opened if need be. Raises: OSError, BadFile."""
        with self._lock:
            found = self._open.get(name)
            if found is not None:
                self._open.move_to_end(name)
        if found is None:
            return self._open_file(name, shard)
        now = self._runtime.monotonic()
        if now >= found.until:
            self._touch(found.file)
            self._keep(name, found._replace(until=now + TOUCH_S))
        return found

    def _reopen(self, name: str, shard: int) -> OpenedCopy | None:
        """What is there now under this name."""
        self.forget(name)
        return self._open_file(name, shard)

    def _open_file(self, name: str, shard: int) -> OpenedCopy | None:
        """Raises: OSError, BadFile."""
        try:
            file = self._files.open(self._path(name, shard))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in _OUR_FAULT:
                raise
            self.close_files()
            return None
        return self._learn(name, file)

    def _learn(self, name: str, file: CacheFile) -> OpenedCopy:
        """Keep a file open whose head is right. Raises: OSError, BadFile."""
        head, data = read_head(file.read, name.encode())
        age_s = (self._runtime.now_ns() - file.mtime_ns()) / 1e9
        if not 0 <= age_s < TOUCH_S:
            self._touch(file)
            age_s = 0.0
        until = self._runtime.monotonic() + TOUCH_S - age_s
        opened = OpenedCopy(file, *head, data[: head.base], until)
        self._keep(name, opened)
        return opened

    def _touch(self, file: CacheFile) -> None:
        try:
            file.touch(self._runtime.now_ns())
        except OSError:
            pass  # a disk that is read-only: nothing will be evicted there, either

    def _keep(self, name: str, opened: OpenedCopy) -> None:
        with self._lock:
            self._open[name] = opened
            self._open.move_to_end(name)
            if len(self._open) > self.limits.open_files:
                self._open.popitem(last=False)

    def forget(self, name: str) -> None:
        """Let go of an object's file: who comes next opens what there is then."""
        with self._lock:
            self._open.pop(name, None)

    def close_files(self) -> None:
        """Let go of every descriptor, so that the disk can be unmounted."""
        with self._lock:
            self._open.clear()

    # --- adding ----------------------------------------------------------------------------------

    def add_whole(self, name: str, shard: int, pieces: Sequence[Buffer]) -> bool:
        """Keep an object; False where there is no room. Raises: OSError."""
        before = self._found_before(name, shard)
        if before is not None and before.extents is None:
            return True
        size = sum(map(len, pieces))
        head = pack_whole(name.encode(), size)
        used = _rounded(len(head) + size)
        if not self._take_room(used):
            return False
        try:
            old = 0 if before is None else before.file.used_bytes()
            tmp = self.place.tmp()
            self._files.create(tmp, (head, *pieces))
            return self._publish(tmp, name, shard, used, old)
        finally:
            self._give_room(used)

    def add_range(self, name: str, shard: int, begin: int, data: Buffer) -> bool:
        """Keep a part of an object; False where there is no room. Raises: OSError."""
        with self._stripes[shard % STRIPES]:
            before = self._found_before(name, shard)
            end = begin + len(data)
            if before is not None and (
                before.extents is None or covers(before.extents, begin, end)
            ):
                return True
            used = _rounded(len(data)) + 2 * PAGE_BYTES
            if not self._take_room(used):
                return False
            try:
                if before is not None:
                    return self._extend(name, shard, begin, data)
                tmp = self.place.tmp()
                file = self._files.create(tmp, (pack_ranges(name.encode(), ((begin, end),)),))
                file.write((data,), RANGES_BASE + begin)
                return self._publish(tmp, name, shard, file.used_bytes(), 0)
            finally:
                self._give_room(used)

    def _found_before(self, name: str, shard: int) -> OpenedCopy | None:
        """What is there already; a bad file is none. Raises: OSError."""
        try:
            return self._reopen(name, shard)
        except BadFile:
            self.drop(name, shard)
            return None

    def _extend(self, name: str, shard: int, begin: int, data: Buffer) -> bool:
        """Add a part to a file of ranges: data first, then the list that vouches for them.

        All through one descriptor: what others put under the name meanwhile is not touched.
        """
        try:
            file = self._files.open(self._path(name, shard), write=True)
        except FileNotFoundError:  # another mount evicted it
            return False
        before = file.used_bytes()
        try:
            head = parse(file.read(RANGES_BASE, 0), name.encode())
        except BadFile:
            return False
        if head.extents is None:
            return True
        extents = add_extent(head.extents, begin, begin + len(data))
        if len(extents) > EXTENTS_MAX:
            return False
        file.write((data,), RANGES_BASE + begin)
        file.write((pack_ranges(name.encode(), extents),), 0)
        self.forget(name)
        with self.usage.locked() as table:
            table.add(shard, file.used_bytes() - before)
        return True

    def _publish(self, tmp: str, name: str, shard: int, used: int, old: int) -> bool:
        """Give a finished file its name, if it still fits. Raises: OSError."""
        try:
            with self.usage.locked() as table:
                fits = table.total + used - old <= self.limits.capacity_bytes
                if fits:
                    self._rename(tmp, name, shard)
                    table.add(shard, used - old)
        except OSError:
            self._unlink(tmp)
            raise
        if not fits:  # another mount was faster
            self._unlink(tmp)
        self.forget(name)
        return fits

    def _rename(self, tmp: str, name: str, shard: int) -> None:
        try:
            self._files.rename(tmp, self._path(name, shard))
        except FileNotFoundError:  # the shard's first file
            self._files.make_directory(self._folder(shard))
            self._files.rename(tmp, self._path(name, shard))

    def _unlink(self, path: str) -> None:
        try:
            self._files.unlink(path)
        except FileNotFoundError:
            pass

    # --- removing --------------------------------------------------------------------------------

    def drop(self, name: str, shard: int) -> bool:
        """Remove an object's file; whether there was one. Raises: OSError."""
        self.forget(name)
        try:
            file = self._files.open(self._path(name, shard))
        except FileNotFoundError:
            return False
        with self.usage.locked() as table:
            used = file.used_bytes()
            try:
                self._files.unlink(self._path(name, shard))
            except FileNotFoundError:  # another mount was faster
                return True
            table.add(shard, -used)
        return True

    def make_room(self, size: int) -> bool:
        """Have room for an object of `size` bytes, evicting if need be. Raises: OSError."""
        used = _rounded(HEAD_BYTES + size)
        if not self._take_room(used):
            return False
        self._give_room(used)
        return True

    def _take_room(self, size: int) -> bool:
        """Reserve `size` bytes, evicting if need be. Raises: OSError."""
        self.full = not self._make_room(size)
        return not self.full

    def _make_room(self, size: int) -> bool:
        for _ in range(usage.SHARDS + 1):
            want = self.missing(size)
            if want <= 0:
                with self._lock:
                    self._inflight += size
                return True
            if self.limits.eviction == "none" or size > self.limits.capacity_bytes:
                return False
            slack = min(SLACK_BYTES_MAX, self.limits.capacity_bytes // SLACK_SHARE)
            if not self._evict(want + slack):
                return False
        return False

    def _give_room(self, size: int) -> None:
        with self._lock:
            self._inflight -= size

    def missing(self, size: int) -> int:
        """How many bytes have to go before `size` fit."""
        with self._lock:
            inflight = self._inflight
        space = self._files.space(self._base)
        over = self.usage.seen + inflight + size - self.limits.capacity_bytes
        floor = int(space.total_bytes * self.limits.free_ratio)
        short = floor - (space.free_bytes - size)
        if space.free_inodes_share < self.limits.free_ratio:
            short = max(short, 1)
        return max(over, short)

    def _evict(self, want: int) -> bool:
        """Look through the next shard that has anything; False where none has."""
        with self.usage.locked() as table:
            shard = table.next_used(self._cursor)
        if shard is None:
            return False
        self._cursor = shard
        self.look_through(shard, want)
        return True

    def look_through(self, shard: int, want: int = 0) -> None:
        """Count a shard exactly, and remove about `want` bytes of it and what has expired.

        Raises: OSError.
        """
        folder = self._folder(shard)
        with self.usage.locked() as table:
            listed = self._files.list(folder)
            left = sum(each.used_bytes for each in listed)
            try:
                for each in self._victims(listed, min(want, max(1, left // EVICT_SHARE))):
                    self._unlink(f"{folder}/{each.name}")
                    self.forget(each.name)
                    left -= each.used_bytes
                    self.evicted += 1
            finally:
                table.set(shard, left)

    def _victims(self, listed: list[Listed], want: int) -> list[Listed]:
        """Which files of a shard go for `want` bytes."""
        victims: list[Listed] = []
        if self.limits.expire_s:
            old = self._runtime.now_ns() - int(self.limits.expire_s * 1e9)
            victims = [each for each in listed if each.mtime_ns < old]
            listed = [each for each in listed if each.mtime_ns >= old]
            want -= sum(each.used_bytes for each in victims)
        if want <= 0:
            return victims
        pick = _oldest if self.limits.eviction == "lru" else self._older_of_two
        listed = sorted(listed, key=_age)
        while listed and want > 0:
            victims.append(listed.pop(pick(len(listed))))
            want -= victims[-1].used_bytes
        return victims

    def _older_of_two(self, length: int) -> int:
        """Of two random files in order of age the older one."""
        return int(min(self._runtime.random(), self._runtime.random()) * length)


def _oldest(_: int) -> int:
    return 0


def _age(listed: Listed) -> int:
    return listed.mtime_ns


def _rounded(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES

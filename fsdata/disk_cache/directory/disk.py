"""One directory of the disk cache: finds, adds and removes the cache files of one volume.

    DIR/UUID/SHARD/NAME      cache files (`format`); SHARD is three hexadecimal digits

The rest of the directory is that of `location`.

`DiskCache` calls it and handles its OSErrors. Bytes are not verified here but by `BlockStore`.

Threading: any method from any thread. One of `_stripes`, and the lock of `usage`, is held across
I/O to this disk, by threads that only write it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from fsdata.disk_cache.directory.eviction import DiskLimits, Eviction
from fsdata.disk_cache.directory.file_io import CacheFiles
from fsdata.disk_cache.directory.format import (
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
from fsdata.disk_cache.directory.location import CacheLocation
from fsdata.disk_cache.directory.open_copies import OpenCopies, OpenedCopy
from fsdata.objects.contract import Buffer
from fsmeta.runtime import Runtime

PAGE_BYTES: Final = 4096  # what files take on a disk is rounded up to this
TRIES: Final = 3  # other mounts may change a file of ranges while it is read
STRIPES: Final = 16  # files of ranges changed at a time


class DiskUsage(NamedTuple):
    """What is here of an object."""

    whole: bool
    bytes: int


class Disk:
    """The cache of one volume in one directory."""

    def __init__(
        self, runtime: Runtime, files: CacheFiles, root: str, volume: str, limits: DiskLimits
    ) -> None:
        self.place = CacheLocation(runtime, files, root, volume)
        self.limits = limits
        self.copies = OpenCopies(runtime, files, self.place, limits.open_files)
        self.eviction = Eviction(runtime, files, self.place, limits, self.copies)
        self._files = files
        self.usage = self.place.usage
        self._stripes = [runtime.lock() for _ in range(STRIPES)]

    # --- reading ---------------------------------------------------------------------------------

    def read(
        self, name: str, shard: int, begin: int, end: int | None, quick: bool = False
    ) -> bytes | None:
        """Bytes `begin..end` of an object, fewer past its end; None where they are not here.

        `quick`: None as well where that needs a look at the disk. Raises: OSError, BadFile.
        """
        for _ in range(TRIES):
            found = self.copies.find(name, shard)
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
            found = self.copies.find(name, shard)
            if found is not None and found.extents is not None:
                found = self.copies.reopen(name, shard)  # another mount may have all of it by now
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
        found = self.copies.find(name, shard)
        whole = found is not None and found.extents is None
        return found is not None and whole and found.file.in_memory(found.base, found.size)

    def _is_still(self, found: OpenedCopy, name: str) -> bool:
        """Whether what was read is what the head says: asked afterwards, so nothing comes between.

        Objects have checksums and no names: only this tells one from another.
        """
        if found.file.read(len(found.head), 0) == found.head:
            return True
        self.copies.forget(name)
        return False

    def extents(self, name: str, shard: int) -> Extents:
        """The parts of an object that are here; none for what is here as a whole, or not at all.

        Raises: OSError, BadFile.
        """
        found = self.copies.reopen(name, shard)
        return () if found is None else found.extents or ()

    def holding(self, name: str, shard: int, use: bool) -> DiskUsage:
        """What is here of an object; `use`: it counts as used now. Nothing is kept open.

        Raises: OSError, BadFile.
        """
        try:
            file = self._files.open(self.place.path(name, shard))
        except FileNotFoundError:
            return DiskUsage(False, 0)
        head, _ = read_head(file.read, name.encode())
        if use:
            self.copies.touch(file)
        if head.extents is None:
            return DiskUsage(True, head.size)
        return DiskUsage(False, sum(end - begin for begin, end in head.extents))

    def _with_range(
        self, found: OpenedCopy, name: str, shard: int, begin: int, end: int | None, quick: bool
    ) -> OpenedCopy | None:
        """A file of ranges with `begin..end`; a mount may have added it since it was opened."""
        if end is not None and covers(found.extents or (), begin, end):
            return found
        if quick:
            return None
        again = self.copies.reopen(name, shard)
        if again is None or again.extents is None:
            return again
        return again if end is not None and covers(again.extents, begin, end) else None

    # --- adding ----------------------------------------------------------------------------------

    def add_whole(self, name: str, shard: int, pieces: Sequence[Buffer]) -> bool:
        """Keep an object; False where there is no room. Raises: OSError."""
        before = self._found_before(name, shard)
        if before is not None and before.extents is None:
            return True
        size = sum(map(len, pieces))
        head = pack_whole(name.encode(), size)
        used = _rounded(len(head) + size)
        if not self.eviction.take_room(used):
            return False
        try:
            old = 0 if before is None else before.file.used_bytes()
            tmp = self.place.tmp()
            self._files.create(tmp, (head, *pieces))
            return self.publish(tmp, name, shard, used, old)
        finally:
            self.eviction.give_room(used)

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
            if not self.eviction.take_room(used):
                return False
            try:
                if before is not None:
                    return self._extend(name, shard, begin, data)
                tmp = self.place.tmp()
                file = self._files.create(tmp, (pack_ranges(name.encode(), ((begin, end),)),))
                file.write((data,), RANGES_BASE + begin)
                return self.publish(tmp, name, shard, file.used_bytes(), 0)
            finally:
                self.eviction.give_room(used)

    def _found_before(self, name: str, shard: int) -> OpenedCopy | None:
        """What is there already; a bad file is none. Raises: OSError."""
        try:
            return self.copies.reopen(name, shard)
        except BadFile:
            self.drop(name, shard)
            return None

    def _extend(self, name: str, shard: int, begin: int, data: Buffer) -> bool:
        """Add a part to a file of ranges: data first, then the list of valid ranges.

        All through one descriptor: a file that another mount has put under the name meanwhile is
        not touched.
        """
        try:
            file = self._files.open(self.place.path(name, shard), write=True)
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
        self.copies.forget(name)
        with self.usage.locked() as table:
            table.add(shard, file.used_bytes() - before)
        return True

    def publish(self, tmp: str, name: str, shard: int, used: int, old: int) -> bool:
        """Give a finished file its name, if it still fits. Raises: OSError."""
        try:
            with self.usage.locked() as table:
                fits = table.total + used - old <= self.limits.capacity_bytes
                if fits:
                    self._rename(tmp, name, shard)
                    table.add(shard, used - old)
        except OSError:
            self.place.remove(tmp)
            raise
        if not fits:  # another mount was faster
            self.place.remove(tmp)
        self.copies.forget(name)
        return fits

    def _rename(self, tmp: str, name: str, shard: int) -> None:
        try:
            self._files.rename(tmp, self.place.path(name, shard))
        except FileNotFoundError:  # the shard's first file
            self._files.make_directory(self.place.folder(shard))
            self._files.rename(tmp, self.place.path(name, shard))

    # --- removing --------------------------------------------------------------------------------

    def drop(self, name: str, shard: int) -> bool:
        """Remove an object's file; whether there was one. Raises: OSError."""
        self.copies.forget(name)
        try:
            file = self._files.open(self.place.path(name, shard))
        except FileNotFoundError:
            return False
        with self.usage.locked() as table:
            used = file.used_bytes()
            try:
                self._files.unlink(self.place.path(name, shard))
            except FileNotFoundError:  # another mount was faster
                return True
            table.add(shard, -used)
        return True

    def make_room(self, size: int) -> bool:
        """Have room for an object of `size` bytes, evicting if need be. Raises: OSError."""
        used = _rounded(HEAD_BYTES + size)
        if not self.eviction.take_room(used):
            return False
        self.eviction.give_room(used)
        return True


def _rounded(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES

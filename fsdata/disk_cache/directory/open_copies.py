"""Cache files of one disk that are open: the files that were used last, with what their heads say.

`Disk` reads through it. Opening verifies the head, and counts as a use of the file: its mtime is
moved when it is older than TOUCH_S, so eviction finds the files that were not used for longest.

Threading: any method from any thread; `_lock` guards the table, is a leaf, and is not held across
I/O to the disk.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from typing import Final, NamedTuple

from fsdata.disk_cache.directory.file_io import CacheFile, CacheFiles
from fsdata.disk_cache.directory.format import Extents, read_head
from fsdata.disk_cache.directory.location import CacheLocation
from fsmeta.runtime import Runtime

TOUCH_S: Final = 300.0  # a file's mtime tells when it was used, no finer than this
OUR_FAULT: Final = (errno.EMFILE, errno.ENFILE)  # of an open: this process has too many files


class OpenedCopy(NamedTuple):
    """A cache file that is open, and what its head says."""

    file: CacheFile
    base: int
    size: int
    extents: Extents | None
    head: bytes  # as it was when that was read off it
    until: float  # when it is to be touched


class OpenCopies:
    """At most so many open files, by name."""

    def __init__(
        self, runtime: Runtime, files: CacheFiles, place: CacheLocation, limit: int
    ) -> None:
        self._runtime = runtime
        self._files = files
        self._place = place
        self._limit = limit
        self._lock = runtime.lock()
        self._open: OrderedDict[str, OpenedCopy] = OrderedDict()  # guarded by _lock

    def find(self, name: str, shard: int) -> OpenedCopy | None:
        """A cache file, opened if need be. Raises: OSError, BadFile."""
        with self._lock:
            found = self._open.get(name)
            if found is not None:
                self._open.move_to_end(name)
        if found is None:
            return self._open_file(name, shard)
        now = self._runtime.monotonic()
        if now >= found.until:
            self.touch(found.file)
            self._keep(name, found._replace(until=now + TOUCH_S))
        return found

    def reopen(self, name: str, shard: int) -> OpenedCopy | None:
        """What is there now under this name. Raises: OSError, BadFile."""
        self.forget(name)
        return self._open_file(name, shard)

    def _open_file(self, name: str, shard: int) -> OpenedCopy | None:
        """Raises: OSError, BadFile."""
        try:
            file = self._files.open(self._place.path(name, shard))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in OUR_FAULT:
                raise
            self.close()
            return None
        return self._learn(name, file)

    def _learn(self, name: str, file: CacheFile) -> OpenedCopy:
        """Keep a file open whose head is right. Raises: OSError, BadFile."""
        head, data = read_head(file.read, name.encode())
        age_s = (self._runtime.now_ns() - file.mtime_ns()) / 1e9
        if not 0 <= age_s < TOUCH_S:
            self.touch(file)
            age_s = 0.0
        until = self._runtime.monotonic() + TOUCH_S - age_s
        opened = OpenedCopy(file, *head, data[: head.base], until)
        self._keep(name, opened)
        return opened

    def touch(self, file: CacheFile) -> None:
        """A file counts as used now."""
        try:
            file.touch(self._runtime.now_ns())
        except OSError:
            pass  # a disk that is read-only: nothing will be evicted there, either

    def _keep(self, name: str, opened: OpenedCopy) -> None:
        with self._lock:
            self._open[name] = opened
            self._open.move_to_end(name)
            if len(self._open) > self._limit:
                self._open.popitem(last=False)

    def forget(self, name: str) -> None:
        """Let go of an object's file: the next reader opens what there is then."""
        with self._lock:
            self._open.pop(name, None)

    def close(self) -> None:
        """Let go of every descriptor, so that the disk can be unmounted."""
        with self._lock:
            self._open.clear()

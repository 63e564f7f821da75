"""Whole files on cache disks: plain, without heads, so that the kernel can read them itself.

Only of inodes that never change (snapshots). A whole file lies in a shard as any cache file does,
so it is counted, used, evicted and expired as those are; the copies of its blocks stay. Its bytes
come from verified blocks, and its CRC-32C is kept beside it as an attribute. Heads and checksums
come before the bytes of a block's copy, so reflinks can't share them.

A file is handed out if this process has verified it within VERIFIED_S; else the caller has to
`verify` it, which reads all of it. The kernel verifies nothing, and what it has opened stays open
when the file is evicted.

Called by `kernel/passthrough`. Threading: any method from any thread.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from struct import Struct
from typing import Final

from fsdata.disk_cache.cache import DiskCache
from fsdata.disk_cache.directory.open_copies import TOUCH_S
from fsdata.disk_cache.write_queue import CopyTarget
from fsdata.objects.contract import Buffer
from fsdata.resources.crc import crc32c
from fsdata.resources.private_paths import open_private
from fsmeta.runtime import Runtime

log = logging.getLogger(__name__)

VERIFIED_S: Final = 3600.0  # a disk that rots is noticed at an open an hour later
VERIFIED_MAX: Final = 100_000  # files that this process knows to be right
_XATTR: Final = "user.slicefs.whole"
_SUM: Final = Struct("<IQ")  # CRC-32C and size
_PIECE_BYTES: Final = 1 << 20
_UNIT: Final = 512  # of st_blocks, stat(2)
_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW


class WholeFiles:
    """The whole files of one volume."""

    def __init__(self, runtime: Runtime, cache: DiskCache) -> None:
        self._runtime = runtime
        self._cache = cache
        self._lock = runtime.lock()
        self._verified: OrderedDict[str, float] = OrderedDict()  # when; guarded by _lock

    def open(self, ino: int, size: int) -> int | None:
        """A descriptor of a file that was verified of late; None where there is none."""
        name = _name(ino, size)
        with self._lock:
            verified_s = self._verified.get(name)
        if verified_s is None or self._runtime.monotonic() - verified_s > VERIFIED_S:
            return None
        fd = self._open(name)
        if fd is not None and os.fstat(fd).st_size != size:
            os.close(fd)
            return None
        return fd

    def _open(self, name: str) -> int | None:
        target = self._cache.target(name)
        if target is None:
            return None
        try:
            fd = open_private(
                target.member.disk.place.path(name, target.shard), _FLAGS | os.O_RDONLY
            )
        except OSError:
            return None
        now_ns = self._runtime.now_ns()
        if now_ns - os.fstat(fd).st_mtime_ns > TOUCH_S * 1e9:
            with suppress(OSError):
                os.utime(fd, ns=(now_ns, now_ns))
        return fd

    def verify(self, ino: int, size: int) -> bool:
        """Whether a file is there, and right; one that is wrong is dropped."""
        name = _name(ino, size)
        fd = self._open(name)
        if fd is None:
            return False
        try:
            right = _is_right(fd, size)
        except OSError as error:
            log.info("whole file %s: %s", name, error)
            return False
        finally:
            os.close(fd)
        target = self._cache.target(name)
        if right:
            self._note(name)
        elif target is not None:
            log.warning("cache disk %s: %s is damaged", target.member.disk.place.root, name)
            target.member.drop(name, target.shard)
        return right

    def make(self, ino: int, size: int, pieces: Iterable[Buffer]) -> bool:
        """Keep a file with these verified bytes; False where that can't be."""
        name = _name(ino, size)
        target = self._cache.target(name)
        if target is None or not target.member.is_keeping():
            return False
        disk = target.member.disk
        try:
            if not disk.eviction.take_room(size):
                return False
            try:
                made = self._make(target, size, pieces)
            finally:
                disk.eviction.give_room(size)
        except OSError as error:  # the blocks serve, as ever
            log.info("whole file %s is not kept: %s", name, error)
            return False
        if made:
            self._note(name)
        return made

    def _make(self, target: CopyTarget, size: int, pieces: Iterable[Buffer]) -> bool:
        """Raises: OSError."""
        disk = target.member.disk
        tmp = disk.place.tmp()
        fd = os.open(tmp, _FLAGS | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            got, crc = 0, 0
            for piece in pieces:
                view = memoryview(piece)
                crc = crc32c(view, crc)
                while view:
                    wrote = os.pwrite(fd, view, got)
                    got += wrote
                    view = view[wrote:]
            if got != size:
                os.unlink(tmp)
                return False
            os.setxattr(fd, _XATTR, _SUM.pack(crc, size))
            used = os.fstat(fd).st_blocks * _UNIT
        except BaseException:
            with suppress(OSError):
                os.unlink(tmp)
            raise
        finally:
            os.close(fd)
        return disk.publish(tmp, target.name, target.shard, used, self._used_before(target))

    def _used_before(self, target: CopyTarget) -> int:
        """What a file of another mount takes that is about to be replaced."""
        try:
            found = os.lstat(target.member.disk.place.path(target.name, target.shard))
        except OSError:
            return 0
        return found.st_blocks * _UNIT

    def _note(self, name: str) -> None:
        with self._lock:
            self._verified[name] = self._runtime.monotonic()
            self._verified.move_to_end(name)
            if len(self._verified) > VERIFIED_MAX:
                self._verified.popitem(last=False)


def _name(ino: int, size: int) -> str:
    return f"whole-{ino:x}-{size:x}"


def _is_right(fd: int, size: int) -> bool:
    """Raises: OSError."""
    crc, at = 0, 0
    while piece := os.pread(fd, _PIECE_BYTES, at):
        crc = crc32c(piece, crc)
        at += len(piece)
    return at == size and os.getxattr(fd, _XATTR) == _SUM.pack(crc, size)

"""Which objects are being fetched for a cache directory, as all processes of the host know it.

    DIR/UUID/fetching        one byte for each hash of a name; it holds nothing but locks

Several mounts, or the workers of a DataLoader, may share a directory and miss the same object at
the same time. The first one claims it: a lock of one byte of the file, which the kernel takes back
from a process that dies. The others look into the cache again until the copy is there. They wait
for a bounded time, so a claim that lasts costs time and never a read.

`DiskCache` calls it. Threading: any method from any thread. `_lock` is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from typing import Final, TypeVar

from fsdata.disk_cache.directory.file_io import CacheFile, CacheFiles
from fsmeta.runtime import Runtime

FIRST_PAUSE_S: Final = 0.001
PAUSE_S_MAX: Final = 0.02
FIRST_WAIT_S: Final = 0.5
WAIT_S_MIN: Final = 0.05  # a copy has to be written, too
STORE_FACTOR: Final = 4  # a wait ends after so many times what a request to the store takes
IDLE_S: Final = 1.0  # without claims, after a wait that has brought nothing
CLAIMS_MAX: Final = 64
_OFFSET_BITS: Final = 62  # of the 63 that an offset of a file has

T = TypeVar("T")


class FetchClaim:
    """The right to fetch an object, until it is given up or the process ends."""

    __slots__ = ("_at", "_ended", "_file")

    def __init__(self, file: CacheFile | None, at: int, ended: Callable[[], None]) -> None:
        """`file`: where its byte `at` is locked; None where nothing is."""
        self._file = file
        self._at = at
        self._ended = ended

    def give_up(self) -> None:
        """There is a copy of the object now, or there will be none."""
        file, self._file = self._file, None
        if file is not None:
            self._ended()
            with suppress(OSError):  # the disk is gone, and the lock with it
                file.unlock_byte(self._at)  # a process that was forked may have the file open, too


NO_CLAIM: Final = FetchClaim(None, 0, lambda: None)  # other processes may fetch the same


class FetchClaims:
    """The claims of one cache directory."""

    def __init__(self, runtime: Runtime, files: CacheFiles, path: str) -> None:
        self._runtime = runtime
        self._files = files
        self._path = path
        self._lock = runtime.lock()
        self._claimed = 0  # claims that are held; guarded by _lock
        self._idle_until = 0.0  # nothing is claimed before: threads may miss each other's
        self.waits = 0  # for other processes; likewise

    def claim(
        self, lock: Callable[[], FetchClaim | None], look: Callable[[], T | None], wait_s: float
    ) -> tuple[T | None, FetchClaim]:
        """What `look` finds of an object that was not there a moment ago.

        Where that is None the caller fetches the object, and gives the claim up once a copy has
        been made, or will not be. `lock` calls the method of that name.
        """
        mine = lock()
        if mine is None:
            self.waits += 1
            found, mine = self._wait(lock, look, wait_s)
        else:
            found = look()  # another process may have been faster than the lock
        if found is not None:
            mine.give_up()
        return found, mine

    def _wait(
        self, lock: Callable[[], FetchClaim | None], look: Callable[[], T | None], wait_s: float
    ) -> tuple[T | None, FetchClaim]:
        """Look until another process has made a copy, has given up, or takes too long."""
        deadline = self._runtime.monotonic() + wait_s
        pause_s = FIRST_PAUSE_S
        while self._runtime.monotonic() < deadline:
            self._runtime.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
            mine = lock()
            found = look()
            if found is not None or mine is not None:
                return found, mine or NO_CLAIM
        self._idle_until = self._runtime.monotonic() + IDLE_S  # copies are slow, or a fetch hangs
        return None, NO_CLAIM

    def lock(self, name: str) -> FetchClaim | None:
        """Lock the byte of an object; None where another process has it."""
        if self._runtime.monotonic() < self._idle_until or not self._begin():
            return NO_CLAIM
        at, claim = _offset(name), NO_CLAIM
        try:
            file = self._files.open_locks(self._path)  # not kept: its disk may be to be unmounted
            if not file.lock_byte(at):
                return None
            claim = FetchClaim(file, at, self._end)
        except OSError:
            pass  # no such locks there, or what reads and writes of the disk tell as well
        finally:
            if claim is NO_CLAIM:
                self._end()
        return claim

    def _begin(self) -> bool:
        """Whether there may be one more claim: each has a descriptor."""
        with self._lock:
            if self._claimed == CLAIMS_MAX:
                return False
            self._claimed += 1
            return True

    def _end(self) -> None:
        with self._lock:
            self._claimed -= 1


def patience_s(store_s: float) -> float:
    """How long to wait for another process, where a request takes `store_s`, or 0: not known."""
    return max(WAIT_S_MIN, STORE_FACTOR * store_s) if store_s else FIRST_WAIT_S


def _offset(name: str) -> int:
    """The byte of an object; two that share one wait for each other, which costs time only."""
    digest = blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _OFFSET_BITS)

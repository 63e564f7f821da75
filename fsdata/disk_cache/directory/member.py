"""A cache disk under supervision: errors are handled here, and never reach a reader.

`DiskCache` has one for each directory. Reads are timed; an error becomes a miss and a report to
`Health`. Additions are jobs of the disk's own threads. A keeper thread counts what is there, looks
for the disk, probes it while it is in quarantine, and lets files expire.

Threading: any method from any thread. The counters are guarded by `_lock`, a leaf.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Final, TypeVar

from fsdata.disk_cache.directory import usage
from fsdata.disk_cache.directory.disk import Disk, DiskUsage
from fsdata.disk_cache.directory.fetch_claims import NO_CLAIM, FetchClaim, patience_s
from fsdata.disk_cache.directory.format import BadFile, Extents
from fsdata.disk_cache.directory.health import Health, HealthState
from fsdata.disk_cache.directory.open_copies import OUR_FAULT
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.runtime import Runtime, Thread, spawn_lasting

log = logging.getLogger(__name__)

T = TypeVar("T")

SLOW_S: Final = 1.0  # no SSD needs so long; an overloaded machine may
HUNG_S: Final = 10.0  # a read that takes so long keeps later ones off the disk
STORE_FACTOR: Final = 8  # and either only if it is so many times what the store takes
WAIT_S: Final = 0.001  # reads that take longer wait for a disk; others are copies of its pages
AVERAGE_OF: Final = 8
LOOK_S: Final = 5.0  # how often the keeper looks whether the disk is there
ROUND_S: Final = 3600.0  # how often it counts everything
SHARED_ROUND_S: Final = 600.0  # where the count can't be locked: the excess is evicted then
FIRST_ROUND_S: Final = 10.0  # a mount has more urgent things to do at first
STEP_S: Final = 0.01  # between two shards: a round leaves disk and processors to readers
CLOSE_S: Final = 5.0  # how long its keeper, and then its writers, may keep a mount from ending

_NOTHING: Final = DiskUsage(False, 0)
_NOT_WRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_TAKEN_AWAY: Final = (errno.ENOENT, errno.ESTALE)  # NFS forgets open files that are removed
_GONE: Final = (errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ESTALE)


class CacheDir:
    """A disk, its health, its writers and its keeper."""

    def __init__(
        self,
        runtime: Runtime,
        disk: Disk,
        number: int,
        writers: int,
        store_s: Callable[[], float],
        returned: Callable[[], None],
    ) -> None:
        """`store_s()`: how many seconds a request to the store takes these days; `returned` is told
        when the disk is used again."""
        self.disk = disk
        self.health = Health(runtime, disk.place.root)
        self._runtime = runtime
        self._number = number
        self._store_s = store_s
        self._returned = returned
        self._writers = WorkerPool(runtime, f"cache-{number}", writers)
        self._tokens = count()
        self._reads: dict[int, float] = {}  # when each read under way began
        self._average_s = 0.0  # of reads; threads may miss each other's
        self._cond = runtime.condition()
        self._closed = False  # guarded by _cond
        self._keeper: Thread | None = None
        self.recount_s = ROUND_S

    def start(self) -> None:
        """Begin to look after the disk."""
        self._keeper = spawn_lasting(self._runtime, f"cache-keeper-{self._number}", self._keep)

    def close(self) -> None:
        """End the threads; what they have not written yet is not written.

        A disk that hangs holds up its own threads only, which end with the process.
        """
        with self._cond:
            self._closed = True
            self._cond.notify_all()
        if self._keeper is not None:
            self._keeper.join(CLOSE_S)
        if not self._writers.close(CLOSE_S):
            log.warning("cache disk %s hangs: its writers are abandoned", self.disk.place.root)
        self.disk.copies.close()

    # --- for readers -----------------------------------------------------------------------------

    def is_usable(self) -> bool:
        """Whether it is to be asked at all."""
        return self.health.usable() and not (self._reads and self._hangs())

    def is_keeping(self) -> bool:
        """Whether what is fetched now will be found here later."""
        return self.health.writable() and not self.disk.eviction.full

    def read(
        self, name: str, shard: int, begin: int, end: int | None, quick: bool = False
    ) -> bytes | None:
        """As `Disk.read`; whatever goes wrong is a miss."""
        look = partial(self.disk.read, name, shard, begin, end, quick)
        return self._tried(name, shard, look, None)

    def read_into(self, name: str, shard: int, pieces: Sequence[memoryview]) -> int | None:
        """As `Disk.read_into`; whatever goes wrong is a miss."""
        return self._tried(name, shard, partial(self.disk.read_into, name, shard, pieces), None)

    def claim(
        self, name: str, shard: int, look: Callable[[], T | None]
    ) -> tuple[T | None, FetchClaim]:
        """As `FetchClaims.claim`; without one where nothing will be kept."""
        if not self.is_keeping():
            return None, NO_CLAIM
        claims = self.disk.place.claims

        def lock() -> FetchClaim | None:
            return self._tried(name, shard, partial(claims.lock, name), None)

        return claims.claim(lock, look, patience_s(self._store_s()))

    def is_near(self, name: str, shard: int) -> bool:
        """As `Disk.is_near`; whatever goes wrong is a miss."""
        return self._tried(name, shard, partial(self.disk.is_near, name, shard), False)

    def extents(self, name: str, shard: int) -> Extents:
        """Which parts of an object are here, of one that is here in parts."""
        return self._tried(name, shard, partial(self.disk.extents, name, shard), ())

    def holding(self, name: str, shard: int, use: bool = False) -> DiskUsage:
        """As `Disk.holding`; whatever goes wrong is nothing there."""
        return self._tried(name, shard, partial(self.disk.holding, name, shard, use), _NOTHING)

    def _tried(self, name: str, shard: int, look: Callable[[], T], missed: T) -> T:
        """What a look at an object says; `missed` where it fails, and it is judged."""
        token = self._begin()
        try:
            return look()
        except BadFile as error:
            self._downgrade(name, shard, str(error))
        except OSError as error:
            self.disk.copies.forget(name)
            self._met(error)
        finally:
            self._end(token)
        return missed

    def make_room(self, size: int) -> bool:
        """As `Disk.make_room`, of a disk that takes something."""
        try:
            return self.health.writable() and self.disk.make_room(size)
        except OSError as error:
            self._met(error, writing=True)
            return False

    def has_room(self, size: int) -> bool:
        """Whether something that large finds room without anything going for it."""
        try:
            return self.health.writable() and self.disk.eviction.missing(size) <= 0
        except OSError as error:
            self._met(error)
            return False

    def _begin(self) -> int:
        if self._average_s > WAIT_S:
            self._runtime.will_wait()
        token = next(self._tokens)
        self._reads[token] = self._runtime.monotonic()
        return token

    def _end(self, token: int) -> None:
        took_s = self._runtime.monotonic() - self._reads.pop(token)
        self._average_s += (took_s - self._average_s) / AVERAGE_OF
        if took_s > SLOW_S and took_s > STORE_FACTOR * self._store_s():
            self.health.failed(f"a read took {took_s:.1f} s")

    def _hangs(self) -> bool:
        """Whether a read does not come back; then no other should go."""
        now = self._runtime.monotonic()
        longest_s = now - min(list(self._reads.values()), default=now)
        if longest_s <= max(HUNG_S, STORE_FACTOR * self._store_s()):
            return False
        self.health.lost(f"a read hangs for {longest_s:.0f} s")
        return True

    # --- for writers -----------------------------------------------------------------------------

    def submit(self, add: Callable[[Disk], bool], then: Callable[[bool], None]) -> None:
        """Have one of the writers add something; `then` is called with whether it is there now."""
        self._writers.submit(lambda: self._add(add, then))

    def _add(self, add: Callable[[Disk], bool], then: Callable[[bool], None]) -> None:
        added = False
        try:
            if self.health.writable() and not self._closed:
                added = add(self.disk)
                self.health.wrote()
        except BadFile as error:
            self.health.failed(str(error))
        except OSError as error:
            self._met(error, writing=True)
        finally:
            then(added)

    def drop(self, name: str, shard: int) -> bool:
        """Remove an object's file; whether there was one."""
        try:
            return self.disk.drop(name, shard)
        except OSError as error:
            self._met(error, writing=True)
            return False

    # --- errors ----------------------------------------------------------------------------------

    def _met(self, error: OSError, writing: bool = False) -> None:
        """Say what an error means for the disk."""
        why = error.strerror or str(error)
        if error.errno in OUR_FAULT:
            log.debug("cache disk %s: %s", self.disk.place.root, why)
        elif writing and error.errno in _NOT_WRITABLE:
            self.health.pause(why)
        elif error.errno in _TAKEN_AWAY and self._is_present():
            log.debug("cache disk %s: %s; another mount was faster", self.disk.place.root, error)
        elif error.errno in _GONE:
            self.health.lost(why)
        else:
            self.health.failed(why)

    def _is_present(self) -> bool:
        """Whether the directory is there, where something in it is not."""
        try:
            return self.disk.place.is_present()
        except OSError:
            return False

    def _downgrade(self, name: str, shard: int, why: str) -> None:
        """A file is not what it should be."""
        self.drop(name, shard)
        self.health.failed(f"cache file {name}: {why}")

    # --- keeping ---------------------------------------------------------------------------------

    def _keep(self) -> None:
        """The keeper's body."""
        next_round = self._runtime.monotonic() + FIRST_ROUND_S
        while True:
            before = self.health.state
            pause_s = self._look()
            if before is HealthState.ASIDE and self.health.usable():
                next_round = self._runtime.monotonic()
                self._returned()
            if self.health.usable() and self._runtime.monotonic() >= next_round:
                self._round()
                next_round = self._runtime.monotonic() + self._round_s()
            if self._wait(pause_s):
                return

    def _round_s(self) -> float:
        """Seconds between rounds: files expire in time."""
        expire_s = self.disk.limits.expire_s
        return min(self.recount_s, expire_s / 2) if expire_s else self.recount_s

    def _look(self) -> float:
        """Look whether the disk is there and well; seconds until the next look."""
        if self.health.usable():
            try:
                if not self.disk.place.is_present():
                    self.health.lost("its directory is not there, or another one")
                elif self.health.state is HealthState.SUSPECT:
                    self.disk.place.probe()
            except (OSError, BadFile) as error:
                self._probe_failed(error)
            self.health.calm_down()
        if self.health.usable():
            return LOOK_S
        self.disk.copies.close()
        try:
            self.disk.place.probe()
        except (OSError, BadFile):
            return self.health.probed(good=False)
        return self.health.probed(good=True)

    def _probe_failed(self, error: OSError | BadFile) -> None:
        if isinstance(error, OSError):
            self._met(error, writing=True)
        else:
            self.health.failed(str(error))

    def _round(self) -> None:
        """Count every shard, and let files expire."""
        try:
            self.disk.place.sweep_tmp()
            for shard in range(usage.SHARDS):
                if not self.health.usable() or self._wait(STEP_S):
                    return
                self.disk.eviction.look_through(shard)
        except OSError as error:
            self._met(error, writing=True)

    def _wait(self, seconds: float) -> bool:
        """Wait; whether it is time to end."""
        with self._cond:
            if not self._closed:
                self._cond.wait(seconds)
            return self._closed

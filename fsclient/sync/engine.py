"""Comparing two trees as streams, and copying what differs.

Both listings are merged by key in constant memory; what is to be deleted is kept until the listings
have ended without an error, and nothing is deleted where one has not, or where the source was
empty. What is there already is passed over, so an interrupted run is repeated: `KeyboardInterrupt`
ends the copies that are under way, whose temporary files go, and says how many were copied.

Threading: `sync` in the caller's thread, which lists; copies run in threads of a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from typing import Final, NamedTuple

from fsclient.sync.items import (
    Content,
    Item,
    ItemKind,
    ItemRefused,
    PathFilter,
    SyncSide,
    names_of,
    order,
)
from fsclient.sync.local import is_temporary
from fsclient.trees.walk import Failure, Failures
from fsdata.objects.rate_limit import Pace
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import ConfigError, StoreError, Unavailable
from fsmeta.runtime import Runtime

THREADS: Final = 10
AHEAD: Final = 4  # copies that wait, for each thread
STOP_S = 10.0  # what copies under way have to end, once the run is interrupted
CHECKS: Final = ("mtime", "size", "checksum")
_SECOND: Final = 10**9


class SyncRequest(NamedTuple):
    """How trees are to be made alike."""

    rules: PathFilter
    delete: bool = False
    dry_run: bool = False
    check: str = "mtime"
    threads: int = THREADS
    bytes_s: int = 0  # 0: no limit
    ordered: bool = False  # a file is begun when all before it are there
    dirs: bool = False  # directories get objects in a bucket


class Synced(NamedTuple):
    """What was done, or, after a dry run, would be."""

    listed: int
    copied: int
    bytes: int
    same: int
    deleted: int
    skipped: int
    failed: int
    failures: list[Failure]


class _Counts:
    """Numbers of several threads."""

    def __init__(self, runtime: Runtime) -> None:
        self._lock = runtime.lock()
        self.listed = self.copied = self.bytes = self.same = self.deleted = self.skipped = 0

    def add(self, **more: int) -> None:
        with self._lock:
            for name, value in more.items():
                setattr(self, name, getattr(self, name) + value)


class _Gate:
    """Holds back the listing while enough copies wait."""

    def __init__(self, runtime: Runtime, most: int) -> None:
        self._cond = runtime.condition()
        self._most = most
        self._now = 0  # guarded by _cond

    def enter(self) -> None:
        with self._cond:
            while self._now >= self._most:
                self._cond.wait(1.0)
            self._now += 1

    def leave(self) -> None:
        with self._cond:
            self._now -= 1
            self._cond.notify_all()

    def drain(self) -> None:
        with self._cond:
            while self._now:
                self._cond.wait(1.0)


class Sync:
    """One run from `source` to `target`."""

    def __init__(
        self,
        source: SyncSide,
        target: SyncSide,
        wish: SyncRequest,
        runtime: Runtime,
        progress: Callable[[str], object] = lambda _: None,
        told: Callable[[str, str], object] = lambda *_: None,
    ) -> None:
        """`told` is called with each action and its key."""
        self._source = source
        self._target = target
        self._wish = wish
        self._progress = progress
        self._told = told
        self._counts = _Counts(runtime)
        self._failures = Failures(runtime)
        self._stopped = runtime.event()
        self._pace = Pace(runtime, wish.bytes_s, self._stopped) if wish.bytes_s else None
        threads = 1 if wish.ordered else wish.threads
        self._pool = WorkerPool(runtime, "sync", threads)
        self._gate = _Gate(runtime, AHEAD * threads)
        self._exact = source.has_modes and target.has_modes
        self._folders: list[Item] = []
        self._first: dict[tuple[int, int], str] = {}
        self._links: list[tuple[str, str]] = []
        self._extra: list[Item] = []

    def run(self) -> Synced:
        """Make `target` like `source`. Failures of single items are told at the end.

        Raises: KeyboardInterrupt, with what to tell the user.
        """
        try:
            done = self._run()
        except BaseException as error:
            self._stop()
            if not isinstance(error, KeyboardInterrupt):
                raise
            why = f"interrupted: {self._counts.copied} copied; the same command goes on from there"
            raise KeyboardInterrupt(why) from error
        self._pool.close()
        return done

    def _stop(self) -> None:
        """End what is under way; a request that hangs is left behind and ends with the process."""
        self._stopped.set()
        self._source.stop()
        self._target.stop()
        self._pool.close(STOP_S)

    def _run(self) -> Synced:
        complete = False
        try:
            self._merge()
            complete = True
        except (OSError, StoreError) as error:
            name = getattr(error, "filename", None) or "listing"
            self._failures.add(str(name), f"the listing failed: {error}; nothing is deleted")
        self._gate.drain()
        if not self._wish.dry_run:
            for first, key in self._links:
                self._try(key, partial(self._target.link, first, key))
        if complete and self._wish.delete:
            self._delete()
        if self._exact and not self._wish.dry_run:
            for item in reversed(self._folders):
                self._try(item.key, partial(self._target.dress, item))
        c, f = self._counts, self._failures
        numbers = (c.listed, c.copied, c.bytes, c.same, c.deleted, c.skipped)
        return Synced(*numbers, f.count, f.first)

    # --- comparing -------------------------------------------------------------------------------

    def _merge(self) -> None:
        theirs = self._chosen(self._source.list(), True)
        ours = self._chosen(self._target.list(), False)
        mine = next(ours, None)
        for item in theirs:
            self._counts.add(listed=1)
            while mine is not None and order(mine.key) < order(item.key):
                self._extra.append(mine)
                mine = next(ours, None)
            before = None
            if mine is not None and mine.key == item.key:
                before, mine = mine, next(ours, None)
            self._judge(item, before)
            c = self._counts
            self._progress(f"{c.listed} listed, {c.copied} copied, {self._failures.count} failures")
        while mine is not None:
            self._extra.append(mine)
            mine = next(ours, None)

    def _chosen(self, items: Iterator[Item], source: bool) -> Iterator[Item]:
        for item in items:
            if self._wish.rules.allow(item.key) and not (source and is_temporary(item.key)):
                yield item

    def _judge(self, item: Item, before: Item | None) -> None:
        """What is to be done with one item of the source."""
        try:
            names_of(item.key)
        except ItemRefused as error:
            self._failures.add(item.key, str(error))
            return
        if item.kind is ItemKind.OTHER or (item.kind is not ItemKind.FILE and not self._exact):
            if item.kind is not ItemKind.DIR:
                self._counts.add(skipped=1)
                self._told("skip", item.key)
            elif self._makes_folders(before) and not self._wish.dry_run:
                self._try(item.key, partial(self._target.make, item))
            return
        if item.kind is ItemKind.DIR:
            self._folders.append(item)
            if before is None and self._note("make", item) and not self._wish.dry_run:
                self._try(item.key, partial(self._target.make, item))
            return
        if item.inode is not None and self._exact:
            first = self._first.setdefault(item.inode, item.key)
            if first != item.key:
                if before is None or not self._quick(item, before):
                    self._note("link", item)
                    self._links.append((first, item.key))
                return
        if before is not None and self._wish.check != "checksum" and self._quick(item, before):
            self._counts.add(same=1)
            return
        self._gate.enter()
        self._pool.submit(partial(self._work, item, before))

    def _makes_folders(self, before: Item | None) -> bool:
        """Whether a directory is made in the target, where `before` is now."""
        return self._target.has_modes or (self._wish.dirs and before is None)

    def _note(self, what: str, item: Item) -> bool:
        self._told(what, item.key)
        return True

    def _quick(self, item: Item, before: Item) -> bool:
        """Whether both seem the same by what the listings tell."""
        if item.kind is not before.kind or item.size != before.size:
            return False
        if item.kind is ItemKind.LINK and item.target != before.target:
            return False
        if self._wish.check == "size" or item.kind is ItemKind.LINK:
            return True
        if self._target.has_modes and self._source.has_modes:
            return item.mtime_ns == before.mtime_ns
        if self._target.has_modes:
            return item.mtime_ns // _SECOND == before.mtime_ns // _SECOND
        return before.mtime_ns // _SECOND >= item.mtime_ns // _SECOND  # an object is younger

    # --- copying ---------------------------------------------------------------------------------

    def _work(self, item: Item, before: Item | None) -> None:
        try:
            if not self._stopped.is_set():
                self._try(item.key, partial(self._copy, item, before))
        finally:
            self._gate.leave()

    def _copy(self, item: Item, before: Item | None) -> None:
        if before is not None and self._wish.check == "checksum" and self._same(item, before):
            self._counts.add(same=1)
            return
        self._told("copy", item.key)
        if not self._wish.dry_run:
            if item.kind is ItemKind.LINK:
                self._target.make(item)
            else:
                content = self._source.read(item)
                try:
                    self._target.write(item, content._replace(pieces=self._paced(content.pieces)))
                finally:
                    _close(content)
        self._counts.add(copied=1, bytes=item.size)

    def _same(self, item: Item, before: Item) -> bool:
        if item.kind is not before.kind or item.size != before.size:
            return False
        if item.kind is ItemKind.LINK:
            return item.target == before.target
        return self._digest(self._source, item) == self._digest(self._target, before)

    def _digest(self, place: SyncSide, item: Item) -> bytes:
        content, digest = place.read(item), blake2b()
        try:
            for piece in self._paced(content.pieces):
                digest.update(piece)
        finally:
            _close(content)
        return digest.digest()

    def _paced(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Raises: Unavailable once the run is interrupted."""
        for piece in pieces:
            if self._stopped.is_set():
                raise Unavailable("the run is interrupted")
            if self._pace is not None:
                self._pace.take(len(piece))
            yield piece

    def _try(self, key: str, job: Callable[[], object]) -> None:
        try:
            job()
        except (OSError, StoreError, ItemRefused, UnicodeError) as error:
            self._failures.add(key, error if isinstance(error, OSError) else str(error))

    # --- deleting --------------------------------------------------------------------------------

    def _delete(self) -> None:
        """What the source does not have, from below."""
        if not self._counts.listed:
            self._failures.add(
                "--delete", "the source has nothing to copy, so nothing is deleted: check SRC"
            )
            return
        failed = self._failures.count
        for item in reversed(self._extra):
            self._told("delete", item.key)
            if not self._wish.dry_run:
                self._try(item.key, partial(self._target.delete, [item]))
        self._counts.add(deleted=len(self._extra) - (self._failures.count - failed))


def _close(content: Content) -> None:
    """End the pieces, which hold a descriptor until then."""
    close = getattr(content.pieces, "close", None)
    if close is not None:
        close()


def require_check(check: str) -> None:
    """Raises: ConfigError where no such comparison exists."""
    if check not in CHECKS:
        raise ConfigError(f"--check {check}: use one of {', '.join(CHECKS)}")

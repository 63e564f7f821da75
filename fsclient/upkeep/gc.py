"""Garbage collection: objects that no chunk refers to and none will.

The `gc` command calls it, on volumes in use, and so do tests. What makes it safe is not age but the
floors that sessions show: below the lowest, no client will commit a slice any more, so references
can only go away. docs/design/deletion-gc-repair has the argument.

It streams: the chunks once, into a bit for each slice, then the store's listing. It may be killed
at any time and run again: what is deleted is deleted, and with a `GcCheckpoint` in files it goes on
where it was. Of several at once the one that has begun last goes on. One thread, and those that
delete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

from fsclient.upkeep.gc_checkpoint import MARK, SWEEP, GcCheckpoint
from fsdata.format.object_keys import CHUNKS, parse_key
from fsdata.objects.contract import ObjectInfo, ObjectStore
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import ConfigError, StoreError
from fsmeta.meta.meta import Meta
from fsmeta.ops.data import gc as marks
from fsmeta.runtime import Runtime
from fsmeta.schema import keys, scan
from fsmeta.store.contract import COMMIT_OPS_ENOUGH

AGE_S: Final = 3600.0  # no garbage is in a hurry; more than any clock is wrong by
THREADS: Final = 8
BATCH: Final = 1000  # objects deleted before the next are looked at


class Count(NamedTuple):
    """Objects, and what they take in the store."""

    objects: int = 0
    bytes: int = 0

    def plus(self, info: ObjectInfo) -> Count:
        """One more."""
        return Count(self.objects + 1, self.bytes + info.size)


class Collected(NamedTuple):
    """What is in the store."""

    in_use: Count = Count()
    dead: Count = Count()  # wait for deletion by the leader
    leaked: Count = Count()  # of no file
    young: Count = Count()  # of no file, and younger than asked for
    recent: Count = Count()  # of slices that a client may still commit
    strange: Count = Count()  # keys that are no blocks'
    deleted: Count = Count()
    failed: int = 0  # of those leaked, that could not be deleted
    floor: int = 0  # slices below it were classified
    held_by: str = ""  # the session that keeps the floor so low


class Progress(NamedTuple):
    """Called now and then with numbers so far."""

    inodes: Callable[[int], None]
    objects: Callable[[int, Collected], None]


class Job(NamedTuple):
    """What is to be done."""

    age_s: float = AGE_S
    delete: bool = False
    threads: int = THREADS
    may_delete: Callable[[], None] = lambda: None  # raises where it must not begin


def collect(
    meta: Meta,
    objects: ObjectStore,
    runtime: Runtime,
    job: Job,
    progress: Progress,
    place: GcCheckpoint | None = None,
) -> Collected:
    """Find what is leaked, and delete it if asked to; go on from `place`.

    Only a gc that deletes has a checkpoint in files: marks are safe to keep where clients know of
    them. Raises: Corrupt where a chunk can't be read: what it refers to is not known; Unavailable;
    ConfigError where another one has begun meanwhile.
    """
    place = place or GcCheckpoint(runtime)
    try:
        if not place.is_good(meta):
            _begin(meta, job, place)
        if place.phase == MARK:
            noted = _mark(meta, place, progress)
            if job.delete and not _end_marks(meta, place.run, noted):
                raise ConfigError("another gc has started: wait until it ends, or run this again")
            place.enter(SWEEP)
        sweep = _Sweep(place, runtime.now_ns() - int(job.age_s * 1e9))
        remove = _ObjectRemover(runtime, objects, job.threads) if job.delete else None
        return _sweep(objects, sweep, remove, progress)
    finally:
        place.close()


def _begin(meta: Meta, job: Job, place: GcCheckpoint) -> None:
    """Find out what may be deleted at all."""
    store_epoch = meta.deletion.store_epoch()
    floor, holder = _floor(meta)
    run = place.begin(floor, store_epoch)
    if job.delete:
        job.may_delete()  # clients that are gone by now were not counted, or held the floor down
        bound = floor
        meta.transactor.run(lambda txn: marks.begin(txn, bound, run))
        after, by = _floor(meta)  # of sessions that have joined before they could see it
        if after < floor:
            floor, holder = after, by
    place.floor, place.counts = floor, {"held_by": holder}
    place.save()


def settled_floor(meta: Meta) -> tuple[int, str]:
    """A floor that stays one, whichever client joins again; and the session that keeps it low.

    Raises: StoreError.
    """
    floor, holder = _floor(meta)
    meta.transactor.run(lambda txn: marks.raise_void(txn, floor))
    after, by = _floor(meta)  # of sessions that have joined before they could see it
    return (after, by) if after < floor else (floor, holder)


def _floor(meta: Meta) -> tuple[int, str]:
    """Below it no client will commit a slice; and the session that keeps it below what was handed
    out."""
    _, floor = meta.sessions.round_and_floor()
    holder = ""
    for each in meta.sessions.all():
        if each.floor < floor:
            floor = each.floor
            holder = f"session {each.id} ({each.info.get('host')} pid {each.info.get('pid')})"
    return floor, holder


def _mark(meta: Meta, place: GcCheckpoint, progress: Progress) -> list[bytes]:
    """Note every slice that is referred to; the fields of those noted by others as well."""
    used = place.used
    inodes = 0
    for page in scan.pages(meta.store, place.walk_from):
        for each in page.inodes:
            if each.error is not None:
                raise each.error
            for slices in each.chunks.values():
                for piece in slices:
                    used.add(piece.id)
        inodes += len(page.inodes)
        progress.inodes(inodes)
        if page.cursor is not None:
            place.step(page.cursor)
    shared = [field for field, _ in scan.fields_of(meta.store, keys.SHARED)]
    for field in shared:
        used.add(keys.id_of(field))
    for sid, _ in scan.dead(meta.store):  # last: what the chunks lose meanwhile goes there
        place.dead.add(sid)
    return shared


def _end_marks(meta: Meta, run: bytes, noted: Sequence[bytes]) -> bool:
    """Tell clients that no gc reads the chunks any more; False where another gc does.

    Their notes go first, while none can begin unnoticed.
    """
    for begin in range(0, max(len(noted), 1), COMMIT_OPS_ENOUGH):
        end = begin + COMMIT_OPS_ENOUGH
        part = partial(marks.end, run=run, noted=noted[begin:end], last=end >= len(noted))
        if not meta.transactor.run(part):
            return False
    return True


class _Sweep:
    """What the listing is compared with, and what was found."""

    def __init__(self, place: GcCheckpoint, before_ns: int) -> None:
        self.place = place
        self._before_ns = before_ns
        self.seen = int(place.counts.get("seen", 0))
        self.counts = {name: Count(*place.counts.get(name, ())) for name in _VERDICTS}
        self._deleted = Count(*place.counts.get("deleted", ()))

    def verdict(self, info: ObjectInfo) -> str:
        """The field of `Collected` that an object belongs to."""
        name = parse_key(info.key)
        if name is None:
            return "strange"
        if name.slice_id in self.place.used:
            return "in_use"
        if name.slice_id in self.place.dead:
            return "dead"
        if name.slice_id >= self.place.floor:
            return "recent"
        return "leaked" if info.mtime_ns <= self._before_ns else "young"

    def note(self, info: ObjectInfo) -> bool:
        """Count an object; whether it is leaked."""
        verdict = self.verdict(info)
        self.counts[verdict] = self.counts[verdict].plus(info)
        self.seen += 1
        return verdict == "leaked"

    def so_far(self, remove: _ObjectRemover | None) -> Collected:
        """What was found and done, by earlier runs, too."""
        deleted, failed = self._deleted, 0
        if remove is not None:
            deleted = Count(*map(sum, zip(deleted, remove.deleted, strict=True)))
            failed = remove.failed
        held_by = str(self.place.counts.get("held_by", ""))
        return Collected(
            **self.counts, deleted=deleted, failed=failed, floor=self.place.floor, held_by=held_by
        )

    def step(self, key: str, so_far: Collected) -> None:
        """All up to `key` is classified and dealt with."""
        kept = {name: list(getattr(so_far, name)) for name in (*_VERDICTS, "deleted")}
        self.place.counts |= {**kept, "seen": self.seen}
        self.place.step(key)


_VERDICTS: Final = ("in_use", "dead", "leaked", "young", "recent", "strange")


def _sweep(
    objects: ObjectStore, sweep: _Sweep, remove: _ObjectRemover | None, progress: Progress
) -> Collected:
    """Classify each object; leaked ones go, before the next `BATCH` is looked at."""
    listing = objects.list(f"{CHUNKS}/", sweep.place.at)
    try:
        while batch := list(islice(listing, BATCH)):
            leaked = [info for info in batch if sweep.note(info)]
            if remove is not None:
                remove.all(leaked)
            so_far = sweep.so_far(remove)
            sweep.step(batch[-1].key, so_far)
            progress.objects(sweep.seen, so_far)
    finally:
        if remove is not None:
            remove.close()
    return sweep.so_far(remove)


class _ObjectRemover:
    """Deletes objects with several threads."""

    def __init__(self, runtime: Runtime, objects: ObjectStore, threads: int) -> None:
        self._objects = objects
        self._lock = runtime.lock()
        self.deleted = Count()  # guarded by _lock, as is `failed`
        self.failed = 0
        self._pool = WorkerPool(runtime, "gc", threads)

    def all(self, batch: list[ObjectInfo]) -> None:
        """Delete these; what fails is counted."""
        self._pool.run_all([partial(self._some, part) for part in self._pool.parts(batch)])

    def _some(self, infos: Sequence[ObjectInfo]) -> None:
        """Delete these together, or else each by itself, to know which of them."""
        try:
            self._objects.delete(*(info.key for info in infos))
            done = infos
        except (OSError, StoreError):
            done = [info for info in infos if self._is_deleted(info)]
        with self._lock:
            for info in done:
                self.deleted = self.deleted.plus(info)
            self.failed += len(infos) - len(done)

    def _is_deleted(self, info: ObjectInfo) -> bool:
        try:
            self._objects.delete(info.key)
        except (OSError, StoreError):
            return False
        return True

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

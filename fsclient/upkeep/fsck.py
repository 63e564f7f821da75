"""One check of a volume: its metadata, the objects that they name, and its backups.

`slicefs fsck` calls it, and scripts may. With `kept_in` the notes are files of the user, beside
each other, and a check that was killed goes on from them; see `fsmeta/check/kept_table`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from fsclient.upkeep.verify_backups import BackupVerdict, verify_backups
from fsclient.upkeep.verify_objects import (
    LOOKUPS,
    KeptListing,
    Naming,
    ObjectsVerdict,
    look_up_objects,
    verify_objects,
)
from fsclient.volume.object_options import parse_options
from fsclient.volume.object_stores import open_objects, stacked, stored_key
from fsclient.volume.paths import find, path_of
from fsdata.objects.contract import ObjectStore
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.check.check import Examination
from fsmeta.check.findings import KEPT_MAX
from fsmeta.check.kept_table import KeptAt, forget
from fsmeta.check.spill_table import CACHE_BYTES
from fsmeta.check.subtree import SubtreeExamination
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime
from fsmeta.store.contract import Store
from fsmeta.types import Ino, SliceId

_NAMED_MAX: Final = 100  # files of which the path is looked for
_OBJECTS: Final = ".objects"


class FsckRequest(NamedTuple):
    """What is to be checked."""

    store_options: Sequence[str] = ()
    paths: Sequence[str] = ()  # from the volume's root; none: everything
    kept_in: str | None = None  # a file for notes
    mend: bool = False  # remove backups that are not whole


class FsckReport(NamedTuple):
    """What was found."""

    inodes: int
    slices: int
    objects: int
    leaked_objects: int
    problems: list[str]  # the first KEPT_MAX
    problem_count: int
    repaired: Sequence[str] = ()  # what was mended before
    unfinished_backups: int = 0

    def with_problems(self, more: list[str], count: int) -> FsckReport:
        """This with further problems, of which `more` were kept."""
        kept = [*self.problems, *more][:KEPT_MAX]
        return self._replace(problems=kept, problem_count=self.problem_count + count)


def examine(
    meta: Meta, request: FsckRequest, runtime: Runtime, progress: Callable[[str], None]
) -> FsckReport:
    """Check metadata and objects. Raises: ConfigError, Corrupt, NoVolume, Unavailable, OSError."""
    store = meta.store
    tops = [find(meta, path) for path in request.paths]
    kept = None if request.kept_in is None else KeptAt(request.kept_in, runtime.monotonic)
    made = (
        SubtreeExamination(store, tops, progress)
        if tops
        else Examination(store, progress, CACHE_BYTES, kept)
    )
    with made as examination:
        found = examination.run()
        settings = meta.format
        overrides = parse_options(settings.storage, tuple(request.store_options))
        raw = open_objects(settings, runtime, overrides)
        objects = stacked(raw, settings.storage, runtime).store
        naming = Naming(partial(stored_key, settings), _Paths(store, examination).of)
        try:
            if tops:
                verdict = _look_up(meta, objects, examination, runtime, progress, naming)
                saved = BackupVerdict([], 0, [])
            else:
                listing = None
                if kept is not None:
                    beside = kept._replace(path=kept.path + _OBJECTS)
                    listing = KeptListing(beside, examination.identity)
                verdict = verify_objects(
                    objects, settings.block_bytes, examination, False, progress, naming, listing
                )
                saved = verify_backups(objects, request.mend)
        finally:
            objects.close()
    report = FsckReport(
        found.inodes, found.slices, verdict.objects, verdict.leaked,
        [str(each) for each in found.problems], found.problem_count,
    )  # fmt: skip
    report = report._replace(unfinished_backups=saved.unfinished, repaired=saved.removed)
    report = report.with_problems(verdict.problems, verdict.problem_count)
    return report.with_problems(saved.problems, len(saved.problems))


def forget_notes(kept_in: str) -> None:
    """Remove the notes of a check that is through: the next one begins anew."""
    forget(kept_in)
    forget(kept_in + _OBJECTS)


def _look_up(
    meta: Meta,
    objects: ObjectStore,
    examination: Examination,
    runtime: Runtime,
    progress: Callable[[str], None],
    naming: Naming,
) -> ObjectsVerdict:
    pool = WorkerPool(runtime, "fsck", LOOKUPS)
    try:
        return look_up_objects(
            objects, meta.format.block_bytes, examination, pool, progress, naming
        )
    finally:
        pool.close()


class _Paths:
    """The files that slices belong to, as users name them."""

    def __init__(self, store: Store, examination: Examination) -> None:
        self._store = store
        self._notes = examination.notes
        self._found: dict[Ino, str] = {}

    def of(self, sid: SliceId) -> str:
        """A path; of many only the inode, for a user to look up."""
        ino = self._notes.user(sid)
        if ino is None:
            return ""
        if ino not in self._found and len(self._found) < _NAMED_MAX:
            self._found[ino] = path_of(self._store, ino)
        return self._found.get(ino, f"inode {ino}")

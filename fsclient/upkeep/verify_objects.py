"""Are the objects there, and right? The second half of `slicefs fsck`.

The listing is noted in tables that spill to disk, and then read beside the slices in order. Of a
part of the volume (`fsck --path`) nothing is listed: each block is looked up by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, Protocol

from fsdata.format.block_v1 import decode
from fsdata.format.geometry import block_count, block_length
from fsdata.format.object_keys import CHUNKS, object_key, parse_key
from fsdata.objects.contract import ObjectStore
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.check.findings import KEPT_MAX
from fsmeta.check.kept_table import KeptAt, KeptTable
from fsmeta.check.spill_table import ID_MAX, Groups, SpillTable
from fsmeta.errors import ObjectDamaged, ObjectMissing
from fsmeta.types import SliceId

_SCRIPT: Final = (
    "CREATE TABLE object(id, block, length, PRIMARY KEY(id, block, length)) WITHOUT ROWID"
)
_TELL_EVERY: Final = 1000  # objects
_LISTING: Final = "listing"  # the phases of a check that is kept
_LISTED: Final = "listed"
LOOKUPS: Final = 16  # at once
_SLICES_AT_ONCE: Final = 1000


class Slices(Protocol):
    """What a check has seen, each by id."""

    def slices(self) -> Iterator[tuple[SliceId, int]]:
        """Id and size of what files refer to."""

    def dead(self) -> Iterator[tuple[SliceId, int]]:
        """Id and size of what waits for deletion."""


class Naming(NamedTuple):
    """How users are told of an object."""

    key: Callable[[str], str] = str  # what the store calls it
    path: Callable[[SliceId], str] = lambda _: ""  # of a file that has the slice; "": not known

    def tell(self, sid: SliceId, key: str, what: str) -> str:
        """One problem."""
        path = self.path(sid)
        return f"object {self.key(key)}{what}{path and f': {path}'}"


class ObjectsVerdict(NamedTuple):
    """What was found in the object store."""

    problems: list[str]  # the first KEPT_MAX
    problem_count: int
    objects: int
    leaked: int  # objects that neither a file nor a pending deletion knows


class KeptListing(NamedTuple):
    """Where the listing is kept, and the state of the volume that it is good for."""

    at: KeptAt
    identity: bytes


_PLAIN: Final = Naming()


def verify_objects(
    objects: ObjectStore,
    block_bytes: int,
    known: Slices,
    data: bool,
    progress: Callable[[str], None] = lambda _text: None,
    naming: Naming = _PLAIN,
    kept: KeptListing | None = None,
) -> ObjectsVerdict:
    """Compare the blocks of slices with a listing; with `data`, read each one."""
    table = SpillTable(_SCRIPT) if kept is None else KeptTable(_SCRIPT, kept.at)
    try:
        table.begin(b"" if kept is None else kept.identity)
        judge = _ObjectsCheck(objects, block_bytes, table, naming)
        judge.list(progress)
        progress("comparing objects and slices")
        judge.compare(known)
        if data:
            for sid, size in known.slices():
                for key, what in _damaged(objects, sid, size, block_bytes):
                    judge.report(sid, key, what)
    finally:
        table.close()
    return ObjectsVerdict(judge.problems, judge.problem_count, judge.objects, judge.leaked)


def look_up_objects(
    objects: ObjectStore,
    block_bytes: int,
    known: Slices,
    pool: WorkerPool,
    progress: Callable[[str], None] = lambda _text: None,
    naming: Naming = _PLAIN,
) -> ObjectsVerdict:
    """Ask for each block of the slices that files refer to; several at once, by `pool`."""
    table = SpillTable(_SCRIPT)
    try:
        judge = _ObjectsCheck(objects, block_bytes, table, naming)
        slices = known.slices()
        while batch := list(islice(slices, _SLICES_AT_ONCE)):
            judge.look_up(batch, pool)
            progress(f"{judge.objects} objects looked up")
    finally:
        table.close()
    return ObjectsVerdict(judge.problems, judge.problem_count, judge.objects, 0)


class _ObjectsCheck:
    """One comparison."""

    def __init__(
        self, objects: ObjectStore, block_bytes: int, table: SpillTable, naming: Naming
    ) -> None:
        self._naming = naming
        self._objects = objects
        self._block_bytes = block_bytes
        self._table = table
        self.problems: list[str] = []
        self.problem_count = 0
        self.objects = 0
        self.leaked = 0

    def report(self, sid: SliceId, key: str, what: str) -> None:
        """Note a problem with an object of a slice."""
        self.problem_count += 1
        if len(self.problems) < KEPT_MAX:
            self.problems.append(self._naming.tell(sid, key, what))

    def list(self, progress: Callable[[str], None]) -> None:
        """Note every object; one that is no block's is leaked."""
        place = self._table.place
        if place.phase == _LISTED:
            self._restore(place.at)
            return
        after = self._restore(place.at)
        for info in self._objects.list(f"{CHUNKS}/", after):
            self.objects += 1
            name = parse_key(info.key)
            if name is None or name.slice_id > ID_MAX:
                self.leaked += 1
            else:
                self._table.add("object", name.slice_id, name.block, name.length)
            if self.objects % _TELL_EVERY == 0:
                progress(f"{self.objects} objects listed")
                self._table.step(_LISTING, self._noted(info.key))
        self._table.step(_LISTED, self._noted(""))

    def _noted(self, key: str) -> bytes:
        """What is counted until `key`."""
        return f"{self.objects} {self.leaked} {key}".encode()

    def _restore(self, noted: bytes) -> str:
        """Take up the counts of an earlier run; the last key that it noted."""
        if not noted:
            return ""
        objects, leaked, key = noted.decode().split(" ", 2)
        self.objects, self.leaked = int(objects), int(leaked)
        return key

    def look_up(self, batch: Sequence[tuple[SliceId, int]], pool: WorkerPool) -> None:
        """Report the blocks of some slices that are not there."""
        missing: list[tuple[SliceId, str]] = []
        counts: list[int] = []

        def ask(part: Sequence[tuple[SliceId, int]]) -> None:
            for sid, size in part:
                counts.append(block_count(size, self._block_bytes))
                found = _missing(self._objects, sid, size, self._block_bytes)
                missing.extend((sid, key) for key in found)

        pool.run_all([partial(ask, batch[at : at + 1]) for at in range(len(batch))])
        self.objects += sum(counts) - len(missing)
        for sid, key in sorted(missing):
            self.report(sid, key, " is missing")

    def compare(self, known: Slices) -> None:
        """Each slice must have its blocks, and no others."""
        there = Groups(
            self._table.rows("SELECT id, block, length FROM object ORDER BY id, block"),
            lambda row: strays.add(row[0]),
        )
        strays = _Strays(known.dead())
        for sid, size in known.slices():
            right = 0
            for _, block, length in there.of(sid):
                key = object_key(sid, block, length)
                if block >= block_count(size, self._block_bytes):
                    self.report(sid, key, ": the slice has no such block")
                elif length != block_length(size, block, self._block_bytes):
                    self.report(sid, key, ": the block has another length")
                else:
                    right += 1
            if right != block_count(size, self._block_bytes):
                for key in _missing(self._objects, sid, size, self._block_bytes):
                    self.report(sid, key, " is missing")
        there.end()
        self.leaked += strays.leaked


class _Strays:
    """Counts objects of slices that no file has, unless they wait for deletion."""

    def __init__(self, dead: Iterable[tuple[SliceId, int]]) -> None:
        self._dead = Groups(dead)
        self._last = (-1, False)  # a slice, and whether it waits
        self.leaked = 0

    def add(self, sid: int) -> None:
        """One more object, of a slice that is not below the last."""
        if sid != self._last[0]:
            self._last = sid, bool(self._dead.of(sid))
        self.leaked += not self._last[1]


def _keys(sid: SliceId, size: int, block_bytes: int) -> list[str]:
    return [
        object_key(sid, index, block_length(size, index, block_bytes))
        for index in range(block_count(size, block_bytes))
    ]


def _missing(objects: ObjectStore, sid: SliceId, size: int, block_bytes: int) -> list[str]:
    keys = _keys(sid, size, block_bytes)
    return [key for key in keys if objects.head(key) is None]


def _damaged(
    objects: ObjectStore, sid: SliceId, size: int, block_bytes: int
) -> list[tuple[str, str]]:
    """Keys, and what is wrong with each."""
    problems = []
    for index, key in enumerate(_keys(sid, size, block_bytes)):
        try:
            block = decode(objects.get(key))
        except ObjectMissing:
            continue  # reported by the listing
        except ObjectDamaged as error:
            problems.append((key, f": {error}"))
            continue
        if len(block) != block_length(size, index, block_bytes):
            problems.append((key, f": {len(block)} bytes"))
    return problems

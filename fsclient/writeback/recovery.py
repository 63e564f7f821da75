"""What an earlier process has left in the directory of a journal, and what of it is still whole.

`WriteBack` owns one. The journal is read before the client joins the volume: from then on parts of
this client take numbers of inodes and slices, which must be none that the journal names.

Threading: called before a mount serves.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar

from fsclient.background.leadership import LEASE_S
from fsdata.staging import journal as staging_log
from fsdata.staging.data_segments import SegmentSpot
from fsdata.staging.disk import StagingDisk
from fsdata.staging.journal import FoundRecord
from fsdata.staging.staged_objects import StagedObjects
from fsmeta.errors import ConfigError, Unavailable
from fsmeta.ops.sessions import ids
from fsmeta.runtime import Runtime
from fsmeta.schema import keys
from fsmeta.schema.journal import HOLDER_FIELD, is_mark, journal_row, unpack_holder
from fsmeta.store.contract import Store
from fsmeta.store.rollback import STEADY
from fsmeta.txn.retry import Transactor
from fsmeta.txn.row_cache import RowCache
from fsmeta.writeback.entries.intents import slices_of
from fsmeta.writeback.entries.log_entry import EVERY, After, LogEntry, Need, unpack

log = logging.getLogger(__name__)

T = TypeVar("T")

RECOVERY_S: Final = 30.0  # for the disk to be read, or the store to say what it has
JOURNAL_BITS: Final = 63
_PAUSE_S: Final = 1.0


class Left(NamedTuple):
    """A journal, and the changes in it that are not published."""

    journal: int
    found: FoundRecord | None  # None where it is a new one
    last: int  # the last sequence that may have been used
    waiting: list[LogEntry]


class Recovery:
    """See the module."""

    def __init__(
        self, runtime: Runtime, disk: StagingDisk, store: Store, objects: StagedObjects
    ) -> None:
        self._runtime = runtime
        self._disk = disk
        self._run = Transactor(store, runtime, RowCache(runtime))
        self._objects = objects

    def read(self, volume: str) -> Left:
        """The journal in the directory, or a new one.

        Raises: StoreError, OSError; ConfigError where a running mount has it.
        """
        found = self.patiently(partial(staging_log.recover, self._disk, volume))
        entries = [unpack(payload) for payload in found.payloads] if found else []
        marks = self._marks(found.journal) if found else {}
        if found is not None and marks is None:
            self._set_aside(found.journal)
            found, entries = None, []
        if found is None:  # what was removed here does not come back beside what comes now
            self.patiently(self._disk.sync_names)
            return Left(self._runtime.random_bits(JOURNAL_BITS), None, 0, [])
        self._require_left(found.journal)
        if found.damaged:
            log.error(
                "staging journal: %d bytes at its end are damaged; the changes in them are lost",
                found.damaged,
            )
        self._keep_numbers(entries)
        marks = marks or {}
        # what the disk has forgotten may have been published: its numbers are not used again
        last = max((found.first - 1, *marks.values(), *(each.sequence for each in entries)))
        waiting = [
            each for each in entries if any(marks.get(d, 0) < each.sequence for d in each.domains)
        ]
        return Left(found.journal, found, last, waiting)

    def _marks(self, journal: int) -> dict[int, int] | None:
        """Up to which sequence a journal is published, by domain.

        None where it was drained: then its row is gone. Raises: StoreError.
        """
        row = journal_row(journal)
        fields = self._run.view(lambda txn: txn.get_row(row))
        if not fields:
            return None
        return {
            keys.id_of(field): keys.id_of(value)
            for field, value in fields.items()
            if is_mark(field)
        }

    def _require_left(self, journal: int) -> None:
        """A copy of a journal is not taken up beside the original: each would publish changes
        under numbers that the other has used, and one of them would be lost.

        The lock tells of the directory that the journal was announced in, whatever the host is
        called: containers and hosts of a cluster have one under several names. In another
        directory, the session of the journal has to have ended, or to stand still for LEASE_S.
        Raises: ConfigError, StoreError.
        """
        row = journal_row(journal)
        value = self._run.view(lambda txn: txn.get(row, HOLDER_FIELD))
        holder = None if value is None else unpack_holder(row, value)
        if holder is None or holder.place == shown_place(self._disk):
            return
        key = keys.SESSIONS, keys.pack_u64(holder.session)
        first = beat = self._run.view(lambda txn: txn.get(*key))
        deadline = self._runtime.monotonic() + LEASE_S
        if beat is not None:
            log.warning(
                "staging journal: it was in %s on %s: the mount waits up to %.0f s to see that "
                "session %d has ended", holder.place, holder.host, LEASE_S, holder.session
            )  # fmt: skip
        while beat is not None and self._runtime.monotonic() < deadline:
            self._runtime.sleep(_PAUSE_S)
            beat = self._run.view(lambda txn: txn.get(*key))
            if beat is not None and beat != first:
                raise ConfigError(
                    f"the journal in {self._disk.place} is a copy of the one in {holder.place} on "
                    f"{holder.host}, which a mount uses: remove the copy, or unmount that one first"
                )

    def _keep_numbers(self, entries: Sequence[LogEntry]) -> None:
        """No inode and no slice that the journal names is made anew. Raises: StoreError."""
        ino = max((0, *(ino for each in entries for ino in each.inos)))
        named = (number for each in entries for number, _ in slices_of(each.intent))
        verb = partial(ids.raise_above, ino=ino, slice_id=max((0, *named)))
        if self._run.run(verb):
            log.error(
                "staging journal: the metadata are older than it, as after a loss of power or from "
                "a backup: changes of files that they do not know are lost"
            )

    def _set_aside(self, journal: int) -> None:
        """Keep a journal out of the way that was drained, and came back with a loss of power.

        It may be another one, where the metadata are older than it: so nothing is deleted.
        """
        name = self.patiently(partial(staging_log.set_aside, self._disk, journal))
        log.warning(
            "staging journal: the metadata know nothing of the one in %s: all of it was published, "
            "or they are older than it; it is not taken up, and is kept in files %s*: "
            "remove them if nothing is missing",
            self._disk.place,
            name,
        )

    def take_up(self, waiting: Sequence[LogEntry]) -> set[int]:
        """Go on with their blocks; entries that rely on what did not survive, and those behind
        them.

        Reads all that is staged: better than to show what is found missing later.
        Raises: StoreError.
        """
        domains: set[int] = set()
        lost = self._without_cause(waiting)
        if lost:
            log.error(
                "staging journal: the metadata store has lost what the last %d changes follow: "
                "they are lost, too",
                len(lost),
            )
        for entry in waiting:
            if entry.sequence in lost:
                domains |= entry.domains
                continue
            behind = domains and (EVERY in entry.domains | domains or entry.domains & domains)
            if not behind and all(self._has(need) for need in entry.needs):
                continue
            log.log(
                logging.INFO if behind else logging.ERROR,
                "%s: %s",
                entry,
                "is left out, too"
                if behind
                else "staged data are lost; it is left out, and what "
                "came after it in its directory",
            )
            domains |= entry.domains
            lost.add(entry.sequence)
        return lost

    def _without_cause(self, waiting: Sequence[LogEntry]) -> set[int]:
        """Entries behind a commit that the store has lost with the power. Raises: StoreError.

        What an earlier process has synced is not among them: the store is synced before the log.
        """
        if self._run.store.history is not STEADY:
            return set()  # it may have forgotten older commits, too, which can't be told
        fences = sorted({each.after.fence for each in waiting if each.after is not None})
        found = self.patiently(partial(self._run.store.read_rows, fences))
        known = dict(zip(fences, found, strict=True))
        return {each.sequence for each in waiting if each.after and _is_lost(each.after, known)}

    def _has(self, need: Need) -> bool:
        spot = SegmentSpot(need.segment, need.offset, need.length, need.crc)
        return self.patiently(partial(self._objects.take_up, need.key, spot))

    def patiently(self, ask: Callable[[], T]) -> T:
        """What a disk or a store says when it is well again. Raises: Unavailable."""
        deadline = self._runtime.monotonic() + RECOVERY_S
        while True:
            try:
                return ask()
            except OSError as error:
                if self._runtime.monotonic() > deadline:
                    raise Unavailable(
                        f"the staging journal in {self._disk.place} can't be read: "
                        f"{error.strerror}: repair the disk and mount again, or move that "
                        "directory away to do without what is in it"
                    ) from error
            except Unavailable:
                if self._runtime.monotonic() > deadline:
                    raise
            self._runtime.sleep(_PAUSE_S)


def shown_place(disk: StagingDisk) -> str:
    """The directory of a journal, as the metadata store has it."""
    return os.fsencode(disk.place).decode(errors="replace")


def _is_lost(after: After, sessions: Mapping[bytes, Mapping[bytes, bytes]]) -> bool:
    """Whether the store does not know a commit of a session any more.

    Of a session that has ended in order nothing is left, nor is there anything lost.
    """
    known = sessions[after.fence]
    return bool(known) and keys.id_of(known.get(after.worker, bytes(8))) < after.number

"""Publishes what a mount holds back: in order, each when its blocks are in the store.

`WriteBack` owns it. One thread takes the oldest entry whose turn it is, and those behind it in its
domain that could follow at once, and runs their verbs on the volume's store: in one commit where
they can share one. Stores that are away are waited for; what does not fit any more is decided by
`fsmeta/writeback/replay`, and said in the log: one by one, after those before it.

Threading: one thread; `numbers` from any.
"""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Final, NamedTuple, TypeVar

from fsdata.staging.staged_objects import StagedObjects
from fsmeta.errors import StoreError, Voided
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime, Thread, spawn_lasting
from fsmeta.schema import keys
from fsmeta.store.contract import Store
from fsmeta.txn.batch import BatchTxn
from fsmeta.txn.retry import CommitNumbers, Transactor
from fsmeta.txn.txn import Txn
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino
from fsmeta.writeback import replay
from fsmeta.writeback.entries.intents import slices_of
from fsmeta.writeback.entries.log_entry import LogEntry, VerbRules
from fsmeta.writeback.staged_store import StagedStore

log = logging.getLogger(__name__)

T = TypeVar("T")

NUMBERS: Final = CommitNumbers(worker=0x8000)  # of the session's; the others are counted from 1
RUN_MAX: Final = 256  # of entries: a segment's files, created and written
_PAUSE_FIRST_S: Final = 0.05
_PAUSE_MAX_S: Final = 5.0
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_MADE: Final = (errno.ENOTEMPTY, errno.EEXIST)  # the row of an inode is not empty
_DELETED: Final = (errno.ESTALE, errno.ENOENT)


def none_of(run: Sequence[LogEntry]) -> list[bool]:
    """No packing here."""
    return [False] * len(run)


def never_voided(entry: LogEntry) -> None:
    """No packing here: no entry has moved to a segment."""


class PublisherPorts(NamedTuple):
    """What is told and asked about entries."""

    # told of those that are dealt with, and whether as they were meant
    published: Callable[[Sequence[tuple[LogEntry, bool]]], object]
    last_ones: Callable[[Sequence[LogEntry]], list[bool]] = none_of  # in their segments
    voided: Callable[[LogEntry], None] = never_voided  # told of those whose segment is ours no more


class Publisher:
    """Publishes the held commits of a mount."""

    def __init__(
        self,
        meta: Meta,
        store: StagedStore,
        inner: Store,
        objects: StagedObjects,
        runtime: Runtime,
        journal: int,
        ports: PublisherPorts,
    ) -> None:
        self._meta = meta
        self._held, self._tell = store.held, store.tell
        self._objects = objects
        self._runtime = runtime
        self._journal = journal
        self._run = Transactor(
            inner, runtime, store.beneath, numbers=NUMBERS, beside=meta.transactor
        )
        self._run.follow = self._follow
        self._published, self._last_ones, self._voided = ports
        self._given_up: dict[int, int] = {}  # domains whose entries up to a sequence are left out
        self.left_out: set[int] = set()  # entries that are not to be seen; before `start` only
        self._ended = runtime.event()
        self._away = False  # said once
        self._most = RUN_MAX  # entries in a commit; fewer for a while where fewer went together
        self._thread: Thread | None = None
        self.published = 0
        self.conflicts = 0

    def start(self) -> None:
        """Begin to publish."""
        self._thread = spawn_lasting(self._runtime, "publisher", self._work)

    def stop(self) -> None:
        """End behind the entry that is under way."""
        self._ended.set()
        self._held.wake()
        if self._thread is not None:
            self._thread.join()

    def forget_journal(self) -> None:
        """The journal is empty and its files are gone. Raises: StoreError."""
        self._do(partial(replay.forget_journal, journal=self._journal))

    def _work(self) -> None:
        while run := self._held.next_run(self._is_ready, self._ended.is_set, self._most):
            pause = _PAUSE_FIRST_S
            while not self._ended.is_set():
                try:
                    outcomes = self._publish_run(run)
                except (OSError, StoreError) as error:
                    self._wait(run[0], error, pause)
                    pause = min(_PAUSE_MAX_S, 2 * pause)
                    continue
                self._away = False
                if not outcomes:
                    self._voided(run[0])
                    break
                self._most = len(outcomes) if len(outcomes) < len(run) else 2 * self._most
                self._most = min(self._most, RUN_MAX)
                self.published += len(outcomes)
                self._held.published(outcomes)
                self._published(outcomes)
                break

    def _is_ready(self, entry: LogEntry) -> bool:
        return all(self._objects.is_stored(need.key) for need in entry.needs)

    def _wait(self, entry: LogEntry, error: Exception, pause: float) -> None:
        if not self._away:
            self._away = True
            log.warning("%s waits to be published: %s", entry, error)
        self._ended.wait(pause)

    def _do(self, verb: Callable[[Txn], T], *entries: LogEntry) -> T:
        """Run a verb in the name of our session; of entries, only if gc has not come before."""
        ids = [number for each in entries for number, _ in slices_of(each.published)]
        self._run.fence = self._meta.sessions.fence_for(ids)
        self._run.edition = self._meta.transactor.edition
        return self._run.run(verb)

    def _publish_run(self, run: Sequence[LogEntry]) -> list[tuple[LogEntry, bool]]:
        """`_publish` the first entry, with as many of those behind it as go into its commit.

        None of them where the first is to be moved anew.
        Raises: StoreError, OSError where a store is away or full.
        """
        plain = [*takewhile(self._is_plain, run)]
        if len(plain) > 1:
            try:
                return self._publish_together(plain)
            except (OSError, Voided):
                pass  # one of them; it is found when all before it are published
        as_meant = self._publish(run[0])
        return [] if as_meant is None else [(run[0], as_meant)]

    def _is_plain(self, entry: LogEntry) -> bool:
        """Whether nothing speaks against publishing an entry, as far as we know."""
        if entry.sequence in self.left_out or any(
            self._given_up.get(d, 0) >= entry.sequence for d in entry.domains
        ):
            return False
        return not any(self._objects.is_lost(need.key) for need in entry.needs)

    def _publish_together(self, entries: Sequence[LogEntry]) -> list[tuple[LogEntry, bool]]:
        """Raises: as `_publish`, and OSError, Voided where one of them can't be published."""
        verb = partial(
            replay.publish_run,
            together=lambda txn: BatchTxn(txn, self._run.store, self._run.cache),
            journal=self._journal,
            entries=entries,
            lasts=self._last_ones(entries),
            charging=self._charging,
            most_at=replay.attempts(len(entries)),
        )
        done = self._do(verb, *entries)
        answers = zip(entries, done, strict=False)
        return [(entry, answer or entry.moved is None) for entry, answer in answers]

    def _publish(self, entry: LogEntry) -> bool | None:
        """Have an entry in the store; whether it is what the program meant and we show.

        None where it was moved to a segment that is ours no more: then it is to be moved anew.

        Raises: StoreError, OSError where a store is away or full.
        """
        if entry.sequence in self.left_out or self._is_given_up(entry):
            self._do(partial(replay.leave_out, journal=self._journal, entry=entry))
            return False
        try:
            verb = partial(
                replay.publish,
                journal=self._journal,
                entry=entry,
                charging=self._charging,
                is_last=self._last_ones((entry,))[0],
            )
            # a commit of our own may have come late: then the store has what that one said
            return self._do(verb, entry) or entry.moved is None
        except OSError as error:
            if error.errno in _FULL:
                raise
            self._resolve(entry, error)
            return False
        except Voided as error:
            if entry.moved is not None:
                return None
            self._give_up(entry, str(error))
            return self._publish(entry)

    def _is_given_up(self, entry: LogEntry) -> bool:
        """Whether an entry is not to be seen, because blocks of it or before it are lost."""
        lost = [need.key for need in entry.needs if self._objects.is_lost(need.key)]
        if lost:
            self._give_up(entry, "staged data are lost")
            self._objects.forget_lost(lost)
        return any(self._given_up.get(d, 0) >= entry.sequence for d in entry.domains)

    def _give_up(self, entry: LogEntry, why: str) -> None:
        """Leave out an entry whose blocks are not there, and what came after it in its domain."""
        upto = self._held.refuse(entry.domains)
        log.error(
            "%s: %s; it and what came after it in its directory is left out, and changes there "
            "are refused until the volume is mounted again",
            entry,
            why,
        )
        self._given_up.update(dict.fromkeys(entry.domains, upto))

    def _resolve(self, entry: LogEntry, error: OSError) -> None:
        """Another client was faster: its change remains. Raises: StoreError, OSError."""
        self.conflicts += 1
        if replay.keeps_data(entry) and self._rescue(entry, error):
            return
        self._do(partial(replay.leave_out, journal=self._journal, entry=entry))
        gone = error.errno in _DELETED and entry.name != "rename"
        level = logging.INFO if gone else logging.WARNING
        log.log(level, "%s is left out, another client was faster: %s", entry, error.strerror)

    def _rescue(self, entry: LogEntry, why: OSError) -> bool:
        """Have a file in /lost+found; False where its inode is there already, or its name is.

        Raises: StoreError, OSError.
        """
        lost, place = self._lost_and_found()
        try:
            self._do(
                partial(
                    replay.rescue,
                    journal=self._journal,
                    entry=entry,
                    lost=lost,
                    charging=self._charging,
                )
            )
        except OSError as error:
            if error.errno in _MADE:
                return False
            raise
        # the own mount has made the directory, and gets no invalidation for its own commits
        self._tell([keys.dir_row(lost), keys.inode_row(lost)])
        name = replay.rescued_name(entry).decode(errors="replace")
        log.warning("%s: %s; it is in /%s/%s", entry, why.strerror, place, name)
        return True

    def _lost_and_found(self) -> tuple[Ino, str]:
        """The directory of that name, or of the next one that is root's; and its name.

        Raises: StoreError, OSError; then it is tried again.
        """
        for name in replay.lost_and_found_names():
            try:
                self._meta.create(ROOT_CALLER, ROOT_INO, name, stat.S_IFDIR | 0o700)
            except FileExistsError:
                pass
            lost = self._run.view(partial(replay.lost_and_found, name=name))
            if lost is not None:
                return lost, name.decode()
        raise OSError(errno.EEXIST, "users have all names of /lost+found: remove some of them")

    def _charging(self) -> VerbRules:
        return VerbRules.of(self._meta.format)

    def _follow(self) -> None:
        """The volume's settings have changed: follow the new ones. Raises: StoreError."""
        assert self._meta.transactor.follow is not None, "set when the settings were read first"
        if self._run.edition == self._meta.transactor.edition:
            self._meta.transactor.follow()
        self._run.edition = self._meta.transactor.edition

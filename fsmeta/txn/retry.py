"""The only retry loop: runs a verb on a `Txn`, commits, and owns conflicts, doubt and deadlines.

A verb returns its answer or raises an `OSError`. Then:
- with writes: they are committed together with a check of every read;
- without, or on an OSError: the answer is true only if all reads are of one moment. That holds when
  one request brought them all, or when each row is leased; otherwise a commit of checks alone
  proves it;
- a Conflict drops what was cached and runs the verb again;
- a lost answer sends the same commit again: the store knows it by worker and sequence. A refusal
  of the repeat says nothing about the first try, so the store is asked for its `fate`; where there
  is no answer up to the deadline the commit stays in doubt, and `Ambiguous` carries what to ask by;
- Outdated has `follow` read the volume's new settings, and runs the verb again.

Threading: any method from any thread.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Final, NamedTuple, TypeVar

from fsmeta.errors import (
    Ambiguous,
    Conflict,
    Doubt,
    Fenced,
    LimitExceeded,
    NotEmpty,
    Outdated,
    StoreError,
    StoreFull,
    StoreRolledBack,
    Unavailable,
    Voided,
)
from fsmeta.runtime import Runtime
from fsmeta.schema.keys import id_of, pack_u64, worker_field
from fsmeta.store.contract import COMMIT_OPS_LIMIT, EDITION, Applied, Call, Commit, Store, is_table
from fsmeta.store.writes import row_of
from fsmeta.txn.cached_fields import WATCHED, Unwatched
from fsmeta.txn.row_cache import RowCache
from fsmeta.txn.txn import Txn

T = TypeVar("T")

DEADLINE_S: Final = 30.0  # how long one verb waits for a store that is away before it fails
_BACKOFF_FIRST_S: Final = 0.01
_BACKOFF_MAX_S: Final = 1.0
# rows that a commit only reads: Redis 7.0 goes through all that are watched with each read
WATCHED_MAX: Final = 320
ENDED_MAX: Final = 16  # own sessions that another client ended; what they committed is kept
GENERATION_BITS: Final = 40  # of the processes that have one session after the other
GENERATIONS: Final = 64  # that have workers of their own; below those of publishers
GENERATION_WORKERS: Final = 256
_new: Final = tuple.__new__  # makes a NamedTuple in half the time of its constructor
_NO_ROWS: Final[Collection[bytes]] = ()
_CONFLICTS_BEFORE_BACKOFF: Final = 3  # at a conflict another client has succeeded: go on at once


class Counters:
    """What the retry loop has seen; read by metrics."""

    def __init__(self) -> None:
        self.commits = 0
        self.conflicts = 0
        self.repeats = 0  # commits sent again after a lost answer
        self.unavailable = 0


class CommitNumbers(NamedTuple):
    """Where a transactor begins to count what identifies its commits."""

    worker: int = 0
    sequence: int = 1

    @classmethod
    def of_generation(cls, generation: int) -> CommitNumbers:
        """Those of one of the processes that have one session after the other: they share none."""
        worker = generation % GENERATIONS * GENERATION_WORKERS
        return cls(worker, (generation << GENERATION_BITS) + 1)


class Notices(NamedTuple):
    """What a transactor reports, each on the thread that notices it."""

    rolled_back: Callable[[StoreRolledBack], object] = bool  # once; nothing is written any more
    ended: Callable[[Sequence[bytes]], object] = bool  # rows no longer leased: a commit of ours


FIRST_NUMBERS: Final = CommitNumbers()
NO_NOTICES: Final = Notices()


class Transactor:
    """Runs verbs against one store in the name of one session."""

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        cache: RowCache,
        deadline_s: float = DEADLINE_S,
        numbers: CommitNumbers = FIRST_NUMBERS,
        beside: Transactor | None = None,
        notices: Notices = NO_NOTICES,
    ) -> None:
        """One that works `beside` another for one session has workers of other numbers; both stop
        when it finds that the store has gone back.
        """
        self.store = store
        self.cache = cache
        self.counters = Counters()
        self.fence: bytes | None = None  # row of our session, once there is one
        self.edition = EDITION  # of the settings that verbs follow
        self.follow: Callable[[], None] | None = None  # learn new settings; sets `edition`
        self.rewound = ""  # why nothing is written any more, once that is so
        self._notices = notices._replace(rolled_back=beside.stop_writing) if beside else notices
        self._runtime = runtime
        self._deadline_s = deadline_s
        # workers: identities under which one commit at a time is sent, and sent again
        self._idle: list[bytes] = []  # append and pop are atomic
        self._workers = numbers.worker  # guarded by _lock
        # of all workers, and of those beside; `next` is atomic
        self._sequences: Iterator[int] = beside._sequences if beside else count(numbers.sequence)
        # what our sessions that were ended had committed last; written under _lock
        self._ended: dict[bytes, Mapping[bytes, bytes]] = beside._ended if beside else {}
        self._lock = runtime.lock()

    def next_sequence(self) -> int:
        """A number that no commit of this client has."""
        return next(self._sequences)

    def unfenced(self) -> Transactor:
        """For commits that are not of our session."""
        return Transactor(self.store, self._runtime, self.cache, self._deadline_s)

    def view(self, verb: Callable[[Txn], T]) -> T:
        """Run a verb that only reads; answered from cache only where rows are leased."""
        return self.run(verb, vouched_only=True)

    def run(
        self, verb: Callable[[Txn], T], call: Call | None = None, vouched_only: bool = False
    ) -> T:
        """Run a verb that may write; `call` goes with its commit. `vouched_only` is for `view`.

        Raises: OSError from the verb; StoreError when the store stays away past the deadline.
        """
        give_up = 0.0
        attempt = 0
        follow: Callable[[], None] | None = None
        while True:
            if follow:  # after the pause: settings read before it may be old again
                follow()
                follow = None
            txn = Txn(self.store, self.cache, vouched_only, self.edition)
            txn.first = attempt == 0
            try:
                try:
                    result = verb(txn)
                except (Conflict, Unavailable):
                    raise
                except Exception:
                    # an errno, even "corrupt" or a number that does not fit, is only true if the
                    # reads behind it were, all at one moment
                    if not txn.is_snapshot():
                        txn.writes.clear()
                        txn.empties.clear()
                        self._commit(txn)
                    raise
                if txn.writes or not txn.is_snapshot():
                    self._commit(txn, call)
                return result
            except Conflict:
                pause = self._note_conflict(txn, attempt)
            except Outdated:
                follow = self.follow
                if follow is None:
                    raise
                pause = self._conflict_pause(attempt)
            except Unavailable:
                self.counters.unavailable += 1
                pause = self._backoff(attempt)
            now = self._runtime.monotonic()
            give_up = give_up or now + self._deadline_s
            if now + pause > give_up:
                raise Unavailable(f"{self.store.name}: gave up after {self._deadline_s:.0f} s")
            if pause:
                self._runtime.sleep(pause)
            attempt += 1

    def _note_conflict(self, txn: Txn, attempt: int) -> float:
        """Drop what the attempt relied on; how long to wait before the next."""
        self.counters.conflicts += 1
        self.cache.drop({row for row, _ in txn.reads} | set(txn.empties))
        return self._conflict_pause(attempt)

    def _conflict_pause(self, attempt: int) -> float:
        return self._backoff(attempt) if attempt >= _CONFLICTS_BEFORE_BACKOFF else 0.0

    def _backoff(self, attempt: int) -> float:
        longest = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * float(1 << min(attempt, 10)))
        return longest * (0.5 + self._runtime.random() / 2)

    def _commit(self, txn: Txn, call: Call | None = None) -> None:
        reads, writes = txn.reads, txn.writes
        checks = [(row, field, value) for (row, field), value in reads.items()]
        if len(reads) + len(writes) > COMMIT_OPS_LIMIT:
            text = "directories lie too deep for one change: rename some to a place further up"
            raise OSError(errno.ENAMETOOLONG, text)
        if self.rewound and txn.writes:
            raise StoreRolledBack(self.rewound)
        mark = self.cache.mark()
        worker = self._take_worker()
        number, fence = next(self._sequences), txn.fence or self.fence
        contended, busy, begun = self.cache.busy, _NO_ROWS, 0.0
        if contended.has_any() or len(reads) > WATCHED_MAX:
            begun, busy = contended.now(), self._unwatched(txn)
        empties, edition, glances, tails = txn.empties, txn.edition, txn.glances or (), txn.tails
        values = (fence, worker, number, checks, empties, writes, edition, glances)
        commit = _new(Commit, (*values, call, busy, txn.durable, tails or ()))
        try:
            applied = self._send(commit)
        except LimitExceeded as error:
            self._idle.append(worker)
            self.cache.drop({row for row, _ in txn.reads})
            raise _limit_error(error) from error
        except NotEmpty as error:
            self._idle.append(worker)
            raise OSError(errno.ENOTEMPTY, "the directory is not empty") from error
        except Ambiguous:
            # it may still be on its way, so this worker's next sequence could be taken for it:
            # the worker is not used again
            self.cache.drop({row for row, _ in txn.reads}.union(map(row_of, txn.writes)))
            raise
        except StoreFull as error:
            self._idle.append(worker)
            raise OSError(errno.ENOSPC, "the metadata store is full") from error
        except StoreRolledBack as error:
            self._idle.append(worker)
            self.stop_writing(error)
            raise
        except (StoreError, OSError):  # OSError: a store that holds changes back sent nothing
            self._idle.append(worker)
            raise
        self._idle.append(worker)
        self.counters.commits += 1
        leased = self.store.has_leases()
        unwatched = WATCHED
        if applied is not None:
            leased = leased and not applied.held
        if busy:
            unwatched = Unwatched(busy, begun, () if applied is None else applied.merged)
        ended = self.cache.settle(mark, empties, writes, leased, commit.proven(), unwatched)
        if ended:
            self._notices.ended(ended)

    def _unwatched(self, txn: Txn) -> Collection[bytes]:
        """The rows of a commit to leave untracked: busy ones, and those that it only reads, where
        they are very many."""
        busy = self.cache.busy.among(txn.reads) if txn.writes else ()
        if len(txn.reads) <= WATCHED_MAX:
            return busy
        read = {row for row, _ in txn.reads if not is_table(row)}
        read.difference_update(map(row_of, txn.writes))
        return {*busy, *read} if len(read) > WATCHED_MAX else busy

    def stop_writing(self, error: StoreRolledBack) -> None:
        """The store has gone back: cached values and what it has must not be mixed."""
        with self._lock:
            first = not self.rewound
            self.rewound = str(error)
            self.fence = None  # reads still have to be proven
        if first:
            self.cache.forget()
            # one without a traceback, which may be kept
            self._notices.rolled_back(StoreRolledBack(self.rewound))

    def _send(self, commit: Commit) -> Applied | None:
        """Commit; once an answer was lost, repeat until the store says what became of it."""
        doubtful = False
        give_up = 0.0
        attempt = 0
        while True:
            try:
                return self.store.commit(commit)
            except Ambiguous:
                self.counters.repeats += 1
                doubtful = bool(commit.writes)
            except Unavailable:
                if not doubtful:
                    raise
            except StoreRolledBack:
                raise
            except StoreError as refusal:  # of the repeat, by what has become so since, perhaps
                if doubtful and self._was_applied(commit, refusal):
                    return Applied(held=True)  # other clients may have changed it since
                raise
            pause = self._backoff(attempt)
            now = self._runtime.monotonic()
            give_up = give_up or now + self._deadline_s
            if now + pause > give_up:
                if not doubtful:
                    raise Unavailable(f"{self.store.name}: no answer to a read")
                raise Ambiguous(f"{self.store.name}: no answer to a commit", _doubt(commit))
            self._runtime.sleep(pause)
            attempt += 1

    # --- doubt -----------------------------------------------------------------------------------

    def _was_applied(self, commit: Commit, refusal: StoreError) -> bool:
        """Whether a try of `commit` was applied whose answer was lost. Raises: Ambiguous."""
        doubt = _doubt(commit)
        if doubt is None:
            return False
        try:
            return self.fate(doubt)
        except StoreError as error:
            raise Ambiguous(f"{self.store.name}: a commit is in doubt: {refusal}", doubt) from error

    def fate(self, doubt: Doubt) -> bool:
        """Whether a commit in doubt was applied; if it was not, it never will be.

        Raises: Unavailable, Ambiguous while it is not known; Voided where it never will be.
        """
        records = self._ended.get(doubt.fence)
        if records is None:
            sealed = next(self._sequences)
            try:
                return self.run(lambda txn: _settle(txn, doubt, sealed))
            except Fenced:  # nothing is added to what it has done, so that is all
                found = self.view(lambda txn: txn.get_row(doubt.fence))
                records = self._ended.get(doubt.fence, found)
        if not records:
            raise Voided("the outcome of a commit of an ended session is not known any more")
        return records.get(doubt.worker) == pack_u64(doubt.number)

    def remember_ended(self, fence: bytes, records: Mapping[bytes, bytes]) -> None:
        """What the row of an own session holds that another client has ended: for `fate`."""
        with self._lock:
            self._ended[fence] = records
            while len(self._ended) > ENDED_MAX:
                del self._ended[next(iter(self._ended))]

    def _take_worker(self) -> bytes:
        """A worker that has no commit under way."""
        try:
            return self._idle.pop()  # asking first whether there is one: another thread takes it
        except IndexError:
            return self._new_worker()

    def _new_worker(self) -> bytes:
        with self._lock:
            self._workers += 1
            return worker_field(self._workers)

    def drop(self, rows: Iterable[bytes] | None) -> None:
        """Believe nothing of `rows` any more; None: of anything."""
        if rows is None:
            self.cache.forget()
        else:
            self.cache.drop(rows)


def _doubt(commit: Commit) -> Doubt | None:
    """By what to ask what became of a commit; only sessions are remembered."""
    if commit.fence is None:
        return None
    return Doubt(commit.fence, commit.worker, commit.sequence)


def _settle(txn: Txn, doubt: Doubt, sealed: int) -> bool:
    """Whether a commit was applied; if it was not, it never will be: its worker is at `sealed`.

    That is a number which no commit has. What was applied is written as it is, so that the answer
    is as safe as that of a commit (`--redis-wait`). Raises: Fenced (the commit) where the session
    has ended.
    """
    value = txn.get(doubt.fence, doubt.worker)
    last = 0 if value is None else id_of(value)
    if last <= doubt.number:  # else another thread has settled it before
        txn.fence = doubt.fence
        number = last if last == doubt.number else sealed
        txn.put(doubt.fence, doubt.worker, pack_u64(number))
    return last == doubt.number


def _limit_error(error: LimitExceeded) -> OSError:
    code = {"ENOSPC": errno.ENOSPC, "EDQUOT": errno.EDQUOT}[error.tag]
    return OSError(code, "the volume or a quota is full")

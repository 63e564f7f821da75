"""The only retry loop: runs a verb on a `Txn`, commits, and owns conflicts, doubt and deadlines.

A verb returns its answer or raises an `OSError`. Then:
- with writes: they are committed together with a check of every read;
- without, or on an OSError: the answer is true only if all reads are of one moment. That holds when
  one request brought them all, or when each row is vouched; otherwise a commit of checks alone
  proves it;
- a Conflict drops what was believed and runs the verb again;
- a lost answer sends the same commit again: the store knows it by worker and sequence. A refusal
  of the repeat is no news of the first try, so the store is asked for its `fate`; where there is
  no answer up to the deadline the commit stays in doubt, and `Ambiguous` carries what to ask by;
- Outdated has `follow` read the volume's new settings, and runs the verb again.

Threading: any method from any thread.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Final, TypeVar

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
from fsmeta.store.contract import COMMIT_OPS_LIMIT, EDITION, Applied, Commit, Store, is_table
from fsmeta.txn.row_cache import WATCHED, RowCache, Unwatched
from fsmeta.txn.txn import Txn

T = TypeVar("T")

DEADLINE_S: Final = 30.0  # how long one verb waits for a store that is away before it fails
_BACKOFF_FIRST_S: Final = 0.01
_BACKOFF_MAX_S: Final = 1.0
# rows that a commit only reads: Redis 7.0 goes through all that are watched with each read
WATCHED_MAX: Final = 320
ENDED_MAX: Final = 16  # sessions of ours that others ended, of which we remember what they did
_CONFLICTS_BEFORE_BACKOFF: Final = 3  # a conflict means that somebody else succeeded: go on at once


class Counters:
    """What the retry loop has seen; read by metrics."""

    def __init__(self) -> None:
        self.commits = 0
        self.conflicts = 0
        self.repeats = 0  # commits sent again after a lost answer
        self.unavailable = 0


class Transactor:
    """Runs verbs against one store in the name of one session."""

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        cache: RowCache,
        deadline_s: float = DEADLINE_S,
        first_worker: int = 0,
        beside: Transactor | None = None,
    ) -> None:
        """One that works `beside` another for one session has workers of other numbers."""
        self.store = store
        self.cache = cache
        self.counters = Counters()
        self.fence: bytes | None = None  # row of our session, once there is one
        self.edition = EDITION  # of the settings that verbs follow
        self.follow: Callable[[], None] | None = None  # learn new settings; sets `edition`
        self.rewound = ""  # why nothing is written any more, once that is so
        self.on_rewound: Callable[[StoreRolledBack], object] = (
            bool  # told once, by whoever finds out
        )
        # told of rows that are vouched for no more because of a commit of ours
        self.on_ended: Callable[[Sequence[bytes]], object] = bool
        self._runtime = runtime
        self._deadline_s = deadline_s
        # workers: identities under which one commit at a time is sent, and sent again
        self._idle: list[bytes] = []  # append and pop are atomic
        self._workers = first_worker  # guarded by _lock
        # of all workers, and of those beside; `next` is atomic
        self._sequences: Iterator[int] = beside._sequences if beside else count(1)
        # what our sessions that were ended had committed last; written under _lock
        self._ended: dict[bytes, Mapping[bytes, bytes]] = beside._ended if beside else {}
        self._lock = runtime.lock()

    def unfenced(self) -> Transactor:
        """For commits that are not of our session."""
        return Transactor(self.store, self._runtime, self.cache, self._deadline_s)

    def run(self, verb: Callable[[Txn], T], call: object = None) -> T:
        """Run a verb that may write; `call` goes with its commit.

        Raises: OSError from the verb; StoreError when the store stays away past the deadline.
        """
        return self._run(verb, vouched_only=False, call=call)

    def view(self, verb: Callable[[Txn], T]) -> T:
        """Run a verb that only reads; answered from memory only where the store vouches."""
        return self._run(verb, vouched_only=True)

    def _run(self, verb: Callable[[Txn], T], vouched_only: bool, call: object = None) -> T:
        give_up = 0.0
        attempt = 0
        while True:
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
                if self.follow is None:
                    raise
                self.follow()
                pause = self._backoff(attempt) if attempt else 0.0
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
        return self._backoff(attempt) if attempt >= _CONFLICTS_BEFORE_BACKOFF else 0.0

    def _backoff(self, attempt: int) -> float:
        longest = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * float(1 << min(attempt, 10)))
        return longest * (0.5 + self._runtime.random() / 2)

    def _commit(self, txn: Txn, call: object = None) -> None:
        checks = [(row, field, value) for (row, field), value in txn.reads.items()]
        if txn.ops > COMMIT_OPS_LIMIT:
            text = "directories lie too deep for one change: rename some to a place further up"
            raise OSError(errno.ENAMETOOLONG, text)
        if self.rewound and txn.writes:
            raise StoreRolledBack(self.rewound)
        mark = self.cache.mark()
        worker = self._idle.pop() if self._idle else self._new_worker()
        number, fence = next(self._sequences), txn.fence or self.fence
        begun = self.cache.busy.now()
        busy = self._unwatched(txn)
        commit = Commit(
            fence,
            worker,
            number,
            checks,
            txn.empties,
            txn.writes,
            txn.edition,
            txn.glances or (),
            call,
            busy,
            txn.durable,
        )
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
            self.cache.drop({row for row, _ in txn.reads}.union([each[1] for each in txn.writes]))
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
        vouched = self.store.vouches()
        unwatched = WATCHED
        if applied is not None:
            vouched = vouched and not applied.held
        if busy:
            unwatched = Unwatched(busy, begun, () if applied is None else applied.merged)
        ended = self.cache.settle(mark, txn.empties, txn.writes, vouched, checks, unwatched)
        if ended:
            self.on_ended(ended)

    def _unwatched(self, txn: Txn) -> Collection[bytes]:
        """The rows of a commit that this client need not hear of: busy ones, and what it only reads
        where that is very much."""
        busy = self.cache.busy.among(txn.reads) if txn.writes else ()
        if len(txn.reads) <= WATCHED_MAX:
            return busy
        read = {row for row, _ in txn.reads if not is_table(row)}
        read.difference_update([write[1] for write in txn.writes])
        return {*busy, *read} if len(read) > WATCHED_MAX else busy

    def stop_writing(self, error: StoreRolledBack) -> None:
        """The store has gone back: what we know and what it has must not be mixed."""
        with self._lock:
            first = not self.rewound
            self.rewound = str(error)
            self.fence = None  # reads still have to be proven
        if first:
            self.cache.forget()
            self.on_rewound(
                StoreRolledBack(self.rewound)
            )  # one without a traceback, which may be kept

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
                    return Applied(held=True)  # others may have changed it since
                raise
            pause = self._backoff(attempt)
            now = self._runtime.monotonic()
            give_up = give_up or now + self._deadline_s
            if now + pause > give_up:
                if not doubtful:
                    raise Unavailable(f"{self.store.name}: no answer to a question")
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

        Raises: Unavailable, Ambiguous as long as nobody can tell; Voided where nobody ever will.
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
            raise Voided("nobody knows any more what became of a commit of an ended session")
        return records.get(doubt.worker) == pack_u64(doubt.number)

    def remember_ended(self, fence: bytes, records: Mapping[bytes, bytes]) -> None:
        """What the row of a session of ours holds, which others have ended: for `fate`."""
        with self._lock:
            self._ended[fence] = records
            while len(self._ended) > ENDED_MAX:
                del self._ended[next(iter(self._ended))]

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
    if last <= doubt.number:  # else somebody has settled it before
        txn.fence = doubt.fence
        number = last if last == doubt.number else sealed
        txn.put(doubt.fence, doubt.worker, pack_u64(number))
    return last == doubt.number


def _limit_error(error: LimitExceeded) -> OSError:
    code = {"ENOSPC": errno.ENOSPC, "EDQUOT": errno.EDQUOT}[error.tag]
    return OSError(code, "the volume or a quota is full")

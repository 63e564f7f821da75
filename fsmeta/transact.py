"""The only retry loop: runs a verb on a `Txn`, commits, and owns conflicts, doubt and deadlines.

A verb is a function of a `Txn`. It reads (each read is remembered), buffers writes, and returns its
answer or raises an `OSError`. Then:
- with writes: they are committed together with a check of every read;
- without, or on an OSError: the answer is true only if all reads are of one moment. That holds when
  one request brought them all, or when each row is vouched; otherwise a commit of checks alone
  proves it;
- a Conflict drops what was believed and runs the verb again;
- a lost answer sends the same commit again: the store knows it by worker and sequence;
- Outdated has `follow` read the volume's new settings, and runs the verb again.

Threading: `Transactor` may be used from any thread; a `Txn` belongs to one call.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Final, TypeVar

from fsmeta.cache import WATCHED, Memory, Missing, RowCache, Unwatched
from fsmeta.errors import (
    Ambiguous,
    Conflict,
    LimitExceeded,
    NotEmpty,
    Outdated,
    Rewound,
    StoreError,
    StoreFull,
    Unavailable,
)
from fsmeta.runtime import Runtime
from fsmeta.store import (
    ADD,
    APPEND,
    BESIDE,
    COMMIT_OPS_MAX,
    DELETE,
    DELETE_ROW,
    EDITION,
    MERGE,
    PUT,
    SHIFT,
    Applied,
    Commit,
    Key,
    Parts,
    Reads,
    Store,
    Write,
)

T = TypeVar("T")

DEADLINE_S: Final = 30.0  # how long one verb waits for a store that is away before it fails
_BACKOFF_FIRST_S: Final = 0.01
_BACKOFF_MAX_S: Final = 1.0
_CONFLICTS_BEFORE_BACKOFF: Final = 3  # a conflict means that somebody else succeeded: go on at once


class Txn:
    """One attempt of one verb. Reads don't see its own writes; see `together` for many."""

    __slots__ = (
        "_cache", "_store", "_vouched_only",
        "cached", "edition", "empties", "fence", "first", "glances", "reads", "requests", "writes",
    )  # fmt: skip

    def __init__(self, store: Reads, cache: Memory, vouched_only: bool, edition: bytes) -> None:
        self.edition = edition  # from before the verb has looked at the settings
        self._store = store
        self._cache = cache
        self._vouched_only = vouched_only
        self.reads: dict[Key, bytes | None] = {}
        self.glances: set[Key] | None = None  # of the reads, those that `glance` alone has made
        self.empties: list[bytes] = []
        self.writes: list[Write] = []
        self.requests = 0  # times the store was asked
        self.cached = False  # some read came from what we remember
        self.fence: bytes | None = None  # the session to commit in, where the verb cares
        self.first = True  # nothing that this verb supposed has turned out wrong

    def is_snapshot(self) -> bool:
        """Whether everything read so far was true at one moment."""
        if self.cached:
            return self._vouched_only and self.requests == 0
        return self.requests <= 1 and not self.empties

    def _recall(self, key: Key) -> bytes | Missing | None:
        """What this attempt has read at `key`, or else what the cache knows, which it then uses."""
        if key in self.reads:
            if self.glances:
                self.glances.discard(key)
            return self.reads[key]
        value = self._cache.get(key[0], key[1], self._vouched_only)
        if not isinstance(value, Missing):
            self.cached = True
            self.reads[key] = value
        return value

    def get(self, row: bytes, field: bytes) -> bytes | None:
        key = (row, field)
        value = self._recall(key)
        if isinstance(value, Missing):
            self._fetch([key])
            return self.reads[key]
        return value

    def glance(self, row: bytes, field: bytes) -> bytes | None:
        """`get` of a value whose change means that counters are shifted, or set, to which the verb
        adds: the store need not watch both.
        """
        key = (row, field)
        if self.glances is None:
            self.glances = set()
        if key in self.reads:
            return self.reads[key]
        value = self.get(row, field)
        self.glances.add(key)
        return value

    def get_with(self, key: Key, witness: Key) -> tuple[bytes | None, bytes | None]:
        """The value of `key`, and that of `witness` unless `key` is remembered.

        For a value whose absence means nothing if the witness is absent, too.
        """
        value = self._recall(key)
        if isinstance(value, Missing):
            self._fetch([key, witness])
            return self.reads[key], self.reads[witness]
        return value, b"remembered"

    def get_many(
        self, keys: Sequence[Key], along: Sequence[Key] = (), vacant: Key | None = None
    ) -> list[bytes | None]:
        """The values of `keys`; one request for all that are not remembered.

        If there has to be one, it brings `along`, too, for whoever comes next, and what is
        remembered of the same rows without a promise. There has to be none if only `vacant` is
        wanted: that is supposed to be absent at first, and the commit proves it.
        """
        if self.glances:
            self.glances.difference_update(keys)
        unread = [key for key in keys if key not in self.reads]
        wanted = [key for key in unread if isinstance(self._recall(key), Missing)]
        if wanted == [vacant] and self.first:
            self.cached = True
            self.reads[wanted[0]] = None
        elif wanted:
            if len(wanted) < len(unread) and not self._vouched_only:
                rows = {row for row, _ in wanted if not self._cache.is_vouched(row)}
                wanted = [key for key in unread if key[0] in rows or key in wanted]
            self._fetch([*wanted, *along])
        return [self.reads[key] for key in keys]

    def _fetch(self, keys: list[Key]) -> None:
        """Ask the store for `keys`; for a view, also for what it has used from memory.

        So that a view's reads are of one request, which proves them without a commit.
        Raises: Conflict where memory was wrong.
        """
        believed: dict[Key, bytes | None] = {}
        if self.cached and self._vouched_only and not self.requests:
            believed = dict(self.reads)
            keys = [*believed, *keys]
            self.cached = False
        mark = self._cache.mark()
        busy = self._cache.busy.among(keys)
        self.requests += 1
        rows: dict[bytes, dict[bytes, bytes | None]] = {}
        for key, value in zip(keys, self._store.read(keys, busy), strict=True):
            self.reads[key] = value
            rows.setdefault(key[0], {})[key[1]] = value
        vouched = self._store.vouches()
        for row, fields in rows.items():
            self._cache.fill(mark, row, fields, vouched and row not in busy)
        if any(self.reads[key] != value for key, value in believed.items()):
            raise Conflict("what was remembered has changed")

    def get_linked(
        self, row: bytes, field: bytes, skip: int, prefix: bytes, fields: Sequence[bytes]
    ) -> tuple[bytes | None, list[bytes | None]]:
        """A value that names another row, and `fields` of that row: `Store.read_linked`."""
        value = self._recall((row, field))
        if not isinstance(value, Missing):
            if value is None:
                return None, []
            linked = prefix + value[skip:]
            return value, self.get_many([(linked, name) for name in fields])
        mark = self._cache.mark()
        busy = self._cache.busy.has(row)
        self.requests += 1
        value, found = self._store.read_linked(row, field, skip, prefix, fields, busy)
        self.reads[(row, field)] = value
        self._cache.fill(mark, row, {field: value}, self._store.vouches() and not busy)
        if value is not None:
            linked = prefix + value[skip:]
            known = dict(zip(fields, found, strict=True))
            self.reads.update({(linked, name): each for name, each in known.items()})
            # the store can't promise to watch a row it was not told of beforehand
            self._cache.fill(mark, linked, known, vouched=False)
        return value, found

    def get_row(self, row: bytes) -> dict[bytes, bytes]:
        """All fields of a small row, from the store, *not* checked by the commit: see `expect`."""
        return self.get_rows([row])[0]

    def get_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes]]:
        """`get_row` of several rows in one request."""
        self.requests += 1
        return self._store.read_rows(rows)

    def expect(self, row: bytes, field: bytes, value: bytes | None) -> None:
        """Let the commit check a value that `get_row` brought."""
        if self.glances:
            self.glances.discard((row, field))
        self.reads[(row, field)] = value

    def knows(self, row: bytes, field: bytes) -> bool:
        """Whether this can be read without asking the store."""
        return not isinstance(self._recall((row, field)), Missing)

    def suppose(self, row: bytes, field: bytes, value: bytes | None) -> None:
        """Take `value` for what is there, unless that is remembered; the commit proves it."""
        if isinstance(self._recall((row, field)), Missing):
            self.cached = True
            self.reads[(row, field)] = value

    def overlook(self, row: bytes, field: bytes) -> None:
        """Let the commit not check what was read there: the verb would do the same otherwise."""
        self.reads.pop((row, field), None)

    def expect_same(self, row: bytes, field: bytes, value: bytes | None) -> None:
        """`expect` of what has been read before. Raises: Conflict where it was another value."""
        if self.glances:
            self.glances.discard((row, field))
        if self.reads.setdefault((row, field), value) != value:
            raise Conflict("it changed between two reads")

    def put(self, row: bytes, field: bytes, value: bytes) -> None:
        self.writes.append((PUT, row, field, value))

    def delete(self, row: bytes, field: bytes) -> None:
        self.writes.append((DELETE, row, field))

    def delete_row(self, row: bytes) -> None:
        self.writes.append((DELETE_ROW, row))

    def add(self, row: bytes, field: bytes, delta: int, limit: int = 0, tag: str = "") -> None:
        """Move a decimal counter; past `limit` the commit fails with the errno named `tag`."""
        if delta:
            self.writes.append((ADD, row, field, b"%d" % delta, b"%d" % limit, tag, b"%d" % -delta))

    def charge(self, row: bytes, field: bytes, delta: int) -> None:
        """`add` within the limit that stands beside the counter, if any; past it it is EDQUOT."""
        self.writes.append((ADD, row, field, b"%d" % delta, BESIDE, "EDQUOT", b"%d" % -delta))

    def shift(self, row: bytes, field: bytes, source: bytes, add: bool) -> None:
        """Add what the counter `source` holds, as `charge` does; or take it away."""
        sign = b"+" if add else b"-"
        self.writes.append((SHIFT, row, field, source, sign, BESIDE, "EDQUOT"))

    def append(self, row: bytes, field: bytes, suffix: bytes) -> None:
        """Add `suffix` to a value, which may be absent."""
        self.writes.append((APPEND, row, field, suffix))

    def merge(self, row: bytes, field: bytes, parts: Parts) -> None:
        """Change parts of a record that is not read: `store.MERGE`."""
        self.writes.append((MERGE, row, field, *parts))

    def require_empty(self, row: bytes) -> None:
        """The commit fails unless `row` has no field."""
        self.empties.append(row)


class _Worker:
    """An identity under which one commit at a time is sent, and sent again."""

    def __init__(self, number: int) -> None:
        self.field = b"w" + number.to_bytes(2, "big")


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
        self.on_rewound: Callable[[Rewound], object] = bool  # told once, by whoever finds out
        # told of rows that are vouched for no more because of a commit of ours
        self.on_ended: Callable[[Sequence[bytes]], object] = bool
        self._runtime = runtime
        self._deadline_s = deadline_s
        self._idle: list[_Worker] = []  # list.append and pop are atomic
        self._workers = first_worker  # guarded by _lock
        # of all workers, and of those beside; `next` is atomic
        self._sequences: Iterator[int] = beside._sequences if beside else count(1)
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
        assert len(checks) + len(txn.writes) <= COMMIT_OPS_MAX, "the verb must work in steps"
        if self.rewound and txn.writes:
            raise Rewound(self.rewound)
        mark = self.cache.mark()
        worker = self._idle.pop() if self._idle else self._new_worker()
        number, fence = next(self._sequences), txn.fence or self.fence
        begun = self.cache.busy.now()
        busy = self.cache.busy.among(txn.reads) if txn.writes else ()
        commit = Commit(
            fence,
            worker.field,
            number,
            checks,
            txn.empties,
            txn.writes,
            txn.edition,
            txn.glances or (),
            call,
            busy,
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
            raise
        except StoreFull as error:
            self._idle.append(worker)
            raise OSError(errno.ENOSPC, "the metadata store is full") from error
        except Rewound as error:
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

    def stop_writing(self, error: Rewound) -> None:
        """The store has gone back: what we know and what it has must not be mixed."""
        with self._lock:
            first = not self.rewound
            self.rewound = str(error)
            self.fence = None  # reads still have to be proven
        if first:
            self.cache.forget()
            self.on_rewound(Rewound(self.rewound))  # one without a traceback, which may be kept

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
                doubtful = True
            except Unavailable:
                if not doubtful:
                    raise
            pause = self._backoff(attempt)
            now = self._runtime.monotonic()
            give_up = give_up or now + self._deadline_s
            if now + pause > give_up:
                raise Ambiguous(f"{self.store.name}: no answer to a commit")
            self._runtime.sleep(pause)
            attempt += 1

    def _new_worker(self) -> _Worker:
        with self._lock:
            self._workers += 1
            return _Worker(self._workers)

    def drop(self, rows: Iterable[bytes] | None) -> None:
        """Believe nothing of `rows` any more; None: of anything."""
        if rows is None:
            self.cache.forget()
        else:
            self.cache.drop(rows)


def _limit_error(error: LimitExceeded) -> OSError:
    code = {"ENOSPC": errno.ENOSPC, "EDQUOT": errno.EDQUOT}[error.tag]
    return OSError(code, "the volume or a quota is full")

"""The connection to TiKV: PyPI's `tikv-client` on an event loop in a thread of its own.

Used by `tikv/engine` and `tikv/group_commit`, and the only place that knows that package. Its calls
are awaited on the loop thread only, each with a timeout, since the package has none: it would wait
without end for a placement driver that hands out no timestamps. All its errors are plain
exceptions; the one table that reads their texts is here.

The package starts threads that no fork survives: connect after daemonising.

Threading: `call` and `close` from any thread; coroutines on the loop thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, Final, TypeAlias, TypeVar

from fsmeta.errors import (
    Ambiguous,
    ConfigError,
    StoreError,
    StoreFull,
    Unavailable,
)
from fsmeta.runtime import Runtime

T = TypeVar("T")
Snapshot: TypeAlias = Any  # the package has no types

CONNECT_TIMEOUT_S: Final = 4.0  # as on Redis: a live cluster takes milliseconds
# one request: the package itself repeats for 2 s what meets another's lock or a region on the move
REQUEST_TIMEOUT_S: Final = 5.0
ROLLBACK_TIMEOUT_S: Final = 3.0
HAND_OVER_TIMEOUT_S: Final = 30.0  # nothing is sent; only a busy machine takes seconds
LOCKS_EXPIRE_S: Final = 25.0  # those of a client that died: 20 s at most, and finding it out
CLOSE_TIMEOUT_S: Final = 1.0
_LEAVE_S: Final = 0.005  # a hundred times what it takes
SCAN_SURE: Final = 50  # keys whose values fit into one message, whatever attributes they are
SCAN_MAX: Final = 2000  # keys a scan; the server reserves room for as many as it is asked for
GET_MAX: Final = 2000  # keys a request: about 200 kB, a page of a listing with its attributes


class Transaction:
    """One of the package's, until it is over.

    It keeps its locks alive for as long as anything refers to it, be it a traceback.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class WriteConflict(StoreError):
    """Others have changed, since the transaction began, a key that it writes or locks."""


class KeyLocked(Unavailable):
    """A transaction has held a key for longer than the package waits: its client may be dead."""


class Dead(Unavailable):
    """The package has given up its connection for good: make another."""


class NoAnswer(Unavailable):
    """Not in time; the package may go on with it."""


class TooLarge(StoreError):
    """A value that the cluster does not take."""


class LongAnswer(StoreError):
    """What was asked for is more than a message of the package may hold, 4 MiB."""


# what a text says, first match; everything else may be tried again
_MEANINGS: Final[tuple[tuple[str, type[StoreError]], ...]] = (
    ("conflict: Some(WriteConflict", WriteConflict),
    ("Failed to resolve lock", KeyLocked),
    ("locked: Some", KeyLocked),
    ("TimestampRequest channel is closed", Dead),
    ("disk_full: Some", StoreFull),
    ("raft_entry_too_large: Some", TooLarge),
    ("message length too large", LongAnswer),
)
_SHOWN_MAX: Final = 200  # of a text, which may list every region
_PLACE: Final = re.compile(r"^\[/[^]]*\]: ")  # in the package's own source


def translate(error: Exception) -> StoreError:
    """What an exception of the package, or a timeout, means."""
    if isinstance(error, TimeoutError):
        return NoAnswer("tikv: no answer in time")
    text = str(error)
    shown = _PLACE.sub("", text)[:_SHOWN_MAX]
    for fragment, kind in _MEANINGS:
        if fragment in text:
            return kind(f"tikv: {shown}")
    return Unavailable(f"tikv: {shown}")


class TikvClient:
    """One client's connection to a cluster."""

    def __init__(self, pds: Sequence[str], runtime: Runtime) -> None:
        """Raises: ConfigError where the package is missing, or nothing answers at `pds`."""
        self._connect_to = _connector()
        self._pds = list(pds)
        self._runtime = runtime
        self._lock = runtime.lock()
        self._closed = False  # guarded by _lock
        self._client: Any = None  # loop thread
        self._connecting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()  # not awaited; loop thread
        self.round_trips = 0  # loop thread
        self._loop = asyncio.new_event_loop()
        self._thread = runtime.spawn("tikv", self._serve)
        try:
            self.call(self.now(CONNECT_TIMEOUT_S))
        except StoreError as error:
            self.close()
            why = str(error).removeprefix("tikv: ")
            raise ConfigError(
                f"can't reach TiKV by its PD at {','.join(pds)}: {why}; check host and port, and"
                " that PD runs there"
            ) from error

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def read(self, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """`call`, again and again while a client that may be dead is in the way."""
        give_up = self._runtime.monotonic() + LOCKS_EXPIRE_S
        while True:
            try:
                return self.call(read())
            except KeyLocked:  # the package has paused for two seconds: that will do
                if self._runtime.monotonic() > give_up:
                    raise
            except Ambiguous as error:  # closed: nothing was changed
                raise Unavailable(str(error)) from error

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop thread and wait for it. Raises: what it raises."""
        with self._lock:
            if self._closed:
                work.close()
                raise Unavailable("tikv: closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._runtime.will_wait()
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise Ambiguous("tikv: closed while it waited") from error

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin something that is not awaited; it ends with the connection at the latest."""
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(lambda: self.later(work()))

    def close(self) -> None:
        """End all that waits, and the thread; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._stop()))
        self._thread.join(2 * CLOSE_TIMEOUT_S)
        self._await_package()

    def _await_package(self) -> None:
        """Let the package's threads leave Python: one that is still in it when the interpreter ends
        brings the process down.

        They are in it to deliver an answer, which is what `call_soon_threadsafe` does.
        """
        give_up = self._runtime.monotonic() + CLOSE_TIMEOUT_S
        self._runtime.sleep(_LEAVE_S)  # those that deliver nothing, for it is wanted no more
        while any(map(_is_delivery, sys._current_frames().values())):
            if self._runtime.monotonic() > give_up:
                return
            self._runtime.sleep(_LEAVE_S)

    async def _stop(self) -> None:
        """Cancel what is under way, let it clean up for a moment, and stop."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
        self._client = None
        self._loop.stop()

    async def ask(
        self,
        start: Callable[[], Awaitable[T]],
        trips: int = 1,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> T:
        """Await one request that waits for `trips` answers, one after the other.

        Raises: StoreError, as `translate` says.
        """
        self.round_trips += trips
        try:
            async with asyncio.timeout(timeout_s):
                return await start()
        except Exception as error:  # the package has no type of its own
            if type(error) not in (Exception, TimeoutError) and not _is_panic(error):
                raise  # a mistake of ours
            meaning = translate(error)
            if isinstance(meaning, Dead):
                self._client = None
            raise meaning from error
        finally:
            del start  # see Transaction

    async def _connected(self, timeout_s: float = REQUEST_TIMEOUT_S) -> Any:
        if self._client is None:
            async with self._connecting:
                if self._client is None:
                    self._client = await self.ask(
                        lambda: self._connect_to(self._pds), timeout_s=timeout_s
                    )
        return self._client

    async def now(self, timeout_s: float = REQUEST_TIMEOUT_S) -> int:
        """A timestamp later than every commit that was answered before."""
        client = await self._connected(timeout_s)
        moment: int = await self.ask(client.current_timestamp, timeout_s=timeout_s)
        return moment

    async def snapshot(self) -> Snapshot:
        """The whole store at this moment, for reading."""
        client = await self._connected()
        return client.snapshot(await self.ask(client.current_timestamp), False)

    async def begin(self) -> Transaction:
        """An optimistic transaction; it must be given to `commit` or `abandon`."""
        client = await self._connected()
        return Transaction(await self.ask(lambda: client.begin(False)))

    async def get(self, reader: Snapshot, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The values of those keys that are there; one request for each GET_MAX of them."""
        found: dict[bytes, bytes] = {}
        for begin in range(0, len(keys), GET_MAX):
            wanted = list(keys[begin : begin + GET_MAX])
            found.update(await self.ask(partial(reader.batch_get, wanted)))
        return found

    async def scan(
        self, reader: Snapshot, begin: bytes, end: bytes, limit: int
    ) -> list[tuple[bytes, bytes]]:
        """At most `limit` keys with their values, in order."""
        assert 0 < limit <= SCAN_MAX
        if begin >= end:
            return []
        try:
            pairs = await self.ask(lambda: reader.scan(begin, end, limit, True, False))
            return list(pairs)
        except LongAnswer:
            if limit <= SCAN_SURE:
                raise
        found: list[tuple[bytes, bytes]] = []
        while len(found) < limit:
            wanted = min(SCAN_SURE, limit - len(found))
            part = await self.scan(reader, begin, end, wanted)
            found += part
            if len(part) < wanted:
                break
            begin = part[-1][0] + b"\0"
        return found

    async def scan_keys(
        self, reader: Snapshot, begin: bytes, end: bytes, limit: int
    ) -> list[bytes]:
        """At most `limit` keys, in order."""
        assert 0 < limit <= SCAN_MAX
        if begin >= end:
            return []
        try:
            keys = await self.ask(lambda: reader.scan_keys(begin, end, limit, True, False))
            return list(keys)
        except LongAnswer:  # some servers send the values along
            return [key for key, _ in await self.scan(reader, begin, end, limit)]

    async def drop_before(self, moment: int, timeout_s: float) -> None:
        """Give up all values of the cluster that were replaced before `moment`."""
        client = await self._connected()
        await self.ask(lambda: client.gc(moment), timeout_s=timeout_s)

    async def hand_over(
        self,
        transaction: Transaction,
        values: Mapping[bytes, bytes | None],
        locks: Sequence[bytes] = (),
    ) -> None:
        """What to put, to delete (None) and to lock: the package keeps it until `commit`."""
        inner = transaction.inner

        def start() -> asyncio.Future[list[None]]:
            work = [inner.delete(k) if v is None else inner.put(k, v) for k, v in values.items()]
            if locks:
                work.append(inner.lock_keys(list(locks)))
            return asyncio.gather(*work)

        await self.ask(start, trips=0, timeout_s=HAND_OVER_TIMEOUT_S)

    async def commit(
        self, transaction: Transaction, is_applied: Callable[[], Awaitable[bool]] | None
    ) -> None:
        """Commit; whatever comes of it, nothing is left half done that we can help.

        `is_applied` reads something that is written by this transaction alone, where there is such
        a thing. To undo is right only as long as nothing can have asked for the second phase: keys
        in several regions are undone one by one, also where the first one has been committed.
        Raises: WriteConflict, Unavailable and others when it is certain that nothing was applied,
        Ambiguous when it is not.
        """
        try:
            # writing, a timestamp, committing
            await self.ask(transaction.inner.commit, trips=3)
        except (WriteConflict, KeyLocked):  # met in the first phase
            self.later(self.abandon(transaction))  # a retry need not wait for that
            raise
        except StoreError as error:
            if not await self._was_applied(transaction, error, is_applied):
                await self.abandon(transaction)
                raise
        except BaseException:
            transaction.inner = None
            raise
        transaction.inner = None

    async def _was_applied(
        self,
        transaction: Transaction,
        error: StoreError,
        is_applied: Callable[[], Awaitable[bool]] | None,
    ) -> bool:
        """Find out what became of a commit that ended with `error`. Raises: Ambiguous.

        A read meets its locks, and then finds what became of the first key, or nothing: in that
        case there was no second phase, and all may be undone.
        """
        if is_applied is None or isinstance(error, NoAnswer):
            transaction.inner = None
            raise Ambiguous(str(error)) from error
        try:
            return await is_applied()
        except BaseException as again:
            transaction.inner = None  # its locks expire: see Transaction
            if not isinstance(again, StoreError):
                raise
            raise Ambiguous(f"{error}; and {again}") from error

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin something that is not awaited. Loop thread only."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def abandon(self, transaction: Transaction) -> None:
        """Undo what an attempt may have left; other clients undo the rest in time."""
        try:
            await self._roll_back(transaction)
        except StoreError:
            pass  # its locks expire

    async def _roll_back(self, transaction: Transaction) -> None:
        try:
            await self.ask(transaction.inner.rollback, trips=0, timeout_s=ROLLBACK_TIMEOUT_S)
        finally:
            transaction.inner = None


def _is_panic(error: Exception) -> bool:
    """Whether something in the package has gone wrong, which then has ended that request."""
    return type(error).__name__ == "RustPanic"


def _is_delivery(frame: FrameType) -> bool:
    """Whether a thread is in `call_soon_threadsafe`, called by no Python."""
    return frame.f_back is None and frame.f_code.co_name == "call_soon_threadsafe"


def _connector() -> Callable[[list[str]], Awaitable[Any]]:
    """How the package connects. Raises: ConfigError where there is none."""
    try:
        from tikv_client.tikv_client import TransactionClient
    except ImportError as error:
        raise ConfigError(
            "tikv:// needs the package tikv-client, which exists for CPython 3.11 on x86-64 only:"
            " pip install 'slicefs[tikv]'"
        ) from error
    connect: Callable[[list[str]], Awaitable[Any]] = TransactionClient.connect
    return connect

"""What can be put around an object store: retry, counting, a key prefix. They compose.

`Retrying(Metered(Prefixed(store)))` counts every attempt; the other order counts what callers see.
Threading: as the contract says; `Metered` has one lock, held for a few additions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from fsdata.objects.contract import Buffer, NoPlace, ObjectInfo, ObjectStore, Range
from fsmeta.errors import ObjectMissing, Refused, StoreError, Unavailable
from fsmeta.latency import Histogram, HistogramReading
from fsmeta.runtime import Event, Runtime
from fsmeta.spans import Spans

T = TypeVar("T")


class Backoff(NamedTuple):
    """How long a request is repeated."""

    first_s: float = 0.02
    longest_s: float = 2.0
    total_s: float = 30.0  # after this the caller gets Unavailable


class Retrying:
    """Repeats what failed with `Unavailable` after jittered, growing pauses, up to a deadline.

    But not what is `Refused`, nor what has waited for a place for that long.
    """

    def __init__(
        self,
        runtime: Runtime,
        inner: ObjectStore,
        backoff: Backoff | None = None,
        leaving: Event | None = None,
    ) -> None:
        """Once `leaving` is set nothing is repeated any more."""
        self._runtime = runtime
        self._inner = inner
        self._backoff = backoff or Backoff()
        self._leaving = leaving or runtime.event()
        self._lock = runtime.lock()
        self._repeats = 0  # guarded by _lock
        self._silent_since: float | None = None  # a failure after which no request was answered
        self._together = False  # set once, when the client is about to leave, as below
        self._answered = False  # since then and since `leaving`
        self._away: Unavailable | None = None

    def give_up_together(self) -> None:
        """The first request that is given up from now on ends the patience with all.

        It was repeated for as long as any is, so the store is away. Others that wait for their next
        attempt fail then; and where one more fails before any is answered, none is sent.
        """
        self._together = True

    def repeats(self) -> int:
        """How many requests were sent again so far."""
        with self._lock:
            return self._repeats

    def silent_s(self) -> float:
        """For how long requests have failed, and none was answered; 0: the store answers."""
        since = self._silent_since
        return 0.0 if since is None else self._runtime.monotonic() - since

    def repeat(self, request: Callable[[], T]) -> T:
        """`request`, which is not of the contract of stores, repeated like those that are."""
        return self._call(request)

    def _call(self, request: Callable[[], T]) -> T:
        if self._together:
            return self._call_last(request)
        try:
            answer = request()
        except (NoPlace, Refused):
            raise
        except Unavailable as error:
            return self._again(request, error)
        if self._silent_since is not None:
            self._silent_since = None
        return answer

    def _call_last(self, request: Callable[[], T]) -> T:
        """As `_call`, when the client is about to leave."""
        away = self._away
        if away is not None:
            raise Unavailable(str(away)) from away
        try:
            answer = request()
        except (NoPlace, Refused):
            raise
        except Unavailable as error:
            return self._again(request, error)
        self._answered = self._answered or self._leaving.is_set()
        return answer

    def _give_up(self, error: Unavailable) -> None:
        if not self._together:
            return
        if self._leaving.is_set() and not self._answered:
            self._away = error
        self._leaving.set()

    def _again(self, request: Callable[[], T], error: Unavailable) -> T:
        """Repeat until it works or the next pause would pass the deadline; then `error` again."""
        pause, now = self._backoff.first_s, self._runtime.monotonic()
        deadline = now + self._backoff.total_s
        if self._silent_since is None:
            self._silent_since = now
        while True:
            wait = pause * (0.5 + self._runtime.random() / 2)
            if self._runtime.monotonic() + wait > deadline or self._leaving.wait(wait):
                self._give_up(error)
                raise error
            pause = min(2 * pause, self._backoff.longest_s)
            with self._lock:
                self._repeats += 1
            try:
                answer = request()
            except (NoPlace, Refused):
                raise
            except Unavailable as latest:
                error = latest
            else:
                self._silent_since = None
                return answer

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        self._call(lambda: self._inner.put(key, pieces))

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        return self._call(lambda: self._inner.get(key, begin, end))

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        return self._call(lambda: self._inner.get_ranges(key, ranges))

    def get_into(self, key: str, pieces: Sequence[memoryview]) -> int:
        return self._call(lambda: self._inner.get_into(key, pieces))

    def delete(self, *keys: str) -> None:
        self._call(lambda: self._inner.delete(*keys))

    def head(self, key: str) -> ObjectInfo | None:
        return self._call(lambda: self._inner.head(key))

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """A listing that breaks off goes on behind what it has given already."""
        last = after
        while True:
            listing = self._call(partial(_Peeked, self._inner, prefix, last))
            try:
                for info in listing:
                    last = info.key
                    yield info
                return
            except Unavailable:
                continue

    def sync(self, keys: Iterable[str]) -> None:
        kept = list(keys)
        self._call(lambda: self._inner.sync(kept))

    def close(self) -> None:
        self._inner.close()


class _Peeked:
    """A listing after key `last`, whose first item is fetched at once so that it can be retried."""

    def __init__(self, inner: ObjectStore, prefix: str, last: str) -> None:
        self._rest = inner.list(prefix, last)
        self._first = next(self._rest, None)

    def __iter__(self) -> Iterator[ObjectInfo]:
        if self._first is not None:
            yield self._first
            yield from self._rest


class Metered:
    """Counts requests, errors, bytes and seconds of each verb, and how long they took."""

    VERBS = ("put", "get", "delete", "head", "list", "sync")
    OUTCOMES = ("ok", "missing", "error")

    def __init__(self, runtime: Runtime, inner: ObjectStore) -> None:
        self._clock = runtime.monotonic
        self._inner = inner
        self._lock = runtime.lock()
        # guarded by _lock: count, errors, bytes, seconds
        self._sums: dict[str, list[float]] = {verb: [0, 0, 0, 0.0] for verb in self.VERBS}
        self._times = {  # guarded by _lock
            (verb, outcome): Histogram() for verb in self.VERBS for outcome in self.OUTCOMES
        }

    def readings(self) -> dict[tuple[str, str], HistogramReading]:
        """How long requests took, by verb and outcome."""
        with self._lock:
            return {key: each.reading() for key, each in self._times.items()}

    def snapshot(self) -> dict[str, float]:
        """`<verb>_count`, `_errors`, `_bytes` and `_seconds` since the start."""
        names = ("count", "errors", "bytes", "seconds")
        with self._lock:
            return {
                f"{verb}_{name}": value
                for verb, sums in self._sums.items()
                for name, value in zip(names, sums, strict=True)
            }

    def _add(
        self, verb: str, begun: float, moved: int, outcome: str = "ok", count: int = 1
    ) -> None:
        spent = self._clock() - begun
        with self._lock:
            self._times[verb, outcome].add(spent, count)
            sums = self._sums[verb]
            sums[0] += count
            sums[1] += outcome == "error"
            sums[2] += moved
            sums[3] += spent * count

    def _call(
        self, verb: str, request: Callable[[], T], moved: Callable[[T], int], count: int = 1
    ) -> T:
        """`count`: how many requests that is, which all take as long as the slowest."""
        begun = self._clock()
        try:
            answer = request()
        except (OSError, StoreError) as error:
            outcome = "missing" if isinstance(error, ObjectMissing) else "error"
            self._add(verb, begun, 0, outcome, count)
            raise
        self._add(verb, begun, moved(answer), count=count)
        return answer

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        size = sum(map(len, pieces))
        self._call("put", lambda: self._inner.put(key, pieces), lambda _: size)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        return self._call("get", lambda: self._inner.get(key, begin, end), len)

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        """Counted as what it is to the store: a request each."""
        return self._call("get", lambda: self._inner.get_ranges(key, ranges), _total, len(ranges))

    def get_into(self, key: str, pieces: Sequence[memoryview]) -> int:
        return self._call("get", lambda: self._inner.get_into(key, pieces), int)

    def delete(self, *keys: str) -> None:
        self._call("delete", lambda: self._inner.delete(*keys), _nothing)

    def head(self, key: str) -> ObjectInfo | None:
        return self._call("head", lambda: self._inner.head(key), _nothing)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        begun, outcome = self._clock(), "error"
        try:
            yield from self._inner.list(prefix, after)
            outcome = "ok"
        finally:
            self._add("list", begun, 0, outcome)

    def sync(self, keys: Iterable[str]) -> None:
        self._call("sync", lambda: self._inner.sync(keys), _nothing)

    def close(self) -> None:
        self._inner.close()


class TracedObjects(Metered):
    """Each request is a span of a trace, too, but those of listings: on mounts with `--trace`."""

    def __init__(self, spans: Spans, runtime: Runtime, inner: ObjectStore) -> None:
        super().__init__(runtime, inner)
        self._spans = spans

    def _call(
        self, verb: str, request: Callable[[], T], moved: Callable[[T], int], count: int = 1
    ) -> T:
        span = self._spans.below(f"object.{verb}")
        if span is None:
            return super()._call(verb, request, moved, count)

        def counted(answer: T) -> int:
            size = moved(answer)
            span.attributes["slicefs.bytes"] = size
            return size

        span.attributes["slicefs.requests"] = count
        return self._spans.spent(span, super()._call, verb, request, counted, count)


def _nothing(_: object) -> int:
    return 0


def _total(parts: Sequence[bytes]) -> int:
    return sum(map(len, parts))


class Prefixed:
    """The objects below `prefix` of another store, under the rest of their keys."""

    def __init__(self, inner: ObjectStore, prefix: str) -> None:
        self._inner = inner
        self._prefix = prefix

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        self._inner.put(self._prefix + key, pieces)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        return self._inner.get(self._prefix + key, begin, end)

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        return self._inner.get_ranges(self._prefix + key, ranges)

    def get_into(self, key: str, pieces: Sequence[memoryview]) -> int:
        return self._inner.get_into(self._prefix + key, pieces)

    def delete(self, *keys: str) -> None:
        self._inner.delete(*(self._prefix + key for key in keys))

    def head(self, key: str) -> ObjectInfo | None:
        info = self._inner.head(self._prefix + key)
        return None if info is None else info._replace(key=key)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        skip = len(self._prefix)
        behind = self._prefix + after if after else ""
        for info in self._inner.list(self._prefix + prefix, behind):
            yield info._replace(key=info.key[skip:])

    def sync(self, keys: Iterable[str]) -> None:
        self._inner.sync([self._prefix + key for key in keys])

    def close(self) -> None:
        self._inner.close()


_CONFORM: tuple[
    Callable[[Runtime, ObjectStore], ObjectStore],
    Callable[[Runtime, ObjectStore], ObjectStore],
    Callable[[ObjectStore, str], ObjectStore],
] = (Retrying, Metered, Prefixed)

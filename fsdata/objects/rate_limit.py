"""Two ways to ask a store for less: fewer requests at a time, and fewer bytes a second.

`Adaptive` obeys a store that says "slow down"; `Limited` obeys the user's options. The client puts
`Adaptive` below `Retrying`, so that a request in its back-off takes no place, and `Limited` above
it, so that waiting for bandwidth counts as no failure.

Threading: any method from any thread; each has one lock, a leaf, not held across store I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Final, NamedTuple, TypeVar

from fsdata.objects.contract import Buffer, NoPlace, ObjectInfo, ObjectStore, Range, Throttled
from fsmeta.errors import Unavailable
from fsmeta.runtime import Event, Runtime

T = TypeVar("T")

REQUESTS_MAX: Final = 256  # at a time: what `--max-uploads` and the serving threads may reach
LEAVING_S: Final = 0.5  # a request that waits for a place notices so late that the client leaves
CUT: Final = 0.5  # what remains of the window when the store gets too many requests


class Window(NamedTuple):
    """How many requests are let through at a time, are under way, and were turned away so far."""

    size: float
    busy: int
    throttled: int


class Adaptive:
    """Halves the requests at a time when the store throttles, and adds one a round while it works.

    That is how TCP shares a line (additive increase, multiplicative decrease): many clients that
    know nothing of each other settle at what the store can do. All that was sent before a cut
    counts as one complaint. Listings pass: they are one request at a time as it is.
    """

    def __init__(
        self,
        runtime: Runtime,
        inner: ObjectStore,
        most: int = REQUESTS_MAX,
        patience_s: float = inf,
        leaving: Event | None = None,
    ) -> None:
        """`patience_s`: how long a request waits for a place; not once the client is `leaving`."""
        self._inner = inner
        self._most = most
        self._clock = runtime.monotonic
        self._patience_s = patience_s
        self._leaving = leaving or runtime.event()
        self._cond = runtime.condition()
        self._window = float(most)  # guarded by _cond, as all below
        self._busy = 0
        self._cuts = 0
        self._throttled = 0

    def window(self) -> Window:
        """The state now."""
        with self._cond:
            return Window(self._window, self._busy, self._throttled)

    def _enter(self) -> int:
        """Wait for a place; how many cuts there have been. Raises: NoPlace."""
        with self._cond:
            if self._busy >= int(self._window):
                self._await_place()
            self._busy += 1
            return self._cuts

    def _await_place(self) -> None:
        """Wait until there is a place. The caller holds the lock. Raises: NoPlace."""
        until = self._clock() + self._patience_s
        while self._busy >= int(self._window):
            left = until - self._clock()
            if left <= 0:
                raise NoPlace(
                    f"no answer in {self._patience_s:g} s: too many requests for the store"
                )
            if self._leaving.is_set():
                raise NoPlace("too many requests for the store, and the client is leaving")
            self._cond.wait(min(left, LEAVING_S))

    def _more(self, places: int) -> bool:
        """Take `places` more if they are free now: a request with one must not wait for more."""
        with self._cond:
            free = self._busy + places <= int(self._window)
            self._busy += places * free
            return free

    def _leave(self, places: int = 1) -> None:
        """What ends here says nothing about the store's load."""
        with self._cond:
            self._busy -= places
            self._cond.notify(places)

    def _succeed(self) -> None:
        with self._cond:
            self._busy -= 1
            if self._window < self._most:
                self._window = min(float(self._most), self._window + 1 / self._window)
            self._cond.notify(2)  # the place that became free, and the one that may be new

    def _cut(self, cuts: int) -> None:
        with self._cond:
            self._throttled += 1
            if cuts == self._cuts:
                self._window = max(1.0, min(self._window, self._busy) * CUT)
                self._cuts += 1
            self._busy -= 1
            self._cond.notify()

    def _call(self, request: Callable[[], T]) -> T:
        cuts = self._enter()
        try:
            answer = request()
        except Throttled:
            self._cut(cuts)
            raise
        except BaseException:
            self._leave()
            raise
        self._succeed()
        return answer

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        self._call(lambda: self._inner.put(key, pieces))

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        return self._call(lambda: self._inner.get(key, begin, end))

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        """A place for each, or one after the other."""

        def ask() -> list[bytes]:
            more = len(ranges) - 1
            if not self._more(more):
                return [self._inner.get(key, begin, end) for begin, end in ranges]
            try:
                return self._inner.get_ranges(key, ranges)
            finally:
                self._leave(more)

        return self._call(ask)

    def get_into(self, key: str, pieces: Sequence[memoryview]) -> int:
        return self._call(lambda: self._inner.get_into(key, pieces))

    def delete(self, *keys: str) -> None:
        self._call(lambda: self._inner.delete(*keys))

    def head(self, key: str) -> ObjectInfo | None:
        return self._call(lambda: self._inner.head(key))

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self._inner.list(prefix, after)

    def sync(self, keys: Iterable[str]) -> None:
        self._inner.sync(keys)

    def close(self) -> None:
        self._inner.close()


class Pace:
    """So many bytes a second; no bound where `bytes_s` is 0."""

    def __init__(self, runtime: Runtime, bytes_s: float, leaving: Event | None = None) -> None:
        self._runtime = runtime
        self._bytes_s = bytes_s
        self._leaving = leaving or runtime.event()
        self._lock = runtime.lock()
        self._free_s = 0.0  # guarded by _lock: when what was taken so far has gone through

    def take(self, size: int) -> None:
        """Wait until all that was taken before has gone through, and take `size` bytes.

        Raises: Unavailable once the client is leaving, instead of waiting.
        """
        if not self._bytes_s:
            return
        with self._lock:
            now = self._runtime.monotonic()
            start = max(now, self._free_s)
            self._free_s = start + size / self._bytes_s
        if start > now and self._leaving.wait(start - now):
            raise Unavailable("the limit leaves no time: the client is leaving")


class Limited:
    """Keeps puts under `upload_bytes_s` and gets under `download_bytes_s`; 0: no limit."""

    def __init__(
        self,
        runtime: Runtime,
        inner: ObjectStore,
        upload_bytes_s: float,
        download_bytes_s: float,
        leaving: Event | None = None,
    ) -> None:
        self._inner = inner
        self._up = Pace(runtime, upload_bytes_s, leaving)
        self._down = Pace(runtime, download_bytes_s, leaving)

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        self._up.take(sum(map(len, pieces)))
        self._inner.put(key, pieces)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        self._down.take(max(0, end - begin) if end is not None else 0)
        data = self._inner.get(key, begin, end)
        if end is None:  # now it is known, and the next one waits for it
            self._down.take(len(data))
        return data

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        self._down.take(sum(max(0, end - begin) for begin, end in ranges))
        return self._inner.get_ranges(key, ranges)

    def get_into(self, key: str, pieces: Sequence[memoryview]) -> int:
        self._down.take(sum(map(len, pieces)))
        return self._inner.get_into(key, pieces)

    def delete(self, *keys: str) -> None:
        self._inner.delete(*keys)

    def head(self, key: str) -> ObjectInfo | None:
        return self._inner.head(key)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self._inner.list(prefix, after)

    def sync(self, keys: Iterable[str]) -> None:
        self._inner.sync(keys)

    def close(self) -> None:
        self._inner.close()


_CONFORM: tuple[
    Callable[[Runtime, ObjectStore], ObjectStore],
    Callable[[Runtime, ObjectStore, float, float], ObjectStore],
] = (Adaptive, Limited)

"""An object store that fails on demand, for tests of what stands above it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from errno import ENOSPC

from fsdata.objects.contract import Buffer, ObjectInfo, ObjectStore, Range, fill
from fsmeta.errors import Unavailable
from fsmeta.runtime import Event, Runtime


def unavailable() -> Exception:
    return Unavailable("injected")


def no_space() -> Exception:
    return OSError(ENOSPC, "injected")


class FaultyObjects:
    """`inner` with faults; each is set by the test and counts down or stays until cleared."""

    def __init__(self, runtime: Runtime, inner: ObjectStore) -> None:
        self.inner = inner
        self.puts: list[str] = []  # keys in order of arrival
        self.gets: list[tuple[str, int, int | None]] = []
        self.together: list[int] = []  # ranges that were asked for at once
        self.synced: list[str] = []
        self._lock = runtime.lock()
        self._fail: dict[str, tuple[int, Callable[[], Exception]]] = {}  # guarded by _lock
        self.full_for: Sequence[bytes] = ()  # there is no space for what contains any of these
        self.torn = False  # a failing put leaves half of the object behind
        self.flip_at: int | None = None  # this bit of every answer is wrong
        self.flips: int | None = None  # of so many answers; None: of all
        self.gate: Event | None = None  # puts and gets wait for it
        self.arrived: Event = runtime.event()  # set when something waits at the gate

    def fail(self, verb: str, count: int, make: Callable[[], Exception] = unavailable) -> None:
        """The next `count` calls of `verb` raise what `make` makes."""
        with self._lock:
            self._fail[verb] = count, make

    def _fault(self, verb: str) -> Exception | None:
        with self._lock:
            count, make = self._fail.get(verb, (0, unavailable))
            if count <= 0:
                return None
            self._fail[verb] = count - 1, make
            return make()

    def _pass(self) -> None:
        if self.gate is not None:
            self.arrived.set()
            self.gate.wait()

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        with self._lock:
            self.puts.append(key)
        self._pass()
        error = self._fault("put")
        if self.full_for and any(part in b"".join(pieces) for part in self.full_for):
            error = no_space()
        if error is not None:
            if self.torn:
                whole = b"".join(pieces)
                self.inner.put(key, [whole[: len(whole) // 2]])
            raise error
        self.inner.put(key, pieces)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        with self._lock:
            self.gets.append((key, begin, end))
        self._pass()
        error = self._fault("get")
        if error is not None:
            raise error
        data = self.inner.get(key, begin, end)
        if self.flip_at is not None and data and self.flips != 0:
            self.flips = None if self.flips is None else self.flips - 1
            flipped = bytearray(data)
            flipped[self.flip_at // 8 % len(data)] ^= 1 << self.flip_at % 8
            data = bytes(flipped)
        return data

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        self.together.append(len(ranges))
        return [self.get(key, begin, end) for begin, end in ranges]

    def get_into(self, key: str, pieces: Sequence[memoryview]) -> int:
        return fill(pieces, self.get(key, 0, sum(map(len, pieces))))

    def delete(self, *keys: str) -> None:
        error = self._fault("delete")
        if error is not None:
            raise error
        self.inner.delete(*keys)

    def head(self, key: str) -> ObjectInfo | None:
        return self.inner.head(key)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        for info in self.inner.list(prefix, after):
            error = self._fault("list")
            if error is not None:
                raise error
            yield info

    def sync(self, keys: Iterable[str]) -> None:
        kept = list(keys)
        self.synced += kept
        self.inner.sync(kept)

    def close(self) -> None:
        self.inner.close()


_CONFORMS: Callable[[Runtime, ObjectStore], ObjectStore] = FaultyObjects

"""A metadata engine whose requests are timed: reads, scans and commits, by outcome.

The mount puts it right before the engine, so that what it measures is a round trip with nothing of
the client but the adapter. Called through the `Store` contract. Threading: as the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeVar

from fsmeta.errors import Conflict, NotEmpty, StoreError
from fsmeta.latency import Histogram, Reading
from fsmeta.runtime import Runtime
from fsmeta.store.contract import SCAN_PAGE, Applied, Commit, Key, Page, RowPage, Store

T = TypeVar("T")
OK: Final = "ok"
CONFLICT: Final = "conflict"  # of a commit that runs again
ERROR: Final = "error"
_OUTCOMES: Final = (OK, CONFLICT, ERROR)
_VERBS: Final = ("read", "scan", "commit")


class MeteredStore:
    """Times the requests to `inner`."""

    def __init__(self, inner: Store, runtime: Runtime) -> None:
        self._inner = inner
        self._clock = runtime.monotonic
        self._lock = runtime.lock()
        self._times = {  # guarded by _lock
            (verb, outcome): Histogram() for verb in _VERBS for outcome in _OUTCOMES
        }
        self.name = inner.name
        self.history = inner.history
        self.vouches, self.hear, self.watch = inner.vouches, inner.hear, inner.watch
        self.now_ns, self.tidy, self.sync = inner.now_ns, inner.tidy, inner.sync
        self.everything, self.close = inner.everything, inner.close

    def readings(self) -> dict[tuple[str, str], Reading]:
        """How long requests took, by verb and outcome."""
        with self._lock:
            return {key: each.reading() for key, each in self._times.items()}

    @property
    def round_trips(self) -> int:
        return self._inner.round_trips

    def _add(self, verb: str, outcome: str, begun: float) -> None:
        spent = self._clock() - begun
        with self._lock:
            self._times[verb, outcome].add(spent)

    def _timed(self, verb: str, request: Callable[[], T]) -> T:
        begun = self._clock()
        try:
            answer = request()
        except (Conflict, NotEmpty):
            self._add(verb, CONFLICT, begun)
            raise
        except (StoreError, OSError):
            self._add(verb, ERROR, begun)
            raise
        self._add(verb, OK, begun)
        return answer

    def commit(self, commit: Commit) -> Applied | None:
        return self._timed("commit", lambda: self._inner.commit(commit))

    def read(self, keys: Sequence[Key], busy: Collection[bytes] = ()) -> list[bytes | None]:
        return self._timed("read", lambda: self._inner.read(keys, busy))

    def read_many(
        self, rows: Sequence[bytes], fields: Sequence[bytes]
    ) -> list[Sequence[bytes | None]]:
        return self._timed("read", lambda: self._inner.read_many(rows, fields))

    def read_linked(
        self,
        row: bytes,
        field: bytes,
        skip: int,
        prefix: bytes,
        fields: Sequence[bytes],
        busy: bool = False,
    ) -> tuple[bytes | None, list[bytes | None]]:
        inner = self._inner
        return self._timed(
            "read", lambda: inner.read_linked(row, field, skip, prefix, fields, busy)
        )

    def read_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes]]:
        return self._timed("read", lambda: self._inner.read_rows(rows))

    def read_short_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes] | None]:
        return self._timed("read", lambda: self._inner.read_short_rows(rows))

    def scan(self, row: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> Page:
        return self._timed("scan", lambda: self._inner.scan(row, cursor, limit))

    def scan_rows(self, prefix: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> RowPage:
        return self._timed("scan", lambda: self._inner.scan_rows(prefix, cursor, limit))


def _conforms(store: MeteredStore) -> Store:
    return store

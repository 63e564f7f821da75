"""A metadata engine whose requests are timed: reads, scans and commits, by outcome.

The mount puts it right before the engine, so that what it measures is a round trip with nothing of
the client but the adapter. Called through the `Store` contract. Threading: as the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeVar

from fsmeta.errors import Conflict, NotEmpty, StoreError
from fsmeta.latency import Histogram, HistogramReading
from fsmeta.runtime import Runtime
from fsmeta.spans import Spans
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
        self.has_leases, self.poll_invalidations, self.watch = (
            inner.has_leases,
            inner.poll_invalidations,
            inner.watch,
        )
        self.now_ns, self.tidy, self.sync = inner.now_ns, inner.tidy, inner.sync
        self.everything, self.close = inner.everything, inner.close

    def readings(self) -> dict[tuple[str, str], HistogramReading]:
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

    def _timed(self, verb: str, request: Callable[..., T], *arguments: object) -> T:
        begun = self._clock()
        try:
            answer = request(*arguments)
        except (Conflict, NotEmpty):
            self._add(verb, CONFLICT, begun)
            raise
        except (StoreError, OSError):
            self._add(verb, ERROR, begun)
            raise
        spent = self._clock() - begun
        with self._lock:
            self._times[verb, OK].add(spent)
        return answer

    def commit(self, commit: Commit) -> Applied | None:
        return self._timed("commit", self._inner.commit, commit)

    def read(self, keys: Sequence[Key], busy: Collection[bytes] = ()) -> list[bytes | None]:
        return self._timed("read", self._inner.read, keys, busy)

    def read_many(
        self, rows: Sequence[bytes], fields: Sequence[bytes]
    ) -> list[Sequence[bytes | None]]:
        return self._timed("read", self._inner.read_many, rows, fields)

    def read_linked(
        self,
        row: bytes,
        field: bytes,
        skip: int,
        prefix: bytes,
        fields: Sequence[bytes],
        busy: bool = False,
    ) -> tuple[bytes | None, list[bytes | None]]:
        linked = self._inner.read_linked
        return self._timed("read", linked, row, field, skip, prefix, fields, busy)

    def read_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes]]:
        return self._timed("read", self._inner.read_rows, rows)

    def read_short_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes] | None]:
        return self._timed("read", self._inner.read_short_rows, rows)

    def scan(self, row: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> Page:
        return self._timed("scan", self._inner.scan, row, cursor, limit)

    def scan_rows(self, prefix: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> RowPage:
        return self._timed("scan", self._inner.scan_rows, prefix, cursor, limit)


class TracedStore(MeteredStore):
    """Each request is a span of a trace, too: on mounts with `--trace`."""

    def __init__(self, spans: Spans, inner: Store, runtime: Runtime) -> None:
        super().__init__(inner, runtime)
        self._spans = spans

    def _timed(self, verb: str, request: Callable[..., T], *arguments: object) -> T:
        span = self._spans.below(f"store.{verb}")
        if span is None:
            return super()._timed(verb, request, *arguments)
        span.attributes["slicefs.engine"] = self.name
        return self._spans.spent(span, super()._timed, verb, request, *arguments)


def _conforms(store: MeteredStore) -> Store:
    return store

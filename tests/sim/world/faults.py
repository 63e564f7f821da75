"""A metadata store behind a bad network: latency, lost requests, lost replies, late news.

`FaultStore` stands between one client and its connection to a store of the simulated world, the
way a network would. `Faults` says how often what happens; after `heal` nothing more goes wrong.
It never invents a Conflict: verbs may count on one meaning that something changed.

The wrapped store runs shielded: the crash of a client does not stop a server half-way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, NoReturn, TypeVar

from fsmeta.errors import Ambiguous, StoreError, Unavailable
from fsmeta.store.contract import (
    SCAN_PAGE,
    Applied,
    Commit,
    Key,
    Listener,
    Page,
    Record,
    RowPage,
    Store,
    is_table,
)
from tests.sim.world.scheduler import SimProcess, SimRuntime

T = TypeVar("T")

PAGE: Final = 7  # fields of a page, so that directories of the simulation have several


class Faults(NamedTuple):
    """How a network behaves; rates are probabilities of one request, times are seconds."""

    latency_s: float = 0.001  # of one way; each is drawn anew, up to twice this
    slow: float = 0.01  # ways that take `slow_s`
    slow_s: float = 0.5
    refused: float = 0.02  # Unavailable, nothing applied
    reply_lost: float = 0.02  # Ambiguous, applied
    request_lost: float = 0.02  # Ambiguous, not applied
    late: float = 0.0  # Ambiguous, applied `late_s` afterwards, maybe between or after repeats
    late_s: float = 0.3
    news_lost: float = 0.0  # the link for `watch` breaks, which is noticed after `news_s`
    news_s: float = 1.0

    @property
    def news_late_s(self) -> float:
        """How long a client may believe what is no longer true."""
        late = 2 * self.latency_s + (self.slow_s if self.slow else 0)
        return late + (self.news_s + late if self.news_lost else 0)


CALM = Faults(slow=0, refused=0, reply_lost=0, request_lost=0)


class Network:
    """Chance and delay of one client's connection."""

    def __init__(self, sim: SimRuntime, seed: int, faults: Faults) -> None:
        self.sim = sim
        self.faults = faults
        self.cut = False  # while True, nothing arrives
        self.deaf = False  # while True, no answer does
        self._random = random.Random(seed)

    def happens(self, rate: float) -> bool:
        return self._random.random() < rate

    def draw(self, upper: float) -> float:
        return self._random.random() * upper

    def travel(self) -> None:
        """Spend the time of one way."""
        self.sim.sleep(self.delay_s())

    def delay_s(self) -> float:
        if self.happens(self.faults.slow):
            return self.faults.slow_s
        return self.draw(2 * self.faults.latency_s)

    def ask(self, call: Callable[[], T]) -> T:
        """A request that may be repeated. Raises: Unavailable."""
        self.travel()
        if self.cut or self.happens(self.faults.refused):
            raise Unavailable("simulated: no connection")
        answer = self.serve(call)
        self.travel()
        if self.cut or self.deaf or self.happens(self.faults.reply_lost):
            raise Unavailable("simulated: reply lost")
        return answer

    def serve(self, call: Callable[[], T]) -> T:
        """What the server does, whatever becomes of the client."""
        with self.sim.shield():
            return call()

    def heal(self) -> None:
        """From now on all goes well."""
        self.cut = self.deaf = False
        self.faults = CALM


class FaultStore:
    """A `Store` behind a `Network`, used by the threads of one process.

    A lost request or reply ends the connection, as with Redis: what the old one had read is watched
    no more, so the listener is told that anything may have changed, and what the old one still
    brings to pass is news like that of others.
    """

    def __init__(
        self,
        store: Store,
        sim: SimRuntime,
        seed: int,
        faults: Faults | None = None,
        process: SimProcess | None = None,
    ) -> None:
        self.name = f"faulty {store.name}"
        self.history = store.history
        self.network = Network(sim, seed, faults or Faults())
        self._store = store
        self._sim = sim
        self._process = process
        self._listener: Listener | None = None
        self._on_news: Listener | None = None  # brings news to it
        self._deaf = False  # the link for news is broken
        self._vouching = True  # as far as the client has noticed

    @property
    def round_trips(self) -> int:
        return self._store.round_trips

    def heal(self) -> None:
        self.network.heal()

    def read(self, keys: Sequence[Key], busy: Collection[bytes] = ()) -> list[bytes | None]:
        return self.network.ask(lambda: self._store.read(keys, busy))

    def read_many(
        self, rows: Sequence[bytes], fields: Sequence[bytes]
    ) -> list[Sequence[bytes | None]]:
        return self.network.ask(lambda: self._store.read_many(rows, fields))

    def read_linked(
        self,
        row: bytes,
        field: bytes,
        skip: int,
        prefix: bytes,
        fields: Sequence[bytes],
        busy: bool = False,
    ) -> tuple[bytes | None, list[bytes | None]]:
        link = (row, field, skip, prefix, fields, busy)
        return self.network.ask(lambda: self._store.read_linked(*link))

    def read_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes]]:
        return self.network.ask(lambda: self._store.read_rows(rows))

    def read_short_rows(self, rows: Sequence[bytes]) -> list[dict[bytes, bytes] | None]:
        return self.network.ask(lambda: self._store.read_short_rows(rows))

    def scan(self, row: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> Page:
        return self.network.ask(lambda: self._store.scan(row, cursor, min(limit, PAGE)))

    def scan_rows(self, prefix: bytes, cursor: bytes = b"", limit: int = SCAN_PAGE) -> RowPage:
        return self.network.ask(lambda: self._store.scan_rows(prefix, cursor, limit))

    def everything(self) -> AbstractContextManager[Iterator[Record]]:
        return self.network.ask(self._store.everything)

    def commit(self, commit: Commit) -> Applied | None:
        """The wrapped store's answer, or one of the ways to lose it."""
        net = self.network
        net.travel()
        if net.happens(net.faults.refused):
            raise Unavailable("simulated: not accepted")
        if net.cut or net.happens(net.faults.request_lost):
            self._lose_connection("request lost")
        if net.happens(net.faults.late):
            self._sim.spawn_in(None, "late commit", lambda: self._commit_late(commit))
            self._lose_connection("request delayed")
        applied = net.serve(lambda: self._store.commit(commit))
        net.travel()
        if net.cut or net.deaf or net.happens(net.faults.reply_lost):
            self._lose_connection("reply lost")
        return applied

    def _lose_connection(self, why: str) -> NoReturn:
        if self._listener is not None:
            self._listener(None)
        raise Ambiguous(f"simulated: {why}")

    def _commit_late(self, commit: Commit) -> None:
        self._sim.sleep(self.network.draw(self.network.faults.late_s))
        try:
            self._store.commit(commit)
        except StoreError:
            return  # nobody waits for this answer any more
        if self._on_news is not None:
            self._on_news([write.row for write in commit.writes if not is_table(write.row)])

    def sync(self) -> None:
        self.network.ask(self._store.sync)

    def watch(self, listener: Listener) -> None:
        """News reach `listener` late, each in a thread of the client's process, maybe reordered."""

        def deliver(rows: Sequence[bytes] | None) -> None:
            self.network.travel()
            if not self._deaf:
                listener(rows)

        def reconnect() -> None:
            self._sim.sleep(self.network.faults.news_s)  # until the silence is noticed
            self._vouching = False
            listener(None)
            self.network.travel()
            self._deaf = False
            listener(None)
            self._vouching = True

        def on_news(rows: Sequence[bytes] | None) -> None:
            if self._deaf or self._is_dead():
                return
            if self.network.happens(self.network.faults.news_lost):
                self._deaf = True
                self._sim.spawn_in(self._process, "watch reconnects", reconnect)
            else:
                self._sim.spawn_in(self._process, "watch delivers", lambda: deliver(rows))

        self._listener, self._on_news = listener, on_news
        self._store.watch(on_news)

    def _is_dead(self) -> bool:
        return self._process is not None and self._process.crashed

    def poll_invalidations(self) -> None:
        self._store.poll_invalidations()

    def has_leases(self) -> bool:
        return self._store.has_leases() and self._vouching

    def now_ns(self) -> int:
        return self.network.ask(self._store.now_ns)

    def tidy(self) -> None:
        self._store.tidy()

    def close(self) -> None:
        self._store.close()


def _conforms(store: FaultStore) -> Store:
    return store

"""The engines under test, and short words for commits and volumes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsmeta.meta.meta import Meta
from fsmeta.rules import settings as volume
from fsmeta.runtime import Runtime, SystemRuntime
from fsmeta.store.contract import Commit, Store
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.store.redis.engine import RedisStore
from fsmeta.store.sqlite import SqliteStore
from fsmeta.store.tikv.engine import TikvStore
from fsmeta.store.writes import Add, Write
from fsmeta.txn.retry import Transactor
from fsmeta.txn.row_cache import RowCache
from fsmeta.types import SpaceUsage
from tests.support.redis_server import RedisServer
from tests.support.redis_sets import Cluster
from tests.support.tikv_server import TikvServer

ENGINES = ("mem", "sqlite", "redis", "cluster", "tikv")
RUNTIME = SystemRuntime()
_NUMBERS = itertools.count()
NO_LIMITS = SpaceUsage(0, 0)
PATIENT_S = 60.0  # how long a verb tries: a disk that others write to takes seconds


class Engine:
    """One database, with a volume in it, and the clients that a test opens on it."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Store],
        url: str = "",
        hang_up: Callable[[], object] = bool,
    ) -> None:
        """`hang_up` ends connections that only listen: closing such a client waits a second."""
        self.name = name
        self.url = url  # for another process; "" where there can't be one
        self._connect = connect
        self._hang_up = hang_up
        self._clients: list[Store] = []
        self._first = self.open()

    @property
    def tells(self) -> bool:
        """Whether clients are told of each other's changes."""
        return self.name not in ("sqlite", "tikv")

    def open(self) -> Store:
        """A client of its own; closed with the engine."""
        store = self._connect()
        self._clients.append(store)
        return store

    def format(self, limits: SpaceUsage = NO_LIMITS) -> None:
        make_volume(self._first, RUNTIME, limits)

    def meta(self, deadline_s: float = PATIENT_S) -> Meta:
        """A client with a session."""
        meta = Meta(self.open(), RUNTIME, deadline_s)
        meta.sessions.open({"host": "test"})
        return meta

    @property
    def first(self) -> Store:
        """A client for looking at what is stored."""
        return self._first

    def close(self) -> None:
        closing = [threading.Thread(target=store.close) for store in self._clients]
        for thread in closing:
            thread.start()
        for thread in closing:
            while thread.is_alive():
                self._hang_up()
                thread.join(0.01)


def open_engine(name: str, directory: Path, server_of: Callable[[str], Any]) -> Engine:
    """`server_of` is told the name of a fixture: a server is started only where it is wanted."""
    if name == "mem":
        backend = MemBackend(RUNTIME)
        return Engine(name, lambda: MemStore(backend))
    if name == "sqlite":
        path = str(directory / "meta.db")
        return Engine(name, lambda: SqliteStore(path, RUNTIME, create=True), f"sqlite://{path}")
    if name == "tikv":
        cluster: TikvServer = server_of("tikv_server")
        place = cluster.empty_url()
        return Engine(name, lambda: TikvStore(place, RUNTIME), place)
    if name == "cluster":
        cluster_name = f"v{next(_NUMBERS)}"
        nodes: Cluster = server_of("redis_cluster")
        return Engine(
            name,
            lambda: RedisStore(nodes.url(cluster_name), RUNTIME),
            nodes.url(cluster_name),
            lambda: [node.ask("CLIENT", "KILL", "TYPE", "pubsub") for node in nodes.nodes],
        )
    server: RedisServer = server_of("redis_server")
    url = server.empty_url()
    return Engine(
        name,
        lambda: RedisStore(url, RUNTIME),
        url,
        lambda: server.ask("CLIENT", "KILL", "TYPE", "pubsub"),
    )


def transactor(
    store: Store, runtime: Runtime = RUNTIME, deadline_s: float = PATIENT_S
) -> Transactor:
    """A client's retry loop with a cache of its own, told of others' changes."""
    run = Transactor(store, runtime, RowCache(runtime), deadline_s)
    store.watch(run.cache.apply_invalidations)
    return run


def make_volume(store: Store, runtime: Runtime, limits: SpaceUsage = NO_LIMITS) -> None:
    choices = volume.FormatChoices(capacity=limits.space, inodes=limits.inodes)
    settings = volume.new_format("test", "mem", "", choices)
    run = Transactor(store, runtime, RowCache(runtime))
    past = store.history.store_epoch()
    run.run(lambda txn: volume.create_volume(txn, settings, (0, 0), runtime.now_ns(), past))


def change(
    *writes: Write,
    checks: Sequence[tuple[bytes, bytes, bytes | None]] = (),
    empties: Sequence[bytes] = (),
    fence: bytes | None = None,
    worker: bytes = b"w\0\1",
    sequence: int = 0,
) -> Commit:
    """A commit; without `fence` it has no session and no memory."""
    return Commit(fence, worker, sequence, checks, empties, writes)


def add(row: bytes, field: bytes, delta: int, limit: int = 0, tag: str = "") -> Write:
    """An Add as `Txn.add` makes it."""
    return Add(row, field, delta, b"%d" % limit, tag)


def dump(store: Store, prefix: bytes = b"") -> dict[bytes, dict[bytes, bytes]]:
    """All rows that begin with `prefix`."""
    rows: set[bytes] = set()
    cursor: bytes | None = b""
    while cursor is not None:
        page = store.scan_rows(prefix, cursor)
        rows.update(page.rows)
        cursor = page.cursor
    found = sorted(rows)
    return dict(zip(found, store.read_rows(found), strict=True)) if found else {}

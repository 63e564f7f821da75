"""A volume and one client of it in the test's own process, without a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsclient.client.client import MountClient
from fsclient.client.client_options import ClientOptions
from fsclient.client.given_parts import GivenParts
from fsclient.upkeep.verify_objects import verify_objects
from fsclient.volume.metadata_url import open_store
from fsclient.writeback.writeback import WriteBackOptions
from fsdata.objects.contract import Buffer
from fsdata.objects.mem import MemObjects
from fsmeta.check.check import Examination, check
from fsmeta.meta.meta import Meta
from fsmeta.rules import settings as volume
from fsmeta.runtime import SystemRuntime
from fsmeta.store.contract import Store
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.store.sqlite import SqliteStore
from fsmeta.txn.retry import Transactor
from fsmeta.txn.row_cache import RowCache
from tests.posix.metafs import MetaFS
from tests.posix.volumes import PATIENCE_S

RUNTIME = SystemRuntime()
SLUGGISH_S = 0.03
Connect = Callable[[], Store]


def memory() -> Connect:
    """A new database in memory."""
    backend = MemBackend(RUNTIME)
    return lambda: MemStore(backend)


def sqlite(path: Path) -> Connect:
    """A new database in the file `path`."""
    return lambda: SqliteStore(str(path), RUNTIME, True)


def server(url: str) -> Connect:
    """An empty database of a server."""
    return lambda: open_store(url, RUNTIME)


def format_volume(connect: Connect, settings: volume.VolumeFormat | None = None) -> None:
    """Make a volume in an empty database."""
    store = connect()
    settings = settings or volume.new_format("testvol", "mem", "unused")
    Transactor(store, RUNTIME, RowCache(RUNTIME)).run(
        lambda txn: volume.create_volume(txn, settings, (0, 0), RUNTIME.now_ns())
    )
    store.close()


class Sluggish(MemObjects):
    """Objects that take a while to be stored, so that much is held back, and never for long."""

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        RUNTIME.sleep(RUNTIME.random() * SLUGGISH_S)
        super().put(key, pieces)


@contextmanager
def client(connect: Connect, staging: Path | None = None) -> Iterator[MountClient]:
    """A client of a new volume; in the end all data is where the metadata says.

    With `staging`, a directory, it writes back.
    """
    format_volume(connect)
    options = ClientOptions(heartbeat_s=0.5, meta_timeout_s=PATIENCE_S)
    objects = MemObjects(RUNTIME)
    if staging is not None:
        objects = Sluggish(RUNTIME)
        options = options._replace(staging_dir=str(staging), writeback=WriteBackOptions())
    made = MountClient(connect(), RUNTIME, options, GivenParts(objects))
    made.start()
    try:
        yield made
    finally:
        stored = made.stop()
    assert stored
    store = connect()
    with Examination(store) as examination:
        assert not examination.run().problems
        block_bytes = made.meta.format.block_bytes
        verdict = verify_objects(objects, block_bytes, examination, data=True)
    store.close()
    assert not verdict.problems
    assert not verdict.leaked


@contextmanager
def meanwhile(
    meta: object, verb: str, then: Callable[[], object], before: bool = False
) -> Iterator[None]:
    """`then` happens once: when `verb` has its answer and its caller has not, or just `before`."""
    real = getattr(meta, verb)

    def slowly(*args: Any) -> Any:
        setattr(meta, verb, real)
        if before:
            then()
            return real(*args)
        answer = real(*args)
        then()
        return answer

    setattr(meta, verb, slowly)
    try:
        yield
    finally:
        assert getattr(meta, verb) == real, f"{verb} was not called"
        delattr(meta, verb)


@contextmanager
def meta_only(connect: Connect) -> Iterator[MetaFS]:
    """The metadata of a new volume; in the end it is true to itself."""
    format_volume(connect)
    meta = Meta(connect(), RUNTIME)
    meta.sessions.open({"host": "test"})
    fs = MetaFS(meta)
    yield fs
    fs.purge()
    assert check(meta.store).problems == []
    meta.sessions.close()
    meta.store.close()

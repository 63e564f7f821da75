"""M2: old values in TiKV: dropped after three hours, by whoever leads, unless there is a TiDB."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from fsmeta.errors import Unavailable
from fsmeta.store.tikv import engine as store_tikv
from fsmeta.store.tikv.engine import TikvStore
from fsmeta.store.tikv.gc import KEEP_S, collect, moment_before
from tests.fsmeta.engines import RUNTIME, Engine
from tests.fsmeta.sessions import A, put
from tests.support.tikv_server import TikvServer
from tests.support.waiting import wait_until

tikv = pytest.mark.parametrize("engine", ["tikv"], indirect=True)
TIDB_KEY = b"mDBs\x00\x00\x00"


@pytest.fixture
def leading(engine: Engine) -> Iterator[TikvStore]:
    """A client that has old values dropped."""
    store = TikvStore(engine.url, RUNTIME, collects=True)
    yield store
    store.close()


def _asked(server: TikvServer) -> int:
    return server.counts().get("UpdateGCSafePoint", 0)


def _set(store: TikvStore, key: bytes, value: bytes | None) -> None:
    """A key outside the volume."""

    async def work() -> None:
        transaction = await store._link.begin()
        inner = transaction.inner
        await (inner.delete(key) if value is None else inner.put(key, value))
        await store._link.commit(transaction, None)

    store._link.call(work())


@tikv
def test_m2_the_mark_moves_to_three_hours_ago(
    leading: TikvStore, tikv_server: TikvServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, moments = _asked(tikv_server), []
    drop = leading._link.drop_before

    async def note(moment: int, timeout_s: float) -> None:
        moments.append(moment)
        await drop(moment, timeout_s)

    monkeypatch.setattr(leading._link, "drop_before", note)
    put(leading, A, x=b"1")
    leading.tidy()
    wait_until(lambda: _asked(tikv_server) == before + 1)
    age = datetime.now(UTC).timestamp() - (moments[0] >> 18) / 1000
    assert KEEP_S - 1 < age < KEEP_S + 60
    assert leading.read([(A, b"x")]) == [b"1"]


@tikv
def test_m2_nobody_else_moves_it(engine: Engine, tikv_server: TikvServer) -> None:
    """A command, or a mount with --tikv-gc=off."""
    store, before = engine.open(), _asked(tikv_server)
    store.tidy()
    time.sleep(0.2)
    assert _asked(tikv_server) == before


@tikv
def test_m2_where_there_is_a_tidb_it_sees_to_it(
    leading: TikvStore, tikv_server: TikvServer
) -> None:
    _set(leading, TIDB_KEY, b"1")
    try:
        before = _asked(tikv_server)
        assert leading._link.call(collect(leading._link)) is False
        assert _asked(tikv_server) == before
    finally:
        _set(leading, TIDB_KEY, None)
    assert leading._link.call(collect(leading._link)) is True


@tikv
def test_m2_a_store_that_is_away_is_asked_again_later(
    leading: TikvStore, tikv_server: TikvServer
) -> None:
    before = _asked(tikv_server)
    scanned = tikv_server.counts().get("KvScanLock", 0)
    tikv_server.fault("KvScanLock", "before")
    leading.tidy()
    wait_until(lambda: tikv_server.counts().get("KvScanLock", 0) > scanned)
    tikv_server.heal()
    leading.tidy()
    wait_until(lambda: _asked(tikv_server) > before)


@tikv
def test_m5_a_dump_does_not_outlast_what_it_reads(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that others may have dropped meanwhile would be missing from it, silently."""
    monkeypatch.setattr(store_tikv, "DUMP_MAX_S", -1.0)
    with engine.open().everything() as records, pytest.raises(Unavailable, match="no longer kept"):
        list(records)


def test_moments() -> None:
    assert moment_before(10_000 << 18, 3) == 7_000 << 18
    assert moment_before((10_000 << 18) + 7, 3) == (7_000 << 18) + 7
    assert moment_before(5, 3) == 0

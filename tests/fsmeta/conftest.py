"""The `engine` fixture: each test that takes it runs on every engine, and leaves a clean volume."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsmeta.schema.trash import HOUR_NS
from fsmeta.store.redis import invalidation, topology
from fsmeta.store.tikv import client
from tests.conftest import assert_clean
from tests.fsmeta.engines import ENGINES, PATIENT_S, RUNTIME, Engine, open_engine


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for seconds is no lost link: other tests have those.

    Nor does an hour of the trash end meanwhile: it is half past.
    """
    monkeypatch.setattr(invalidation, "_PING_EVERY_S", PATIENT_S)
    for name in ("socket_connect_timeout", "socket_timeout"):
        monkeypatch.setitem(topology._HURRY, name, PATIENT_S)
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", PATIENT_S)
    ahead_ns = HOUR_NS // 2 - time.time_ns() % HOUR_NS
    monkeypatch.setattr(RUNTIME, "now_ns", lambda: time.time_ns() + ahead_ns)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path, patient: None) -> Iterator[Engine]:
    """A database with an empty volume. `parametrize("engine", […], indirect=True)` picks some."""
    del patient
    made = open_engine(request.param, tmp_path, request.getfixturevalue)
    try:
        made.format()
        yield made
        assert_clean(made.first)
    finally:
        made.close()

"""Recorded histories of several clients at once are linearizable, on every engine."""

from __future__ import annotations

import pytest

from tests.fsmeta.engines import Engine
from tests.linear.client import parties, run_at_once
from tests.linear.history import require_linearizable

CLIENTS = 4
TURNS = 12
ROUNDS = 12


def test_clients_at_once(engine: Engine, request: pytest.FixtureRequest) -> None:
    metas = [engine.meta() for _ in range(CLIENTS)]
    rounds = 50 * ROUNDS if request.config.getoption("soak") else ROUNDS
    for _, clients in parties(metas, rounds):
        require_linearizable(run_at_once(clients, TURNS))

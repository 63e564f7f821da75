"""M2: histories of clients of a TiKV that loses answers, moves its regions and stands still.

In the simulation (`sim/test_linear.py`) the store itself is right; here two-phase commit is tried,
with locks that clients leave behind and commits whose outcome they have to find out.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

from fsmeta.meta.meta import Meta
from fsmeta.schema import keys
from fsmeta.store.tikv.engine import parse_url
from fsmeta.store.tikv.keys import KeySpace
from fsmeta.txn.retry import Counters
from fsmeta.types import Ino
from tests.fsmeta.engines import RUNTIME, Engine
from tests.linear.client import parties, run_at_once
from tests.linear.history import UNKNOWN, Call, require_linearizable
from tests.support.tikv_server import TikvServer

pytestmark = pytest.mark.parametrize("engine", ["tikv"], indirect=True)
CLIENTS = 4
TURNS = 12
IMPATIENT_S = 1.0  # of one client in two: gives up in doubt, and does not know
FAULTS = (
    ("KvCommit", "after"),
    ("KvCommit", "before"),
    ("KvCommit", "late"),
    ("KvCommit", "busy"),
    ("KvBatchRollback", "before"),
    ("KvPrewrite", "after"),
    ("KvPrewrite", "late"),
    ("KvBatchGet", "before"),
    ("KvScan", "delay"),
    ("Tso", "before"),
)
FAULTS_MAX = 30  # of a kind in one spell
LATE_MS = 30
SPELL_S = 0.4  # of bad weather: longer than the package's first few tries
DOUBT_S = 2.0  # longer than all its tries


def _metas(engine: Engine) -> list[Meta]:
    """Clients with sessions, every second one impatient."""
    metas = [Meta(engine.open(), RUNTIME, (10.0, IMPATIENT_S)[n % 2]) for n in range(CLIENTS)]
    for meta in metas:
        meta.sessions.open({"host": "test"})
        meta._inos.take()  # has a supply: no commit of a history is for that
    return metas


def _cuts(url: str, directory: Ino) -> list[bytes]:
    """Where regions may end in the rows that all work on."""
    space = KeySpace(parse_url(url)[1])
    rows = keys.dir_row(directory), keys.inode_row(directory)
    return [space.key(row, field) for row in rows for field in (b"", b"b", b"v")]


@contextmanager
def _weather(
    server: TikvServer, cuts: list[bytes], is_doubtful: Callable[[], bool], seed: int
) -> Iterator[None]:
    """Commits whose outcome is in doubt, where `seed` is odd even for who looks at once, until that
    has come about; then faults that come and go, while regions split and are led by others.
    """
    chance, over = random.Random(seed), threading.Event()
    chance.shuffle(cuts)

    def blow() -> None:
        server.fault("KvCommit", "after")
        if seed % 2:
            for method in ("KvPrewrite", "KvCommit"):  # until somebody is in the second phase
                begun = server.counts()[method]
                while server.counts()[method] == begun and not over.is_set():
                    over.wait(LATE_MS / 1000)
            server.fault("KvBatchGet", "before")
            while not is_doubtful() and not over.is_set():
                over.wait(LATE_MS / 1000)
        else:
            over.wait(DOUBT_S)
        server.heal()
        while not over.is_set():
            for method, kind in chance.sample(FAULTS, 2):
                server.fault(method, kind, count=FAULTS_MAX, millis=LATE_MS)
            if cuts:
                server.split(cuts.pop())
            server.move_leaders()
            over.wait(SPELL_S * chance.random())
            server.heal()
            over.wait(SPELL_S * chance.random())

    with ThreadPoolExecutor(1) as pool:
        blowing = pool.submit(blow)
        try:
            yield
        finally:
            over.set()
            blowing.result()
            server.heal()


def test_m2_bad_weather_is_linearizable(
    engine: Engine, tikv_server: TikvServer, request: pytest.FixtureRequest
) -> None:
    metas = _metas(engine)
    counters = [meta.transactor.counters for meta in metas]
    calls: list[Call] = []
    rounds = 100 if request.config.getoption("soak") else 2
    for seed, (directory, clients) in enumerate(parties(metas, rounds)):
        is_doubtful = partial(_are_more, counters, sum(each.repeats for each in counters))
        cuts = _cuts(engine.url, directory)
        with _weather(tikv_server, cuts, is_doubtful, seed):
            history = run_at_once(clients, TURNS)
        require_linearizable(history)
        calls += history
    assert sum(each.unavailable for each in counters)
    assert sum(each.repeats for each in counters)
    known = sum(call.answer != UNKNOWN for call in calls)
    assert known > len(calls) // 2


def _are_more(counters: Sequence[Counters], repeats: int) -> bool:
    return sum(each.repeats for each in counters) > repeats

"""M2: a commit in doubt whose keys lie in several regions is applied whole, or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from fsmeta.store.contract import Store
from fsmeta.store.tikv.engine import parse_url
from fsmeta.store.tikv.keys import KeySpace
from tests.fsmeta.engines import Engine, transactor
from tests.fsmeta.sessions import FENCE, WORKER, A, fenced, outcome_of, put
from tests.support.tikv_server import TikvServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.parametrize("engine", ["tikv"], indirect=True)
LOCKS_EXPIRE_S = 100.0  # those of a client that is gone take 20 s; only a failure takes longer


def _torn_apart(engine: Engine, server: TikvServer) -> Store:
    """A client whose next commit has the record of its worker in a region of its own."""
    store = engine.open()
    put(store, FENCE, a=b"1")
    space = KeySpace(parse_url(engine.url)[1])
    for row in (A, FENCE):
        server.split(space.begin(row))
    return store


@pytest.mark.parametrize("then", ["after", "busy"])
def test_what_is_applied_in_one_region_is_not_undone_in_another(
    engine: Engine, tikv_server: TikvServer, then: str
) -> None:
    """The first key was committed; that answer is lost, and those to all further tries."""
    store = _torn_apart(engine, tikv_server)
    tikv_server.fault("KvCommit", "after", count=1)
    tikv_server.fault("KvCommit", then)
    with ThreadPoolExecutor(1) as pool:
        outcome = outcome_of(pool.submit(store.commit, fenced(A, b"a", 1)))
    tikv_server.heal()
    assert outcome in ("applied", "Ambiguous")
    run = transactor(engine.open(), deadline_s=LOCKS_EXPIRE_S)
    assert run.view(lambda txn: txn.get(A, b"log")) == b"a"
    store.commit(fenced(A, b"a", 1))
    assert store.read_rows([A]) == [{b"log": b"a", b"n": b"1"}]
    assert store.read([(FENCE, WORKER)]) != [None]


@pytest.mark.parametrize("method", ["KvPrewrite", "KvCommit"])
def test_what_is_not_applied_is_applied_later_once(
    engine: Engine, tikv_server: TikvServer, method: str
) -> None:
    """A store refuses one of the phases: nothing is there; the same commit passes when it may."""
    store = _torn_apart(engine, tikv_server)
    tikv_server.fault(method, "busy")
    with ThreadPoolExecutor(1) as pool:
        outcome = outcome_of(pool.submit(store.commit, fenced(A, b"a", 1)))
    tikv_server.heal()
    assert outcome in ("Unavailable", "Ambiguous")
    again = transactor(store, deadline_s=LOCKS_EXPIRE_S)
    assert again.view(lambda txn: txn.get(A, b"log")) is None
    store.commit(fenced(A, b"a", 1))
    assert store.read_rows([A]) == [{b"log": b"a", b"n": b"1"}]


def test_a_client_that_leaves_undoes_nothing(engine: Engine, tikv_server: TikvServer) -> None:
    """It is closed while its second phase is applied and not answered."""
    store = _torn_apart(engine, tikv_server)
    before = tikv_server.counts()
    tikv_server.fault("KvCommit", "after", count=1)
    tikv_server.fault("KvCommit", "freeze")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.commit, fenced(A, b"a", 1))
        wait_until(partial(_is_more, tikv_server, "KvPrewrite", before.get("KvPrewrite", 0)))
        # who asks a second time has been told of the first that it was lost
        wait_until(partial(_is_more, tikv_server, "KvCommit", before.get("KvCommit", 0) + 1))
        store.close()
        assert outcome_of(waiting) == "Ambiguous"
    tikv_server.heal()
    run = transactor(engine.open(), deadline_s=LOCKS_EXPIRE_S)
    found = run.view(lambda txn: txn.get_many([(A, b"log"), (FENCE, WORKER)]))
    assert found[0] == b"a"
    assert found[1] is not None


def _is_more(server: TikvServer, method: str, than: int) -> bool:
    return server.counts().get(method, 0) > than

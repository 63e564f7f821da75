"""TiKV when answers are lost, clients die, clocks stand still and regions move."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from fsmeta.errors import Ambiguous, Unavailable
from fsmeta.meta.meta import Meta
from fsmeta.schema import keys
from fsmeta.store.contract import Store
from fsmeta.store.tikv.engine import parse_url
from fsmeta.store.tikv.keys import KeySpace
from fsmeta.store.writes import DeleteRow, Put
from fsmeta.types import ROOT_CALLER as ROOT, ROOT_INO
from tests.conftest import assert_clean
from tests.fsmeta.engines import Engine, change, transactor
from tests.fsmeta.sessions import FENCE, A, B, fenced, outcome_of, put
from tests.fsmeta.victim import ONE, TWO
from tests.fsmeta.work import random_work
from tests.support.tikv_server import TikvServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.parametrize("engine", ["tikv"], indirect=True)
LOCKS_EXPIRE_S = 100.0  # those of a dead client take 20 s; only a failure takes longer
IN_TIME_S = 100.0  # one request is given up after 5 s
NOTICED_S = 100.0  # the package tries again for seconds before it says anything


@pytest.fixture
def store(engine: Engine) -> Store:
    opened = engine.open()
    put(opened, FENCE, a=b"1")
    return opened


def _wait_for_second_phase(server: TikvServer, before: dict[str, int]) -> None:
    """Until a commit that begins now has written, and then asked for its second phase.

    The former alone tells that it is this commit: others' second phases end behind their answers.
    """
    for method in ("KvPrewrite", "KvCommit"):
        wait_until(partial(_is_more, server, method, before.get(method, 0)))


def _is_more(server: TikvServer, method: str, than: int) -> bool:
    return server.counts().get(method, 0) > than


# --- what gets lost ------------------------------------------------------------------------------


@pytest.mark.parametrize("arrives", ["after", "before"])
def test_a_lost_answer_is_found_out(store: Store, tikv_server: TikvServer, arrives: str) -> None:
    """All answers to the second phase are lost; a look at what was written tells."""
    tikv_server.fault("KvCommit", arrives)
    with ThreadPoolExecutor(1) as pool:
        outcome = outcome_of(pool.submit(store.commit, fenced(A, b"a", 1)))
    assert outcome == ("applied" if arrives == "after" else "Unavailable")
    tikv_server.heal()
    store.commit(fenced(A, b"a", 1))
    assert store.read_rows([A]) == [{b"log": b"a", b"n": b"1"}]


@pytest.mark.parametrize("arrives", ["after", "before"])
def test_what_stays_in_doubt_counts_once(
    engine: Engine, store: Store, tikv_server: TikvServer, arrives: str
) -> None:
    store.commit(fenced(A, b"a", 1))
    assert store.read_rows([A]) == [{b"log": b"a", b"n": b"1"}]  # and no key is still locked by it
    tikv_server.fault("KvCommit", arrives)
    tikv_server.fault("KvBatchGet", "before", skip=1)  # whether it was applied
    with pytest.raises(Ambiguous):
        store.commit(fenced(A, b"b", 2))
    tikv_server.heal()
    for sender in (store, store, engine.open()):
        sender.commit(fenced(A, b"b", 2))
        assert store.read_rows([A]) == [{b"log": b"ab", b"n": b"2"}]


def test_the_retry_loop_settles_doubt(engine: Engine, tikv_server: TikvServer) -> None:
    """A verb works all the same, once, though its answers are lost and nothing can be read."""
    meta = engine.meta()
    meta.create(ROOT, ROOT_INO, b"first", 0o100644)  # takes a supply of inode numbers
    counters = meta.transactor.counters
    tikv_server.fault("KvCommit", "after")
    before = tikv_server.counts()
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(meta.create, ROOT, ROOT_INO, b"second", 0o100644)
        _wait_for_second_phase(tikv_server, before)
        tikv_server.fault("KvBatchGet", "before")
        wait_until(lambda: counters.repeats or made.done(), NOTICED_S)
        tikv_server.heal()
        made.result()
    assert counters.repeats
    assert meta.statfs().inodes_used == 3


@pytest.mark.parametrize(
    ("method", "kind", "skip"),
    [
        ("KvBatchGet", "before", 0),
        ("KvBatchGet", "busy", 0),
        ("KvScan", "busy", 0),
        ("KvPrewrite", "before", 0),
        ("KvPrewrite", "after", 0),
        ("KvPrewrite", "busy", 0),
        ("KvPrewrite", "leader", 0),
        ("KvCommit", "busy", 0),
        ("KvCommit", "leader", 0),
        ("Tso", "before", 0),
        ("Tso", "before", 1),  # the second is that of the second phase
    ],
)
def test_a_verb_outlasts(
    engine: Engine, tikv_server: TikvServer, method: str, kind: str, skip: int
) -> None:
    """Trouble that ends within the retry loop's time is not seen above it.

    It ends when the loop has met it: how often the package tries, and what other requests of this
    kind are still under way behind an answer, does not matter.
    """
    meta = engine.meta()
    for name in (b"nothing is known", b"all is known"):
        tikv_server.fault(method, kind, skip=skip)
        assert _heal_once_met(tikv_server, meta, name)
    assert meta.statfs().inodes_used == 3
    assert len(meta.names(ROOT_INO)[0]) == 2


def _heal_once_met(server: TikvServer, meta: Meta, name: bytes) -> bool:
    """Create a file, with faults for as long as they have not been met; whether they were."""
    counters = meta.transactor.counters
    seen = counters.unavailable + counters.repeats
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(meta.create, ROOT, ROOT_INO, name, 0o100644)
        try:
            wait_until(
                lambda: counters.unavailable + counters.repeats > seen or made.done(), NOTICED_S
            )
        finally:
            server.heal()
        made.result()
    return counters.unavailable + counters.repeats > seen


def test_a_dead_clients_locks_are_passed(
    engine: Engine, store: Store, tikv_server: TikvServer
) -> None:
    """Killed between the two phases: what it has locked is free again once its time is over."""
    command = [sys.executable, "-m", "tests.fsmeta.victim", engine.url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as victim:
        assert victim.stdin is not None
        assert victim.stdout is not None
        assert victim.stdout.readline() == "ready\n"
        tikv_server.fault("KvCommit", "freeze")
        before = tikv_server.counts()
        victim.stdin.write("go\n")
        victim.stdin.flush()
        _wait_for_second_phase(tikv_server, before)
        victim.kill()
    tikv_server.heal()
    run = transactor(store, deadline_s=LOCKS_EXPIRE_S)
    found = run.view(lambda txn: txn.get_many([(ONE, b"x"), (TWO, b"x")]))
    assert found in ([None, None], [b"victim", b"victim"])
    run.run(lambda txn: txn.put(TWO, b"x", b"mine"))
    run.run(lambda txn: txn.put(ONE, b"x", b"mine"))
    assert store.read([(ONE, b"x"), (TWO, b"x")]) == [b"mine", b"mine"]


# An answer to `begin` that comes after it was given up: the package complains of the transaction.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("method", ["Tso", "KvBatchGet"])
def test_no_answer_is_waited_for_without_end(
    store: Store, tikv_server: TikvServer, method: str
) -> None:
    tikv_server.fault(method, "freeze")
    begin = time.monotonic()
    with pytest.raises(Unavailable, match="in time"):
        store.read([(A, b"x"), (B, b"x")])
    with pytest.raises(Unavailable, match="in time"):
        store.commit(fenced(A, b"a", 1))
    assert time.monotonic() - begin < 2 * IN_TIME_S
    tikv_server.heal()
    store.commit(fenced(A, b"a", 1))
    assert store.read([(A, b"log")]) == [b"a"]


def test_closing_does_not_wait(engine: Engine, store: Store, tikv_server: TikvServer) -> None:
    """Whoever waits is told that it is not known what became of it."""
    tikv_server.fault("KvCommit", "freeze")
    before = tikv_server.counts()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.commit, fenced(A, b"a", 1))
        _wait_for_second_phase(tikv_server, before)
        begin = time.monotonic()
        store.close()
        assert time.monotonic() - begin < IN_TIME_S
        assert outcome_of(waiting) == "Ambiguous"
    tikv_server.heal()
    other = transactor(engine.open(), deadline_s=LOCKS_EXPIRE_S)
    assert other.view(lambda txn: txn.get(A, b"log")) in (None, b"a")


# --- regions -------------------------------------------------------------------------------------


def test_regions_split_and_move_under_work(engine: Engine, tikv_server: TikvServer) -> None:
    """Rows torn apart, and led by another store from one moment to the next."""
    metas = [engine.meta() for _ in range(2)]
    space = KeySpace(parse_url(engine.url)[1])
    works = [
        threading.Thread(target=random_work, args=(meta, random.Random(seed), 60))
        for seed, meta in enumerate(metas)
    ]
    for work in works:
        work.start()
    root, inode = keys.dir_row(ROOT_INO), keys.inode_row
    cuts = [space.key(root, b"n5"), space.key(inode(ROOT_INO), b"v"), space.begin(inode(10))]
    for cut in (*cuts, space.begin(keys.USAGE), space.begin(root), space.key(inode(4), b"c")):
        tikv_server.split(cut)
        time.sleep(0.02)
        tikv_server.move_leaders()
        time.sleep(0.02)
    for work in works:
        work.join()
    assert_clean(engine.first)


def test_a_row_in_many_regions(engine: Engine, store: Store, tikv_server: TikvServer) -> None:
    space = KeySpace(parse_url(engine.url)[1])
    names = [b"%03d" % n for n in range(300)]
    store.commit(change(*(Put(A, name, name) for name in names)))
    for name in names[::50]:
        tikv_server.split(space.key(A, name))
    tikv_server.move_leaders()
    assert store.read_rows([A, B]) == [{name: name for name in names}, {}]
    page = store.scan(A, limit=120)
    assert [name for name, _ in page.items] == names[:120]
    assert store.read([(A, name) for name in names]) == list(names)
    assert A in store.scan_rows(b"t").rows
    store.commit(change(DeleteRow(A), Put(B, b"x", b"1"), checks=[(A, b"299", b"299")]))
    assert store.read_rows([A, B]) == [{}, {b"x": b"1"}]

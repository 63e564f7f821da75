"""M1: Sentinel and Cluster. Clients go on where the volume is now, and lose nothing that counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsmeta.errors import Ambiguous, ConfigError, StoreError, StoreRolledBack
from fsmeta.meta.meta import Meta
from fsmeta.store.redis.commit import ReplicaWait
from fsmeta.store.redis.engine import RedisStore
from fsmeta.txn.retry import Transactor
from fsmeta.txn.txn import Txn
from fsmeta.types import ROOT_CALLER, ROOT_INO, Dentry
from tests.conftest import assert_clean
from tests.fsmeta.engines import RUNTIME, make_volume
from tests.support.redis_server import RedisServer, free_port
from tests.support.redis_sets import Cluster, Sentinels
from tests.support.waiting import wait_until

ROW, LOG = b"tlog", b"log"
NEW_MASTER_S = 100.0  # of it half a minute where a busy machine has stopped the Sentinels
WAIT = ReplicaWait(1)
pytestmark = pytest.mark.skipif(not RedisServer.is_installed(), reason="needs redis-server")


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    with Sentinels(tmp_path) as made:
        yield made


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster in which each node has a replica."""
    with Cluster(tmp_path, replicas=True) as made:
        yield made


class Clients:
    """Clients with sessions, on a volume."""

    def __init__(self, url: str, wait: ReplicaWait | None = None) -> None:
        self._url = url
        self._wait = wait
        self._metas: list[Meta] = []
        store = RedisStore(url, RUNTIME)
        make_volume(store, RUNTIME)
        store.close()

    def join(self, deadline_s: float = NEW_MASTER_S, wait: ReplicaWait | None = None) -> Meta:
        meta = Meta(RedisStore(self._url, RUNTIME, wait or self._wait), RUNTIME, deadline_s)
        meta.sessions.open({"host": "test"})
        self._metas.append(meta)
        return meta

    def end(self) -> None:
        """What every test ends with."""
        closing = [threading.Thread(target=meta.store.close) for meta in self._metas]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        store = RedisStore(self._url, RUNTIME)
        assert_clean(store)
        store.close()


def _append(run: Transactor, text: bytes) -> None:
    """Blindly: applied twice, it shows twice."""

    def verb(txn: Txn) -> None:
        txn.append(ROW, LOG, text)
        txn.add(ROW, b"n", 1)

    run.run(verb)


class Load:
    """Threads of several clients that append and create."""

    def __init__(self, metas: list[Meta]) -> None:
        self.failures: list[BaseException] = []
        self._stop = threading.Event()
        self._done: list[list[bytes]] = [[] for _ in metas]
        self._threads = [
            threading.Thread(target=self._work, args=(n, meta)) for n, meta in enumerate(metas)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, n: int, meta: Meta) -> None:
        turn = 0
        try:
            while not self._stop.is_set():
                text = b"%d.%d" % (n, turn)
                _append(meta.transactor, text + b",")
                meta.create(ROOT_CALLER, ROOT_INO, text, 0o100644)
                self._done[n].append(text)
                turn += 1
        except (StoreError, OSError) as error:
            self.failures.append(error)

    def progress(self, more: int = 20) -> None:
        """Wait until each has done so many more, or has failed."""
        goals = [len(done) + more for done in self._done]
        wait_until(
            lambda: (
                self.failures
                or all(len(done) >= goal for done, goal in zip(self._done, goals, strict=True))
            ),
            NEW_MASTER_S,
        )
        assert self.failures == []

    def judge(self, meta: Meta) -> None:
        """All that was acknowledged is there, once."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self.failures == []
        texts = sorted(text for done in self._done for text in done)
        meta.cache.forget()
        log = meta.transactor.view(lambda txn: txn.get(ROW, LOG)) or b""
        assert sorted(log.split(b",")[:-1]) == texts
        names = {entry.name for entry in _all_names(meta)}
        assert names == set(texts)


def _all_names(meta: Meta) -> Iterator[Dentry]:
    cursor: bytes | None = b""
    while cursor is not None:
        page, cursor = meta.names(ROOT_INO, cursor)
        yield from page


def _through(clients: Clients, event: Callable[[], None]) -> Meta:
    """Under load of three clients, have something happen: nothing fails, nothing is lost."""
    metas = [clients.join() for _ in range(3)]
    load = Load(metas)
    load.progress()
    event()
    load.progress()
    load.judge(metas[0])
    wait_until(lambda: all(_vouches(meta) for meta in metas), NEW_MASTER_S)
    metas[0].create(ROOT_CALLER, ROOT_INO, b"news", 0o100644)
    wait_until(lambda: b"news" in {entry.name for entry in _all_names(metas[1])})
    clients.end()
    return metas[0]


def _vouches(meta: Meta) -> bool:
    meta.transactor.view(lambda txn: txn.get(ROW, b"absent"))
    return meta.store.has_leases()


# --- Sentinel ------------------------------------------------------------------------------------


def test_fail_over_under_load(sentinels: Sentinels) -> None:
    clients = Clients(sentinels.url(), WAIT)

    def fail_over() -> None:
        sentinels.first.kill()
        sentinels.watch_closely()

    _through(clients, fail_over)
    wait_until(sentinels.has_failed_over, NEW_MASTER_S)  # the last Sentinel may hear of it late


def test_a_frozen_master_under_load(sentinels: Sentinels) -> None:
    """It comes back and believes to be the master still, for a moment."""
    clients = Clients(sentinels.url(), WAIT)

    def freeze() -> None:
        sentinels.first.freeze()
        sentinels.watch_closely()
        wait_until(sentinels.has_failed_over, NEW_MASTER_S)
        time.sleep(1)
        sentinels.first.thaw()

    _through(clients, freeze)


def test_the_form_of_juicefs(sentinels: Sentinels) -> None:
    hosts = sentinels.url().split("/")[2]
    clients = Clients(f"redis://main,{hosts}/0")
    meta = clients.join()
    meta.create(ROOT_CALLER, ROOT_INO, b"file", 0o100644)
    clients.end()


def test_a_lost_suffix_stops_who_was_told_of_it(sentinels: Sentinels) -> None:
    """Without --redis-wait a fail-over can lose what was answered: noticed, not mixed up."""
    clients = Clients(sentinels.url())
    one, two = clients.join(), clients.join()
    one.create(ROOT_CALLER, ROOT_INO, b"kept", 0o100644)
    two.create(ROOT_CALLER, ROOT_INO, b"kept too", 0o100644)
    assert sentinels.first.ask("WAIT", 2, 60_000) == 2
    for replica in sentinels.servers[1:]:
        replica.freeze()
    sentinels.first.ask("CLIENT", "KILL", "TYPE", "replica")  # nothing is on its way to them
    one.create(ROOT_CALLER, ROOT_INO, b"lost", 0o100644)
    sentinels.first.kill()
    sentinels.watch_closely()
    for replica in sentinels.servers[1:]:
        replica.thaw()
    with pytest.raises(StoreRolledBack):
        one.create(ROOT_CALLER, ROOT_INO, b"refused", 0o100644)
    made = two.create(ROOT_CALLER, ROOT_INO, b"goes on", 0o100644)
    assert made.ino < 1 << 40, "of a batch that it has"
    three = clients.join()
    assert three.create(ROOT_CALLER, ROOT_INO, b"later", 0o100644).ino > 1 << 40
    names = {entry.name for entry in _all_names(three)}
    assert names == {b"kept", b"kept too", b"goes on", b"later"}
    clients.end()


def test_redis_wait_answers_when_replicas_have_it(sentinels: Sentinels) -> None:
    clients = Clients(sentinels.url(), ReplicaWait(2, 100))
    patient = clients.join(wait=ReplicaWait(2, 9_000))
    meta, hurried = clients.join(), clients.join(deadline_s=0.5)
    _append(patient.transactor, b"a,")
    before = patient.store.round_trips
    _append(patient.transactor, b"b,")
    assert patient.store.round_trips == before + 1
    replica = sentinels.servers[1]
    assert replica.ask("HGET", ROW, LOG) == b"a,b,"
    replica.freeze()
    with pytest.raises(Ambiguous):
        _append(hurried.transactor, b"c,")
    thawing = threading.Timer(0.5, replica.thaw)
    thawing.start()
    _append(meta.transactor, b"d,")
    assert replica.ask("HGET", ROW, LOG) == b"a,b,c,d,", "answered only when it was there"
    thawing.join()
    clients.end()


def test_wrong_sentinels(sentinels: Sentinels) -> None:
    wrong = {
        sentinels.url().replace("/main/", "/other/"): "no Sentinel knows a master 'other'",
        f"redis+sentinel://127.0.0.1:{free_port()}/main/0": "refused",
        sentinels.url().replace("/main/0", ""): "name the master",
        "redis+sentinel://127.0.0.1:x/main/0": "'127.0.0.1:x' is no HOST:PORT",
    }
    for url, why in wrong.items():
        with pytest.raises(ConfigError, match=why) as caught:
            RedisStore(url, RUNTIME)
        assert "\n" not in str(caught.value)


# --- Cluster -------------------------------------------------------------------------------------


def test_a_slot_moves_under_load(redis_cluster: Cluster) -> None:
    """Key by key, and slowly: what touches rows that are on their way waits."""
    clients = Clients(redis_cluster.url("moving"), None)
    slot = clients_slot(redis_cluster.url("moving"))

    def move() -> None:
        for _ in range(2):
            redis_cluster.move(slot, keys_at_once=5, pause_s=0.01)

    _through(clients, move)


def clients_slot(url: str) -> int:
    store = RedisStore(url, RUNTIME)
    slot = store._servers._slot
    store.close()
    return slot


def test_a_node_dies_under_load(replicated: Cluster) -> None:
    clients = Clients(replicated.url("vol"), WAIT)
    slot = clients_slot(replicated.url("vol"))
    owner = replicated.owner(slot)

    def die() -> None:
        owner.kill()
        replicated.watch_closely()
        wait_until(lambda: replicated.owner(slot) is not owner, NEW_MASTER_S)
        owner.start()  # as the replica that WAIT waits for

    _through(clients, die)


def test_volumes_share_a_cluster(redis_cluster: Cluster) -> None:
    both = [Clients(redis_cluster.url(name)) for name in ("one", "two")]
    for n, clients in enumerate(both):
        clients.join().create(ROOT_CALLER, ROOT_INO, b"%d" % n, 0o100644)
    for n, clients in enumerate(both):
        assert [entry.name for entry in _all_names(clients.join())] == [b"%d" % n]
        clients.end()
    keys = [key for node in redis_cluster.nodes for key in node.ask("KEYS", "{one}*")]
    assert keys
    assert all(key.startswith(b"{one}") for key in keys)


@pytest.mark.parametrize("name", ["", "a/b", "a{b}", "x" * 65])
def test_a_cluster_s_volume_needs_a_name(redis_cluster: Cluster, name: str) -> None:
    with pytest.raises(ConfigError, match="name the volume's keys"):
        RedisStore(redis_cluster.url(name), RUNTIME)

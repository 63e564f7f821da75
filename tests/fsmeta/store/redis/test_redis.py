"""M6: Redis over a connection that breaks: each commit counts exactly once, and all heals."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fsclient.upkeep import orphan_journals
from fsmeta.check.check import check
from fsmeta.check.repair import repair
from fsmeta.errors import Ambiguous, Fenced, StoreError, Unavailable
from fsmeta.meta.meta import Meta
from fsmeta.schema import keys
from fsmeta.store.contract import FENCE_FIELD
from fsmeta.store.redis.engine import RedisStore
from fsmeta.store.redis.script import ask
from fsmeta.store.writes import DeleteRow, Put
from fsmeta.txn.retry import Transactor
from fsmeta.txn.txn import Txn
from fsmeta.types import AT_END, ROOT_CALLER, ROOT_INO, Slice
from tests.conftest import assert_clean
from tests.fsmeta.engines import RUNTIME, change, make_volume, transactor
from tests.fsmeta.proxy import Cut, Proxy
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

ROW, LOG, FENCE = b"tlog", b"log", b"tsession"
COMMIT = b"appended"  # a word in every commit of `_append`, and in no other request


@pytest.fixture
def direct(redis_url: str) -> Iterator[RedisStore]:
    """A connection that never breaks, to a volume."""
    store = RedisStore(redis_url, RUNTIME)
    make_volume(store, RUNTIME)
    store.commit(change(Put(FENCE, FENCE_FIELD, b"1")))
    yield store
    store.close()
    _check(redis_url)


def _check(url: str) -> None:
    """Over a connection that nobody has broken."""
    store = RedisStore(url, RUNTIME)
    assert_clean(store)
    store.close()


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as made:
        yield made


@pytest.fixture
def client(proxy: Proxy, redis_url: str, direct: RedisStore) -> Iterator[Transactor]:
    """A client with a session whose connections go through the proxy."""
    del direct  # it makes the volume
    url = redis_url.replace(redis_url.split(":")[2].split("/")[0], str(proxy.port))
    run = transactor(RedisStore(url, RUNTIME))
    run.fence = FENCE
    yield run
    closing = threading.Thread(target=run.store.close)
    closing.start()
    proxy.refuse = True
    proxy.drop_all()  # who listens for news would wait a second
    closing.join()


def _append(run: Transactor, text: bytes) -> None:
    """Blindly: applied twice, it shows twice."""

    def verb(txn: Txn) -> None:
        txn.append(ROW, LOG, text)
        txn.put(ROW, COMMIT, text)
        txn.add(ROW, b"n", 1)

    run.run(verb)


def _log(store: RedisStore) -> bytes | None:
    return store.read([(ROW, LOG)])[0]


@pytest.mark.parametrize("cut", Cut)
def test_a_broken_commit_counts_once(
    client: Transactor, proxy: Proxy, direct: RedisStore, cut: Cut
) -> None:
    _append(client, b"a,")
    for n in range(5):
        proxy.arm(cut, COMMIT)
        _append(client, b"%d," % n)
        _append(client, b"-,")
    assert proxy.cuts == 5
    assert _log(direct) == b"a,0,-,1,-,2,-,3,-,4,-,"
    assert direct.read([(ROW, b"n")]) == [b"11"]
    assert client.counters.repeats >= (0 if cut is Cut.BEFORE_REQUEST else 5)


def test_a_lost_answer_is_not_a_conflict_with_itself(
    client: Transactor, proxy: Proxy, direct: RedisStore
) -> None:
    """The repeat's checks are no longer true: its own first sending has made them so."""
    ran = 0

    def verb(txn: Txn) -> None:
        nonlocal ran
        ran += 1
        old = txn.get(ROW, LOG)
        txn.put(ROW, LOG, (old or b"") + b"x")
        txn.put(ROW, COMMIT, b"1")

    for _ in range(3):
        proxy.arm(Cut.BEFORE_REPLY, COMMIT)
        client.run(verb)
    assert _log(direct) == b"xxx"
    assert ran == 3
    assert client.counters.conflicts == 0


def test_reads_go_on_after_a_cut(client: Transactor, proxy: Proxy) -> None:
    _append(client, b"a")
    for cut in Cut:
        client.cache.forget()
        proxy.arm(cut, LOG)
        assert client.view(lambda txn: txn.get(ROW, LOG)) == b"a"
    assert proxy.cuts == len(Cut)


def test_killed_connections_lose_nothing(
    client: Transactor, redis_server: RedisServer, direct: RedisStore
) -> None:
    """Threads append while all connections are killed, each time that one has got through."""
    stop = threading.Event()
    failures: list[BaseException] = []
    done: list[int] = []

    def work(name: int) -> None:
        try:
            for turn in range(60):
                _append(client, b"%d.%d," % (name, turn))
                done.append(turn)
        except StoreError as error:
            failures.append(error)

    def kill() -> None:
        seen = -1
        while not stop.wait(0.007):
            if len(done) > seen:
                seen = len(done)
                redis_server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    killer = threading.Thread(target=kill)
    for thread in [*threads, killer]:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    killer.join()
    assert failures == []
    log = _read_again(direct)
    expected = [b"%d.%d" % (name, turn) for name in range(3) for turn in range(60)]
    assert sorted(log.split(b",")[:-1]) == sorted(expected)


def _read_again(store: RedisStore) -> bytes:
    """The log, over a connection that was killed too."""
    logs: list[bytes] = []

    def read() -> bool:
        with suppress(Unavailable):
            logs.append(_log(store) or b"")
        return bool(logs)

    wait_until(read)
    return logs[0]


def test_news_missed_during_a_cut_are_made_up_for(
    client: Transactor, proxy: Proxy, direct: RedisStore
) -> None:
    _append(client, b"a")
    wait_until(client.store.has_leases)
    assert client.view(lambda txn: txn.get(ROW, LOG)) == b"a"
    proxy.refuse = True
    proxy.drop_all()
    direct.commit(change(Put(ROW, LOG, b"b")))
    wait_until(lambda: not client.store.has_leases())
    proxy.refuse = False
    assert client.view(lambda txn: txn.get(ROW, LOG)) == b"b"
    wait_until(lambda: _vouches_again(client))
    direct.commit(change(Put(ROW, LOG, b"c")))
    wait_until(lambda: client.view(lambda txn: txn.get(ROW, LOG)) == b"c")


def _vouches_again(client: Transactor) -> bool:
    client.view(lambda txn: txn.get(ROW, LOG))
    return client.store.has_leases()


def test_an_unreachable_server_is_given_up_after_the_deadline(
    client: Transactor, proxy: Proxy
) -> None:
    _append(client, b"a")
    hurried = Transactor(client.store, RUNTIME, client.cache, deadline_s=0.2)
    proxy.refuse = True
    proxy.drop_all()
    with pytest.raises(Unavailable, match="gave up after 0 s"):
        hurried.view(lambda txn: txn.get(ROW, b"absent"))


def test_a_restarted_server_is_found_again(tmp_path: Path) -> None:
    """It has forgotten scripts, connections and tracking, and kept the data."""
    with RedisServer(tmp_path, "--save", "3600 1") as server:
        store = RedisStore(server.url(), RUNTIME)
        make_volume(store, RUNTIME)
        run = transactor(store)
        hurried = Transactor(store, RUNTIME, run.cache, deadline_s=0.2)
        run.run(lambda txn: txn.put(ROW, LOG, b"a"))
        wait_until(store.has_leases)
        server.stop()
        wait_until(lambda: not store.has_leases())
        with pytest.raises(Unavailable):
            store.read([(ROW, LOG)])
        with pytest.raises(Unavailable):
            hurried.run(lambda txn: txn.put(ROW, LOG, b"!"))
        server.start()
        assert run.view(lambda txn: txn.get(ROW, LOG)) == b"a"
        run.run(lambda txn: txn.put(ROW, LOG, b"b"))
        assert store.read([(ROW, LOG)]) == [b"b"]
        wait_until(lambda: _vouches_again(run))
        _check(server.url())
        store.close()


def test_who_asks_for_news_while_their_link_ends_is_not_hurt(direct: RedisStore) -> None:
    """Regression: the descriptor was closed between two steps of a poll, which raised EBADF."""
    direct.watch(lambda _: None)
    tracking = direct._tracking
    assert tracking is not None
    waiting = tracking._input
    closed = select.epoll()
    closed.close()
    tracking._input = closed
    direct.poll_invalidations()
    tracking._input = waiting


def test_news_of_tables_go_no_further(direct: RedisStore, redis_url: str) -> None:
    """M1, regression: later Redis, and Valkey, tell of all that a script reads.

    Of the table of sessions nobody made an inode's number: the thread that tells the kernel ended,
    and locks waited for it for ever.
    """
    news: list[bytes] = []
    direct.watch(lambda rows: news.extend(rows or ()))
    direct.read([(ROW, b"x")])
    wait_until(direct.has_leases)
    for row in (b"T", ROW):
        ask(direct._main, (b"HGET", row, b"x"))
    other = RedisStore(redis_url, RUNTIME)
    for row in (b"T", ROW):
        other.commit(change(Put(row, b"x", b"1")))
    wait_until(lambda: ROW in news)
    assert news == [ROW]
    other.commit(change(DeleteRow(b"T"), DeleteRow(ROW)))
    other.close()


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("cut", [Cut.BEFORE_REQUEST, Cut.BEFORE_REPLY])
def test_an_append_that_nobody_answers_is_made_once(
    redis_url: str, proxy: Proxy, direct: RedisStore, cut: Cut, ended: bool
) -> None:
    """Redis is away for longer than `--meta-timeout`, and perhaps than a lease."""
    url = redis_url.replace(redis_url.split(":")[2].split("/")[0], str(proxy.port))
    meta, other = Meta(RedisStore(url, RUNTIME), RUNTIME, 0.2), Meta(direct, RUNTIME)
    first = meta.sessions.open({})
    other.sessions.open({})
    ino = meta.create(ROOT_CALLER, ROOT_INO, b"f", 0o100644).ino
    batch = [(AT_END, Slice(0, meta.new_slice_id(), 9, 0, 9))]
    proxy.arm(cut, keys.pack_u64(batch[0][1].id))
    proxy.refuse = True
    with pytest.raises(Ambiguous):
        meta.write_slices(ino, batch, 9, 1)
    if ended:
        other.sessions.end(first.id)
    proxy.refuse = False
    meta.transactor._deadline_s = 60.0
    if ended:
        with pytest.raises(Fenced):
            meta.create(ROOT_CALLER, ROOT_INO, b"g", 0o100644)
        meta.sessions.open({}, first.id)
    assert meta.write_slices(ino, batch, 9, 1).after.size == 9
    assert other.read_chunk(ino, 0) == [batch[0][1]]
    proxy.refuse = True
    proxy.drop_all()
    meta.store.close()


def test_keys_of_others_in_the_database_are_left_alone(redis_url: str) -> None:
    """Of any type, and whatever letter they begin with."""
    store = RedisStore(redis_url, RUNTIME)
    make_volume(store, RUNTIME)
    others = {b"%cession" % letter: b"string" for letter in b"sjiAlgd"}
    others |= {b"%cobs" % letter: b"hash" for letter in b"sjiAlgd"}
    for key, kind in others.items():
        store._ask_plainly(
            *((b"SET", key, b"1") if kind == b"string" else (b"HSET", key, b"a", b"1"))
        )
    meta = Meta(store, RUNTIME)
    orphan_journals.require_published(meta)
    repair(meta, 1)
    assert {each.what for each in check(store).problems} == {
        f"row {key!r} is nothing we know"
        for key, kind in others.items()
        if kind == b"hash" and key[:1] not in b"sj"
    }
    assert {key: store._ask_plainly(b"TYPE", key) for key in others} == others
    store.close()

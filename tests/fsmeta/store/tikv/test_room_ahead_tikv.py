"""Q1 on TiKV: with limits clients do not queue for a counter, and still none is passed or lost."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from subprocess import PIPE
from typing import Any

import pytest

from fsmeta.admin import quota_admin
from fsmeta.admin.quota_admin import QuotaLimits
from fsmeta.errors import LimitExceeded
from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import DentryLocation
from fsmeta.rules import quota
from fsmeta.schema import keys
from fsmeta.store.contract import Key, Store
from fsmeta.store.tikv.client import TikvClient, Transaction, WriteConflict
from fsmeta.store.tikv.counter_claims import CLAIM_S, PATIENCE, Claim, CounterClaims
from fsmeta.store.tikv.engine import parse_url
from fsmeta.store.tikv.escrow_counters import UNLIMITED, claim_of
from fsmeta.store.tikv.keys import KeySpace
from fsmeta.store.writes import Delete, DeleteRow, Put, Shift, limit_field
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino
from tests.fsmeta.engines import RUNTIME, Engine, add, change
from tests.fsmeta.hoarder import PAGE, USER, fill
from tests.support.tikv_server import TikvServer, serving
from tests.support.waiting import wait_until

pytestmark = pytest.mark.parametrize("engine", ["tikv"], indirect=True)
LIMIT = 80  # inodes of the directory
DEEP = 3


@pytest.fixture(scope="module")
def tikv_cluster() -> Iterator[TikvServer]:
    """A server of this file's own: nobody who was here before still asks it for anything."""
    yield from serving()


@pytest.fixture
def top(engine: Engine) -> Ino:
    """A directory with a limit, whose owner and group have one, too."""
    meta = engine.meta()
    made = meta.create(ROOT_CALLER, ROOT_INO, b"d", 0o40777).ino
    quota_admin.set_quota(meta, quota.dir_node(made), QuotaLimits(LIMIT * PAGE, LIMIT))
    for node in quota.owners(USER.uid, USER.gid):
        quota_admin.set_quota(meta, node, QuotaLimits(LIMIT * PAGE * 2, LIMIT * 2))
    return made


def _together(works: list[Callable[[], object]]) -> None:
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


def test_q1_clients_below_one_limit_do_not_meet(engine: Engine, top: Ino) -> None:
    """Regression: a user, group or directory with a limit was a key that every create wrote.

    Three clients then needed ten tries for three creates. One may still meet the locks that its own
    last commit is about to let go, on a machine that does other things; that is one more try.
    """
    clients, files = [engine.meta() for _ in range(3)], 10
    for node in (quota.dir_node(top), *quota.owners(USER.uid, USER.gid)):
        quota_admin.set_quota(clients[0], node, QuotaLimits(1 << 40, 1_000_000))
    own = [meta.create(USER, top, b"%d" % n, 0o40777).ino for n, meta in enumerate(clients)]

    def work(client: int, turn: int) -> None:
        for n in range(files):
            clients[client].create(USER, own[client], b"%d.%d" % (turn, n), 0o100666)

    tries: list[Callable[[], int]] = []
    for turn in range(2):  # in the first one each takes its share
        tries = [_tries_of(meta.store) for meta in clients]
        _together([lambda n=n, turn=turn: work(n, turn) for n in range(3)])  # type: ignore[misc]
    assert sum(count() for count in tries) < 1.5 * files * len(clients)


def test_q1_a_create_below_limits_asks_no_more_often(
    engine: Engine, top: Ino, tikv_server: TikvServer
) -> None:
    meta, own = engine.meta(), top
    for _ in range(DEEP):
        own = meta.create(USER, own, b"deeper", 0o40777).ino
    for n in range(3):
        before, waits = tikv_server.counts(), meta.store.round_trips
        meta.create(USER, own, b"%d" % n, 0o100666)
        wait_until(lambda: _has_committed(tikv_server, before))  # noqa: B023
        after = tikv_server.counts()
    assert meta.store.round_trips - waits == 6  # five, and the look at the new row besides
    for method in ("KvBatchGet", "KvPrewrite"):
        assert after[method] - before[method] == 1


def _has_committed(server: TikvServer, before: dict[str, int]) -> bool:
    """Whether both second phases have come; nobody waits for the latter."""
    return server.counts()["KvCommit"] >= before["KvCommit"] + 2


@pytest.mark.parametrize("faults", [False, True], ids=["killed", "killed, and answers lost"])
def test_q1_killed_clients_take_no_room_along(
    engine: Engine, top: Ino, tikv_server: TikvServer, faults: bool
) -> None:
    """What they had ahead the last one gets, to the very last inode."""
    chance = random.Random(faults)
    command = [sys.executable, "-m", "tests.fsmeta.hoarder", engine.url]
    with ExitStack() as stack:
        victims = [
            stack.enter_context(
                subprocess.Popen([*command, f"v{n}", "20"], stdin=PIPE, stdout=PIPE)
            )
            for n in range(3)
        ]
        for victim in victims:
            assert victim.stdout is not None
            if faults:
                tikv_server.fault("KvCommit", chance.choice(("before", "after")), 3, 5)
                tikv_server.fault("KvPrewrite", chance.choice(("busy", "after")), 2, 5)
            victim.stdout.read(chance.randrange(3, 12))
            victim.kill()
    tikv_server.heal()
    fill(engine.meta(), b"last")
    assert quota_admin.get_quota(engine.meta(), quota.dir_node(top)).used.inodes == LIMIT


def test_q1_two_clients_fill_a_directory_exactly(engine: Engine, top: Ino) -> None:
    """Both to the end, at once; what one deletes then, the other can have."""
    metas = [engine.meta() for _ in range(2)]
    _together([lambda n=n: fill(metas[n], b"c%d" % n) for n in range(2)])  # type: ignore[misc]
    node = quota.dir_node(top)
    assert quota_admin.get_quota(metas[0], node).used.inodes == LIMIT
    own = metas[0].lookup(USER, top, b"c0").ino
    gone = metas[0].names(own)[0][:9]
    for dentry in gone:
        metas[0].unlink(USER, own, dentry.name)
    assert fill(metas[1], b"more") == len(gone) - 1  # and its directory
    assert quota_admin.get_quota(metas[0], node).used.inodes == LIMIT


def test_q1_what_moves_takes_what_lies_in_all_parts(engine: Engine, top: Ino) -> None:
    """A directory in which several clients work is moved out of a quota and back."""
    metas = [engine.meta() for _ in range(3)]
    moving = metas[0].create(USER, top, b"moving", 0o40777).ino
    other = metas[0].create(ROOT_CALLER, ROOT_INO, b"other", 0o40777).ino
    for n, meta in enumerate(metas):
        for k in range(4):
            meta.create(USER, moving, b"%d.%d" % (n, k), 0o100666)
    nodes = [quota.dir_node(ino) for ino in (top, moving, other)]

    def used() -> list[int]:
        return [quota_admin.get_quota(metas[1], node).used.inodes for node in nodes]

    assert used() == [13, 12, 0]
    metas[1].rename(USER, DentryLocation(top, b"moving"), DentryLocation(other, b"moving"))
    assert used() == [0, 12, 13]
    metas[2].unlink(USER, moving, b"0.0")
    metas[0].rename(USER, DentryLocation(other, b"moving"), DentryLocation(top, b"moving"))
    assert used() == [12, 11, 0]
    quota_admin.recount(metas[1])
    assert used() == [12, 11, 0]


# --- who needs all of a counter ------------------------------------------------------------------

MAKERS, MOVES = 6, 4  # even: it comes back
TRIES_MAX = 10  # a move: four with claims, and some thirty without
NETWORK_MS = 10


def test_q1_a_directory_moves_while_others_create_in_it(
    engine: Engine, top: Ino, tikv_server: TikvServer
) -> None:
    """Regression: they never met each other, so he who moved it met one of them each time.

    They go on making files below it for as long as he moves it out of its quota and back.
    """
    *makers, mover = (engine.meta() for _ in range(MAKERS + 1))
    for node in (quota.dir_node(top), *quota.owners(USER.uid, USER.gid)):
        quota_admin.set_quota(mover, node, QuotaLimits(1 << 40, 1_000_000))
    moving = mover.create(USER, top, b"moving", 0o40777).ino
    other = mover.create(ROOT_CALLER, ROOT_INO, b"other", 0o40777).ino
    for method in ("KvBatchGet", "KvScan", "KvPrewrite"):
        tikv_server.fault(method, "delay", millis=NETWORK_MS)
    tries, done = _tries_of(mover.store), threading.Event()
    made = [0] * MAKERS

    def make(client: int) -> None:
        own = makers[client].create(USER, moving, b"%d" % client, 0o40777).ino
        made[client] += 1
        while not done.is_set():
            makers[client].create(USER, own, b"%d" % made[client], 0o100666)
            made[client] += 1

    places = [DentryLocation(top, b"moving"), DentryLocation(other, b"moving")]
    with ThreadPoolExecutor(len(makers)) as pool:
        making = [pool.submit(make, n) for n in range(len(makers))]
        try:
            for n in range(MOVES):
                wanted = sum(made) + 2 * MAKERS
                while sum(made) < wanted and not any(each.done() for each in making):
                    RUNTIME.sleep(0.01)
                mover.rename(USER, places[n % 2], places[1 - n % 2])
        finally:
            done.set()
        for each in making:
            each.result()
    used = [quota_admin.get_quota(mover, quota.dir_node(ino)).used.inodes for ino in (top, moving)]
    assert used == [sum(made) + 1, sum(made)]
    assert tries() <= MOVES * TRIES_MAX


def _tries_of(store: Store) -> Callable[[], int]:
    """How many transactions a client has begun for commits, from now on."""
    committer, tries = store._committer, itertools.count()  # type: ignore[attr-defined]
    attempt = committer._attempt

    async def count(*given: object) -> object:
        next(tries)
        return await attempt(*given)

    committer._attempt = count
    return lambda: next(tries)


def test_q1_a_dead_client_s_claim_holds_nobody_up_for_long(engine: Engine, top: Ino) -> None:
    """It is no part of the count; who has waited for it lifts it."""
    meta, other = engine.meta(), engine.meta()
    meta.create(USER, top, b"a", 0o100666)
    space = KeySpace(parse_url(engine.url)[1])
    link = other.store._link  # type: ignore[attr-defined]
    claims = CounterClaims(link, space, RUNTIME)
    dead, counter = Claim(), (keys.ACCOUNTS, quota.inodes_field(quota.dir_node(top)))
    dead.wanted = [counter]
    link.call(claims.lay(dead))
    assert claim_of(_base(engine, other.store, counter)) == dead.name
    assert quota_admin.get_quota(other, quota.dir_node(top)).used.inodes == 1
    with other.store.everything() as records:
        assert {f: v for r, f, v in records if r == keys.ACCOUNTS}[counter[1]] == b"1"
    begun = RUNTIME.monotonic()
    meta.create(USER, top, b"b", 0o100666)
    assert RUNTIME.monotonic() - begun >= CLAIM_S
    assert claim_of(_base(engine, other.store, counter)) == b""
    assert quota_admin.get_quota(other, quota.dir_node(top)).used.inodes == 2


def test_q1_a_claim_of_a_commit_that_is_refused_is_lifted(engine: Engine) -> None:
    """Whoever claims what he then may not have leaves no claim behind."""
    store, other = engine.open(), engine.open()
    row, (name, target) = keys.ACCOUNTS, (quota.space_field(quota.user_node(n)) for n in (8, 9))
    store.commit(change(add(row, name, 3)))
    link: TikvClient = store._link  # type: ignore[attr-defined]
    commit, commits = link.commit, 0

    async def conflict(transaction: Transaction, is_applied: Callable[[], Any] | None) -> None:
        nonlocal commits
        commits += 1
        if commits > PATIENCE:
            await commit(transaction, is_applied)
            return
        await link.abandon(transaction)
        if commits == PATIENCE:
            other.commit(change(Put(row, limit_field(target), b"2")))
        raise WriteConflict("somebody was faster")

    async def settle() -> None:
        if link._tasks:
            await asyncio.wait(link._tasks)

    link.commit = conflict  # type: ignore[method-assign]
    with pytest.raises(LimitExceeded):
        store.commit(change(Shift(row, target, name, b"+", b"<", "EDQUOT")))
    link.call(settle())
    assert commits == PATIENCE + 2  # laid and lifted
    assert _base(engine, other, (row, name)) == b"%d" % (3 + UNLIMITED)
    other.commit(change(Delete(row, name), Delete(row, limit_field(target))))


# --- what is stored ------------------------------------------------------------------------------


def _base(engine: Engine, store: Store, counter: Key) -> bytes:
    """What stands at the key of a counter."""
    place = KeySpace(parse_url(engine.url)[1]).key(*counter)
    link: TikvClient = store._link  # type: ignore[attr-defined]

    async def read() -> bytes:
        return (await link.get(await link.snapshot(), [place]))[place]

    return link.call(read())


def _stored(engine: Engine, store: Store, row: bytes) -> dict[bytes, int]:
    """A row in parts as it is."""
    space = KeySpace(parse_url(engine.url)[1])
    link = store._link  # type: ignore[attr-defined]
    begin, end = space.begin(row), space.end(row)

    async def read() -> list[tuple[bytes, bytes]]:
        pairs: list[tuple[bytes, bytes]] = await link.scan(await link.snapshot(), begin, end, 2000)
        return pairs

    return {key[len(begin) :]: int(value) for key, value in link.call(read())}


def test_q1_near_the_limit_nothing_is_ahead(engine: Engine) -> None:
    """Shares shrink with what is left; at the end the base says it all."""
    stores, row, name = [engine.open() for _ in range(3)], keys.USAGE, b"space"
    ahead = []
    for n in range(100):
        stores[n % 3].commit(change(add(row, name, 1, 100, "ENOSPC")))
        fields = _stored(engine, stores[0], row)
        ahead.append(-sum(v for f, v in fields.items() if f.startswith(name) and f != name))
        assert n + 1 + ahead[-1] == fields[name] <= 100
    assert max(ahead) > 0 == ahead[-1]
    for store in stores:
        with pytest.raises(LimitExceeded):
            store.commit(change(add(row, name, 1, 100, "ENOSPC")))
    stores[0].commit(change(add(row, name, -100)))


def test_pages_of_counters_in_many_parts(engine: Engine) -> None:
    """A page may end between the parts of a counter; each comes once, whole."""
    stores, row = [engine.open() for _ in range(3)], keys.ACCOUNTS
    names = [quota.space_field(quota.user_node(n)) for n in range(100)]
    for turn, store in enumerate(stores):
        store.commit(change(*(add(row, name, turn + 1) for name in names)))
    limits = [Put(row, limit_field(name), b"1") for name in names[::3]]
    assert len(_stored(engine, stores[0], row)) > 2 * len(names)
    expected = dict.fromkeys(names, b"6")
    cursor: bytes | None = b""
    found: list[tuple[bytes, bytes]] = []
    while cursor is not None:
        page = stores[0].scan(row, cursor, 70)
        found += page.items
        cursor = page.cursor
    assert found == sorted(expected.items())
    assert stores[1].read([(row, name) for name in names]) == [b"6"] * 100
    assert stores[1].read([(row, name) for name in names[:3]]) == [b"6"] * 3
    assert stores[1].read_rows([row]) == [expected]
    with stores[2].everything() as records:
        assert {f: v for r, f, v in records if r == row} == expected
    stores[0].commit(change(*limits))  # takes the parts back
    assert {_stored(engine, stores[0], row)[name] for name in names[::3]} == {6}
    stores[0].commit(change(DeleteRow(row)))
    assert stores[1].scan(row).items == []


def test_q1_a_volume_s_limit_comes_and_goes(engine: Engine) -> None:
    """What was taken without a limit is taken back by the first commit that has one."""
    meta = engine.meta()
    for n in range(3):
        meta.create(ROOT_CALLER, ROOT_INO, b"a%d" % n, 0o100666)
    quota_admin.change_settings(meta, lambda now: now._replace(inodes=6))
    assert fill_root(engine.meta()) == 2
    assert meta.statfs().inodes_used == 6
    quota_admin.change_settings(meta, lambda now: now._replace(inodes=0))
    meta.create(ROOT_CALLER, ROOT_INO, b"more", 0o100666)
    assert meta.statfs().inodes_used == 7


def fill_root(meta: Meta) -> int:
    """Make files until there is no room; how many."""
    for n in range(100):
        try:
            meta.create(ROOT_CALLER, ROOT_INO, b"b%d" % n, 0o100666)
        except OSError:
            return n
    return 100

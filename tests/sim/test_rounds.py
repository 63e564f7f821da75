"""Deletion rounds, step by step: who leads, who is waited for, what a client that was away may
lose.

Directed worlds, each with a few seeds; `test_client` looks for what nobody thought of.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable

import pytest

from fsclient.background.background import HEARTBEAT_S
from fsclient.background.leader import NEWS_S
from fsclient.background.leadership import LEASE_S, LOOK_S
from fsmeta.errors import ObjectMissing
from fsmeta.schema import keys
from fsmeta.store.contract import COMMIT_OPS_ENOUGH
from fsmeta.types import CHUNK_BYTES, Slice, SliceId
from tests.conftest import LogWatch
from tests.sim.world.cluster import Cluster, Node, Weather
from tests.sim.world.harness import simulate
from tests.sim.world.posix import File, Posix
from tests.sim.world.scheduler import SimRuntime

DATA = b"held to the end " * 1000
ROUNDS_S = 6 * (HEARTBEAT_S + NEWS_S)  # time enough for a file and its slices to go
SEEDS = pytest.mark.sim_seeds(12)

ENDED = "sent no heartbeat|has ended session"  # what is logged where a client is ended


@pytest.fixture
def ends(log_watch: LogWatch) -> None:
    """For worlds in which a client is taken for dead; in others nobody may be."""
    log_watch.expect(ENDED)


def _world(seed: int, body: Callable[[Cluster], None], clients: int) -> None:
    """Run `body` in a calm world of `clients` clients, then judge it."""

    def run(sim: SimRuntime) -> None:
        cluster = Cluster(sim, seed, Weather())
        for _ in range(clients):
            cluster.add()
        sim.sleep(NEWS_S)  # the first of them leads by now
        body(cluster)
        cluster.settle()
        cluster.drain()
        cluster.stop()
        cluster.judge()

    simulate(seed, run)


def _make(node: Node, path: bytes = b"/f") -> File:
    file = Posix(node.client.vfs).open(path, os.O_CREAT | os.O_RDWR)
    file.write(0, DATA)
    file.fsync()
    return file


def _leader(cluster: Cluster) -> Node:
    value = cluster.backend.rows[keys.BACKGROUND][keys.LEADER]
    (node,) = [each for each in cluster.living() if each.session_id() == keys.id_of(value)]
    return node


def _is_there(cluster: Cluster, file: File) -> bool:
    return keys.inode_row(file.ino) in cluster.backend.rows


@SEEDS
def test_the_held_stay_and_the_closed_go(sim_seed: int) -> None:
    def body(cluster: Cluster) -> None:
        one, two, three = cluster.nodes
        mine = _make(one)
        theirs = Posix(two.client.vfs).open(b"/f")
        Posix(three.client.vfs).unlink(b"/f")
        for file in (mine, theirs):
            cluster.sim.sleep(ROUNDS_S)
            assert file.read(0, len(DATA) + 1) == DATA
            file.close()
        cluster.sim.sleep(ROUNDS_S)
        assert not _is_there(cluster, mine)
        assert not [*cluster.objects.list("")]

    _world(sim_seed, body, 3)


@SEEDS
@pytest.mark.usefixtures("ends")
def test_a_crash_lets_go(sim_seed: int) -> None:
    def body(cluster: Cluster) -> None:
        cluster.leaks = True
        one, two = cluster.nodes
        file = _make(two)
        Posix(one.client.vfs).unlink(b"/f")
        cluster.sim.sleep(ROUNDS_S)
        assert _is_there(cluster, file)
        two.crash()
        cluster.sim.sleep(LEASE_S + ROUNDS_S)
        assert not _is_there(cluster, file)

    _world(sim_seed, body, 2)


@SEEDS
@pytest.mark.usefixtures("ends")
def test_another_leads_when_the_leader_dies(sim_seed: int) -> None:
    def body(cluster: Cluster) -> None:
        cluster.leaks = True
        first = _leader(cluster)
        (other,) = [node for node in cluster.nodes if node is not first]
        file = _make(other)
        Posix(other.client.vfs).unlink(b"/f")
        cluster.sim.sleep(cluster.sim.random() * (NEWS_S + HEARTBEAT_S))
        first.crash()  # before, in or after a round
        cluster.sim.sleep(2 * LEASE_S)
        assert _leader(cluster) is other
        assert _is_there(cluster, file)
        assert file.read(0, len(DATA)) == DATA
        file.close()

    _world(sim_seed, body, 2)


@SEEDS
@pytest.mark.usefixtures("ends")
def test_two_leaders(sim_seed: int) -> None:
    """The old one wakes up in the middle of its round, while the new one has its own."""

    def body(cluster: Cluster) -> None:
        old = _leader(cluster)
        others = [node for node in cluster.nodes if node is not old]
        files = [_make(others[0], b"/f%d" % n) for n in range(3)]
        for n in range(3):
            Posix(others[1].client.vfs).unlink(b"/f%d" % n)
            cluster.sim.sleep(cluster.sim.random() * NEWS_S)
            if n == 0:
                old.freeze()
        files[0].close()
        cluster.sim.sleep(LEASE_S + ROUNDS_S)
        assert _leader(cluster) is not old
        old.thaw()
        cluster.sim.sleep(ROUNDS_S)
        assert old.has_session(), "it has joined anew"
        for file in files[1:]:
            assert file.read(0, len(DATA)) == DATA
            file.close()

    _world(sim_seed, body, 3)


@SEEDS
def test_a_client_that_comes_in_the_midst_of_a_round(sim_seed: int) -> None:
    def body(cluster: Cluster) -> None:
        one, two = cluster.nodes
        kept = _make(one, b"/kept")
        kept.close()
        lost = _make(two, b"/lost")
        Posix(one.client.vfs).unlink(b"/lost")
        cluster.sim.sleep(cluster.sim.random() * (NEWS_S + HEARTBEAT_S))
        late = cluster.add()
        opened = Posix(late.client.vfs).open(b"/kept")
        Posix(one.client.vfs).unlink(b"/kept")
        cluster.sim.sleep(ROUNDS_S)
        assert opened.read(0, len(DATA)) == DATA
        assert lost.read(0, len(DATA)) == DATA
        opened.close()
        lost.close()

    _world(sim_seed, body, 2)


@SEEDS
@pytest.mark.usefixtures("ends")
def test_who_was_taken_for_dead_loses_no_more_than_it_must(sim_seed: int) -> None:
    """What was not deleted meanwhile is held again; what was gives an error, never other bytes."""

    def body(cluster: Cluster) -> None:
        one, two = cluster.nodes
        away = one if _leader(cluster) is two else two
        other = two if away is one else one
        gone, kept = _make(away, b"/gone"), _make(away, b"/kept")
        Posix(other.client.vfs).unlink(b"/gone")
        cluster.sim.sleep(ROUNDS_S)
        away.freeze()
        cluster.sim.sleep(LEASE_S + ROUNDS_S)
        assert not away.has_session()
        assert not _is_there(cluster, gone)
        Posix(other.client.vfs).unlink(b"/kept")
        cluster.sim.sleep(cluster.sim.random() * NEWS_S)
        away.thaw()
        cluster.sim.sleep(ROUNDS_S)
        with pytest.raises((OSError, ObjectMissing)) as caught:
            gone.read(0, 10)
        assert getattr(caught.value, "errno", errno.ESTALE) == errno.ESTALE
        assert kept.read(0, len(DATA)) == DATA
        for file in (gone, kept):
            file.close()

    _world(sim_seed, body, 2)


@SEEDS
@pytest.mark.usefixtures("ends")
def test_a_stuck_client_holds_a_round_up_for_a_lease(sim_seed: int) -> None:
    def body(cluster: Cluster) -> None:
        leader = _leader(cluster)
        (stuck,) = [node for node in cluster.nodes if node is not leader]
        file = _make(leader)
        file.close()
        Posix(leader.client.vfs).unlink(b"/f")
        stuck.freeze()
        cluster.sim.sleep(LEASE_S / 2)
        assert _is_there(cluster, file)
        cluster.sim.sleep(LEASE_S / 2 + ROUNDS_S)
        assert not _is_there(cluster, file)

    _world(sim_seed, body, 2)


@SEEDS
def test_nobody_is_ended_because_the_store_was_away(sim_seed: int, log_watch: LogWatch) -> None:
    log_watch.expect("gave up after")

    def body(cluster: Cluster) -> None:
        sessions = [node.session_id() for node in cluster.nodes]
        for node in cluster.nodes:
            node.store.network.cut = True
        cluster.sim.sleep(2 * LEASE_S)
        for node in cluster.nodes:
            node.store.network.cut = False
        cluster.sim.sleep(LEASE_S / 2)
        assert [node.session_id() for node in cluster.nodes] == sessions
        assert all(node.has_session() for node in cluster.nodes)

    _world(sim_seed, body, 3)


@SEEDS
def test_nobody_is_ended_by_a_leader_that_was_stopped(sim_seed: int) -> None:
    def body(cluster: Cluster) -> None:
        leader = _leader(cluster)
        leader.freeze()
        cluster.sim.sleep(LEASE_S * 0.9)
        leader.thaw()
        cluster.sim.sleep(LEASE_S / 2)
        assert all(node.has_session() for node in cluster.nodes)

    _world(sim_seed, body, 3)


@pytest.mark.sim_seeds(2)
def test_a_file_of_very_many_chunks(sim_seed: int) -> None:
    """It takes several commits; the data of all chunks must go."""

    def body(cluster: Cluster) -> None:
        (node,) = cluster.nodes
        file = _make(node)
        file.close()
        meta = node.client.meta
        for index in range(1, COMMIT_OPS_ENOUGH):
            batch = [(index, Slice(0, SliceId(10_000 + index), 100, 0, 100))]
            meta.write_slices(file.ino, batch, index * CHUNK_BYTES + 100, 0)
        Posix(node.client.vfs).unlink(b"/f")
        cluster.sim.sleep(ROUNDS_S)
        assert not _is_there(cluster, file)
        assert not cluster.backend.rows.get(keys.DEAD_SLICES)
        assert node.client.background.deleted >= COMMIT_OPS_ENOUGH

    _world(sim_seed, body, 1)


@SEEDS
def test_an_idle_client_leaves_at_once(sim_seed: int) -> None:
    def body(cluster: Cluster) -> None:
        one, two = cluster.nodes
        file = _make(one)
        cluster.sim.sleep(cluster.sim.random() * 10)
        file.close()
        for node in (two, one):
            begun = cluster.sim.monotonic()
            assert node.client.stop()
            assert cluster.sim.monotonic() - begun < 0.1
            node.crash()

    _world(sim_seed, body, 2)


@SEEDS
def test_leaving_in_the_midst_of_a_round(sim_seed: int) -> None:
    """The round's leader does not wait for others; the last client deletes before it leaves."""

    def body(cluster: Cluster) -> None:
        leader = _leader(cluster)
        (other,) = [node for node in cluster.nodes if node is not leader]
        for n in range(20):
            _make(other, b"/f%d" % n).close()
        for n in range(20):
            Posix(other.client.vfs).unlink(b"/f%d" % n)
        cluster.sim.sleep(cluster.sim.random() * (NEWS_S + HEARTBEAT_S))
        for node in (leader, other):
            begun = cluster.sim.monotonic()
            assert node.client.stop()
            assert cluster.sim.monotonic() - begun < 1
            node.crash()
        assert not [*cluster.objects.list("")]

    _world(sim_seed, body, 2)


@SEEDS
@pytest.mark.usefixtures("ends")
def test_a_leader_that_can_not_delete_ends_dead_sessions(sim_seed: int) -> None:
    """The object store hangs while it deletes: the locks of a dead mount are given up even so."""

    def body(cluster: Cluster) -> None:
        cluster.leaks = True
        leader = _leader(cluster)
        other, _ = (node for node in cluster.nodes if node is not leader)
        dead = other.session_id()
        hanging, heals = cluster.sim.event(), cluster.sim.event()
        delete = leader.client.blocks.delete

        def hang(slices: Iterable[tuple[SliceId, int]]) -> None:
            hanging.set()
            heals.wait()
            delete(slices)

        leader.client.blocks.delete = hang  # type: ignore[method-assign]
        file = _make(leader)
        file.close()
        Posix(leader.client.vfs).unlink(b"/f")
        assert hanging.wait(2 * ROUNDS_S)
        other.crash()
        cluster.sim.sleep(LEASE_S + 3 * LOOK_S)
        assert keys.pack_u64(dead) not in cluster.backend.rows[keys.SESSIONS]
        heals.set()
        cluster.sim.sleep(ROUNDS_S)
        assert not [*cluster.objects.list("")]

    _world(sim_seed, body, 3)

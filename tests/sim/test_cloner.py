"""T2: clone jobs of a mount belong to the users who began them."""

from __future__ import annotations

import errno
import json
import os
from functools import partial

import pytest

from fsclient.control.clone_jobs import ALL_AT_ONCE, AT_ONCE, CLONE_XATTR, MANY
from fsmeta.types import ROOT_CALLER, ROOT_INO, Caller, SetAttr
from tests.sim.world.cluster import Cluster, Node, Weather
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime
from tests.support.outcome import errno_of


def _wish(node: Node, name: str) -> bytes:
    source = node.client.meta.lookup(ROOT_CALLER, ROOT_INO, b"source").ino
    return json.dumps({"source": source, "name": name, "preserve": False}).encode()


def _ask(node: Node, user: int, word: bytes, wish: bytes) -> None:
    cloner = node.client.vfs.questions.cloner
    cloner.ask(Caller(user, user, (), os.getpid()), ROOT_INO, ROOT_INO, CLONE_XATTR + word, wish)


def _report(node: Node, user: int, word: bytes) -> dict[str, object]:
    told = node.client.vfs.questions.cloner.tell(Caller(user, user), CLONE_XATTR + word)
    report: dict[str, object] = json.loads(told)
    return report


@pytest.mark.sim_seeds(3)
def test_t2_users_are_not_in_each_others_way(sim_seed: int) -> None:
    """One who has all places of a user takes none of another's, and knows no job but its own."""

    def run(sim: SimRuntime) -> None:
        cluster = Cluster(sim, sim_seed, Weather())
        node = cluster.add()
        meta = node.client.meta
        source = meta.create(ROOT_CALLER, ROOT_INO, b"source", 0o40777).ino
        meta.create(ROOT_CALLER, source, b"file", 0o100666)
        meta.setattr(ROOT_CALLER, ROOT_INO, SetAttr(mode=0o777))
        cloner = node.client.vfs.questions.cloner
        began, go_on = cloner.tree, sim.event()

        def held(_source: object, _stopped: object) -> object:
            go_on.wait()
            return meta

        cloner.tree = held  # type: ignore[assignment]
        users = range(1000, 1000 + ALL_AT_ONCE // AT_ONCE)
        for user in users:
            for number in range(AT_ONCE):
                _ask(node, user, b"%d" % number, _wish(node, f"{user}-{number}"))
            more = partial(_ask, node, user, b"more", _wish(node, "more"))
            assert errno_of(more) == errno.EAGAIN
        assert errno_of(lambda: _ask(node, 2000, b"w", _wish(node, "w"))) == errno.EAGAIN
        _ask(node, 0, b"0", _wish(node, "root"))
        stop = json.dumps({**json.loads(_wish(node, "x")), "stop": True}).encode()
        _ask(node, 2000, b"0", stop)
        assert errno_of(lambda: _report(node, 2000, b"0")) == errno.ENODATA
        _ask(node, 1001, b"1", stop)
        go_on.set()
        cloner.tree = began
        sim.sleep(5)
        for user in users:
            for number in range(AT_ONCE):
                report = _report(node, user, b"%d" % number)
                stopped = (user, number) == (1001, 1)
                assert report["done"]
                assert report["errno"] == (errno.ECANCELED if stopped else 0)
        assert _report(node, 0, b"0")["errno"] == 0
        for number in range(MANY + 10):
            _ask(node, 1000, b"m%d" % number, _wish(node, f"m{number}"))
            sim.sleep(1)
        assert len(cloner._jobs) == MANY
        cluster.settle()
        cluster.drain()
        cluster.stop()
        cluster.judge()

    simulate(sim_seed, run)

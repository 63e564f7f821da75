"""Threads that a mount can't do without go on after an error that nobody foresaw."""

from __future__ import annotations

import itertools
import os

import pytest

from fsclient.background.compactor import Compactor
from fsmeta.runtime import AGAIN_MAX_S, spawn_lasting
from tests.conftest import LogWatch
from tests.sim.world.cluster import Cluster, Weather
from tests.sim.world.harness import simulate
from tests.sim.world.posix import Posix
from tests.sim.world.scheduler import SimRuntime

ROUNDS_S = 120.0  # enough for what is unlinked to be deleted, and for a thread to begin anew


def test_they_begin_anew_and_seldom_where_it_does_not_help(log_watch: LogWatch) -> None:
    log_watch.expect("thread busy failed; it starts again in")

    def run(sim: SimRuntime) -> None:
        begun: list[float] = []

        def body() -> None:
            begun.append(sim.monotonic())
            if len(begun) < 10:
                raise ValueError("nobody foresaw it")

        spawn_lasting(sim, "busy", body).join()
        pauses = [round(after - before) for before, after in itertools.pairwise(begun)]
        assert pauses == [1, 2, 4, 8, 16, 32, AGAIN_MAX_S, AGAIN_MAX_S, AGAIN_MAX_S]

    simulate(0, run)
    assert len(log_watch.seen) == 9
    assert all(each.exc_info for each in log_watch.seen)


def test_who_compacts_fails_and_what_is_dead_is_still_deleted(
    monkeypatch: pytest.MonkeyPatch, log_watch: LogWatch
) -> None:
    log_watch.expect("thread background failed; it starts again in")
    turn = Compactor.turn
    failed: list[Compactor] = []

    def fail_once(self: Compactor) -> None:
        if not failed:
            failed.append(self)
            raise ValueError("nobody foresaw it")
        turn(self)

    monkeypatch.setattr(Compactor, "turn", fail_once)

    def run(sim: SimRuntime) -> None:
        cluster = Cluster(sim, 0, Weather())
        posix = Posix(cluster.add().client.vfs)
        file = posix.open(b"/f", os.O_CREAT | os.O_RDWR)
        file.write(0, b"data")
        file.close()
        posix.unlink(b"/f")
        sim.sleep(ROUNDS_S)
        assert failed
        assert not [*cluster.objects.list("")]
        cluster.settle()
        cluster.drain()
        cluster.stop()
        cluster.judge()

    simulate(0, run)

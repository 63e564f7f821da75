"""P3: one lock that 50 clients hand around, and what it asks of Redis; idle sessions, too."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from fsclient.volume.metadata_url import open_store
from fsmeta.meta.meta import Meta
from fsmeta.runtime import SystemRuntime
from fsmeta.types import ROOT_CALLER, ROOT_INO
from tests.faults.program import succeed
from tests.support.redis_server import RedisServer

PROCESSES, CLIENTS, TURNS = 10, 5, 10
IDLE_S = 10.0
# a hand-over: unlock, what was granted, its notes, the next request in line; each of those that
# write meets somebody else now and then, and begins anew
REQUESTS_MAX = 20.0
IDLE_MAX = 6.0  # commands a second and session: a beat in 5 s, a look at who leads in 1 s


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    if not RedisServer.is_installed():
        pytest.skip("needs redis-server")
    with RedisServer(tmp_path) as made:
        yield made


class Spent:
    """What a Redis has done since the last look."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self.look()

    def look(self) -> tuple[int, float, float]:
        """Commands, seconds of its processor, seconds of the clock."""
        info = {**self._server.ask("INFO", "stats"), **self._server.ask("INFO", "cpu")}
        now = (
            int(info["total_commands_processed"]),
            float(info["used_cpu_user"]) + float(info["used_cpu_sys"]),
            time.monotonic(),
        )
        before, self._last = getattr(self, "_last", now), now
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["flock", "fcntl"])
def test_p3_a_lock_that_50_clients_hand_around(
    server: RedisServer, tmp_path: Path, kind: str
) -> None:
    """Each release wakes one client, and nobody polls while 50 wait."""
    meta, stamp = server.url(), tmp_path / "stamp"
    stamp.write_bytes(bytes(8))
    succeed("format", meta, "testvol", "--bucket", str(tmp_path / "data"), "--trash-days", "0")
    with closing(open_store(meta, SystemRuntime())) as store:
        Meta(store, SystemRuntime()).create(ROOT_CALLER, ROOT_INO, b"lock", 0o100644)
    words = [sys.executable, "-m", "tests.faults.lock_clients", meta, str(stamp)]
    with ExitStack() as stack:
        ran = [
            stack.enter_context(
                subprocess.Popen(
                    [*words, str(CLIENTS), str(TURNS), kind],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(PROCESSES)
        ]
        for process in ran:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        spent = Spent(server)
        time.sleep(IDLE_S)
        idle, idle_cpu_s, idle_s = spent.look()
        for process in ran:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        took: list[float] = []
        asked = conflicts = 0
        for process in ran:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            took += told[0]
            asked, conflicts = asked + told[1], conflicts + told[2]
        commands, cpu_s, clock_s = spent.look()
        for process in ran:
            process.communicate("end\n", timeout=60)
            assert process.returncode == 0
    turns = PROCESSES * CLIENTS * TURNS
    took.sort()
    print(
        f"{PROCESSES * CLIENTS} sessions idle: {idle / idle_s:.0f} commands/s, "
        f"{100 * idle_cpu_s / idle_s:.1f} % of a core of Redis\n"
        f"{turns} hand-overs ({kind}): {clock_s:.1f} s, "
        f"median {1e3 * statistics.median(took):.1f} ms, "
        f"99 % {1e3 * took[len(took) * 99 // 100]:.1f} ms, most {1e3 * took[-1]:.1f} ms, "
        f"{asked / turns:.1f} requests, {conflicts / turns:.2f} in vain, and "
        f"{commands / turns:.0f} commands with those of scripts, {1e6 * cpu_s / turns:.0f} µs of "
        "Redis each"
    )
    assert len(took) > turns // 2, "they hardly met"
    assert asked / turns < REQUESTS_MAX
    assert idle / idle_s / (PROCESSES * CLIENTS) < IDLE_MAX
    assert json.loads(succeed("fsck", meta, "--json"))["problems"] == []

"""When the client in reserve is started: once the client that serves is quiet, or else later."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from fsclient.survival import channel, client_starter
from fsclient.survival.client_starter import ClientStarter, ReserveClient
from fsclient.survival.supervised_client import SupervisedClient

_BUSY = "while True: pass"
_QUIET = "import time; time.sleep(60)"
LOOK_S = 0.5
WARM_S, LATEST_S = 0.5, 3.0  # as the tests have them


class _CountingStarter:
    """Starts nothing, and notes when it would have."""

    device = 3

    def __init__(self) -> None:
        self.started: list[float] = []

    def start(self, _program: list[str], now: float, modules: bytes) -> None:
        assert modules == b"os"
        self.started.append(now)


@contextmanager
def client(program: str, now: float) -> Iterator[SupervisedClient]:
    """A process that serves for the supervisor's eyes, `now` on its clock."""
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        end, other = channel.pair()
        other.close()
        made = SupervisedClient([], process.pid, end, 1, now)
        try:
            yield made
        finally:
            process.kill()
            made.close()


@pytest.mark.parametrize(("program", "busy"), [(_BUSY, True), (_QUIET, False)])
def test_a_busy_client_is_told_from_a_quiet_one(program: str, busy: bool) -> None:
    with client(program, time.monotonic()) as made:
        time.sleep(LOOK_S)  # the start of Python takes a moment
        made.is_busy(time.monotonic())
        time.sleep(LOOK_S)
        assert made.is_busy(time.monotonic()) is busy


@pytest.mark.parametrize(
    ("program", "is_first", "least_s", "most_s"),
    [(_QUIET, True, WARM_S, LATEST_S), (_BUSY, True, LATEST_S, 60.0), (_BUSY, False, 0.0, WARM_S)],
)
def test_when_one_is_started(
    monkeypatch: pytest.MonkeyPatch, program: str, is_first: bool, least_s: float, most_s: float
) -> None:
    monkeypatch.setattr(client_starter, "WARM_S", WARM_S)
    monkeypatch.setattr(client_starter, "WARM_LATEST_S", LATEST_S)
    starter = _CountingStarter()
    reserve = ReserveClient(cast(ClientStarter, cast(Any, starter)), "/", lambda *_: None)
    reserve.modules = b"os"
    with client(program, time.monotonic()) as serving:
        time.sleep(LOOK_S)
        served_at = time.monotonic()
        serving.is_busy(served_at)  # what its start has taken is no work
        reserve.want(served_at, is_first)
        while not starter.started:
            reserve.start_due([], serving, time.monotonic())
            time.sleep(0.01)
    (started,) = starter.started
    assert least_s <= started - served_at < most_s
    assert not reserve.due_at

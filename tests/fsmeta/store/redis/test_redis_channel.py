"""The connection that threads share, with a server that is slow to connect to, or is no Redis."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from fsmeta.errors import Ambiguous, StoreError, Unavailable
from fsmeta.runtime import SystemRuntime, Thread
from fsmeta.store.redis.connection import Channel
from tests.fsmeta.engines import RUNTIME
from tests.support.waiting import wait_until

PING, PONG = b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n"


class FakeServer:
    """Makes connections; each first runs `connecting`, and finds `greeting` as its answer."""

    def __init__(self) -> None:
        self.connecting: Callable[[], object] = bool
        self.greeting = PONG
        self.attempts = 0
        self.far: list[socket.socket] = []

    def make(self) -> FakeConnection:
        return FakeConnection(self)


class FakeConnection:
    """A `redis/connection.RedisConnection`."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._sock: socket.socket | None = None

    def connect(self) -> None:
        self._server.attempts += 1
        self._server.connecting()
        self._sock, far = socket.socketpair()
        self._server.far.append(far)
        far.sendall(self._server.greeting)

    def disconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()

    __del__ = disconnect

    def send_command(self, *words: str, **options: Any) -> None:
        raise AssertionError((words, options))

    def read_response(self) -> Any:
        raise AssertionError

    def can_read(self, timeout: float = 0) -> bool:
        raise AssertionError(timeout)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    made = FakeServer()
    yield made
    for far in made.far:
        far.close()


def _ask(channel: Channel, into: list[object]) -> Thread:
    """A thread that pings; its answer or its error goes `into` a list."""

    def body() -> None:
        try:
            into.append(channel.request(PING))
        except StoreError as error:
            into.append(type(error))

    return RUNTIME.spawn("asks", body)


def _while_connecting(server: FakeServer, act: Callable[[Channel], None]) -> tuple[Channel, object]:
    """Do `act`, which must not wait for it, while a connection is made; what who asked got."""
    answer = threading.Event()
    server.connecting = answer.wait
    channel, into = Channel(server.make, RUNTIME), list[object]()
    thread = _ask(channel, into)
    wait_until(lambda: server.attempts)
    act(channel)
    answer.set()
    thread.join()
    (got,) = into
    return channel, got


def test_close_does_not_wait_for_a_connection(server: FakeServer) -> None:
    """As at an unmount while Redis is away."""
    _, got = _while_connecting(server, Channel.close)
    assert got == Unavailable
    assert server.attempts == 1


def test_reset_does_not_wait_for_a_connection(server: FakeServer) -> None:
    """And what was being connected before it is not used."""
    channel, got = _while_connecting(server, Channel.reset)
    assert got == b"PONG"
    assert server.attempts == 2
    channel.close()
    for far in server.far:
        far.close()


def test_close_ends_a_wait_for_an_answer(server: FakeServer) -> None:
    server.greeting = b"+PO"
    channel, into = Channel(server.make, RUNTIME), list[object]()
    thread = _ask(channel, into)
    wait_until(lambda: channel.requests)
    channel.close()
    thread.join()
    assert into == [Ambiguous]


def test_those_who_wait_share_a_failure(server: FakeServer) -> None:
    """Ten timeouts one after the other would be ten times as long."""
    answer = threading.Event()

    def fail() -> None:
        answer.wait()
        raise redis.ConnectionError("nobody there")

    server.connecting = fail
    runtime, begun = SystemRuntime(), list[float]()
    clock = runtime.monotonic

    def begin() -> float:
        begun.append(clock())
        return begun[-1]

    runtime.monotonic = begin  # asked for by each request that has seen no failure yet
    channel, into = Channel(server.make, runtime), list[object]()
    threads = [_ask(channel, into) for _ in range(10)]
    wait_until(lambda: server.attempts and len(begun) == 10)
    answer.set()
    for thread in threads:
        thread.join()
    assert into == [Unavailable] * 10
    assert server.attempts == 1
    server.connecting = bool
    assert channel.request(PING) == b"PONG"
    channel.close()


def test_what_is_no_redis_is_hung_up_on(server: FakeServer) -> None:
    server.greeting = b"HTTP/1.1 400 Bad Request\r\n\r\n"
    channel = Channel(server.make, RUNTIME)
    with pytest.raises(Ambiguous):
        channel.request(PING)
    server.greeting = PONG
    assert channel.request(PING) == b"PONG"
    channel.close()


class Told:
    """Counts how often somebody waits for input and lets others work meanwhile."""

    def __init__(self) -> None:
        self.times = 0

    def will_wait(self) -> None:
        pass

    def await_input(self, descriptor: int) -> None:
        del descriptor
        self.times += 1


def _answer(far: socket.socket) -> None:
    """Serve PINGs, each after a while."""
    while far.recv(len(PING)):
        time.sleep(0.005)
        far.sendall(PONG)


@pytest.mark.parametrize("waits", [False, True])
def test_only_who_waits_long_lets_others_work(waits: bool) -> None:
    """Handing over takes longer than an answer that comes at once: it is there already."""
    runtime, told, server = SystemRuntime(), Told(), FakeServer()
    runtime.tell(told)
    channel = Channel(server.make, runtime)
    channel.request(PING)  # the greeting answers
    (far,) = server.far
    far.recv(len(PING))
    answering = threading.Thread(target=_answer, args=(far,))
    if waits:
        answering.start()
    for _ in range(60):
        if not waits:
            far.sendall(PONG)
        channel.request(PING)
        if not waits:
            far.recv(len(PING))
    assert (told.times > 50) == waits, told.times
    channel.close()
    if waits:
        answering.join()
    far.close()


def test_an_answer_that_nobody_asked_for_ends_the_connection() -> None:
    server = FakeServer()
    server.greeting = PONG * 2
    channel = Channel(server.make, RUNTIME)
    channel.request(PING)
    server.greeting = PONG
    channel.request(PING)
    assert server.attempts == 2
    channel.close()
    for far in server.far:
        far.close()


def test_a_lost_connection_is_closed_at_once(server: FakeServer) -> None:
    """Though something refers to it still, as the traceback of an error does."""
    channel = Channel(server.make, RUNTIME)
    assert channel.request(PING) == b"PONG"
    first = channel._link
    assert first is not None
    server.far[0].close()
    with pytest.raises(Ambiguous):
        channel.request(PING)
    assert channel.request(PING) == b"PONG"
    second = channel._link
    assert second is not None
    assert second is not first
    assert (first.sock.fileno(), second.sock.fileno() > 0) == (-1, True)
    channel.close()
    assert second.sock.fileno() == -1

"""The news from Redis: which rows others have changed (client tracking, redirected to us).

A thread of its own holds the connection that invalidation messages are redirected to. While it is
healthy, `healthy` is true and rows may be believed. It pings once a second; when an answer is
overdue or the connection breaks, everything believed is dropped at once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final

import redis

from fsmeta.redis_channel import RedisConnection
from fsmeta.runtime import Runtime
from fsmeta.store import Listener

_CHANNEL: Final = "__redis__:invalidate"
_PING_EVERY_S: Final = 1.0
_RETRY_S: Final = 0.5


class Tracking:
    """Listens for invalidations; `attach` makes a connection's reads known to the server."""

    def __init__(
        self,
        make: Callable[[], RedisConnection],
        runtime: Runtime,
        listener: Listener,
        on_lost: Callable[[], None],
    ) -> None:
        """`on_lost` is called when rows read so far are no longer watched."""
        self._make = make
        self._runtime = runtime
        self._listener = listener
        self._on_lost = on_lost
        self._client_id = 0  # of the listening connection; 0 while there is none
        self._attached = False
        self._connection: RedisConnection | None = None  # the listening one
        self._stop = runtime.event()
        self._ready = runtime.event()
        self._thread = runtime.spawn("redis-tracking", self._run)
        self._ready.wait(_PING_EVERY_S)

    def attach(self, connection: RedisConnection) -> None:
        """Called on each new connection whose reads are to be watched."""
        self._attached = False
        self._listener(None)  # what an earlier connection had read is watched no more
        client_id = self._client_id
        if not client_id:
            return
        connection.send_command("CLIENT", "TRACKING", "ON", "REDIRECT", str(client_id), "NOLOOP")
        connection.read_response()
        self._attached = self._client_id == client_id

    def healthy(self) -> bool:
        """Whether we hear of every change to what the attached connection has read."""
        return self._attached and self._client_id != 0

    def close(self) -> None:
        self._stop.set()
        connection = self._connection
        if connection is not None and connection._sock is not None:
            try:
                connection._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
            except OSError:
                pass  # it is gone already
        self._thread.join(2 * _PING_EVERY_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            connection = self._connection = self._make()
            try:
                self._listen(connection)
            except (redis.RedisError, OSError):
                pass  # said by `_lose`; the retry loop is this one
            finally:
                self._lose()
                connection.disconnect()
            self._stop.wait(_RETRY_S)

    def _listen(self, connection: RedisConnection) -> None:
        connection.connect()
        connection.send_command("CLIENT", "ID")
        client_id = int(connection.read_response())
        connection.send_command("SUBSCRIBE", _CHANNEL)
        connection.read_response()
        self._attached = False
        self._client_id = client_id
        self._on_lost()  # connections made before now redirect elsewhere
        self._ready.set()
        waiting = False
        while not self._stop.is_set():
            if not connection.can_read(timeout=_PING_EVERY_S):
                if waiting:
                    return
                connection.send_command("PING", check_health=False)
                waiting = True
                continue
            waiting = False
            self._take(connection.read_response())

    def _take(self, message: object) -> None:
        """One message: `message`, channel, rows; rows are None after a FLUSHALL. Or a pong."""
        if isinstance(message, list) and len(message) == 3 and message[0] == b"message":
            self._listener(message[2])

    def _lose(self) -> None:
        had = self._client_id
        self._client_id = 0
        self._attached = False
        if had:
            self._listener(None)

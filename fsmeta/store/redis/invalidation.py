"""Invalidations from Redis: which rows other clients have changed (client tracking, redirected).

A thread of its own holds the connection that invalidation messages are redirected to. While it is
healthy, `healthy` is true and rows may be cached. It pings once a second; when an answer is overdue
or the connection breaks, everything cached is dropped at once.

Before an answer from the cache, `poll_invalidations` takes in the messages that have arrived and
that the thread has not processed yet. Redis sends an invalidation together with the answer to the
client that changed the row. So when that client has its answer and passes word of the change on to
this host, the invalidation has arrived here.

Redis forgets the readers of rows when its tracking table is full, and does not report to a client
what it drops in the course of that client's own commands (NOLOOP). So nothing is cached once the
table is nearly full.

Redis 7.0 watches the keys that a script declares, and tables are never declared. Later versions,
and Valkey, watch what it reads: they report tables, too, and these messages are ignored.

Threading: `_hearing` guards the connection's input while there is some; `_client_id` and the like
are written by the thread alone.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable
from typing import Final

import redis

from fsmeta.runtime import Runtime
from fsmeta.store.contract import Listener, is_table
from fsmeta.store.redis.topology import ServerConnection

log = logging.getLogger(__name__)

_CHANNEL: Final = "__redis__:invalidate"
_PING_EVERY_S: Final = 1.0
_RETRY_S: Final = 0.5
AWAY_S: Final = 1.0  # Redis that is away for longer is worth a line in the log
_LOOK_EVERY_S: Final = 5.0  # at the table, unless it could be full by then
_LOOK_SOON_S: Final = 0.2
_NEW_A_SECOND: Final = 250_000  # keys: more than all clients of one Redis come to read
_ANSWER_S: Final = 0.01  # what it says of its table is looked for as often
_NEARLY_FULL: Final = 0.8
_ROOM_AGAIN: Final = 0.6
_TAKE_AT_ONCE: Final = 1000  # messages; a look at the table must not wait for more
_TABLE_KEYS: Final = 1_000_000  # Redis's own default, where we may not ask


class InvalidationStream:
    """Listens for invalidations; `attach` makes a connection's reads known to the server."""

    def __init__(
        self,
        make: Callable[[], ServerConnection],
        runtime: Runtime,
        listener: Listener,
        on_lost: Callable[[], None],
        prefix: bytes = b"",
    ) -> None:
        """`on_lost` is called when rows read so far are no longer watched.

        `prefix` stands before each row's name in Redis.
        """
        self._make = make
        self._runtime = runtime
        self._listener = listener
        self._on_lost = on_lost
        self._prefix = prefix
        self._client_id = 0  # of the listening connection; 0 while there is none
        self._run = ""  # which process that connection is to
        self._attached = False
        self._full = False  # the server's table is: nothing can be cached
        self._look_at = 0.0
        self._connection: ServerConnection | None = None  # the listening one
        self._hearing = runtime.lock()
        self._answered = False  # something has come since the last ping; by `_hearing`
        # A thread takes in what has arrived, or some of it is left; written under _hearing.
        self._busy = False
        self._input: select.epoll | None = None  # of the connection, while there is one
        self._lost_at = runtime.monotonic()  # when the last connection was lost; the thread's
        self._told_away = False  # the log says that Redis is away; the thread's
        self._stop = runtime.event()
        self._ready = runtime.event()
        self._thread = runtime.spawn("redis-tracking", self._listen_on)
        self._ready.wait(_PING_EVERY_S)

    def attach(self, connection: ServerConnection) -> None:
        """Called on each new connection whose reads are to be watched."""
        self._attached = False
        self._listener(None)  # what an earlier connection had read is watched no more
        client_id = self._client_id
        if not client_id:
            return
        if connection.run != self._run:  # ids of one server mean nothing, or others, on another
            self._hang_up()
            return
        connection.send_command("CLIENT", "TRACKING", "ON", "REDIRECT", str(client_id), "NOLOOP")
        connection.read_response()
        self._attached = self._client_id == client_id

    def healthy(self) -> bool:
        """Whether every change of what the attached connection has read is reported."""
        return self._attached and self._client_id != 0 and not self._full

    def poll_invalidations(self) -> None:
        """Take in the invalidations that have arrived by now."""
        waiting = self._input
        try:
            if waiting is None or not (self._busy or waiting.poll(0)):
                return
        except (OSError, ValueError):
            return  # the thread has just closed it, and is about to say that all may have changed
        with self._hearing:
            connection = self._connection
            if self._input is waiting and connection is not None:
                try:
                    self._take_all(connection)
                except (redis.RedisError, OSError):
                    self._hang_up()  # the thread sees it, too, and says so

    def _take_all(self, connection: ServerConnection, most: int = 0) -> None:
        """All messages that are there, or `most` at once; `_hearing` is held.

        What is left may be in our own memory, where no poll sees it: `_busy` says so.
        """
        count = 0
        self._busy = True
        try:
            while connection.can_read(timeout=0):
                if most and count >= most:
                    return
                count += 1
                self._answered = True
                self._take(connection.read_response())
        except BaseException:
            self._busy = False
            raise
        self._busy = False

    def close(self) -> None:
        self._stop.set()
        self._hang_up()
        self._thread.join(2 * _PING_EVERY_S)

    def _hang_up(self) -> None:
        """Wake the thread: its connection is of no use."""
        connection = self._connection
        sock = None if connection is None else connection._sock
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is gone already

    def _listen_on(self) -> None:
        while not self._stop.is_set():
            connection, asking = self._make(), self._make()
            self._connection = connection
            why: object = "it is silent"
            try:
                self._listen(connection, asking)
            except (redis.RedisError, OSError) as error:
                why = error  # the retry loop is this one
                self._lost_at = self._runtime.monotonic() if self._client_id else self._lost_at
            finally:
                self._lose()
                connection.disconnect()
                asking.disconnect()
            self._tell_away(why)
            self._stop.wait(_RETRY_S)

    def _tell_away(self, why: object) -> None:
        """Say so, once, where Redis has been away for AWAY_S."""
        for_s = self._runtime.monotonic() - self._lost_at
        if for_s >= AWAY_S and not self._told_away and not self._stop.is_set():
            self._told_away = True
            log.warning("Redis does not answer, so calls wait: %s", why)

    def _listen(self, connection: ServerConnection, asking: ServerConnection) -> None:
        asking.connect()
        connection.connect()
        connection.send_command("CLIENT", "ID")
        client_id = int(connection.read_response())
        connection.send_command("SUBSCRIBE", _CHANNEL)
        connection.read_response()
        self._attached = False
        self._run = connection.run
        self._client_id = client_id
        if self._told_away:
            self._told_away = False
            away_s = self._runtime.monotonic() - self._lost_at
            log.warning("Redis answers again, after %.0f s", away_s)
        self._on_lost()  # connections made before now redirect elsewhere
        assert connection._sock is not None
        with select.epoll() as arrived:
            arrived.register(connection._sock.fileno(), select.EPOLLIN)
            self._input = arrived
            try:
                self._ready.set()
                self._poll_on(connection, asking, arrived)
            finally:
                with self._hearing:
                    self._input = None
                    self._busy = False

    def _poll_on(
        self, connection: ServerConnection, asking: ServerConnection, arrived: select.epoll
    ) -> None:
        """Take in invalidations until the connection ends."""
        waiting = asked = False
        limit = _limit(asking)
        clock = self._runtime.monotonic
        ping_at = clock() + _PING_EVERY_S
        while not self._stop.is_set():
            if asked:
                if asking.can_read(timeout=0):  # never waited for: messages would be late
                    keys = _tracked(asking.read_response())
                    self._look(keys, limit)
                    self._look_at = clock() + pause_s(keys, limit)
                    asked = False
            elif clock() >= self._look_at:
                asking.send_command("INFO", "stats")
                asked = True
            wake_at = clock() + _ANSWER_S if asked else self._look_at
            if self._busy or arrived.poll(max(0.0, min(ping_at, wake_at) - clock())):
                with self._hearing:
                    self._take_all(connection, _TAKE_AT_ONCE)
                waiting = False
                ping_at = clock() + _PING_EVERY_S
            elif clock() < ping_at:
                continue
            elif waiting and not self._answered:
                self._lost_at = clock() - _PING_EVERY_S
                return
            else:
                self._answered = False
                connection.send_command("PING", check_health=False)
                waiting = True
                ping_at = clock() + _PING_EVERY_S

    def _look(self, keys: int, limit: int) -> None:
        """Believe nothing from now on if the table is nearly full, and again if it has room."""
        if limit and not self._full and keys > _NEARLY_FULL * limit:
            log.warning(
                "Redis tracks %d keys of %d at most, so mounts ask for everything again: set"
                " tracking-table-max-keys 0, or to more than the files in use",
                keys,
                limit,
            )
            self._full = True
            self._listener(None)
        elif self._full and keys < _ROOM_AGAIN * limit:
            self._listener(None)  # what was read meanwhile may have been dropped
            self._full = False

    def _take(self, message: object) -> None:
        """One message: `message`, channel, rows; rows are None after a FLUSHALL. Or a pong."""
        if isinstance(message, list) and len(message) == 3 and message[0] == b"message":
            rows, skip = message[2], len(self._prefix)
            if rows is not None and skip:
                rows = [row[skip:] for row in rows if row.startswith(self._prefix)]
            if rows is not None:
                rows = [row for row in rows if not is_table(row)]
            if rows is None or rows:
                self._listener(rows)

    def _lose(self) -> None:
        had = self._client_id
        self._client_id = 0
        self._attached = False
        if had:
            self._listener(None)


def _limit(asking: ServerConnection) -> int:
    """How many keys the server tracks at most; 0: any number."""
    try:
        asking.send_command("CONFIG", "GET", "tracking-table-max-keys")
        _, value = asking.read_response()
        return int(value)
    except redis.ResponseError:  # not allowed
        return _TABLE_KEYS


def pause_s(keys: int, limit: int) -> float:
    """How long a table of `limit` keys may be left alone: it is not full before."""
    if not limit:
        return _LOOK_EVERY_S
    return min(_LOOK_EVERY_S, max(_LOOK_SOON_S, (limit - keys) / _NEW_A_SECOND))


def _tracked(stats: bytes) -> int:
    """How many keys it tracks, by INFO."""
    for line in stats.splitlines():
        if line.startswith(b"tracking_total_keys:"):
            return int(line.partition(b":")[2])
    return 0

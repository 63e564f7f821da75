"""One connection to Redis that many threads share: requests go out as they come, answers in order.

One connection, because client tracking with NOLOOP leaves out only what the *same* connection
changed; and because requests of several threads then travel, and are run, together. There is no
reader thread: a thread that waits reads the socket itself and hands out the answers of other
threads, so a lone request costs one send, one receive and no wake-up.

redis-py makes the connection (URL, TLS, password, database, unix socket); hiredis parses.

Threading: `_send` guards the order of sending and the making of links, a link's `receiving` its
reader. `_send` may be taken first, never the other way round. `reset` takes neither, and `close`
waits for `_send` no longer than CLOSE_WAIT_S: a connection may be in the making there, to a server
that does not answer.
"""

from __future__ import annotations

import re
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import hiredis
import redis

from fsmeta.errors import Ambiguous, Corrupt, StoreError, StoreFull, Unavailable
from fsmeta.runtime import Runtime

ANSWER_TIMEOUT_S: Final = 10.0  # a Redis that is silent for longer is taken for gone
CLOSE_WAIT_S: Final = 0.5  # for a thread that is sending
SOON_S: Final = 0.0002  # about what it costs to let another thread read requests meanwhile
LATENCY_SHARE: Final = 16  # a longer wait counts by a sixteenth, a shorter one in full
_RECEIVE_BYTES: Final = 64 << 10
_TIMEVAL: Final = struct.Struct("@ll")

# the first word of an error reply: what it means for us; all others are our own mistakes
_ERRORS: Final[dict[str, type[StoreError]]] = {
    "OOM": StoreFull,
    "LOADING": Unavailable,
    "BUSY": Unavailable,
    "NOREPLICAS": Unavailable,
    "MASTERDOWN": Unavailable,
    "TRYAGAIN": Unavailable,
    "ASK": Unavailable,
    "MISCONF": StoreFull,
}


# Redis 6.2 wraps what a command in a script says; later ones give it plainly
_IN_SCRIPT: Final = re.compile(r"(?:ERR Error running |@user_)script.*?: -([A-Z]+ .*)", re.DOTALL)
# the same, for "not here": the connection is dropped, the next one is to another server
_ELSEWHERE: Final = frozenset({"READONLY", "MOVED", "CLUSTERDOWN"})
# Redis has no word of its own for a script that asks for a row which is on another node, or on its
# way there
_NOT_LOCAL: Final = "attempted to access a non local key"


class RedisConnection(Protocol):
    """What we use of `redis.Connection`."""

    @property
    def _sock(self) -> socket.socket | None: ...

    def connect(self) -> None: ...
    def disconnect(self) -> None: ...
    def send_command(self, *words: str, **options: Any) -> None: ...
    def read_response(self) -> Any: ...
    def can_read(self, timeout: float = 0) -> bool: ...


class _Slot:
    """Requests sent together that wait for their answers."""

    __slots__ = ("count", "left", "replies")

    def __init__(self, count: int) -> None:
        self.replies: list[Any] = []
        self.count = count
        self.left = count  # written by the receiving thread; 0 when all replies are there

    def lose(self) -> None:
        """What has not been answered will not be; the last thing it does is to say so."""
        self.replies += [_LOST] * (self.count - len(self.replies))
        self.left = 0


class _SharedConnection:
    """A connection and the requests that wait on it."""

    def __init__(self, connection: RedisConnection, runtime: Runtime) -> None:
        assert connection._sock is not None
        self._runtime = runtime
        self._connection = connection
        self.sock = connection._sock
        self._descriptor = self.sock.fileno()
        # one TLS stream can't be written and read by two threads at once
        self.exclusive = isinstance(self.sock, ssl.SSLSocket)
        self.receiving = runtime.lock()
        self.waiting: deque[_Slot] = deque()  # appended under the channel's _send
        self._reader = hiredis.Reader()  # guarded by receiving
        self._buffer = bytearray(_RECEIVE_BYTES)
        self.broken = False
        self._closed = False  # guarded by receiving
        self.sock.settimeout(None)
        timeout = _TIMEVAL.pack(int(ANSWER_TIMEOUT_S), 0)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def receive(self, slot: _Slot, soon: bool) -> None:
        """Read until `slot` has its answer, handing out the answers before it.

        `soon`: it will be there before anything else could be begun.
        """
        while slot.left:
            if not self.receiving.acquire(blocking=False):
                self._runtime.will_wait()
                self.receiving.acquire()
            try:
                while slot.left:
                    self._receive_some(soon)
            finally:
                self.receiving.release()

    def _receive_some(self, soon: bool) -> None:
        """Hand out the answers that are there; wait for more input where there are none."""
        try:
            if not self._hand_out() and self._take_input(soon):
                self._hand_out()
        except hiredis.ProtocolError:  # no Redis speaks there; nothing after it makes sense either
            self._fail()

    def _hand_out(self) -> bool:
        """Give answers to those that wait for them; False where there are none."""
        waiting, gets = self.waiting, self._reader.gets
        reply = gets()
        if reply is False:
            return False
        while reply is not False and waiting:
            slot = waiting[0]
            replies, left = slot.replies, slot.left
            while left and reply is not False:
                replies.append(reply)
                left -= 1
                reply = gets()
            if not left:
                waiting.popleft()
            slot.left = left  # the last thing: its thread goes on then
        if reply is not False:
            self._fail()  # an answer to no request
        return True

    def _take_input(self, soon: bool) -> bool:
        """Wait for input and take it in; False where there will be none."""
        if self._closed:  # the number of the descriptor may be another file's by now
            self._fail()
            return False
        if self.exclusive:
            self._runtime.will_wait()  # TLS may hold input that the descriptor does not show
        elif not soon:
            self._runtime.await_input(self._descriptor)
        try:
            count = self.sock.recv_into(self._buffer)
        except OSError:
            count = 0
        if count:
            self._reader.feed(self._buffer, 0, count)  # type: ignore[arg-type]  # any buffer
            return True
        self._fail()
        return False

    def hang_up(self) -> None:
        """Wake the receiving thread: there is nothing more to come. From any thread."""
        self.broken = True
        try:
            # not SSLSocket.shutdown: after that a receiving thread would take cipher text for plain
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was first

    def close(self) -> None:
        """Hang up and close the socket. The caller holds `_send` of the channel.

        A socket that is left to the garbage collector stays open until the collector runs.
        """
        self.hang_up()
        with self.receiving:  # its holder has been woken
            self._closed = True
            self._connection.disconnect()

    def _fail(self) -> None:
        """No request that waits here will be answered."""
        self.hang_up()
        while self.waiting:
            self.waiting.popleft().lose()


_LOST: Final = object()
_PLAIN: Final = frozenset((list, int, bytes))  # types of replies that are no errors


class Channel:
    """Sends packed requests and returns their replies; reconnects when asked again."""

    def __init__(
        self,
        make: Callable[[], RedisConnection],
        runtime: Runtime,
        prepare: Callable[[RedisConnection], None] | None = None,
        on_moved: Callable[[str], object] = bool,
    ) -> None:
        """`prepare` runs on every new connection before its first request.

        `on_moved` is called with the place at which a cluster says that our rows are.
        """
        self._make = make
        self._runtime = runtime
        self._prepare = prepare
        self._on_moved = on_moved
        self._send = runtime.lock()
        self._link: _SharedConnection | None = None  # made under _send; `close` drops it
        self._closed = False  # set once, by `close`
        self._resets = 0  # written by `reset`
        self._failures = 0  # connections that could not be made; guarded by _send
        self._failure = ""  # why the last one could not; guarded by _send
        # near the shortest of late, since threads wait for each other, too; written without a lock
        self._latency_s = 0.0
        self.requests = 0  # guarded by _send
        self.links = 0  # connections made so far; written under _send

    def request(self, packed: bytes) -> Any:
        """The reply to one packed request.

        Raises: Unavailable before it was sent, Ambiguous when its answer was lost, StoreError for
        an error reply.
        """
        begun, latency = self._runtime.monotonic(), self._latency_s
        link, replies = self._exchange(packed, 1, soon=latency <= SOON_S)
        took = self._runtime.monotonic() - begun
        self._latency_s = min(took, latency + (took - latency) / LATENCY_SHARE)
        reply = replies[0]
        if reply.__class__ in _PLAIN:
            return reply
        return self._judge(link, replies)[0]

    def request_many(self, packed: bytes, count: int) -> list[Any]:
        """The replies to `count` packed requests sent together. Raises: as `request`."""
        link, replies = self._exchange(packed, count, soon=False)
        if _PLAIN.issuperset(map(type, replies)):  # none of many is an error
            return replies
        return self._judge(link, replies)

    def _exchange(
        self, packed: bytes, count: int, soon: bool
    ) -> tuple[_SharedConnection, list[Any]]:
        """Send requests and receive what comes back, errors too."""
        slot = _Slot(count)
        failures = self._failures
        with self._send:
            link = self._link
            if link is None or link.broken:
                link = self._ready_link(failures)
            self.requests += 1
            link.waiting.append(slot)
            try:
                link.sock.sendall(packed)
            except OSError:
                link.hang_up()
            if link.exclusive:
                link.receive(slot, soon=False)
        link.receive(slot, soon)
        return link, slot.replies

    def _judge(self, link: _SharedConnection, replies: list[Any]) -> list[Any]:
        """Replies of which one may be an error. Raises: as `request`."""
        try:
            return [_answer(reply) for reply in replies]
        except Elsewhere as error:
            link.hang_up()
            self._on_moved(error.place)
            raise

    def reset(self) -> None:
        """Let the next request begin on a new connection. From one thread only."""
        self._resets += 1
        link = self._link
        if link is not None:
            link.hang_up()

    def close(self) -> None:
        """End; later requests are Unavailable."""
        self._closed = True
        link, self._link = self._link, None
        if link is not None:
            link.hang_up()  # wakes a thread that sends on it
            if self._send.acquire(timeout=CLOSE_WAIT_S):  # else it connects, and closes this itself
                try:
                    link.close()
                finally:
                    self._send.release()

    def _ready_link(self, failures: int) -> _SharedConnection:
        """The link, or a new one. Raises: Unavailable.

        A thread that has waited for `_send` while an attempt failed (`failures` have grown) fails,
        too: one after the other the threads would wait for many timeouts.
        """
        link = self._link
        while link is None or link.broken:
            if link is not None:
                link.close()
            if self._closed:
                raise Unavailable("redis: closed")
            if self._failures != failures:
                raise Unavailable(self._failure)
            resets = self._resets
            link = self._link = None  # redis-py's errors refer to themselves, and to this frame
            link = self._link = _SharedConnection(self._connect(), self._runtime)
            self.links += 1
            # `close` and `reset` look for a link last, this for them: one sees the other
            if self._closed or self._resets != resets:
                link.hang_up()
        return link

    def _connect(self) -> RedisConnection:
        connection = self._make()
        self._runtime.will_wait()
        try:
            connection.connect()
            if self._prepare is not None:
                self._prepare(connection)
        except (redis.RedisError, OSError) as error:
            connection.disconnect()
            self._failure = f"redis: {error}"
            self._failures += 1
            raise Unavailable(self._failure) from error
        return connection


def _answer(reply: Any) -> Any:
    if reply is _LOST:
        raise Ambiguous("redis: the connection broke while waiting for an answer")
    if isinstance(reply, hiredis.ReplyError):
        raise _translate(reply)
    return reply


class Elsewhere(Unavailable):
    """The server does not have the volume, or no longer; `place` is where it is, if known."""

    def __init__(self, text: str, place: str) -> None:
        super().__init__(text)
        self.place = place


class NoScript(StoreError):
    """The server does not know a script by its hash: load it and ask again."""


def _translate(error: hiredis.ReplyError) -> StoreError:
    text = str(error)
    inner = _IN_SCRIPT.match(text)
    if inner:
        text = inner[1]
    word = text.split(" ", 1)[0]
    if word == "NOSCRIPT":
        return NoScript(text)
    if word == "CORRUPT":  # redis_commit.lua: `CORRUPT why at row R field F`
        why, _, place = text.partition(" ")[2].rpartition(" at row ")
        row, _, field = place.rpartition(" field ")
        return Corrupt(row.encode(), field.encode(), why)
    if word in _ELSEWHERE:
        return Elsewhere(f"redis: {text}", text.split(" ")[2] if word == "MOVED" else "")
    if word == "NOPERM":
        return NotPermitted(f"redis: {text}")
    if _NOT_LOCAL in text:
        return Unavailable(f"redis: {text}")
    return _ERRORS.get(word, Unexpected)(f"redis: {text}")


class Unexpected(StoreError):
    """An error reply that no correct request provokes."""


class NotPermitted(Unexpected):
    """The Redis user may not run this command; docs/REDIS.md lists the rights that it needs."""

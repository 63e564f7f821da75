"""HTTP/1.1 for small requests: pooled connections, bodies straight from and into buffers.

`s3/s3` is the only caller. General clients spend most of a small request on turning headers into
message objects and on layers of adapters; docs/design/object-stores has the figures.

Every wait has an end: connecting, one silent stretch, and the request as a whole, which may take
longer the more bytes it moves. What ran out of time is cancelled by closing its connection, and no
connection is used again unless the answer before was read to its very end.

Threading: any method from any thread; a connection belongs to one request at a time.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Final, NamedTuple

from fsdata.objects.contract import Buffer
from fsmeta.errors import Unavailable
from fsmeta.runtime import Runtime

IDLE_CONNECTIONS_MAX: Final = 64  # kept for the next request; more than most mounts have threads
IDLE_AGE_S: Final = 15.0  # networks forget idle connections, some without a word
FRONT_BYTES: Final = 64 << 10  # one recv(2) takes the headers and a small body
CHUNKS_BYTES_MAX: Final = 65 << 20  # an answer in chunks: no object has more than 64 MiB
SENDMSG_MAX: Final = 1024  # linux/uio.h: buffers of one sendmsg(2)
_NO_BODY: Final = (204, 304)
_GONE: Final = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)


class Timeouts(NamedTuple):
    """How long one attempt may take."""

    connect_s: float = 5.0
    silent_s: float = 15.0  # without a byte
    whole_s: float = 30.0  # and this for each request …
    slowest_bytes_s: int = 128 << 10  # … plus a second for so many bytes of its body


class Endpoint(NamedTuple):
    """A server."""

    host: str
    port: int
    tls: ssl.SSLContext | None


class HttpAnswer(NamedTuple):
    """Status, headers with names in lower case, body. `body` is empty where `into` was filled."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes
    filled: int = 0  # bytes that went to `into`


class _Dropped(Exception):
    """The server closed a connection before it answered anything."""


class _Connection:
    """A socket, and the bytes that were received and not used yet: `_buffer[_begin:_end]`."""

    def __init__(self, runtime: Runtime, sock: socket.socket, silent_s: float) -> None:
        self.sock = sock
        self._clock = runtime.monotonic
        self._silent_s = silent_s
        self._deadline = 0.0
        self.heard = False  # any answer bytes since the request began
        self.idle_since = 0.0  # guarded by the pool's lock
        self._buffer = bytearray(FRONT_BYTES)
        self._front = memoryview(self._buffer)
        self._begin = self._end = 0

    def start(self, whole_s: float) -> None:
        """A request begins, which may take so long."""
        self._deadline = self._clock() + whole_s
        self.heard = False

    def extend(self, more_s: float) -> None:
        """It turns out to be a long one."""
        self._deadline += more_s

    def _be_patient(self) -> None:
        """Bound the next wait. Raises: TimeoutError."""
        left = self._deadline - self._clock()
        if left <= 0:
            raise TimeoutError
        self.sock.settimeout(min(left, self._silent_s))

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Send everything. Raises: OSError."""
        left = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        plain = not isinstance(self.sock, ssl.SSLSocket)
        while left:
            self._be_patient()
            # TLS has no sendmsg
            sent = self.sock.sendmsg(left[:SENDMSG_MAX]) if plain else self.sock.send(left[0])
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def _receive(self) -> bool:
        """Take in what comes next; False at the end of the stream. Raises: OSError."""
        if self._begin == self._end:
            self._begin = self._end = 0
        self._be_patient()
        got = self.sock.recv_into(self._front[self._end :])
        self._end += got
        self.heard = self.heard or got > 0
        return got > 0

    def until(self, mark: bytes) -> bytes:
        """What comes before `mark`, which is skipped. Raises: OSError, _Dropped, Unavailable."""
        while (at := self._buffer.find(mark, self._begin, self._end)) < 0:
            if self._begin > 0:
                rest = bytes(self._front[self._begin : self._end])
                self._front[: len(rest)] = rest
                self._begin, self._end = 0, len(rest)
            if self._end == FRONT_BYTES:
                raise Unavailable(f"the answer has a head of more than {FRONT_BYTES} bytes")
            if not self._receive():
                if self._begin == self._end:
                    raise _Dropped
                raise Unavailable("the answer ended within its head")
        out = bytes(self._front[self._begin : at])
        self._begin = at + len(mark)
        return out

    def fill(self, view: memoryview) -> None:
        """Fill `view` with body. Raises: OSError, Unavailable where the stream ends before."""
        at = min(len(view), self._end - self._begin)
        view[:at] = self._front[self._begin : self._begin + at]
        self._begin += at
        while at < len(view):
            self._be_patient()
            got = self.sock.recv_into(view[at:])
            if got == 0:
                raise Unavailable(f"the answer ended after {at} of {len(view)} bytes")
            at += got

    def take(self, size: int) -> bytes:
        """The next `size` bytes. Raises: as `fill`."""
        if self._end - self._begin >= size:
            out = bytes(self._front[self._begin : self._begin + size])
            self._begin += size
            return out
        room = bytearray(size)
        self.fill(memoryview(room))
        return bytes(room)

    def is_drained(self) -> bool:
        """Nothing has come that was not asked for."""
        return self._begin == self._end


class HttpPool:
    """Requests to one server."""

    def __init__(self, runtime: Runtime, place: Endpoint, timeouts: Timeouts) -> None:
        self._runtime = runtime
        self._place = place
        self.timeouts = timeouts  # replaced whole
        self._lock = runtime.lock()
        self._idle: list[_Connection] = []  # guarded by _lock; the last one used is the next
        self._closed = False  # guarded by _lock

    def request(
        self,
        head: Sequence[bytes],
        body: Sequence[Buffer] = (),
        into: Sequence[memoryview] = (),
    ) -> HttpAnswer:
        """Send one request that may be repeated, and read its answer.

        `head`: request line and headers, without the empty line at the end. `into`: filled with the
        body of an answer of status 200 or 206.
        Raises: Unavailable.
        """
        self._runtime.will_wait()
        return self._ask(_joined(head), body, into)

    def request_all(self, heads: Sequence[Sequence[bytes]]) -> list[HttpAnswer]:
        """Requests without bodies, each sent on a connection of its own before any is answered.

        One that met a connection which the server had closed is sent again.
        Raises: Unavailable.
        """
        self._runtime.will_wait()
        requests = [_joined(head) for head in heads]
        sent: list[_Connection] = []
        try:
            for lines in requests[1:]:
                sent.append(self._take_idle() or self._connect())
                self._send_ahead(sent[-1], lines)
            answers = [self._ask(requests[0])]
            for lines in requests[1:]:
                connection = sent.pop(0)
                try:
                    answers.append(self._exchange(connection, None, (), (), self.timeouts.whole_s))
                except _Dropped:
                    answers.append(self._ask(lines))
            return answers
        finally:
            for connection in sent:
                connection.sock.close()

    def _send_ahead(self, connection: _Connection, lines: bytes) -> None:
        """Send a request whose answer is read later; so is what went wrong."""
        connection.start(self.timeouts.whole_s)
        try:
            connection.send((lines,))
        except OSError:
            pass

    def _ask(
        self, lines: bytes, body: Sequence[Buffer] = (), into: Sequence[memoryview] = ()
    ) -> HttpAnswer:
        """Raises: Unavailable."""
        whole_s = self.timeouts.whole_s + sum(map(len, body)) / self.timeouts.slowest_bytes_s
        while (connection := self._take_idle()) is not None:
            try:
                return self._exchange(connection, lines, body, into, whole_s)
            except _Dropped:
                pass  # the server had closed it; perhaps all of them
        try:
            return self._exchange(self._connect(), lines, body, into, whole_s)
        except _Dropped as error:
            raise Unavailable("the connection was closed before there was an answer") from error

    def _take_idle(self) -> _Connection | None:
        """The connection used last; if that was too long ago, so it was for all of them."""
        with self._lock:
            if not self._idle:
                return None
            if self._runtime.monotonic() - self._idle[-1].idle_since <= IDLE_AGE_S:
                return self._idle.pop()
        self._drop_idle()
        return None

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.sock.close()

    def _connect(self) -> _Connection:
        """Raises: Unavailable."""
        host, port, tls = self._place
        try:
            sock = socket.create_connection((host, port), self.timeouts.connect_s)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if tls is not None:
                    sock = tls.wrap_socket(sock, server_hostname=host)
            except BaseException:
                sock.close()
                raise
        except OSError as error:
            raise Unavailable(f"can't connect to {host}:{port}: {_reason(error)}") from error
        return _Connection(self._runtime, sock, self.timeouts.silent_s)

    def _exchange(
        self,
        connection: _Connection,
        lines: bytes | None,
        body: Sequence[Buffer],
        into: Sequence[memoryview],
        whole_s: float,
    ) -> HttpAnswer:
        """One request on one connection; no `lines` where a GET was sent before.

        Raises: Unavailable, _Dropped.
        """
        keep = False
        try:
            connection.start(whole_s)
            try:
                if lines is not None:
                    connection.send((lines, *body))
            except _GONE:
                pass  # it may have said why before it stopped listening
            no_body = lines is not None and lines.startswith(b"HEAD ")
            slowest_bytes_s = self.timeouts.slowest_bytes_s
            answer, keep = _read_answer(connection, no_body, into, slowest_bytes_s)
            return answer
        except TimeoutError as error:
            self._drop_idle()  # whatever swallowed this one may have swallowed them all
            raise Unavailable("no answer in time") from error
        except OSError as error:
            if not connection.heard and isinstance(error, _GONE):
                raise _Dropped from error
            raise Unavailable(f"the connection failed: {_reason(error)}") from error
        finally:
            self._put_back(connection, keep)

    def _put_back(self, connection: _Connection, keep: bool) -> None:
        with self._lock:
            if keep and not self._closed and len(self._idle) < IDLE_CONNECTIONS_MAX:
                connection.idle_since = self._runtime.monotonic()
                self._idle.append(connection)
                return
        connection.sock.close()

    def close(self) -> None:
        """Close what is idle now, and the rest when it is done."""
        with self._lock:
            self._closed = True
        self._drop_idle()


def _joined(head: Sequence[bytes]) -> bytes:
    return b"\r\n".join((*head, b"", b""))


def _read_answer(
    connection: _Connection, no_body: bool, into: Sequence[memoryview], slowest_bytes_s: int
) -> tuple[HttpAnswer, bool]:
    """An answer, and whether the connection can be used again. Raises: as `_Connection`."""
    while True:
        status, headers, keep = _parse_head(connection.until(b"\r\n\r\n"))
        if status >= 200:
            break
    body, filled = b"", 0
    if no_body or status in _NO_BODY:
        pass
    elif headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        room = into if status in (200, 206) else ()
        body, filled, whole = _read_chunks(connection, room, slowest_bytes_s)
        keep = keep and whole
    else:
        length = _number(headers.get(b"content-length", b""))
        connection.extend(length / slowest_bytes_s)
        if into and status in (200, 206):
            filled = _scatter(connection, length, into)
            keep = keep and filled == length
        else:
            body = connection.take(length)
    return HttpAnswer(status, headers, body, filled), keep and connection.is_drained()


def _parse_head(head: bytes) -> tuple[int, dict[bytes, bytes], bool]:
    """Status, headers, and whether the connection is to stay. Raises: Unavailable."""
    first, *rest = head.split(b"\r\n")
    if not first.startswith(b"HTTP/1.") or not first[9:12].isdigit():
        raise Unavailable("the answer is not HTTP: is this the port of an S3 server?")
    headers: dict[bytes, bytes] = {}
    for line in rest:
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    wish = headers.get(b"connection", b"").lower()
    keep = wish == b"keep-alive" or (first[7:8] == b"1" and wish != b"close")
    return int(first[9:12]), headers, keep


def _number(text: bytes) -> int:
    if not text.isdigit():
        raise Unavailable("the answer does not say how long it is")
    return int(text)


def _scatter(connection: _Connection, length: int, into: Sequence[memoryview]) -> int:
    """Fill `into` with at most `length` bytes of body; how many. Raises: as `fill`."""
    at = 0
    for view in into:
        part = view[: length - at]
        connection.fill(part)
        at += len(part)
    return at


def _read_chunks(
    connection: _Connection, into: Sequence[memoryview], slowest_bytes_s: int
) -> tuple[bytes, int, bool]:
    """The body of an answer in chunks (RFC 9112, 7.1): the bytes, or how many `into` has taken, and
    whether that is all. Raises: as `_Connection`.
    """
    out, room, total = bytearray(), list(into), 0
    try:
        while size := int(connection.until(b"\r\n").partition(b";")[0], 16):
            if not 0 < size <= CHUNKS_BYTES_MAX - total:
                raise Unavailable(f"the answer has more than {CHUNKS_BYTES_MAX} bytes")
            connection.extend(size / slowest_bytes_s)
            if not into:
                out += connection.take(size)
                total += size
            else:
                filled = _scatter(connection, size, room)
                total += filled
                if filled < size:
                    return b"", total, False
                room = _behind(room, filled)
            connection.take(2)
        while connection.until(b"\r\n"):
            pass  # trailers
    except (ValueError, _Dropped) as error:
        raise Unavailable("the answer's chunks are broken") from error
    return bytes(out), total if into else 0, True


def _behind(views: Sequence[memoryview], size: int) -> list[memoryview]:
    """What is left of `views` behind their first `size` bytes."""
    left = []
    for view in views:
        skipped = min(size, len(view))
        size -= skipped
        if skipped < len(view):
            left.append(view[skipped:])
    return left


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.verify_message}; name its certificate authority with the option ca"
    return error.strerror or str(error) or type(error).__name__

"""An HTTP proxy that answers wrongly, late, partly or not at all, between a client and a server.

It understands requests and answers, so that a fault can be aimed: at a method, at the body, at the
moment after the server has done what was asked. It listens on one port and knows one server.
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Final

HEAD_BYTES_MAX: Final = 1 << 16
DRIP_S: Final = 0.1
CHUNK_BYTES: Final = 10_007
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class Kind(Enum):
    """What happens to a request."""

    DELAY = "it reaches the server later"
    HOLD = "it reaches the server when the proxy is healed"
    STATUS = "the proxy answers it with an error; the server never sees it"
    RESET = "the connection is reset; the server never sees it"
    STUCK = "nobody answers; the server never sees it"
    CUT_REQUEST = "the server sees half of its body"
    FLIP_REQUEST = "the server sees its body with one bit wrong"
    LOSE_ANSWER = "the server does it, and the connection ends without an answer"
    CUT_ANSWER = "the connection ends in the middle of the answer's body"
    SHORTEN = "the answer's body lacks its end, and its headers agree"
    FLIP_ANSWER = "the answer's body has one bit wrong"
    DRIP = "the answer's body comes byte by byte"
    CHUNK = "the answer's body comes in chunks, and no header says how long it is"
    PORTAL = "somebody else answers 200, as the portal of a network does"


@dataclass
class Request:
    """What a client sent."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytearray


@dataclass
class Fault:
    """`kind` happens to the next `count` requests that it is meant for."""

    kind: Kind
    count: float = 1
    method: str = ""  # "": any
    status: int = 503
    code: str = "SlowDown"
    seconds: float = 0.0
    when: Callable[[Request], bool] = lambda _: True
    hits: int = 0
    lifted: threading.Event = field(default_factory=threading.Event)

    def is_for(self, request: Request) -> bool:
        return self.method in ("", request.method) and self.when(request)


@dataclass
class _State:
    """Shared by the connections; guarded by `lock`."""

    faults: list[Fault] = field(default_factory=list)
    sockets: set[socket.socket] = field(default_factory=set)
    seen: list[Request] = field(default_factory=list)
    away: bool = False
    connections: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class HttpProxy:
    """Passes everything on until it is given faults."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self._state = _State()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, fault: Fault) -> Fault:
        """From now on, until it is used up; the first one that fits counts."""
        with self._state.lock:
            self._state.faults.append(fault)
        return fault

    def heal(self) -> None:
        """No faults any more; what was stuck goes without an answer."""
        with self._state.lock:
            for fault in self._state.faults:
                fault.lifted.set()
            self._state.faults.clear()
            self._state.away = False

    def go_away(self) -> None:
        """As if the server were down: connections are reset, old and new."""
        with self._state.lock:
            self._state.away = True
            sockets = list(self._state.sockets)
        for each in sockets:
            _shut(each)

    def requests(self) -> list[Request]:
        """What came so far."""
        with self._state.lock:
            return list(self._state.seen)

    def come_back(self) -> None:
        """As if the server were up again; faults stay."""
        with self._state.lock:
            self._state.away = False

    def connections(self) -> int:
        """How many there have been."""
        with self._state.lock:
            return self._state.connections

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._state.lock:
                away = self._state.away
                if not away:
                    self._state.sockets.add(client)
                    self._state.connections += 1
            if away:
                _reset(client)
            else:
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One connection, request after request."""
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = http.client.HTTPConnection("127.0.0.1", self._server_port, timeout=60)
        try:
            stream = client.makefile("rb")
            while (request := _read_request(stream)) is not None:
                fault = self._fault_for(request)
                if not self._handle(client, server, request, fault):
                    break
        except (OSError, http.client.HTTPException):
            pass  # one side has gone
        finally:
            with self._state.lock:
                self._state.sockets.discard(client)
            server.close()
            _reset(client)

    def _fault_for(self, request: Request) -> Fault | None:
        with self._state.lock:
            self._state.seen.append(request)
            for fault in self._state.faults:
                if fault.hits < fault.count and fault.is_for(request):
                    fault.hits += 1
                    return fault
        return None

    def _handle(
        self,
        client: socket.socket,
        server: http.client.HTTPConnection,
        request: Request,
        fault: Fault | None,
    ) -> bool:
        """Answer one request; False where the connection has to end."""
        kind = fault.kind if fault is not None else None
        if fault is not None and kind is Kind.STATUS:
            text = f"<Error><Code>{fault.code}</Code></Error>".encode()
            shown = b"" if request.method == "HEAD" else text
            client.sendall(_head(fault.status, [], len(text)) + shown)
            return True
        if kind is Kind.PORTAL:
            client.sendall(_head(200, [("Content-Type", "text/html")], 4) + b"<p/>")
            return True
        if kind is Kind.RESET:
            return False
        if fault is not None and kind is Kind.STUCK:
            fault.lifted.wait()
            return False
        if kind is Kind.CUT_REQUEST:
            _send_half(server, request)
            return False
        if fault is not None and kind is Kind.DELAY:
            time.sleep(fault.seconds)
        if fault is not None and kind is Kind.HOLD:
            fault.lifted.wait()
        if kind is Kind.FLIP_REQUEST and request.body:
            request.body[len(request.body) // 2] ^= 0x10
        answer = _ask(server, request)
        body = bytearray(answer.read())
        if kind is Kind.LOSE_ANSWER:
            return False
        return _give(client, request, answer, body, kind)

    def close(self) -> None:
        self.heal()
        _shut(self._listener)
        self._listener.close()
        self.go_away()

    def __enter__(self) -> HttpProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _read_request(stream: object) -> Request | None:
    """The next request, None at the end of the stream."""
    assert hasattr(stream, "readline")
    assert hasattr(stream, "read")
    first = stream.readline(HEAD_BYTES_MAX).decode("latin-1").split()
    if len(first) != 3:
        return None
    headers: list[tuple[str, str]] = []
    while line := stream.readline(HEAD_BYTES_MAX).decode("latin-1").rstrip("\r\n"):
        name, _, value = line.partition(":")
        headers.append((name, value.strip()))
    length = next((int(v) for n, v in headers if n.lower() == "content-length"), 0)
    body = bytearray(stream.read(length))
    return Request(first[0], first[1], headers, body) if len(body) == length else None


def _ask(server: http.client.HTTPConnection, request: Request) -> http.client.HTTPResponse:
    server.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
    for name, value in request.headers:
        server.putheader(name, value)
    server.endheaders(bytes(request.body) or None)
    return server.getresponse()


def _send_half(server: http.client.HTTPConnection, request: Request) -> None:
    whole, request.body = request.body, request.body[: len(request.body) // 2]
    server.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
    for name, value in request.headers:
        server.putheader(name, value)
    server.endheaders(bytes(request.body))
    request.body = whole


def _give(
    client: socket.socket,
    request: Request,
    answer: http.client.HTTPResponse,
    body: bytearray,
    kind: Kind | None,
) -> bool:
    """Pass an answer on; False where the connection has to end."""
    headers = [(n, v) for n, v in answer.getheaders() if n.lower() not in _REWRITTEN]
    length = len(body)
    if request.method == "HEAD":
        length = int(answer.getheader("Content-Length") or 0)
    if kind is Kind.FLIP_ANSWER and body:
        body[len(body) // 2] ^= 0x10
    if kind is Kind.SHORTEN:
        del body[len(body) // 2 :]
        length = len(body)
    head = _head(answer.status, headers, length)
    if kind is Kind.CUT_ANSWER:
        client.sendall(head + body[: len(body) // 2])
        return False
    if kind is Kind.DRIP:
        client.sendall(head)
        for byte in body:
            time.sleep(DRIP_S)
            client.sendall(bytes([byte]))
        return True
    if kind is Kind.CHUNK and body:
        client.sendall(_head(answer.status, [*headers, ("Transfer-Encoding", "chunked")], None))
        for at in range(0, len(body), CHUNK_BYTES):
            part = body[at : at + CHUNK_BYTES]
            client.sendall(b"%x;x=y\r\n%b\r\n" % (len(part), bytes(part)))
        client.sendall(b"0\r\nx-trailer: 1\r\n\r\n")
        return True
    client.sendall(head + body)
    return True


_REWRITTEN: Final = ("content-length", "transfer-encoding", "connection")


def _head(status: int, headers: list[tuple[str, str]], length: int | None) -> bytes:
    lines = [f"HTTP/1.1 {status} x", *(f"{n}: {v}" for n, v in headers)]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _reset(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()

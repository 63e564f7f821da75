"""A TCP proxy that cuts connections at the worst moment, between a client and a real Redis."""

from __future__ import annotations

import socket
import threading
from enum import Enum
from types import TracebackType


class Cut(Enum):
    """When the connection breaks, seen from a request that contains the trigger."""

    BEFORE_REQUEST = "the server never sees it"
    IN_REQUEST = "the server sees half of it"
    AFTER_REQUEST = "the server sees it, and that the client is gone"
    BEFORE_REPLY = "the server has answered, the client doesn't hear"
    IN_REPLY = "the client hears the first byte"


class Proxy:
    """Listens on `port`; `arm` makes it cut one connection, `refuse` turns everybody away."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.refuse = False
        self._lock = threading.Lock()
        self._cut: Cut | None = None  # guarded by _lock
        self._trigger = b""  # guarded by _lock
        self._sockets: set[socket.socket] = set()  # guarded by _lock
        self.cuts = 0  # guarded by _lock
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, cut: Cut, trigger: bytes) -> None:
        """Break the connection of the next request that contains `trigger`."""
        with self._lock:
            self._cut, self._trigger = cut, trigger

    def drop_all(self) -> None:
        """Break every connection now."""
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            _shut(each)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuse:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._server_port))
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, server}
            pair = _Pair(self, client, server)
            threading.Thread(target=pair.requests, daemon=True).start()
            threading.Thread(target=pair.replies, daemon=True).start()

    def take(self, request: bytes) -> Cut | None:
        """The cut for this request, if it is the one; once."""
        with self._lock:
            if self._cut is None or self._trigger not in request:
                return None
            cut, self._cut = self._cut, None
            self.cuts += 1
            return cut

    def close(self) -> None:
        _shut(self._listener)
        self._listener.close()
        self.drop_all()

    def forget(self, *sockets: socket.socket) -> None:
        with self._lock:
            self._sockets -= {*sockets}

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Pair:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._reply_cut: Cut | None = None
        self._first = threading.Lock()  # held by the thread that ended first

    def requests(self) -> None:
        """Client to server, until the end or the cut."""
        try:
            while data := self._client.recv(1 << 20):
                cut = self._proxy.take(data)
                if cut is Cut.BEFORE_REQUEST:
                    break
                if cut is Cut.IN_REQUEST:
                    self._server.sendall(data[: len(data) // 2])
                    break
                if cut in (Cut.BEFORE_REPLY, Cut.IN_REPLY):
                    self._reply_cut = cut
                self._server.sendall(data)
                if cut is Cut.AFTER_REQUEST:
                    break
        except OSError:
            pass  # the other thread was first
        self._end()

    def replies(self) -> None:
        """Server to client."""
        try:
            while data := self._server.recv(1 << 20):
                if self._reply_cut is Cut.IN_REPLY:
                    self._client.sendall(data[:1])
                if self._reply_cut is not None:
                    break
                self._client.sendall(data)
        except OSError:
            pass  # the other thread was first
        self._end()

    def _end(self) -> None:
        """Wake the other thread; the second to come here closes."""
        self._proxy.forget(self._client, self._server)
        _shut(self._client)
        _shut(self._server)
        if not self._first.acquire(blocking=False):
            self._client.close()
            self._server.close()


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # gone already

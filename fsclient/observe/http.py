"""A small HTTP server in one thread: metrics, health and the web page of a mount.

It answers GET and HEAD of fixed paths, one request at a time, each on a connection of its own. The
address is bound before the mount exists, so that a port in use is an error of `slicefs mount`.

It answers requests whose Host is an IP address, `localhost` or a name of this host: a page from
elsewhere whose name is made to lead here (DNS rebinding) has its own name there. Paths that are
`public`, as those of Prometheus, answer any Host, but on a loopback address.

Threading: `bind` and `start` by the thread that mounts; routes are called by the server's thread.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Container, Mapping
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from ipaddress import ip_address
from socketserver import TCPServer
from typing import Any, Final

from fsclient.observe.routes import Address, Reply, Route
from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime, spawn_lasting

log = logging.getLogger(__name__)

SILENT_S: Final = 5.0  # a client that says nothing for so long is left: others wait for it
HEAD_BYTES_MAX: Final = 64 << 10  # of a request, all headers included


def is_own_host(host: str | None, names: Container[str]) -> bool:
    """Whether a Host header has an address or one of `names`; none at all is fine."""
    if host is None:
        return True
    name = host.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    name = name.rstrip(".")
    if name in names:
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _names_of(address: Address) -> frozenset[str]:
    """Names by which this host is asked for."""
    host = socket.gethostname().lower()
    return frozenset({"localhost", address.host.lower(), host, host.partition(".")[0]})


class _Server(TCPServer):
    """Listens at once; the handler finds the routes here."""

    allow_reuse_address = True

    def __init__(self, address: Address, option: str) -> None:
        shown = f"{address.host}:{address.port}"
        try:
            (family, _, _, _, place), *_ = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            self.address_family = family
            super().__init__((str(place[0]), address.port), _Handler)
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(
                f"{option} can't listen on {shown}: {why}; choose another address or port"
            ) from error
        self.is_loopback = ip_address(str(place[0])).is_loopback
        self.names = _names_of(address)
        self.routes: Mapping[str, Route] = {}
        self.public: Container[str] = ()  # paths
        self.clock: Callable[[], float] = float  # of the runtime, once it answers

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log at debug level: a client that goes away is no error."""
        del request
        log.debug("a request of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    timeout = SILENT_S  # of all that is sent, which socket.sendall counts together
    server: _Server
    server_version = "slicefs"
    sys_version = ""

    def setup(self) -> None:
        """Have the whole head within SILENT_S: a client that sends it byte by byte blocks all
        others.

        Raises: TimeoutError.
        """
        head = b""
        clock = self.server.clock
        deadline = clock() + SILENT_S
        while b"\r\n\r\n" not in head and len(head) < HEAD_BYTES_MAX:
            left = deadline - clock()
            if left <= 0:
                raise TimeoutError("the request did not come in time")
            self.request.settimeout(left)
            piece = self.request.recv(HEAD_BYTES_MAX)
            if not piece:
                break
            head += piece
        super().setup()
        self.rfile.close()
        self.rfile = BytesIO(head)

    def do_GET(self) -> None:
        """Answer the path, whatever its query."""
        path = self.path.partition("?")[0]
        route = self.server.routes.get(path)
        if not self._may_ask(path):
            why = b"this Host is not answered: ask by the address, or a name of this host\n"
            reply = Reply("text/plain", why, 403)
        elif route is None:
            known = " ".join(self.server.routes)
            reply = Reply("text/plain", f"not found; there are {known}\n".encode(), 404)
        else:
            try:
                reply = route()
            except Exception as error:  # noqa: BLE001  (the edge: the client waits)
                log.warning("%s of the HTTP endpoint: %r", self.path, error)
                reply = Reply("text/plain", b"failed; the log of the mount says why\n", 500)
        self.send_response(reply.code)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def _may_ask(self, path: str) -> bool:
        """Whether the Host is one that this path answers."""
        if path in self.server.public and not self.server.is_loopback:
            return True
        return is_own_host(self.headers.get("Host"), self.server.names)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log requests at debug level."""
        log.debug(format, *args)


class Listener:
    """One address, bound from construction on."""

    def __init__(self, address: Address, option: str) -> None:
        """Raises: ConfigError where `address` can't be listened on."""
        self.address = address
        self._server = _Server(address, option)
        os.set_inheritable(self._server.fileno(), False)

    def start(
        self, routes: Mapping[str, Route], runtime: Runtime, public: Container[str] = ()
    ) -> None:
        """Answer `routes` from now on, until the process ends; those in `public` any Host."""
        self._server.routes = dict(routes)
        self._server.public = public
        self._server.clock = runtime.monotonic
        spawn_lasting(runtime, f"http-{self.address.port}", self._server.serve_forever)

    def close(self) -> None:
        """Stop listening: nothing was started."""
        self._server.server_close()

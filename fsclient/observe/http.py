"""A small HTTP server in one thread: metrics, health and the web page of a mount.

It answers GET and HEAD of fixed paths, one request at a time, each on a connection of its own. The
address is bound before the mount exists, so that a port in use is an error of `slicefs mount`.

Threading: `bind` and `start` by the thread that mounts; routes are called by the server's thread.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any, Final, NamedTuple

from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime, spawn_lasting

log = logging.getLogger(__name__)

SILENT_S: Final = 5.0  # a client that says nothing for so long is left: others wait for it
PORT_MAX: Final = 65535
LOOPBACK: Final = "127.0.0.1"


class Address(NamedTuple):
    """Where to listen."""

    host: str
    port: int


class Reply(NamedTuple):
    """What a route answers."""

    content_type: str
    body: bytes
    code: int = 200


Route = Callable[[], Reply]


def parse_address(text: str, option: str) -> Address:
    """`HOST:PORT`, `[IPv6]:PORT`, or a port on the loopback address. Raises: ConfigError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= PORT_MAX):
        raise ConfigError(f"{option} {text!r}: write HOST:PORT, as in {LOOPBACK}:9567")
    return Address(host, int(port))


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
        self.routes: Mapping[str, Route] = {}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""
        del request
        log.debug("a request of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    timeout = SILENT_S
    server: _Server
    server_version = "slicefs"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer the path, whatever its query."""
        route = self.server.routes.get(self.path.partition("?")[0])
        if route is None:
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

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Requests are no news."""
        log.debug(format, *args)


class Listener:
    """One address, bound from construction on."""

    def __init__(self, address: Address, option: str) -> None:
        """Raises: ConfigError where `address` can't be listened on."""
        self.address = address
        self._server = _Server(address, option)
        os.set_inheritable(self._server.fileno(), False)

    def start(self, routes: Mapping[str, Route], runtime: Runtime) -> None:
        """Answer `routes` from now on, until the process ends."""
        self._server.routes = dict(routes)
        spawn_lasting(runtime, f"http-{self.address.port}", self._server.serve_forever)

    def close(self) -> None:
        """Stop listening: nothing was started."""
        self._server.server_close()

"""Addresses to listen on, and what a path of them answers.

They are apart from `observe/http`, because a mount that listens nowhere spares the modules of
HTTP and TLS: time at its start, and some MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from fsmeta.errors import ConfigError

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

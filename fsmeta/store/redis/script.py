"""Requests to Redis: a command, several that travel together, a Lua script.

A request that changes nothing may be sent again, so a lost answer to it counts as a request that
was not sent. Called by `redis/engine` and `redis/commit`; any thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, cast

import hiredis
import msgpack

from fsmeta.errors import Ambiguous, Unavailable
from fsmeta.store.redis.connection import Channel, NoScript

# a command of any length; the stubs of hiredis know only pairs
pack: Final = cast("Callable[[tuple[bytes, ...]], bytes]", hiredis.pack_command)

_LENGTHS_MAX: Final = 64  # rows are shorter, but for long prefixes
_LENGTHS: Final = [b"$%d" % length for length in range(_LENGTHS_MAX)]


def ask(channel: Channel, command: tuple[bytes, ...], changes: bool = False) -> Any:
    """One request; if it `changes` something, a lost answer is Ambiguous."""
    try:
        return channel.request(pack(command))
    except Ambiguous as error:
        if changes:
            raise
        raise Unavailable(str(error)) from error


def ask_many(channel: Channel, packed: bytes, count: int) -> list[Any]:
    """`count` requests that change nothing, sent together."""
    try:
        return channel.request_many(packed, count)
    except Ambiguous as error:
        raise Unavailable(str(error)) from error


def as_msgpack(body: object) -> bytes:
    """An argument for a script that is more than bytes."""
    try:
        packer = _packers.pop()
    except IndexError:
        packer = msgpack.Packer(use_bin_type=False)
    packed: bytes = packer.pack(body)
    _packers.append(packer)  # not one that failed: it may hold half of its body
    return packed


# at most one for each thread that packs; each has a buffer of 256 KiB, which is dear to make
_packers: Final[list[msgpack.Packer]] = []


class Script:
    """A Lua script and the hash the server knows it by."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
        self._words = b"$7\r\nEVALSHA\r\n$%d\r\n%b\r\n" % (len(self.sha), self.sha)

    def run(
        self,
        channel: Channel,
        keys: Collection[bytes],
        arguments: Sequence[bytes],
        changes: bool = False,
    ) -> Any:
        """`ask` for what the script answers; `keys` are those that it declares."""
        try:
            return channel.request(self.packed(keys, arguments))
        except NoScript:
            tail = (b"%d" % len(keys), *keys, *arguments)
            return ask(channel, (b"EVAL", self.source, *tail), changes)
        except Ambiguous as error:
            if changes:
                raise
            raise Unavailable(str(error)) from error

    def packed(self, keys: Collection[bytes], arguments: Sequence[bytes]) -> bytes:
        """The request, packed by hand: faster than `pack`, as most of it is known."""
        count = b"%d" % len(keys)
        words = [
            b"*%d\r\n%b$%d\r\n%b" % (3 + len(keys) + len(arguments), self._words, len(count), count)
        ]
        for key in keys:
            words += (_LENGTHS[len(key)] if len(key) < _LENGTHS_MAX else b"$%d" % len(key), key)
        for each in arguments:
            words += (b"$%d" % len(each), each)
        words.append(b"")
        return b"\r\n".join(words)

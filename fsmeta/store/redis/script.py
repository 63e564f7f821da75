"""Requests to Redis: a command, several that travel together, a Lua script.

What changes nothing may be sent again, so there a lost answer is no more than a request that was
not sent. Called by `redis/engine` and `redis/commit`; any thread.
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
    packed: bytes = msgpack.packb(body, use_bin_type=False)
    return packed


class Script:
    """A Lua script and the hash the server knows it by."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()

    def run(
        self,
        channel: Channel,
        keys: Collection[bytes],
        arguments: Sequence[bytes],
        changes: bool = False,
    ) -> Any:
        """`ask` for what the script answers; `keys` are those that it declares."""
        tail = (b"%d" % len(keys), *keys, *arguments)
        try:
            return ask(channel, (b"EVALSHA", self.sha, *tail), changes)
        except NoScript:
            return ask(channel, (b"EVAL", self.source, *tail), changes)

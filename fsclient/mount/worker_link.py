"""A client's end of the channel to its supervisor.

Called by `serve`. A client that has no supervisor has none. Where the supervisor dies the client
goes on, as one that never had any.

Threading: a thread of its own answers pings; the rest is called from the main thread.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from struct import Struct
from typing import Final

from fsclient.fuse.dispatch.fast_lane import Lane
from fsclient.fuse.dispatch.subdir import Serve, Served
from fsclient.fuse.session.init import Agreement, kept_agreement, pack_kept
from fsclient.fuse.wire.protocol import RESENT, Opcode
from fsclient.survival import channel, tables
from fsclient.survival.arena import Arena
from fsclient.survival.channel import Inherited
from fsclient.survival.kept import (
    BUFFER_SHARE,
    DATA_BYTES_MAX,
    PIECES,
    U64,
    KeptRecords,
    serving,
)
from fsclient.survival.survival import Survival
from fsclient.survival.warm import modules_used
from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime
from fsmeta.types import Caller, Ino

log = logging.getLogger(__name__)

_unique: Final = Struct("=8xQ").unpack_from  # of a request: abi.IN_HEADER
_SENT: Final = RESENT - 1  # the bits of it that stay where a request is sent again


class WorkerLink:
    """See the module."""

    def __init__(self, given: Inherited, runtime: Runtime, buffer_bytes: int) -> None:
        """`buffer_bytes`: the limit of memory for file data.

        Raises: ConfigError where the last client wrote another format.
        """
        Arena.require_format(given.arena)
        self.given = given
        self._runtime = runtime
        self._data_max = min(DATA_BYTES_MAX, buffer_bytes // BUFFER_SHARE)
        self._end = socket.socket(fileno=given.channel)
        self._end.set_inheritable(False)
        self.takes_over = bool(given.takes_over)
        self.descriptor = -1  # of a mount that is taken over
        self._arena: Arena | None = None  # from `standby` on

    def standby(self) -> Survival:
        """All that can be checked beforehand is; what is needed to go on, when it is our turn.

        The first client waits until its supervisor, which has begun with it, can start others.
        Raises: ConfigError where the turn never comes.
        """
        address = os.environ.pop(channel.ADDRESS_ENV, "")
        if self.takes_over:
            channel.send(self._end, channel.STANDBY)
            message, self.descriptor = channel.receive(self._end) or (b"", -1)
            if message != channel.GO or self.descriptor < 0:
                raise ConfigError("the supervisor has left: mount again")
        else:
            message, _ = channel.receive(self._end) or (b"", -1)
            if not message.startswith(channel.HERE):
                raise ConfigError("the supervisor has not started: mount again")
            address = os.fsdecode(message[len(channel.HERE) :])
        self._arena = arena = Arena(self.given.arena, self._runtime)
        first = tables.last_number(arena) // PIECES + 1
        kept = KeptRecords(arena, self._runtime, first, self._data_max)
        given = self.given
        how = (given.generation, self.takes_over, given.supervisor, address, given.status)
        return Survival(kept, *how)

    def waits(self) -> bool:
        """Whether this client waits for a store that is away: the mount has no other client.

        It tells the supervisor that it does.
        """
        alone = self.given.takes_over == channel.ALONE
        return alone and channel.send(self._end, channel.PONG)

    def mounted(self, fd: int) -> None:
        """The supervisor is to keep the mount alive."""
        channel.send(self._end, channel.MOUNTED, fd)

    def ready(self) -> None:
        """The mount is served."""
        channel.send(self._end, channel.READY + modules_used())
        self._runtime.spawn("supervisor", self._listen)

    def ended(self, code: int) -> None:
        """This client leaves for good, with that exit code."""
        channel.send(self._end, channel.ENDED + b" %d" % code)

    def _listen(self) -> None:
        while True:
            found = channel.receive(self._end)
            if found is None or not found[0]:
                log.warning("the supervisor has ended: the mount does not survive this process")
                return
            if found[0] == channel.PING:
                channel.send(self._end, channel.PONG)
                if self._arena is not None:
                    self._arena.tidy()


def keep_agreement(kept: KeptRecords, agreed: Agreement, root: Ino, polls: bool) -> None:
    """What later clients of the mount are to go by; `polls`: idle polling is worth it."""
    kept.put(b"N", U64.pack(root) + pack_kept(agreed))
    kept.put(b"Q", bytes((polls,)))


def finds_polling(kept: KeptRecords) -> bool:
    """Whether the first client of the mount has found that idle polling is worth it."""
    return kept.kept(b"Q") == b"\1"


def find_agreement(kept: KeptRecords) -> tuple[Agreement, Ino]:
    """What the first client of the mount has agreed on. Raises: ConfigError."""
    value = kept.kept(b"N")
    if value is None:
        raise ConfigError("the last client died before it had agreed with the kernel: mount again")
    return kept_agreement(value[U64.size :]), Ino(U64.unpack(value[: U64.size])[0])


def noting(serve: Serve, slot: Callable[[], int | None]) -> Serve:
    """`serve`, with the request noted that a thread serves; see `SessionConfig.around`."""

    def serve_noting(opcode: int, caller: Caller, ino: int, view: memoryview, end: int) -> Served:
        serving(slot() or 0, _unique(view)[0] & _SENT)
        return serve(opcode, caller, ino, view, end)

    return serve_noting


def noting_lane(opcode: int, lane: Lane) -> Lane:
    """`lane` with the request noted, as `noting` does, where it opens or closes; see
    `SessionConfig.around_lane`."""
    if opcode not in (Opcode.OPEN, Opcode.RELEASE):
        return lane

    def serve_noting(ino: Ino, view: memoryview, end: int) -> bytes | None:
        serving(0, _unique(view)[0] & _SENT)
        return lane(ino, view, end)

    return serve_noting

"""A mount passes from one supervisor to another, as when its container is replaced.

The new supervisor connects to the old one, which sends what it keeps: the arena, the file of the
client's end, the descriptor of /dev/fuse, and the descriptors that the starter of the mount left
open for it (a lock, most likely). The new one starts a client, which checks all that it can, and
then claims the mount. The old one kills its client, and stands by until the new client serves: a
new supervisor that ends before that costs a pause, and the old one goes on.

    new → old   HAND_OVER; CLAIM; OK (the new client serves)
    old → new   a reason why not, or GIVEN and a name (+ descriptor) for each, and OFFERED with
                numbers; YOURS

Called by both supervisors and by `slicefs mount --take-over`; imports the standard library only.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Final

from fsclient.survival import channel

HAND_OVER: Final = b"hand over"
GIVEN: Final = b"given "
OFFERED: Final = b"offered "
CLAIM: Final = b"claim"
YOURS: Final = b"yours"
VERSION: Final = 1  # of these messages
_ANSWER_S: Final = 10.0
_ENV: Final = "SLICEFS_PREDECESSOR"
_ARENA: Final = "arena"
_STATUS: Final = "status"
_DEVICE: Final = "device"
_HELD: Final = "held"  # what the starter of the mount left open


class HandoverRefused(Exception):
    """The old supervisor does not hand the mount over; the text says why."""


class Predecessor:
    """The old supervisor, as the new one sees it."""

    def __init__(self, end: socket.socket, given: Mapping[str, int], numbers: Sequence[int]):
        self.end = end
        self.arena = given[_ARENA]
        self.status = given[_STATUS]
        self.device = given[_DEVICE]
        self.generation, self.token = numbers
        self._given = given

    @classmethod
    def ask(cls, address: str) -> Predecessor:
        """Raises: OSError, HandoverRefused."""
        end = channel.connect(address, _ANSWER_S)
        given: dict[str, int] = {}
        try:
            end.send(HAND_OVER + b"\n%d" % VERSION)
            while True:
                message, fd = channel.receive(end) or (b"", -1)
                if message.startswith(GIVEN) and fd >= 0:
                    given[message[len(GIVEN) :].decode()] = fd
                elif message.startswith(OFFERED):
                    return cls(end, given, [int(word) for word in message.split()[1:]])
                else:
                    reason = message.decode(errors="replace")
                    raise HandoverRefused(reason or "the supervisor has ended")
        except BaseException:
            for fd in given.values():
                os.close(fd)
            end.close()
            raise

    def bequeath(self, environment: dict[str, str]) -> None:
        """Let the program that this process becomes have it: see `inherited`."""
        words = [f"{name}={fd}" for name, fd in self._given.items()]
        words += [f"end={self.end.fileno()}", f"numbers={self.generation},{self.token}"]
        environment[_ENV] = ":".join(words)
        for fd in (self.end.fileno(), *self._given.values()):
            os.set_inheritable(fd, True)

    @classmethod
    def inherited(cls) -> Predecessor | None:
        """What the program before this one has left in the environment, if anything."""
        text = os.environ.pop(_ENV, "")
        if not text:
            return None
        found = dict(word.split("=", 1) for word in text.split(":"))
        end = socket.socket(fileno=int(found.pop("end")))
        end.settimeout(_ANSWER_S)
        numbers = [int(word) for word in found.pop("numbers").split(",")]
        given = {name: int(fd) for name, fd in found.items()}
        for fd in (end.fileno(), given[_ARENA], given[_STATUS], given[_DEVICE]):
            os.set_inheritable(fd, False)
        return cls(end, given, numbers)

    def claim(self) -> bool:
        """Have the old client ended; whether the mount is ours now."""
        if not channel.send(self.end, CLAIM):
            return False
        found = channel.receive(self.end)
        return found is not None and found[0] == YOURS

    def leave(self, served: bool) -> None:
        """The mount is served by a client of ours, or the old supervisor is to go on."""
        if served:
            channel.send(self.end, channel.OK)
        self.end.close()


class Successor:
    """The new supervisor, as the old one sees it."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.claimed = False  # the old client has ended, and none is started

    def offer(self, given: Mapping[str, int], held: Sequence[int], numbers: Sequence[int]) -> None:
        """Send what the mount consists of; `held` is what the starter left open."""
        descriptors = {**given, **{f"{_HELD}{fd}": fd for fd in held}}
        for name, fd in descriptors.items():
            channel.send(self.end, GIVEN + name.encode(), fd)
        channel.send(self.end, OFFERED + b" ".join(b"%d" % number for number in numbers))

    def next_message(self) -> bytes:
        """The message that waits; empty where it has ended."""
        found = channel.receive(self.end, wait=False)
        return b"" if found is None else found[0]

    def yield_to(self) -> None:
        """The mount is theirs."""
        self.claimed = True
        channel.send(self.end, YOURS)


def given_of(arena: int, status: int, device: int) -> dict[str, int]:
    """What a mount consists of, by the names that both sides use."""
    return {_ARENA: arena, _STATUS: status, _DEVICE: device}


def left_open(known: Sequence[int]) -> list[int]:
    """Descriptors that this program was started with, but for the standard ones and `known`."""
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return [fd for fd in found if fd > 2 and fd not in known and _is_inheritable(fd)]


def _is_inheritable(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False  # of the listing itself

"""Messages between a supervisor and its worker: short packets, of which some carry a descriptor.

Called by both sides; imports the standard library only, because the supervisor stays small. Python
3.11's `socket.recv_fds` ignores its flags, so packets are received by `recvmsg` itself.

    worker → supervisor   STANDBY (checked, waits), MOUNTED (+ descriptor), READY, PONG, DRAINED,
                          ENDED
    supervisor → worker   GO (+ descriptor: take the mount over; without: mount), PING, DRAIN
"""

from __future__ import annotations

import array
import os
import socket
from typing import Final, NamedTuple

STANDBY: Final = b"standby"
MOUNTED: Final = b"mounted"
READY: Final = b"ready"
PONG: Final = b"pong"
DRAINED: Final = b"drained"
ENDED: Final = b"ended"
GO: Final = b"go"
PING: Final = b"ping"
DRAIN: Final = b"drain"
WORKER_ENV: Final = "SLICEFS_WORKER"  # names the descriptors that a worker inherits
HANDED_OVER: Final = 76  # exit code of a worker that has left its mount to the next one
_PACKET_BYTES_MAX: Final = 4096
_FD_BYTES: Final = array.array("i").itemsize


class Inherited(NamedTuple):
    """What the supervisor gives a worker."""

    channel: int  # descriptor of the socket to the supervisor
    arena: int
    tell: int  # a pipe to the command that waits; -1: none
    generation: int  # of the worker: 1 is the first
    supervisor: int  # its process

    def packed(self) -> str:
        """For the environment."""
        return ":".join(map(str, self))


def inherited() -> Inherited | None:
    """What this process was given; None where it has no supervisor."""
    words = os.environ.pop(WORKER_ENV, "").split(":")
    return Inherited(*map(int, words)) if len(words) == len(Inherited._fields) else None


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: bytes, fd: int = -1) -> bool:
    """Send a message, with a descriptor if there is one; False where no one receives it."""
    ancillary = []
    if fd >= 0:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    try:
        end.sendmsg([message], ancillary)
    except OSError:
        return False
    return True


def receive(end: socket.socket, wait: bool = True) -> tuple[bytes, int] | None:
    """The next message and its descriptor or -1; None where none waits, b"" at the end."""
    flags = 0 if wait else socket.MSG_DONTWAIT
    try:
        message, ancillary, _, _ = end.recvmsg(
            _PACKET_BYTES_MAX, socket.CMSG_SPACE(_FD_BYTES), flags | socket.MSG_CMSG_CLOEXEC
        )
    except BlockingIOError:
        return None
    except OSError:
        return b"", -1
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            return message, array.array("i", data[:_FD_BYTES])[0]
    return message, -1

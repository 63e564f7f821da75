"""Messages between a supervisor and its worker: short packets, of which some carry a descriptor.

Called by both sides; imports the standard library only, because the supervisor stays small. Python
3.11's `socket.recv_fds` ignores its flags, so packets are received by `recvmsg` itself.

    worker → supervisor   STANDBY (checked, waits), MOUNTED (+ descriptor), READY and the modules
                          it needed, PONG, ENDED and an exit code
    supervisor → worker   HERE and a path (to the first one: that is where commands reach the
                          supervisor), NEEDED and a directory (to one that is warm: begin there;
                          + descriptor: log to it),
                          PING, GO (+ descriptor: take the mount over)
    command → supervisor  UPGRADE and a program, one argument a line; the answer is OK or a reason

A command is as powerful as the supervisor: it names a program that this executes, or takes its
descriptors. So it comes through a socket in a directory that other users and other containers do
not see. A name in the network namespace would be open to root of every container that has the
network of its host, and any process could take it first.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

STANDBY: Final = b"standby"
MOUNTED: Final = b"mounted"
READY: Final = b"ready"
PONG: Final = b"pong"
ENDED: Final = b"ended"
HERE: Final = b"here "
NEEDED: Final = b"needed "
GO: Final = b"go"
PING: Final = b"ping"
UPGRADE: Final = b"upgrade"
OK: Final = b"ok"
CLIENT_NAME: Final = "slicefs"  # as that of a client without a supervisor
WARM_NAME: Final = "slicefs-warm"
SUPERVISOR_NAME: Final = "slicefs-super"
PROGRAM: Final = "fsclient.survival.supervisor"  # a word of each supervisor's command line
WORKER_ENV: Final = "SLICEFS_WORKER"  # names the descriptors that a worker inherits
WARM_ENV: Final = "SLICEFS_WARM"  # names the modules that a worker imports before it waits
ADDRESS_ENV: Final = "SLICEFS_SUPERVISOR"  # tells a worker where commands reach its supervisor
RUNTIME_DIR_ENV: Final = "SLICEFS_RUNTIME_DIR"
FIRST: Final = 0
ALONE: Final = 1
BESIDE: Final = 2
_PACKET_BYTES_MAX: Final = 64 << 10
_FD_BYTES: Final = array.array("i").itemsize
_CREDENTIALS: Final = struct.Struct("3i")


class Inherited(NamedTuple):
    """What the supervisor gives a worker."""

    channel: int  # descriptor of the socket to the supervisor
    arena: int
    status: int  # the file in which the client says how it ended
    tell: int  # a pipe to the command that waits; -1: none
    generation: int  # of the worker: 1 is the first
    takes_over: int  # ALONE, or BESIDE one that serves; FIRST: none has mounted
    supervisor: int  # its process
    token: int  # of the client, for stores that tell clients apart

    def packed(self) -> str:
        """For the environment."""
        return ":".join(map(str, self))


def inherited(stays: bool = False) -> Inherited | None:
    """What this process was given; None where it has no supervisor. `stays`: it is asked again."""
    found = os.environ.get(WORKER_ENV, "") if stays else os.environ.pop(WORKER_ENV, "")
    words = found.split(":")
    return Inherited(*map(int, words)) if len(words) == len(Inherited._fields) else None


def show_as(name: str) -> None:
    """Have ps(1), top(1) and pgrep(1) show this process by a name, instead of Python's.

    A program that is started as a script has the script's name. The kernel keeps 15 bytes.
    """
    with suppress(OSError), open("/proc/self/comm", "wb") as file:
        file.write(name.encode())


def log_to(fd: int) -> None:
    """Have standard error be this file, and standard output, if both are the same one."""
    if _is_same(fd, 2):
        return
    if _is_same(1, 2):
        os.dup2(fd, 1)
    os.dup2(fd, 2)


def _is_same(one: int, other: int) -> bool:
    """Whether two descriptors are of one file."""
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False  # one is closed


def enter(directory: str) -> None:
    """Begin in the directory in which the mount was begun, if it is still there."""
    try:
        os.chdir(directory)
    except OSError:
        os.chdir("/")


def listen() -> tuple[socket.socket, str]:
    """Where commands reach this supervisor, and its path. Raises: OSError.

    Containers have process ids of their own, so the name has their namespace, too.
    """
    directory, prefix = runtime_directory(), f"supervisor-{os.stat('/proc/self/ns/pid').st_ino}-"
    path = os.path.join(directory, f"{prefix}{os.getpid()}")
    with suppress(FileNotFoundError):
        os.unlink(path)  # of a supervisor that was killed
    _clear(directory, prefix)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _short(path) as place:
        listener.bind(place)
    listener.listen(1)
    return listener, path


def _clear(directory: str, prefix: str) -> None:
    """Remove the sockets of supervisors that were killed; `prefix` is of our process ids."""
    for name in os.listdir(directory):
        pid = name.removeprefix(prefix)
        if pid != name and pid.isdigit() and not _supervises(int(pid)):
            with suppress(OSError):
                os.unlink(os.path.join(directory, name))


def _supervises(pid: int) -> bool:
    """Whether a process is a supervisor, as far as we may look."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return os.fsencode(PROGRAM) in file.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True


def connect(path: str, timeout_s: float) -> socket.socket:
    """A connection to the supervisor that listens at `path`. Raises: OSError."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.settimeout(timeout_s)
    try:
        with _short(path) as place:
            end.connect(place)
        if not is_trusted(end):
            raise PermissionError(errno.EPERM, "its supervisor is another user's", path)
    except BaseException:
        end.close()
        raise
    return end


def is_trusted(end: socket.socket) -> bool:
    """Whether the other end belongs to root or to the user of this process."""
    found = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(found)[1] in (0, os.geteuid())


def runtime_directory() -> str:
    """A directory for sockets that this user alone enters. Raises: OSError."""
    uid = os.geteuid()
    given = os.environ.get(RUNTIME_DIR_ENV)
    usual = "/run" if uid == 0 else os.environ.get("XDG_RUNTIME_DIR", "")
    places = [given] if given else [f"/tmp/slicefs-{uid}"]
    if usual and not given:
        places.insert(0, os.path.join(usual, "slicefs"))
    for place in places:
        with suppress(OSError):
            os.mkdir(place, 0o700)
        with suppress(OSError):
            found = os.lstat(place)
            private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
            if private and found.st_uid == uid and os.access(place, os.W_OK):
                return os.path.abspath(place)
    raise PermissionError(
        errno.EACCES,
        f"a supervisor needs a directory that only its user enters: set {RUNTIME_DIR_ENV} to one",
        places[-1],
    )


@contextmanager
def _short(path: str) -> Iterator[str]:
    """The path of a socket, in the few bytes that the kernel takes."""
    directory, name = os.path.split(path)
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


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

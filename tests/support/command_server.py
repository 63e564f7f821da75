"""A process that has imported `slicefs` and forks for each command: tests spare a start each.

The program's start is most of what a short command costs, and tests run thousands of them. What
runs is the same `main()`, in a process of its own with the words, the environment and the
descriptors of the request; limits and umask are the server's. Tests of the start itself run the
installed program.

`CommandServer` is the caller's side. This file is the server's, too: as a script it takes requests
from a socket (`_serve`). Threading: `CommandServer.run` from any thread.
"""

from __future__ import annotations

import array
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any, Final, NamedTuple, NoReturn

WORDS_BYTES_MAX: Final = 16 << 10  # room for the words of a command in what ps(1) shows
_REQUEST_BYTES_MAX: Final = 128 << 10
_PATH_ENV: Final = "PYTHONPATH"
_FDS: Final = 4  # of a request: standard input, output, error, and where its end is told
_PRELOADED: Final = (
    "fsclient.cli.mount.mount",
    "fsclient.cli.mount.umount",
    "fsclient.cli.upkeep.fsck",
    "fsclient.cli.volume.format",
    "fsclient.cli.volume.status",
    "fsclient.mount.serve",
    "fsmeta.store.redis.engine",
    "fsmeta.store.sqlite",
)


class Ended(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str


class CommandServer:
    """Runs commands of a program by forks of one process, which ends with this one."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._path = os.environ.get(_PATH_ENV)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, __file__, str(theirs.fileno()), "-" * WORDS_BYTES_MAX]
            self._server = subprocess.Popen(
                words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd="/"
            )

    def takes(self, words: list[str]) -> bool:
        """Whether a command may be forked: what is imported is what it would import."""
        is_short = sum(map(len, words)) < WORDS_BYTES_MAX // 4  # of UTF-8 each has 4 bytes at most
        return is_short and os.environ.get(_PATH_ENV) == self._path

    def run(self, words: list[str], timeout: float) -> Ended:
        """Run a command to its end, without standard input. Raises: subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        request = {
            "words": [self._program, *words],
            "environment": dict(os.environ),
            "directory": os.getcwd(),
        }
        out, their_out = os.pipe()
        err, their_err = os.pipe()
        with open(os.devnull, "rb") as nothing:
            told, their_told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            fds = array.array("i", [nothing.fileno(), their_out, their_err, their_told.fileno()])
            message = json.dumps(request).encode()
            self._socket.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        their_told.close()
        os.close(their_out)
        os.close(their_err)
        pid = 0
        try:
            told.settimeout(timeout)
            pid = int(told.recv(20) or self._lost())
            found = _read_all([out, err], deadline)
            told.settimeout(max(0.01, deadline - time.monotonic()))
            code = int(told.recv(20) or self._lost())
        except TimeoutError:
            if pid:
                os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired([self._program, *words], timeout) from None
        finally:
            told.close()
            os.close(out)
            os.close(err)
        return Ended(code, found[out].decode(), found[err].decode())

    def _lost(self) -> NoReturn:
        raise RuntimeError(f"the command server has ended: {self._server.poll()}")


def _read_all(fds: list[int], deadline: float) -> dict[int, bytes]:
    """All that comes from pipes until their ends. Raises: TimeoutError."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    found = {fd: bytearray() for fd in fds}
    left = set(fds)
    while left:
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            raise TimeoutError
        for fd, _ in ready:
            data = os.read(fd, 1 << 16)
            found[fd] += data
            if not data:
                poll.unregister(fd)
                left.remove(fd)
    return {fd: bytes(data) for fd, data in found.items()}


# --- the server ----------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> bool:
    """Fork for each request. False in the server when the caller is gone, True in a command."""
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for fd, _ in poll.poll():
            if fd != requests.fileno():
                poll.unregister(fd)
                pid, told = running.pop(fd)
                os.close(fd)
                _, status = os.waitpid(pid, 0)
                with told:
                    _tell(told, os.waitstatus_to_exitcode(status))
                continue
            message, fds, _, _ = socket.recv_fds(requests, _REQUEST_BYTES_MAX, _FDS)
            if not message:
                return False
            told = socket.socket(fileno=fds[-1])
            pid = os.fork()
            if not pid:
                requests.close()
                for pidfd, (_, others) in running.items():
                    os.close(pidfd)
                    others.close()
                told.close()
                _become(json.loads(message), fds[:-1])
                return True
            for each in fds[:-1]:
                os.close(each)
            _tell(told, pid)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, told
            poll.register(pidfd, select.POLLIN)


def _tell(told: socket.socket, number: int) -> None:
    """A caller that gave up is told nothing."""
    try:
        told.send(b"%d" % number)
    except OSError:
        pass


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Be the process that a shell would have started."""
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    os.chdir(request["directory"])
    sys.argv = request["words"]
    with open("/proc/self/comm", "w") as name:
        name.write(os.path.basename(sys.argv[0]))
    shown = b"".join(os.fsencode(word) + b"\0" for word in (sys.executable, *sys.argv))
    with open("/proc/self/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # where the kernel finds the words
    assert len(shown) <= end - begin, "longer words: run the installed program"
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def _main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    del sys.path[0]  # the directory of this file
    for name in _PRELOADED:
        __import__(name)
    from fsclient.cli.main import main

    gc.freeze()  # pages that children need not copy
    if _serve(requests):
        main()


if __name__ == "__main__":
    _main()

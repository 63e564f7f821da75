"""How the supervisor starts clients, keeps one in reserve, and passes signals on to them.

The first client is no start: it is forked from the command that becomes the supervisor, which has
imported all that a client needs.

Called by the supervisor, and by `survival/launch` in that command; imports the standard library
only.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Collection
from typing import Final, TypeAlias

from fsclient.service_manager import tell_service_manager
from fsclient.survival import channel, handover
from fsclient.survival.channel import Inherited
from fsclient.survival.handover import Predecessor
from fsclient.survival.supervised_client import SupervisedClient

ARENA_BYTES: Final = 512 << 20  # of addresses; memory is taken as it is used
FAILED: Final = 1
WARM_AGAIN_S: Final = 60.0  # after a client in reserve that did not wait
WARM_S: Final = 8.0  # after the mount is served a client in reserve is started,
WARM_LATEST_S: Final = 60.0  # if the client that serves is quiet; or else so long after
_STATUS_FILE: Final = "slicefs-end"  # as fsclient/mount/exit_status finds it
_LOG: Final = 2  # standard error
_FIRST_ENV: Final = "SLICEFS_FIRST"  # names what the first client and its supervisor share
_FORWARDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

Log: TypeAlias = Callable[[str, str], None]


def is_lone() -> bool:
    """Whether this process has one thread."""
    return len(os.listdir("/proc/self/task")) == 1


class FirstClient:
    """The client that is forked from the command, as the supervisor sees it."""

    device: Final = -1  # it has not mounted yet
    generation: Final = 1

    def __init__(self, pid: int, end: socket.socket, arena: int, status: int, token: int) -> None:
        self._pid = pid
        self._end = end
        self.arena = arena
        self.status = status
        self.token = token

    @classmethod
    def fork(cls, tell: int, directory: str) -> FirstClient | Inherited:
        """Fork: in the client what it inherits, in the command the client. Raises: OSError.

        The command has one thread: no other would be in the client, and its locks stayed held.
        """
        assert is_lone(), "a client is forked by a lone thread"
        arena = os.memfd_create("slicefs-arena")
        os.ftruncate(arena, ARENA_BYTES)
        status = os.memfd_create(_STATUS_FILE)
        token = int.from_bytes(os.urandom(8), "big") >> 1
        ours, theirs = channel.pair()
        supervisor = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            return cls(pid, ours, arena, status, token)
        ours.close()
        os.setpgid(0, 0)  # a signal of the terminal comes to the supervisor alone
        channel.enter(directory)
        how = (tell, cls.generation, channel.FIRST, supervisor, token)
        return Inherited(theirs.detach(), arena, status, *how)

    def bequeath(self, environment: dict[str, str]) -> None:
        """Let the program that this process becomes have it: see `inherited`."""
        fds = (self._end.fileno(), self.arena, self.status)
        for fd in fds:
            os.set_inheritable(fd, True)
        environment[_FIRST_ENV] = ":".join(map(str, (self._pid, *fds, self.token)))

    @classmethod
    def inherited(cls) -> FirstClient | None:
        """What the program before this one has left in the environment, if anything."""
        text = os.environ.pop(_FIRST_ENV, "")
        if not text:
            return None
        pid, end, arena, status, token = map(int, text.split(":"))
        for fd in (end, arena, status):
            os.set_inheritable(fd, False)
        return cls(pid, socket.socket(fileno=end), arena, status, token)

    def begin(self, program: list[str], address: str, now: float) -> SupervisedClient:
        """It may mount: commands reach the supervisor at `address`."""
        channel.send(self._end, channel.HERE + os.fsencode(address))
        return SupervisedClient(program, self._pid, self._end, self.generation, now)

    def drop(self) -> None:
        """There is no supervisor: end it."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


class ClientStarter:
    """What every client of the mount inherits."""

    def __init__(
        self, words: list[str], tell: int, directory: str, old: Predecessor | None, log: Log
    ) -> None:
        """`words` are those of the `slicefs` command; `old` is the supervisor before this one."""
        self._words = words
        self._tell = tell
        self._directory = directory
        self._log = log
        self._first = FirstClient.inherited() if old is None else None
        origin = old or self._first
        assert origin is not None, "a mount has a first client or another supervisor"
        self._arena, self._status, self._token = origin.arena, origin.status, origin.token
        self.device: int = origin.device  # /dev/fuse; -1: it is not mounted yet
        self._generation: int = origin.generation  # of the client that was started last
        self.was_served = False  # by a client of ours

    def begin(self, program: list[str], address: str, now: float) -> SupervisedClient:
        """The client that this supervisor begins with, which is told its `address`."""
        if self._first is not None:
            return self._first.begin(program, address, now)
        return self.start(program, now, beside=True)

    def start(
        self, program: list[str], now: float, modules: bytes = b"", beside: bool = False
    ) -> SupervisedClient:
        """A new client; one with `modules` imports those, and waits for NEEDED.

        `beside` one that serves it ends where it can't serve; else it waits until it can.
        """
        self._generation += 1
        ours, theirs = channel.pair()
        given = Inherited(
            theirs.fileno(),
            self._arena,
            self._status,
            self._tell,
            self._generation,
            channel.BESIDE if beside else channel.ALONE,
            os.getpid(),
            self._token,
        )
        environment = {**os.environ, channel.WORKER_ENV: given.packed()}
        if modules:
            environment[channel.WARM_ENV] = os.fsdecode(modules)
        command = [*program, *self._words]
        pid = os.fork()
        if pid == 0:
            self._become(command, environment, given)
        theirs.close()
        return SupervisedClient(program, pid, ours, self._generation, now)

    def _become(self, command: list[str], environment: dict[str, str], given: Inherited) -> None:
        """The forked process becomes the client. A signal of the terminal comes to us alone."""
        try:
            os.setpgid(0, 0)
            for number in _FORWARDED:
                signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            for fd in (given.channel, given.arena, given.status, given.tell):
                if fd >= 0:
                    os.set_inheritable(fd, True)
            if channel.WARM_ENV not in environment:
                channel.enter(self._directory)
            os.execve(command[0], command, environment)
        except OSError as error:
            self._log("ERROR", f"{command[0]}: {error.strerror}")
        os._exit(FAILED)

    @property
    def begins(self) -> bool:
        """Whether the mount was not served yet: its client ends by a signal, and no other helps."""
        return self.device < 0 or not self.was_served

    def is_served(self) -> None:
        """The command that waits for the mount is told by the client that serves it."""
        self.was_served = True
        if silent := tell_service_manager():
            self._log("WARNING", silent)
        if self._tell >= 0:
            os.close(self._tell)
            self._tell = -1

    def offer_to(self, successor: handover.Successor, held: list[int]) -> None:
        """Offer the mount to another supervisor, with what the starter of the mount left open."""
        given = handover.given_of(self._arena, self._status, self.device)
        successor.offer(given, held, (self._generation, self._token))


class ReserveClient:
    """The client that has imported what it needs and waits for its turn, if there is one."""

    def __init__(self, starter: ClientStarter, directory: str, log: Log) -> None:
        self._starter = starter
        self._needed = channel.NEEDED + os.fsencode(directory)
        self._log = log
        self._client: SupervisedClient | None = None
        self.due_at = 0.0  # when one is started; 0: there is one, or none is wanted yet
        self._latest = 0.0  # when it is, although the client that serves is busy
        self.modules = b""  # that clients of this mount need

    def pidfds(self) -> tuple[int, ...]:
        """What tells that it has ended."""
        return () if self._client is None else (self._client.pidfd,)

    def want(self, served_at: float, is_first: bool) -> None:
        """One is to be started, unless there is one; at once where a client had to be replaced.

        What that takes of a processor, programs that have just mounted would miss.
        """
        if self._client is None:
            self.due_at = served_at + (WARM_S if is_first else 0.0)
            self._latest = served_at + (WARM_LATEST_S if is_first else 0.0)

    def bury(self, ready: Collection[int], now: float) -> None:
        """See to one that has died."""
        if self._client is not None and self._client.pidfd in ready:
            self._log("WARNING", f"process {self._client.pid}, which was to be the next, has ended")
            self.drop()
            self.due_at = now + WARM_AGAIN_S

    def start_due(self, program: list[str], serving: SupervisedClient | None, now: float) -> None:
        """Start one if it is time; not while no client serves the mount."""
        if not self.due_at or now < self.due_at:
            return
        if serving is not None and serving.is_busy(now) and now < self._latest:
            self.due_at = now + WARM_S
            return
        self.due_at = 0.0
        if serving is not None and self.modules and self._starter.device >= 0:
            self._client = self._starter.start(program, now, self.modules)

    def next(self, program: list[str], now: float) -> SupervisedClient:
        """The client in reserve, if it is of this program; else a new one."""
        client = self._client
        if (
            client is None
            or client.program != program
            or not channel.send(client.end, self._needed, _LOG)
        ):
            self.drop()
            return self._starter.start(program, now)
        self._client = None
        client.begun = client.heard = self.due_at = now  # another one is due at once
        return client

    def drop(self) -> None:
        """End it."""
        client, self._client, self.due_at = self._client, None, 0.0
        if client is not None:
            client.kill()
            client.reap()


class ForwardedSignals:
    """Signals that the supervisor gets, and that are for the client."""

    def __init__(self) -> None:
        self.fd, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in _FORWARDED:
            signal.signal(number, lambda _number, _frame: None)
        self._due: list[int] = []  # came while there was no client
        self._ending: list[int] = []  # the signal that was to end the mount

    def forward(self, pid: int) -> None:
        """Send what has come to the process `pid`; 0: there is none, and it waits."""
        self._send(os.read(self.fd, 64), pid)

    def forward_due(self, pid: int) -> None:
        """A client serves the mount: it gets what waited, or what was to end the mount."""
        due, self._due = self._due or self._ending, []
        self._send(bytes(due), pid)

    def _send(self, numbers: bytes, pid: int) -> None:
        for number in numbers:
            if number not in _FORWARDED:
                continue
            if number != signal.SIGUSR1:
                self._ending = [number]
            if pid:
                os.kill(pid, number)
            else:
                self._due.append(number)

"""The supervisor of a mount: a small process that outlives the client, and starts the next one.

It keeps what must not be lost with a client: the descriptor of /dev/fuse, by which the kernel knows
the mount, and the arena, in which a client records what the next one needs (`survival/kept`). It
imports the standard library only, as little of it as it can, and does nothing while all is well but
ask the client every PING_S whether it still answers.

    python -m fsclient.survival.supervisor TELL DIRECTORY HANG_S LOG_FORM MOUNTPOINT

Another supervisor, as of another container, may take the mount over: see `survival/handover`.

TELL is a pipe to the command that waits for the mount, or -1; `survival/launch` has the rest.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import stat
import sys
import time
from contextlib import suppress
from typing import Final

from fsclient.survival import channel, handover
from fsclient.survival.client_starter import (
    FAILED,
    ClientStarter,
    ForwardedSignals,
    ReserveClient,
)
from fsclient.survival.handover import Predecessor, Successor
from fsclient.survival.launch import given_words
from fsclient.survival.supervised_client import LOOK_S, KilledClients, SupervisedClient

PING_S: Final = 5.0
START_S: Final = 120.0  # a client that takes longer to get ready hangs
QUICK_S: Final = 1.0  # a client that dies so soon after it got ready was no help
QUICK_MAX: Final = 5  # of them in a row; then the mount ends
BACKOFF_S: Final = 0.2  # before the second of them; then twice as long each time


class SupervisorLog:
    """Lines in the form of the client's log, which is the same file: standard error."""

    def __init__(self) -> None:
        self._is_json = False
        self._path = ""  # of the file; "": it is none

    def begin(self, form: str) -> None:
        """The form is `text` or `json`."""
        self._is_json = form == "json"
        if stat.S_ISREG(os.fstat(2).st_mode):
            self._path = os.readlink("/proc/self/fd/2")

    def __call__(self, level: str, text: str) -> None:
        """Write a line."""
        self._follow()
        seconds = time.time()
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
        line = f"{now} {level} slicefs.supervisor {text}"
        if self._is_json:
            line = self._as_json(seconds, level, text)
        print(line, file=sys.stderr, flush=True)

    def _as_json(self, seconds: float, level: str, text: str) -> str:
        """As `fsclient/mount/logs` has it."""
        import json  # rarely needed, and it takes memory

        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
        shown = {
            "time": f"{at}.{int(seconds * 1000) % 1000:03}+00:00",
            "level": level,
            "logger": "slicefs.supervisor",
            "pid": os.getpid(),
            "thread": "MainThread",
            "message": text,
        }
        return json.dumps(shown)

    def _follow(self) -> None:
        """Where the client, or another, has begun the file anew, go on in the new one.

        Clients that are started later inherit it.
        """
        if not self._path:
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(self._path, flags)
        except OSError:
            return  # it is gone; the old one is still open
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            os.set_blocking(fd, True)
            channel.log_to(fd)
        os.close(fd)


log = SupervisorLog()


def _as_shells_have_it(code: int) -> int:
    """The exit code of a mount that was never served; its client has said why, if it could."""
    if code >= 0:
        return code
    log("ERROR", f"signal {-code} ended the mount before it was served")
    return 128 - code


class Supervisor:
    """Keeps one mount alive."""

    def __init__(
        self, words: list[str], tell: int, directory: str, hang_s: float, mountpoint: str
    ) -> None:
        """`words` are those of the `slicefs` command that mounts."""
        self._predecessor = Predecessor.inherited()  # until a client of ours serves the mount
        self._successor: Successor | None = None
        self._hang_s = hang_s
        self._ping_s = min(PING_S, hang_s / 3)
        self._program = [sys.executable, "-P", "-m", "fsclient.cli.main"]
        self._starter = ClientStarter(words, tell, directory, self._predecessor, log)
        self._held = handover.left_open([tell])
        self._reserve = ReserveClient(self._starter, directory, log)
        self._child: SupervisedClient | None = None
        self._candidate: SupervisedClient | None = None
        self._killed = KilledClients(mountpoint, log)
        self._asker: socket.socket | None = None  # the command that waits for an upgrade
        self._previous: list[str] = []  # the program to go back to, while another is tried
        self._quick = 0  # clients in a row that died at once
        self._start_at = 0.0  # when the next client is started; 0: there is one
        self._pinged = 0.0
        self._signals = ForwardedSignals()
        self._asked, self._address = channel.listen()
        os.environ[channel.ADDRESS_ENV] = self._address  # for clients

    def run(self) -> int:
        """Supervise until the client leaves for good; its exit code."""
        try:
            return self._run()
        finally:
            self._reserve.drop()
            with suppress(OSError):
                os.unlink(self._address)

    def _run(self) -> int:
        first = self._starter.begin(self._program, self._address, time.monotonic())
        if self._predecessor is None:
            self._child = first
        else:
            self._candidate = first
        while True:
            ready = self._wait()
            if self._signals.fd in ready:
                self._signals.forward(self._receiver())
            if self._asked.fileno() in ready:
                self._accept()
            for child in (self._child, self._candidate):
                if child is not None and child.end.fileno() in ready:
                    self._take_messages(child)
            self._killed.reap(ready)
            code = self._bury(ready)
            if code is not None:
                return code
            heir = self._successor
            if heir and heir.end.fileno() in ready and self._is_handed_over(heir):
                return 0
            self._look()

    def _wait(self) -> set[int]:
        """Descriptors that are ready; none after a timeout."""
        poll = select.poll()
        ours = (self._signals.fd, self._asked.fileno())
        for fd in (*ours, *self._reserve.pidfds(), *self._killed.pidfds()):
            poll.register(fd, select.POLLIN)
        clients = [each for each in (self._child, self._candidate) if each is not None]
        for child in clients:
            poll.register(child.pidfd, select.POLLIN)
            if not child.is_silent:
                poll.register(child.end.fileno(), select.POLLIN)
        if self._successor is not None:
            poll.register(self._successor.end.fileno(), select.POLLIN)
        now = time.monotonic()
        look_s = LOOK_S if any(child.is_silent for child in clients) else self._ping_s
        until = min(at for at in (self._start_at, self._reserve.due_at, now + look_s) if at)
        return {fd for fd, _ in poll.poll(max(0.0, until - now) * 1000 + 1)}

    # --- clients ---------------------------------------------------------------------------------

    def _take_messages(self, child: SupervisedClient) -> None:
        """A message of a client."""
        found = channel.receive(child.end, wait=False)
        if found is None:
            return
        if not found[0]:
            child.is_silent = True
            return
        message, fd = found
        child.heard = time.monotonic()
        if message == channel.MOUNTED:
            self._starter.device = fd
        elif message == channel.STANDBY:
            if child is not self._candidate or self._exchange(child):
                channel.send(child.end, channel.GO, self._starter.device)
        elif message.startswith(channel.READY):
            self._reserve.modules = message[len(channel.READY) :]
            self._is_ready(child)
        elif message.startswith(channel.ENDED):
            child.exit_code = int(message.split()[1])

    def _is_ready(self, child: SupervisedClient) -> None:
        child.ready_at = child.heard
        self._starter.is_served()
        if self._program != child.program:
            self._reserve.drop()
        self._program, self._previous = child.program, []
        self._answer(channel.OK)
        self._leave_predecessor(served=True)
        self._reserve.want(child.heard, child.generation == 1)
        if child.generation > 1:
            took = child.ready_at - child.begun
            log("INFO", f"process {child.pid} serves the mount, {took:.1f} s after its start")
        self._signals.forward_due(self._receiver())

    def _receiver(self) -> int:
        """The process that gets signals; 0 while none can."""
        child = self._child
        return child.pid if child is not None and (child.ready_at or self._starter.begins) else 0

    def _bury(self, ready: set[int]) -> int | None:
        """See to clients that have died; the exit code where the mount has ended."""
        candidate, child = self._candidate, self._child
        self._reserve.bury(ready, time.monotonic())
        if candidate is not None and candidate.pidfd in ready:
            candidate.reap()
            self._candidate = None
            self._answer(b"the new version did not start: see the log of the mount")
            if self._leave_predecessor(served=False):
                return FAILED
        if child is None:
            return None
        ended = child.pidfd in ready
        if not ended and not self._is_kept(child):
            return None
        while self._hears(child):
            pass
        code = child.reap() if ended else -signal.SIGKILL
        self._child = None
        if child.exit_code >= 0:
            return child.exit_code
        if self._leave_predecessor(served=False):
            return FAILED
        if self._starter.begins:  # it has said why; the next one would fail, too
            return _as_shells_have_it(code)
        return self._restart(child, code)

    def _is_kept(self, child: SupervisedClient) -> bool:
        """Whether a client was killed, and waits for the next one."""
        return child.is_silent and self._killed.keep_waiting(child, self._starter.device)

    def _hears(self, child: SupervisedClient) -> bool:
        """Whether a client that has died left a message, which is taken."""
        poll = select.poll()
        poll.register(child.end.fileno(), select.POLLIN)
        if not any(event & select.POLLIN for _, event in poll.poll(0)):
            return False
        before = child.heard
        self._take_messages(child)
        return child.heard != before

    def _restart(self, child: SupervisedClient, code: int) -> int | None:
        """Have the next client started, or end."""
        now = time.monotonic()
        quick = not child.ready_at or now - child.ready_at < QUICK_S
        self._quick = self._quick + 1 if quick else 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if self._previous:  # a new version that could not take over
            log("ERROR", f"the new version ended with {how}: going back to the old one")
            self._program, self._previous = self._previous, []
            self._answer(b"the new version could not take over: the old one goes on; see the log")
        elif self._quick >= QUICK_MAX:
            log(
                "ERROR",
                f"{QUICK_MAX} clients in a row ended at once, the last with {how}: "
                "giving up; what was not stored is lost: run `slicefs umount`, then mount again",
            )
            return FAILED
        else:
            log("ERROR", f"process {child.pid} ended with {how}: starting the next one")
        delay = BACKOFF_S * (1 << (self._quick - 2)) if self._quick > 1 else 0.0
        self._start_at = now + delay
        if self._candidate is not None:  # it takes over as soon as it can
            self._start_at = 0.0
        return None

    def _look(self) -> None:
        """What is to be done as time passes."""
        now = time.monotonic()
        passing = self._successor is not None and self._successor.claimed
        if not (self._child or self._candidate or passing) and now >= self._start_at:
            self._start_at = 0.0
            self._child = self._reserve.next(self._program, now)
        self._reserve.start_due(self._program, self._child, now)
        child, candidate = self._child, self._candidate
        if candidate is not None and now - candidate.heard > START_S:
            candidate.kill()
        if child is None or now - self._pinged < self._ping_s:
            return
        last, self._pinged = self._pinged, now
        limit = self._hang_s if child.ready_at else START_S
        silent = last - child.heard > limit - self._ping_s  # not: all stood still since then
        if silent and not self._starter.begins:  # the first client may have a long journal to read
            log("ERROR", f"process {child.pid} has not answered for {limit:.0f} s: killing it")
            child.kill()
        elif child.ready_at:
            channel.send(child.end, channel.PING)

    # --- upgrades --------------------------------------------------------------------------------

    def _accept(self) -> None:
        """A command asks for another version."""
        asker, _ = self._asked.accept()
        if not channel.is_trusted(asker):
            asker.close()
            return
        asker.settimeout(1.0)
        try:
            message = asker.recv(4096)
        except OSError:
            message = b""
        word, *words = message.split(b"\n")
        if word not in (channel.UPGRADE, handover.HAND_OVER) or not words:
            asker.close()
            return
        reason = self._refusal()
        if reason:
            channel.send(asker, reason)
            asker.close()
        elif word == channel.UPGRADE:
            log("INFO", "upgrading: starting the new version")
            self._asker = asker
            program = [os.fsdecode(each) for each in words]
            self._candidate = self._starter.start(program, time.monotonic(), beside=True)
        elif words != [b"%d" % handover.VERSION]:
            channel.send(asker, b"the supervisor is of another version: unmount, and mount again")
            asker.close()
        else:
            log("INFO", "another supervisor is about to take the mount over")
            self._successor = Successor(asker)
            self._starter.offer_to(self._successor, self._held)

    def _refusal(self) -> bytes:
        """Why the mount can't be upgraded or taken over now; b"": it can."""
        changes = self._candidate is not None or self._successor is not None
        if changes or self._starter.device < 0 or self._child is None or not self._child.ready_at:
            return b"the mount is just being taken over: try again"
        return b""

    def _exchange(self, candidate: SupervisedClient) -> bool:
        """A new client has started and waits: it takes over. False where it must not."""
        if self._predecessor is None:
            self._end_child()
            self._previous = self._program
        elif not self._predecessor.claim():
            log("ERROR", "the other supervisor does not let the mount go")
            candidate.kill()
            return False
        self._candidate, self._child = None, candidate
        return True

    def _end_child(self) -> None:
        """Another client takes over from the one that serves, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            self._killed.kill(child, self._starter.device)

    def _is_handed_over(self, successor: Successor) -> bool:
        """Whether the successor's client serves the mount."""
        message = successor.next_message()
        if message == channel.OK:
            log("INFO", "another supervisor has taken the mount over")
            return True
        if message == handover.CLAIM and self._child is not None:
            self._reserve.drop()
            self._end_child()
            successor.yield_to()
            return False
        if successor.claimed:
            log("ERROR", "the other supervisor could not take the mount over: going on with it")
        successor.end.close()
        self._successor = None
        return False

    def _leave_predecessor(self, served: bool) -> bool:
        """Whether there was one. A client of ours serves the mount, or it is to go on."""
        predecessor, self._predecessor = self._predecessor, None
        if predecessor is not None:
            predecessor.leave(served)
        return predecessor is not None

    def _answer(self, text: bytes) -> None:
        """Tell the command that waits for an upgrade, if one does."""
        asker, self._asker = self._asker, None
        if asker is not None:
            try:
                asker.send(text)
            except OSError:
                pass  # it waits no more
            asker.close()


def main() -> None:
    """The program."""
    tell, directory, hang_s, log_form, mountpoint = sys.argv[1:]
    log.begin(log_form)
    channel.show_as(channel.SUPERVISOR_NAME)
    os.chdir("/")  # the directory it was started in can be unmounted
    if int(tell) >= 0:
        fcntl.fcntl(int(tell), fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    supervisor = Supervisor(given_words(), int(tell), directory, float(hang_s), mountpoint)
    sys.exit(supervisor.run())


if __name__ == "__main__":
    main()

"""Client processes, as their supervisor knows them. Imports the standard library only."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable, Collection
from typing import Final

from fsclient.survival.last_threads import only_wait

LOOK_S: Final = 0.05  # between two looks at a client that is being taken apart
BUSY_SHARE: Final = 0.2  # of a processor, above which a client is busy
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_LOOKS: Final = 3  # in a row that find it waiting: else its end is a matter of moments


class SupervisedClient:
    """A client process."""

    def __init__(
        self, program: list[str], pid: int, end: socket.socket, generation: int, now: float
    ) -> None:
        self.program = program
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.end = end
        self.generation = generation
        self.begun = now
        self.ready_at = 0.0
        self.heard = now  # when it last answered
        self.exit_code = -1  # with which it leaves for good, once it has said that it does
        self.is_silent = False  # its end of the channel is closed: it is dead, or soon is
        self._looks = 0
        self._used = (now, 0.0)  # when `is_busy` was asked last, and the processor time by then

    def is_busy(self, now: float) -> bool:
        """Whether it has used much of a processor since this was asked last, or since its start."""
        (asked, before_s), used_s = self._used, self._processor_s()
        self._used = (now, used_s)
        return used_s - before_s > BUSY_SHARE * (now - asked)

    def _processor_s(self) -> float:
        """proc_pid_stat(5): utime and stime; 0 where it is gone."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(") ")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def kill(self) -> None:
        """SIGKILL; its end is awaited otherwise."""
        os.kill(self.pid, signal.SIGKILL)

    def await_end(self, device: int, mountpoint: str) -> bool:
        """Return when a client that was killed has ended; False where it waits for the next one."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        while not poll.poll(LOOK_S * 1000):
            if self.waits_for_next(device, mountpoint):
                return False
        return True

    def waits_for_next(self, device: int, mountpoint: str) -> bool:
        """Whether all that is left of it waits for the mount. To be asked every LOOK_S."""
        self._looks = self._looks + 1 if only_wait(self.pid, device, mountpoint) else 0
        return self._looks >= _LOOKS

    def reap(self) -> int:
        """Take the exit code of a client that has ended."""
        _, status = os.waitpid(self.pid, 0)
        self.close()
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        """It is no more asked anything."""
        os.close(self.pidfd)
        self.end.close()


class KilledClients:
    """Clients that were killed, and of which something waits for the one that serves next."""

    def __init__(self, mountpoint: str, log: Callable[[str, str], None]) -> None:
        self._mountpoint = mountpoint
        self._log = log
        self._clients: list[SupervisedClient] = []

    def pidfds(self) -> tuple[int, ...]:
        """What tells that they have ended."""
        return tuple(each.pidfd for each in self._clients)

    def kill(self, client: SupervisedClient, device: int) -> None:
        """End it; where it waits for the mount of `device` it is kept until it has ended."""
        client.kill()
        if client.await_end(device, self._mountpoint):
            client.reap()
        else:
            self._keep(client)

    def keep_waiting(self, client: SupervisedClient, device: int) -> bool:
        """Whether a client that was killed ends only when the next one serves; it is kept."""
        if device < 0 or not client.waits_for_next(device, self._mountpoint):
            return False
        self._keep(client)
        return True

    def reap(self, ready: Collection[int]) -> None:
        """Some have ended."""
        for client in [each for each in self._clients if each.pidfd in ready]:
            self._clients.remove(client)
            client.reap()
            self._log("INFO", f"process {client.pid}, which waited for the mount, has ended")

    def _keep(self, client: SupervisedClient) -> None:
        self._log("INFO", f"process {client.pid} was killed and waits for the mount: going on")
        self._clients.append(client)

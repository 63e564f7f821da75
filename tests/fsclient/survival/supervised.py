"""A supervised mount: who serves it, and how its client dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from fsclient.mount.supervised_mount import supervisor_address
from fsclient.survival import channel
from tests.faults.program import REPOSITORY, Mount, Volume, kill_client
from tests.fsclient.survival.long_programs import set_up

SLOW_TO_BEGIN = frozenset(("pgbench",))
DEATH_S = 60.0  # for the next client to serve, on a machine that has other work to do


class Programs:
    """Programs that run beside each other on one mount."""

    def __init__(self, base: Path, place: Path, names: tuple[str, ...], seed: int) -> None:
        self._stop = base / "stop"
        self._running = {name: self._start(place, name, seed) for name in names}

    def _start(self, place: Path, name: str, seed: int) -> subprocess.Popen[str]:
        words = [name, str(place), str(seed), str(self._stop)]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.fsclient.survival.programs", *words],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def await_set_up(self) -> None:
        """Those that need long for it have begun with what they are here for."""
        for name in SLOW_TO_BEGIN.intersection(self._running):
            while not set_up(self._stop, name).exists():
                self.require_running()
                time.sleep(0.1)

    def require_running(self) -> None:
        """None has failed yet."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise AssertionError(f"{name}: {process.communicate()[0]}")

    def end(self) -> dict[str, int]:
        """Have them verify what they wrote; how much each did."""
        self._stop.touch()
        done = {}
        for name, process in self._running.items():
            out, _ = process.communicate(timeout=300)
            assert process.returncode == 0, f"{name}: {out}"
            done[name] = int(out)
        return done

    def abandon(self) -> None:
        """After a failure."""
        for process in self._running.values():
            process.kill()
            process.wait()


class Supervised:
    """A mount with a supervisor."""

    def __init__(self, volume: Volume, *options: str) -> None:
        self.mount = volume.mount("--supervisor", *options)
        self.path = self.mount.path
        supervisor = self._says()["supervisor"]
        volume.mounts.append(Mount(self.path, supervisor))  # to be killed where the test fails
        self.supervisor = supervisor
        self.client = self.mount.pid

    def _says(self) -> dict[str, int]:
        """What the client says of itself; waits for one that is on its way."""
        found: dict[str, int] = json.loads((self.path / ".config").read_text())["mount"]
        return found

    def kill(self) -> None:
        """SIGKILL the client."""
        os.kill(self.client, signal.SIGKILL)

    def kill_next(self, after_s: float) -> None:
        """SIGKILL the client that is on its way, so long after it began."""
        while not (pid := self.child()) or pid == self.client:
            time.sleep(0.01)
        time.sleep(after_s)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.client = pid

    def child(self) -> int:
        """The client that the supervisor has started; 0 where there is none, or no supervisor."""
        return (self.children() or [0])[0]

    def children(self) -> list[int]:
        """The clients of the supervisor, oldest first: the one that serves, and one that waits."""
        try:
            children = Path(f"/proc/{self.supervisor}/task/{self.supervisor}/children")
            return [int(pid) for pid in children.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            return []

    def replace(self, *program: str) -> None:
        """Have another program serve the mount, as `slicefs upgrade` has another version."""
        with channel.connect(supervisor_address(str(self.path)), DEATH_S) as asking:
            asking.send(b"\n".join([channel.UPGRADE, *map(os.fsencode, program)]))
            assert asking.recv(4096) == channel.OK
        self.await_next()

    def await_next(self) -> float:
        """Seconds until another client answers."""
        begun = time.monotonic()
        before = self.client
        while self.client == before:
            self.client = self._says()["pid"]
            assert time.monotonic() - begun < DEATH_S
        self.mount.pid = self.client
        return time.monotonic() - begun

    def clean_up(self) -> None:
        """No process is left."""
        for pid in (self.supervisor, self.client):
            kill_client(Mount(self.path, pid))

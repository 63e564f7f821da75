"""`umount` waits as long as data flow, and says what is left where they don't."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fsclient.cli.mount import umount
from fsclient.mount.exit_status import left_by
from fsmeta.runtime import SystemRuntime
from tests.faults.load import content
from tests.faults.program import Volume, needs_mounts, wait_until

CODE = """
import sys
for left in sys.argv[1:]:
    open("/proc/self/comm", "w").write(f"left {left}")
    print(flush=True)
    sys.stdin.readline()
"""
ENDING = """
import os, signal, threading, time
from fsclient.mount import serve
from fsclient.fuse.mount import mount as kernel
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime

stopped, detached = threading.Event(), []

class Session:
    def stop(self, through=None):
        stopped.set()

    def wait(self, seconds=None):
        return stopped.wait(seconds)

def umount(path, lazy=False):
    if not lazy:
        raise ConfigError("it is in use")
    time.sleep(0.5)
    detached.append(path)

kernel.find_mount = lambda path: path
kernel.umount = umount
session = Session()
ending = serve.Ending(session, "/mnt", SystemRuntime())
os.kill(os.getpid(), signal.SIGTERM)
session.wait()
ending.finish()
print(detached)
"""
STEP_S = 0.4


class Clock(SystemRuntime):
    """It goes on by STEP_S with each look, before which the client says its next number."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__()
        self._process = process
        self._now = 0.0
        self.monotonic = lambda: self._now

    def look(self, pidfd: int, seconds: float) -> bool:
        """Whether the client has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._now += seconds
        self._process.stdin.write("go on\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline()
        return not said and bool(select.select([pidfd], [], [])[0])


def waited(monkeypatch: pytest.MonkeyPatch, *left: int) -> int | None:
    """What `umount` makes of a client that tells these numbers one after another."""
    command, pipe = [sys.executable, "-c", CODE, *map(str, left)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the first
        clock = Clock(process)
        monkeypatch.setattr(umount, "UMOUNT_WAIT_S", 3 * STEP_S)
        monkeypatch.setattr(umount, "SILENT_S", 0.0)
        monkeypatch.setattr(umount, "LOOK_S", STEP_S)
        monkeypatch.setattr(umount, "SystemRuntime", lambda: clock)
        monkeypatch.setattr(umount, "_has_ended", clock.look)
        pidfd = os.pidfd_open(process.pid)
        try:
            return umount.await_stored(pidfd, process.pid)
        finally:
            os.close(pidfd)
            process.kill()


def test_a_client_that_stores_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waited(monkeypatch, *range(9000, 0, -1000)) is None, "three times as long as the limit"


def test_a_client_that_stores_nothing_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waited(monkeypatch, *[5000] * 12) == 5000


def test_others_say_nothing() -> None:
    assert left_by(os.getpid()) is None
    assert left_by(2**22 + 1) is None


@needs_mounts
def test_a_mount_tells_what_it_has_left(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount("--upload-limit", "1MiB")
    data = content(1, 12 << 20)
    fd = os.open(mount.path / "file", os.O_CREAT | os.O_WRONLY)
    os.write(fd, data)
    os.kill(mount.pid, signal.SIGTERM)
    seen: list[int] = []

    def is_gone() -> bool:
        left = left_by(mount.pid)
        if left is not None and Path(f"/proc/{mount.pid}").exists():
            seen.append(left)
        return mount.has_ended()

    wait_until("the client leaves", 100, is_gone)
    assert seen
    assert seen == sorted(seen, reverse=True)
    assert seen[0] > 4 << 20
    try:
        os.close(fd)
    except OSError:
        pass  # its mount is gone
    mount = embedded.mount()
    assert (mount.path / "file").read_bytes() == data
    embedded.end("detaching it")


def test_a_client_that_a_signal_ends_detaches_its_mount_before_it_goes() -> None:
    words = [sys.executable, "-c", ENDING]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "['/mnt']\n"), done.stderr

"""`umount` waits as long as data flow, and says what is left where they don't."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fsclient.cli import umount_cmd
from fsclient.leaving import left_by
from tests.faults.load import content
from tests.faults.program import Volume, needs_mounts, wait_until

CODE = """
import sys, time
for left in map(int, sys.argv[1:]):
    open("/proc/self/comm", "w").write(f"left {left}")
    time.sleep(0.4)
"""


def waited(monkeypatch: pytest.MonkeyPatch, *left: int) -> int | None:
    """What `umount` makes of a client that tells these numbers one after another."""
    monkeypatch.setattr(umount_cmd, "UMOUNT_WAIT_S", 1.2)
    monkeypatch.setattr(umount_cmd, "SILENT_S", 0.0)
    monkeypatch.setattr(umount_cmd, "LOOK_S", 0.05)
    process = subprocess.Popen([sys.executable, "-c", CODE, *map(str, left)])
    pidfd = os.pidfd_open(process.pid)
    try:
        return umount_cmd.await_stored(pidfd, process.pid)
    finally:
        os.close(pidfd)
        process.kill()
        process.wait()


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
    mount = embedded.mount("--upload-limit", "2MiB")
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

    wait_until("the client leaves", 60, is_gone)
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

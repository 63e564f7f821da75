"""W1: whoever mounts takes up the journal of the mount that was killed, even one not quite dead."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsclient.writeback.journal_dir import has_log, take_slot
from fsclient.writeback.lock_holder_exiting import is_held_by_exiting
from fsdata.staging import journal
from fsmeta.runtime import SystemRuntime

RUNTIME = SystemRuntime()
VOLUME = "volume"
HOLDER = """
import mmap, sys
from fsclient.writeback.journal_dir import take_slot
from fsmeta.runtime import SystemRuntime
slot = take_slot(SystemRuntime(), sys.argv[1], "volume")
memory = mmap.mmap(-1, int(sys.argv[2]), flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE)
print(slot.path, flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(root: Path, memory: int = 4096) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that holds the slot it tells, and so many bytes, until it is killed."""
    command = [sys.executable, "-c", HOLDER, str(root), str(memory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().rstrip("\n")
        finally:
            process.kill()


def test_a_slot_is_waited_for_while_its_mount_dies(tmp_path: Path) -> None:
    """Its memory takes the kernel longer to give back than a look at the lock takes us."""
    for _ in range(3):
        with holder(tmp_path, 512 << 20) as (process, path):
            Path(path, journal.PREFIX + "0").touch()
            process.kill()
            slot = take_slot(RUNTIME, str(tmp_path), VOLUME)
            assert slot.path == path
            os.close(slot.lock)


def test_a_mount_that_was_stopped_and_killed_is_dying(tmp_path: Path) -> None:
    """Whatever state it was in; and one that only stands still is not."""
    with holder(tmp_path) as (process, path):
        fd = os.open(f"{path}/lock", os.O_RDWR)
        process.send_signal(signal.SIGSTOP)
        assert not is_held_by_exiting(fd)
        process.kill()
        while not _is_free(fd):
            assert is_held_by_exiting(fd) or _is_free(fd)
        os.close(fd)


def _is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_a_mount_that_lives_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError(f"it waits for {seconds} s")

    runtime = SystemRuntime()
    monkeypatch.setattr(runtime, "sleep", sleep)
    with holder(tmp_path) as (_, path), caplog.at_level(logging.WARNING):
        Path(path, journal.PREFIX + "0").touch()
        slot = take_slot(runtime, str(tmp_path), VOLUME)
        assert Path(slot.path) == Path(path).with_name("1")
        assert has_log(path)
        os.close(slot.lock)
    assert not caplog.records

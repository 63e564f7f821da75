"""What may go wrong with a supervised mount besides the death of one client."""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.fixtures import base, embedded
from tests.faults.program import Volume, needs_mounts, slicefs, succeed, wait_until
from tests.fsclient.survival import waiting_client
from tests.fsclient.survival.supervised import Supervised

__all__ = ["base", "embedded"]

pytestmark = needs_mounts

KILLED = "slicefs.supervisor process .* ended with signal 9"
WAITS = "process .* was killed and waits for the mount"
PATIENCE_S = 60.0
MIB = 1 << 20
SMALL_ARENA = 148 * MIB  # each half has 2 MiB for data, beside what must stay free
TINY_ARENA = MIB


@pytest.fixture
def supervised(embedded: Volume) -> Iterator[Supervised]:
    """A supervised mount on SQLite."""
    embedded.format()
    made = Supervised(embedded)
    yield made
    made.clean_up()


def shrink_arena(supervised: Supervised, size: int) -> None:
    """Have the next client find an arena of `size`."""
    os.kill(supervised.client, signal.SIGSTOP)  # it has more of it mapped
    folder = Path(f"/proc/{supervised.supervisor}/fd")
    for each in folder.iterdir():
        if os.readlink(each).startswith("/memfd:slicefs-arena"):
            os.truncate(each, size)
    supervised.kill()
    supervised.await_next()


def test_killed_while_it_takes_over(embedded: Volume, supervised: Supervised) -> None:
    """Clients that die on their way, later each time, leave all to the one that arrives."""
    fd = os.open(supervised.path / "file", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    written = os.urandom(20_000)
    os.write(fd, written)
    supervised.kill()
    for after_s in (0.0, 0.02, 0.05):  # five in a row would be the end
        supervised.kill_next(after_s)
    supervised.await_next()
    assert os.pread(fd, 30_000, 0) == written
    assert os.write(fd, b"more") == 4
    assert os.fstat(fd).st_size == 20_004
    os.close(fd)
    supervised.mount.umount()
    embedded.end(KILLED)


def test_arena_without_room_for_data(embedded: Volume, supervised: Supervised) -> None:
    """What finds no room is committed first, so each byte is in one of both places."""
    shrink_arena(supervised, SMALL_ARENA)
    fd = os.open(supervised.path / "file", os.O_RDWR | os.O_CREAT)
    parts = [bytes([number]) * MIB for number in range(12)]
    for number, part in enumerate(parts):
        assert os.pwrite(fd, part, number * MIB) == MIB
    supervised.kill()
    supervised.await_next()
    for number, part in enumerate(parts):
        assert os.pread(fd, MIB, number * MIB) == part
    os.close(fd)
    supervised.mount.umount()
    embedded.end(KILLED)


def test_arena_full(embedded: Volume, supervised: Supervised) -> None:
    """The mount goes on and says that its records are lost; what was stored is there."""
    shrink_arena(supervised, TINY_ARENA)
    (supervised.path / "file").write_text("committed at once")
    for number in range(12):
        (supervised.path / f"{number}").write_bytes(b"x" * 100_000)
    supervised.kill()
    supervised.await_next()
    assert (supervised.path / "file").read_text() == "committed at once"
    assert (supervised.path / "11").stat().st_size == 100_000
    supervised.mount.umount()
    embedded.end(f"{KILLED}|a record for the next worker is lost: no room")


def test_a_log_that_began_anew(embedded: Volume) -> None:
    """The supervisor and the next client go on in the new file, and in its form."""
    embedded.format()
    words = ("--log-max-size", "64KiB", "--log-format", "json", "--slow-op-log", "0.001")
    supervised = Supervised(embedded, *words)
    wait_until("a warm client", PATIENCE_S, lambda: len(supervised.children()) > 1)
    log = embedded.log
    older = log.with_name(f"{log.name}.1")

    def is_rotated() -> bool:
        (supervised.path / "file").write_bytes(b"x")
        return older.exists()

    wait_until("it starts again", PATIENCE_S, is_rotated)
    supervised.kill()
    supervised.await_next()
    for pid in (supervised.supervisor, supervised.client):
        for fd in (1, 2):
            assert os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), log.stat())
    supervised.mount.umount()
    said = [json.loads(line) for line in embedded.log_lines()]
    (death,) = [each for each in said if each["level"] == "ERROR"]
    assert death["logger"] == "slicefs.supervisor"
    assert death["message"].endswith("ended with signal 9: starting the next one")
    assert any(each["message"].startswith("unmounted ") for each in said)
    assert not older.with_name(f"{older.name}.1").exists()
    embedded.end()
    supervised.clean_up()


def test_supervisor_and_client_killed(embedded: Volume, supervised: Supervised) -> None:
    """All is as without a supervisor: a dead mount; what was synced is there after the next one."""
    fd = os.open(supervised.path / "file", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"synced")
    os.fsync(fd)
    os.kill(supervised.supervisor, signal.SIGKILL)
    supervised.kill()

    def is_dead() -> bool:
        with suppress(FileNotFoundError):
            try:
                os.stat(supervised.path / "other")
            except OSError as error:
                return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
        return False

    wait_until("the end of the mount", PATIENCE_S, is_dead)
    with suppress(OSError):
        os.close(fd)
    slicefs("umount", supervised.path)
    again = embedded.mount()
    assert (again.path / "file").read_bytes() == b"synced"
    succeed("umount", again.path)
    embedded.end("the supervisor has ended|session|lease")


def waits_in_kernel(pid: int, *functions: str) -> bool:
    """Whether a thread of a process waits below these functions of the kernel."""
    stacks = []
    with suppress(FileNotFoundError, ProcessLookupError):
        stacks = [(each / "stack").read_text() for each in Path(f"/proc/{pid}/task").iterdir()]
    return any(all(name in stack for name in functions) for stack in stacks)


@pytest.mark.parametrize("way", ["killed", "upgraded"])
def test_killed_while_the_kernel_waits_for_it(
    embedded: Volume, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A thread of the client waits in the kernel for an answer of the next client, which needs the
    locks that the process had: of SQLite, and of the journal."""
    once = embedded.base / "once"
    once.touch()
    monkeypatch.setenv(waiting_client.ONCE_ENV, str(once))
    embedded.format()
    supervised = Supervised(
        embedded, "--writeback", "--staging-dir", str(embedded.base / "staging")
    )
    supervised.replace(sys.executable, waiting_client.__file__)
    path = supervised.path / "file"
    path.write_bytes(b"0" * mmap.PAGESIZE)
    (supervised.path / "held").write_bytes(b"in the journal")
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, mmap.PAGESIZE) as mapped:
        mapped[:4] = waiting_client.MARK
        syncing = threading.Thread(target=os.fsync, args=(fd,))
        syncing.start()
        inside = "fuse_reverse_inval_inode", "folio_wait"
        wait_until("it", PATIENCE_S, lambda: waits_in_kernel(supervised.client, *inside))
        dead = supervised.client
        if way == "killed":
            supervised.kill()
            supervised.await_next()
        else:  # by no child of ours, which would wait for the file
            supervised.replace(sys.executable, "-P", "-m", "fsclient.cli.main")
        syncing.join(PATIENCE_S)
        assert not syncing.is_alive()
        assert mapped[:5] == b"wait0"
    os.close(fd)
    assert path.read_bytes()[:5] == b"wait0"
    assert (supervised.path / "held").read_bytes() == b"in the journal"
    wait_until("the end", PATIENCE_S, lambda: not Path(f"/proc/{dead}").exists())
    supervised.mount.umount()
    assert any(re.search(WAITS, line) for line in embedded.log_lines())
    embedded.end(KILLED)
    supervised.clean_up()

"""What the next client of a supervised mount takes over, one thing at a time."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsclient.survival.kept import HANDLE, U64
from tests.faults.fixtures import base, durable_redis, served
from tests.faults.program import Mount, Volume, needs_mounts, slicefs, wait_until
from tests.fsclient.survival.supervised import Supervised

__all__ = ["base", "durable_redis", "served"]

pytestmark = needs_mounts

KILLED = "slicefs.supervisor process .* ended with signal 9"
PATIENCE_S = 60.0
HELD = 20
IN_OPEN = 0x20  # linux/inotify.h
_TRY_LOCK = """
import fcntl, sys
with open(sys.argv[1], "r+") as file:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


@pytest.fixture
def supervised(served: Volume) -> Iterator[Supervised]:
    """A supervised mount on Redis."""
    served.format()
    made = Supervised(served)
    yield made
    made.clean_up()


def can_lock(path: Path) -> bool:
    """Whether another process can lock a file."""
    words = [sys.executable, "-c", _TRY_LOCK, str(path)]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


def test_state_of_a_mount(served: Volume, supervised: Supervised) -> None:
    """Handles, locks, listings, maps and unsaved writes are as they were."""
    root = supervised.path
    names = {f"name{number:05}" for number in range(3000)}
    (root / "many").mkdir()
    for name in names:
        (root / "many" / name).touch()
    held = os.open(root / "held", os.O_RDWR | os.O_CREAT)
    os.write(held, b"0" * mmap.PAGESIZE)
    fcntl.lockf(held, fcntl.LOCK_EX)
    gone = os.open(root / "gone", os.O_RDWR | os.O_CREAT)
    os.unlink(root / "gone")
    os.write(gone, b"unlinked")
    os.mkdir(root / "left")
    os.chmod(root / "left", 0o700)
    with mmap.mmap(held, mmap.PAGESIZE) as mapped, os.scandir(root / "many") as listing:
        seen = [next(listing).name for _ in range(10)]
        supervised.kill()
        supervised.await_next()
        seen += [entry.name for entry in listing]
        mapped[:5] = b"after"
        mapped.flush()
        assert not can_lock(root / "held")  # before the map is closed, and the lock with it
        assert os.pread(held, 6, 0) == b"after0"
    assert sorted(seen) == sorted(names)
    assert os.pread(gone, 100, 0) == b"unlinked"
    assert os.fstat(gone).st_nlink == 0
    os.close(held)
    assert can_lock(root / "held")
    os.close(gone)
    assert (root / "left").stat().st_mode & 0o777 == 0o700
    supervised.mount.umount()
    served.end(KILLED)


def test_handles_of_the_fast_lane(served: Volume, supervised: Supervised) -> None:
    """What is opened and closed without a verb has its records, too."""
    path = supervised.path / "file"
    path.write_text("content")
    for _ in range(3):
        path.read_text()  # from the second time on the inode is leased
    held = [os.open(path, os.O_RDONLY) for _ in range(HELD)]
    supervised.kill()
    supervised.await_next()
    assert [os.pread(fd, 100, 0) for fd in held] == [b"content"] * HELD
    before = kept_bytes(supervised)
    for fd in held:
        os.close(fd)
    records = HELD * (U64.size + HANDLE.size)
    wait_until("closing", PATIENCE_S, lambda: kept_bytes(supervised) <= before - records)
    supervised.kill()
    supervised.await_next()
    path.read_text()
    supervised.mount.umount()
    taken = re.findall(r"took over (\d+) handles", served.log.read_text())
    assert taken == [str(HELD), "0"]
    served.end(KILLED)


def kept_bytes(supervised: Supervised) -> float:
    """How much the client keeps for the next one."""
    return supervised.mount.numbers()["arena_bytes"]


def test_upgrade(served: Volume, supervised: Supervised) -> None:
    """Another client serves; files stay open, and nothing is said of a death."""
    with (supervised.path / "open").open("w") as file:
        file.write("before ")
        file.flush()
        done = slicefs("upgrade", supervised.path)
        assert done.code == 0, done
        assert supervised.await_next() < PATIENCE_S
        assert str(supervised.client) in done.out
        file.write("after")
    assert (supervised.path / "open").read_text() == "before after"
    assert slicefs("upgrade", served.base).code == 1
    supervised.mount.umount()
    served.end()


def test_upgrade_that_does_not_start(served: Volume, supervised: Supervised) -> None:
    """The old client goes on, and was not disturbed."""
    script = (
        "import sys\n"
        "from fsclient.cli.mount import upgrade\n"
        f"upgrade.sys.executable = {str(served.base / 'no-such-python')!r}\n"
        "upgrade.upgrade([sys.argv[1]])\n"
    )
    words = [sys.executable, "-c", script, str(supervised.path)]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert "the new version did not start" in done.stderr, done
    before = supervised.client
    (supervised.path / "file").write_text("served")
    assert supervised._says()["pid"] == before
    supervised.mount.umount()
    served.end("no-such-python")


def test_hang(served: Volume) -> None:
    """A client that does not answer any more is replaced."""
    served.format()
    supervised = Supervised(served, "--hang-after", "3")
    try:
        (supervised.path / "file").write_text("hello")
        os.kill(supervised.client, signal.SIGSTOP)
        assert (supervised.path / "file").read_text() == "hello"
        supervised.await_next()
        supervised.mount.umount()
        served.end(f"{KILLED}|has not answered for 3 s: killing it")
    finally:
        supervised.clean_up()


def test_all_stood_still(served: Volume) -> None:
    """As where a virtual machine pauses: the client is no longer silent than its supervisor."""
    served.format()
    supervised = Supervised(served, "--hang-after", "3")
    try:
        for pid in (supervised.supervisor, supervised.client):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(5)
        for pid in (supervised.client, supervised.supervisor):
            os.kill(pid, signal.SIGCONT)
        time.sleep(2)
        assert supervised._says()["pid"] == supervised.client
        supervised.mount.umount()
        served.end()
    finally:
        supervised.clean_up()


def test_clients_that_die_at_once(served: Volume, supervised: Supervised) -> None:
    """The supervisor gives up, and says so."""
    has_ended = Mount(supervised.path, supervised.supervisor).has_ended
    deadline = time.monotonic() + PATIENCE_S
    while not has_ended():
        assert time.monotonic() < deadline
        client = supervised.child()
        if client:
            os.kill(client, signal.SIGKILL)
        time.sleep(0.01)
    assert any("giving up" in line for line in served.log_lines())
    with pytest.raises(OSError, match=r"not connected|abort"):
        os.listdir(supervised.path)
    assert slicefs("umount", supervised.path).code in (0, 1)


def test_a_client_waits_for_its_turn(served: Volume, supervised: Supervised) -> None:
    """It takes over, another one waits then, and none is left in the end."""
    for _ in range(2):
        wait_until("a warm client", PATIENCE_S, lambda: len(supervised.children()) > 1)
        waiting = supervised.children()[1]
        supervised.kill()
        supervised.await_next()
        assert supervised.client == waiting
    wait_until("a warm client", PATIENCE_S, lambda: len(supervised.children()) > 1)
    waiting = supervised.children()[1]
    os.kill(supervised.supervisor, signal.SIGKILL)
    wait_until("its end", PATIENCE_S, Mount(supervised.path, waiting).has_ended)
    wait_until("notice", PATIENCE_S, lambda: "supervisor has ended" in served.log.read_text())
    supervised.mount.umount()
    served.end(f"{KILLED}|the supervisor has ended")


def test_kills_that_follow_each_other(served: Volume, supervised: Supervised) -> None:
    """Each finds a client that has begun before: the pause is never a whole start."""
    wait_until("a warm client", PATIENCE_S, lambda: len(supervised.children()) > 1)
    for _ in range(4):
        waiting = supervised.children()[1]
        supervised.kill()
        supervised.await_next()
        assert supervised.client == waiting
        wait_until("its log line", PATIENCE_S, lambda: served_line(served, supervised.client))
    supervised.mount.umount()
    served.end(KILLED)


def served_line(volume: Volume, client: int) -> bool:
    """Whether the log says that a client serves."""
    return any(f"process {client} serves the mount" in line for line in volume.log_lines())


def test_supervisor_killed(served: Volume, supervised: Supervised) -> None:
    """The client goes on, as one that never had a supervisor."""
    os.kill(supervised.supervisor, signal.SIGKILL)
    (supervised.path / "file").write_text("hello")
    assert (supervised.path / "file").read_text() == "hello"
    wait_until("notice", PATIENCE_S, lambda: "supervisor has ended" in served.log.read_text())
    supervised.mount.umount()
    wait_until("the client's end", PATIENCE_S, supervised.mount.has_ended)
    served.end("the supervisor has ended")


def test_fsync_of_what_the_last_client_has_stored(served: Volume, supervised: Supervised) -> None:
    """It is stored, and not synced: fsync(2) syncs its object, once."""
    path = supervised.path / "file"
    path.write_bytes(b"some bytes")
    fd = os.open(path, os.O_RDWR)
    (stored,) = served.objects()
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    supervised.kill()
    supervised.await_next()
    assert libc.inotify_add_watch(watch, os.fsencode(stored), IN_OPEN) > 0
    os.fsync(fd)
    assert os.read(watch, 4096)
    os.fsync(fd)
    with pytest.raises(BlockingIOError):
        os.read(watch, 4096)
    os.close(watch)
    os.close(fd)
    supervised.mount.umount()
    served.end(KILLED)

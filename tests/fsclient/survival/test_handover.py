"""A mount passes from one supervisor to another, as from a container to its successor."""

from __future__ import annotations

import fcntl
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsclient.mount.supervised_mount import supervisor_address
from fsclient.survival.handover import HandoverRefused, Predecessor
from tests.faults.fixtures import base, durable_redis, served
from tests.faults.program import SLICEFS, Mount, Volume, is_mounted, needs_mounts, slicefs
from tests.fsclient.survival.supervised import Programs, Supervised
from tests.support.waiting import wait_until

__all__ = ["base", "durable_redis", "served"]

pytestmark = needs_mounts

NOBODY = 65534
PROGRAMS = ("verify", "append")
KILLED_S = 60.0
_ASK = """
import os, sys
from fsclient.survival.handover import Predecessor
os.setuid(int(sys.argv[2]))
Predecessor.ask(sys.argv[1])
"""
_UPGRADE = """
import socket, sys
for name in sys.argv[2:]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.connect("\\0" + name[1:] if name.startswith("@") else name)
        end.send(b"\\n".join([b"upgrade", b"/bin/touch", sys.argv[1].encode()]))
        end.recv(100)
"""


def says(path: Path) -> dict[str, int]:
    """What the client of a mount says of itself."""
    found: dict[str, int] = json.loads((path / ".config").read_text())["mount"]
    return found


@contextmanager
def mounting(
    volume: Volume, *options: str, held: tuple[int, ...] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor in the foreground, as the program of a container."""
    path = volume.base / "mnt"
    path.mkdir(exist_ok=True)
    words = (SLICEFS, "mount", "--supervisor", "--log", volume.log, "--cache-dir", "none")
    with subprocess.Popen([*words, *options, volume.meta, path], pass_fds=held) as process:
        try:
            yield process
        finally:
            process.kill()


def await_supervisor(path: Path, pid: int) -> None:
    """Return when that process supervises the mount."""
    wait_until(lambda: is_mounted(path) and says(path).get("supervisor") == pid)


def is_locked(path: Path) -> bool:
    """Whether some process has locked a file."""
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize("options", [(), ("--writeback",)])
def test_supervisors_follow_each_other(served: Volume, options: tuple[str, ...]) -> None:
    """Programs see nothing, and the lock that the first starter took stays held."""
    served.format()
    path, lock = served.base / "mnt", served.base / "lock"
    if options:
        options += ("--staging-dir", str(served.base / "staging"))
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        held = file.fileno()
        with mounting(served, *options, held=(held,)) as first:
            file.close()
            await_supervisor(path, first.pid)
            programs = Programs(served.base, path, PROGRAMS, random.Random(5).randrange(1000))
            try:
                with mounting(served, *options, "--take-over") as second:
                    assert first.wait(KILLED_S) == 0
                    assert says(path)["supervisor"] == second.pid
                    assert is_locked(lock)
                    programs.require_running()
                    with mounting(served, *options, "--take-over") as third:
                        assert second.wait(KILLED_S) == 0
                        served.mounts += [Mount(path, third.pid), Mount(path, says(path)["pid"])]
                        assert is_locked(lock)
                        done = programs.end()
                        assert all(done[name] > 0 for name in PROGRAMS)
                        Mount(path, third.pid).umount()
                        assert third.wait(KILLED_S) == 0
            finally:
                programs.abandon()
        assert not is_locked(lock)
    served.end()


def test_a_successor_that_can_not_serve(served: Volume) -> None:
    """The first supervisor and its client go on, and were not disturbed."""
    served.format()
    supervised = Supervised(served)
    try:
        absent = f"sqlite://{served.base}/absent.db"
        log = served.base / "other.log"
        take = ("--supervisor", "--take-over")
        done = slicefs("mount", "-d", *take, "--log", log, absent, supervised.path)
        assert done.code == 1, done
        assert "absent.db" in done.err
        (supervised.path / "file").write_text("served")
        assert says(supervised.path)["pid"] == supervised.client
        done = slicefs("mount", "--no-supervisor", "--take-over", served.meta, supervised.path)
        assert "--take-over needs --supervisor" in done.err
        assert "is not a SliceFS mount" in slicefs("mount", *take, served.meta, served.base).err
        supervised.mount.umount()
        served.end()
    finally:
        supervised.clean_up()


def test_a_successor_that_dies(served: Volume) -> None:
    """Before its claim nothing happens; after it the first supervisor starts a client again."""
    served.format()
    supervised = Supervised(served)
    try:
        address = supervisor_address(str(supervised.path))
        before = supervised.client
        with (supervised.path / "open").open("w") as file:
            file.write("before ")
            file.flush()
            leave(Predecessor.ask(address))
            assert says(supervised.path)["pid"] == before
            heir = ask_until_free(address)
            with pytest.raises(HandoverRefused, match="just being taken over"):
                Predecessor.ask(address)
            assert heir.claim()
            leave(heir)
            assert supervised.await_next() < KILLED_S
            file.write("after")
        assert (supervised.path / "open").read_text() == "before after"
        assert says(supervised.path)["supervisor"] == supervised.supervisor
        supervised.mount.umount()
        served.end("could not take the mount over: going on with it")
    finally:
        supervised.clean_up()


def leave(heir: Predecessor) -> None:
    """Die as a supervisor that has asked for a mount."""
    heir.leave(served=False)
    for fd in (heir.arena, heir.status, heir.device):
        os.close(fd)


def ask_until_free(address: str) -> Predecessor:
    """Ask for a mount whose supervisor may not have noticed yet that another has left."""
    found: list[Predecessor] = []

    def is_given() -> bool:
        try:
            found.append(Predecessor.ask(address))
        except HandoverRefused:
            return False
        return True

    wait_until(is_given)
    return found[0]


def test_another_user_takes_no_mount_over(served: Volume) -> None:
    """The descriptors of a mount go to its own user and to root only."""
    served.format()
    supervised = Supervised(served)
    try:
        address = supervisor_address(str(supervised.path))
        words = [sys.executable, "-c", _ASK, address, str(NOBODY)]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        assert "PermissionError" in done.stderr
        supervised.mount.umount()
        assert not os.path.exists(address)
        served.end()
    finally:
        supervised.clean_up()


def test_root_of_a_container_upgrades_nothing(served: Volume) -> None:
    """It shares the network of the host, and sees none of its files: no program of its is run."""
    served.format()
    supervised = Supervised(served)
    try:
        address, made = supervisor_address(str(supervised.path)), served.base / "made"
        script = 'mount -t tmpfs none "$0" && exec "$@"'
        inside = ["unshare", "--mount", "sh", "-c", script, os.path.dirname(address)]
        names = [address, *names_of_sockets()]
        for name in names:
            words = [*inside, sys.executable, "-c", _UPGRADE, str(made), name]
            subprocess.run(words, check=False, capture_output=True)
        assert says(supervised.path)["pid"] == supervised.client
        assert not made.exists()
        assert "upgrading" not in served.log.read_text()
        supervised.mount.umount()
        served.end()
    finally:
        supervised.clean_up()


def names_of_sockets() -> list[str]:
    """Sockets of this network namespace that have a name and no path."""
    words = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    return [word for word in words if word.startswith("@slicefs")]


def test_a_directory_for_the_socket(served: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users must not enter it; its path may be longer than the address of a socket."""
    served.format()
    place = served.base / ("long" * 40)
    place.mkdir()
    monkeypatch.setenv("SLICEFS_RUNTIME_DIR", str(place))
    path = served.base / "mnt"
    path.mkdir()
    words = ("mount", "-d", "--supervisor", "--log", served.log, served.meta, path)
    done = slicefs(*words)
    assert (done.code, "SLICEFS_RUNTIME_DIR" in done.err) == (1, True), done
    place.chmod(0o700)
    supervised = Supervised(served)
    try:
        assert supervisor_address(str(supervised.path)).startswith(f"{place}/")
        assert slicefs("upgrade", supervised.path).code == 0
        supervised.await_next()
        supervised.mount.umount()
        wait_until(lambda: os.listdir(place) == [])
        served.end()
    finally:
        supervised.clean_up()

"""How a mount ends: by umount, by signals, lazily, under load; and two of one volume at once."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from fsclient.cli import main
from fsclient.cli.mount import umount as umount_cmd
from fsclient.fuse.mount import mount as kernel
from fsclient.fuse.mount.mount import find_mount
from fsmeta.errors import ConfigError
from tests.faults.judge import Worker, await_operations, start
from tests.faults.load import content
from tests.faults.program import (
    SLICEFS,
    Mount,
    Volume,
    is_mounted,
    needs_mounts,
    slicefs,
    succeed,
    wait_until,
)

pytestmark = needs_mounts

END_S = 60.0
_TGKILL = {"x86_64": 234, "aarch64": 131}[os.uname().machine]
GONE = (errno.ECONNABORTED, errno.ENOTCONN)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_unmounts(embedded: Volume, number: signal.Signals) -> None:
    embedded.format()
    mount = embedded.mount()
    (mount.path / "file").write_text("data")
    os.kill(mount.pid, number)
    wait_until("the client ends", END_S, mount.has_ended)
    assert not is_mounted(mount.path)
    assert any(f"{number.name}: unmounting" in line for line in embedded.log_lines())
    assert (embedded.mount().path / "file").read_text() == "data"
    embedded.end()


def test_a_signal_that_another_thread_takes(embedded: Volume) -> None:
    """The kernel chooses which; the main thread sleeps on."""
    embedded.format()
    mount = embedded.mount()
    (mount.path / "file").write_text("data")
    others = {int(name) for name in os.listdir(f"/proc/{mount.pid}/task")} - {mount.pid}
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.syscall(_TGKILL, mount.pid, others.pop(), signal.SIGTERM) == 0
    wait_until("the client ends", END_S, mount.has_ended)
    assert not is_mounted(mount.path)
    assert (embedded.mount().path / "file").read_text() == "data"
    embedded.end()


def test_sigterm_under_load(served: Volume) -> None:
    """The mount is in use: it ends all the same, and all that was acknowledged is there."""
    served.format()
    mount = served.mount()
    workers = [Worker(mount.path / f"w{n}", served.base / f"journal{n}", n) for n in range(3)]
    try:
        for _ in range(3):
            start(workers)
            await_operations(workers, 4)
            os.kill(mount.pid, signal.SIGTERM)
            os.kill(mount.pid, signal.SIGTERM)
            for worker in workers:
                worker.wait()
                assert worker.failure is not None
                assert worker.failure["errno"] in GONE, worker.failure
            wait_until("the client ends", END_S, mount.has_ended)
            assert not is_mounted(mount.path)
            served.fsck("--data")
            mount = served.mount()
            for worker in workers:
                worker.judge()
    finally:
        for worker in workers:
            worker.abandon()
    served.end("it is in use: .*; detaching it")


def test_sigterm_with_data_not_closed(embedded: Volume) -> None:
    """What write(2) took is stored by a client that is told to end."""
    embedded.format()
    mount = embedded.mount()
    data = content(1, 7_000_000)
    fd = os.open(mount.path / "file", os.O_WRONLY | os.O_CREAT)
    try:
        assert os.write(fd, data) == len(data)
        os.kill(mount.pid, signal.SIGTERM)
        wait_until("the client ends", END_S, mount.has_ended)
        with pytest.raises(OSError, match=r"endpoint|abort") as caught:
            os.write(fd, data)
        assert caught.value.errno in GONE
    finally:
        with pytest.raises(OSError, match=r"endpoint|abort"):
            os.close(fd)
    assert (embedded.mount().path / "file").read_bytes() == data
    embedded.end("it is in use: .*; detaching it")


def test_lazy_umount_with_an_open_file(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount()
    with (mount.path / "file").open("wb", buffering=0) as file:
        file.write(b"before ")
        done = slicefs("umount", mount.path)
        assert done.code == 1
        assert "it is in use" in done.err
        succeed("umount", "--lazy", mount.path)
        assert not is_mounted(mount.path)
        file.write(b"after")
        assert not mount.has_ended()
    wait_until("the client ends", END_S, mount.has_ended)
    assert (embedded.mount().path / "file").read_bytes() == b"before after"
    embedded.end()


def test_umount_of_a_dead_and_of_a_stopped_client(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount("--no-supervisor")
    os.kill(mount.pid, signal.SIGKILL)
    wait_until("the client ends", END_S, mount.has_ended)
    with pytest.raises(OSError, match="none") as caught:
        (mount.path / "none").stat()
    assert caught.value.errno in GONE
    succeed("umount", mount.path)
    mount = embedded.mount()
    os.kill(mount.pid, signal.SIGSTOP)
    succeed("umount", "--lazy", mount.path)
    assert not is_mounted(mount.path)
    os.kill(mount.pid, signal.SIGCONT)
    wait_until("the client ends", END_S, mount.has_ended)
    embedded.end()


def test_umount_waits_for_who_serves_the_mount(embedded: Volume) -> None:
    """Not for a client that is still leaving, whose mount had the same number, which was free."""
    embedded.format()
    leaving = embedded.mount()
    os.kill(leaving.pid, signal.SIGSTOP)
    try:
        succeed("umount", "--lazy", leaving.path)
        mount = embedded.mount(name="next")
        (mount.path / "file").write_text("data")
        succeed("umount", mount.path)
        assert mount.has_ended()
    finally:
        os.kill(leaving.pid, signal.SIGCONT)
    wait_until("the other client ends", END_S, leaving.has_ended)
    embedded.end()


# Of the mounts that other tests have at the same time it keeps no copies.
_ELSEWHERE = """
findmnt -rn -t fuse.slicefs -o TARGET | grep -v "^$1/" | xargs -r umount -l
echo
exec sleep 600
"""


@pytest.fixture
def elsewhere(embedded: Volume) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts a process in a mount namespace of its own, with copies of the volume's mounts."""
    started: list[subprocess.Popen[bytes]] = []

    def start_one() -> subprocess.Popen[bytes]:
        words = ["unshare", "--mount", "sh", "-c", _ELSEWHERE, "sh", str(embedded.base)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        name = Path(f"/proc/{process.pid}/comm")
        wait_until("it sleeps", END_S, lambda: name.read_text() == "sleep\n")
        return process

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def test_umount_says_who_keeps_the_mount(
    embedded: Volume, elsewhere: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """A demo once failed because another, beside it, had a copy of its mounts."""
    embedded.format()
    mount = embedded.mount()
    holder = elsewhere()
    umount = subprocess.Popen([SLICEFS, "umount", mount.path], stderr=subprocess.PIPE, text=True)
    assert umount.stderr is not None
    said = umount.stderr.readline()
    assert f"process {holder.pid} (sleep) has it on {mount.path} in another mount" in said
    assert not is_mounted(mount.path)
    assert umount.poll() is None
    assert not mount.has_ended()
    holder.kill()
    assert (umount.wait(END_S), umount.communicate()[1]) == (0, "")
    assert mount.has_ended()
    embedded.end()


def test_umount_gives_up_on_a_mount_that_is_kept(
    embedded: Volume,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(umount_cmd, "UMOUNT_WAIT_S", 0.2)
    monkeypatch.setattr(umount_cmd, "SILENT_S", 0.1)
    embedded.format()
    mount = embedded.mount()
    other = embedded.base / "other"
    other.mkdir()
    subprocess.run(["mount", "--bind", mount.path, other], check=True)
    assert main.run(["umount", str(mount.path)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"it is mounted on {other}, too: unmount that as well")
    succeed("umount", other)
    wait_until("the client ends", END_S, mount.has_ended)
    embedded.end()


def test_a_mount_that_got_the_device_number_since_keeps_nobody() -> None:
    """An unmount that took long because Redis was away once named another volume's mount."""
    other = find_mount("/proc")
    assert other is not None
    assert umount_cmd._holder(other, []) is None
    holder = umount_cmd._holder(other, [other.id])
    assert holder is not None
    assert (holder.pid, holder.path) == ("self", "/proc")


def test_a_mount_that_got_both_numbers_since_keeps_nobody(
    embedded: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(umount_cmd, "UMOUNT_WAIT_S", 0.2)
    monkeypatch.setattr(umount_cmd, "SILENT_S", 0.1)
    monkeypatch.setattr(kernel, "find_pins", list)  # tests beside this one may have some
    embedded.format()
    mount, others = embedded.mount(), [tmp_path / str(number) for number in range(4)]
    umount = kernel.umount

    def umount_and_mount(mountpoint: str, lazy: bool) -> None:
        os.kill(mount.pid, signal.SIGSTOP)
        umount(mountpoint, lazy)
        for other in others:  # one of them is given its numbers: they are the lowest that are free
            other.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "none", other], check=True)

    monkeypatch.setattr(kernel, "umount", umount_and_mount)
    try:
        with pytest.raises(ConfigError, match="has stored nothing for 0 s: see its log"):
            umount_cmd.umount.main([str(mount.path)], standalone_mode=False)
    finally:
        for other in others:
            subprocess.run(["umount", other], check=True)
        os.kill(mount.pid, signal.SIGCONT)
    wait_until("the client ends", END_S, mount.has_ended)
    embedded.end()


@pytest.mark.parametrize("unmounted", [False, True])
def test_signal_though_a_namespace_keeps_the_mount(
    embedded: Volume, elsewhere: Callable[[], subprocess.Popen[bytes]], unmounted: bool
) -> None:
    embedded.format()
    mount = embedded.mount()
    (mount.path / "file").write_text("data")
    elsewhere()
    if unmounted:
        subprocess.run(["umount", mount.path], check=True)
    os.kill(mount.pid, signal.SIGTERM)
    wait_until("the client ends", END_S, mount.has_ended)
    assert not is_mounted(mount.path)
    assert (embedded.mount().path / "file").read_text() == "data"
    embedded.end("unmounted, but process .* left without a client")


@pytest.fixture
def pinned(elsewhere: Callable[[], subprocess.Popen[bytes]]) -> Iterator[Callable[[], str]]:
    """Makes a namespace with copies of the mounts, in which no process runs; says which it is."""
    held: list[int] = []

    def pin() -> str:
        process = elsewhere()
        held.append(os.open(f"/proc/{process.pid}/ns/mnt", os.O_RDONLY))
        process.kill()
        process.wait()
        return os.readlink(f"/proc/self/fd/{held[-1]}")

    yield pin
    for fd in held:
        os.close(fd)


@pytest.mark.parametrize("unmounted", [False, True])
def test_signal_though_a_namespace_without_processes_keeps_the_mount(
    embedded: Volume, pinned: Callable[[], str], unmounted: bool
) -> None:
    """Such a client never ended, and a second signal was ignored."""
    embedded.format()
    mount = embedded.mount()
    (mount.path / "file").write_text("data")
    namespace = pinned()
    if unmounted:
        subprocess.run(["umount", mount.path], check=True)
    os.kill(mount.pid, signal.SIGTERM)
    wait_until("the client ends", END_S, mount.has_ended)
    assert not is_mounted(mount.path)
    assert any(
        namespace in line and f"process {os.getpid()}" in line for line in embedded.log_lines()
    )
    assert (embedded.mount().path / "file").read_text() == "data"
    embedded.end("unmounted, but the mount namespace .* what is left of it has no client")


def test_umount_names_a_namespace_without_processes(
    embedded: Volume,
    pinned: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(umount_cmd, "UMOUNT_WAIT_S", 0.2)
    monkeypatch.setattr(umount_cmd, "SILENT_S", 0.1)
    embedded.format()
    mount = embedded.mount()
    namespace = pinned()
    assert main.run(["umount", str(mount.path)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert namespace in last
    assert last.endswith(f"has it open; `kill {mount.pid}` ends the client")
    os.kill(mount.pid, signal.SIGTERM)
    wait_until("the client ends", END_S, mount.has_ended)
    embedded.end("unmounted, but the mount namespace .* what is left of it has no client")


def test_a_second_signal_waits_for_nothing_but_storing(embedded: Volume) -> None:
    """What the first one waits for may never come: here a request that hangs."""
    embedded.format()
    mount = embedded.mount()
    file = os.open(mount.path / "file", os.O_CREAT | os.O_WRONLY)
    os.write(file, b"data")
    failed: list[int | None] = []

    def hang() -> None:
        try:
            (mount.path / "hangs").mkdir()
        except OSError as error:
            failed.append(error.errno)

    hanging = threading.Thread(target=hang)
    with closing(sqlite3.connect(embedded.base / "meta.db", isolation_level=None)) as database:
        database.execute("BEGIN EXCLUSIVE")
        hanging.start()
        wait_until("it hangs", END_S, lambda: _serves_mkdir(embedded, mount))
        os.kill(mount.pid, signal.SIGTERM)  # two at once would be one
        text = "SIGTERM: unmounting"
        wait_until("it is taken", END_S, lambda: text in embedded.log.read_text())
        os.kill(mount.pid, signal.SIGTERM)
        text = "a second signal: not waiting for programs that still use the mount"
        wait_until("it says so", END_S, lambda: text in embedded.log.read_text())
        assert not mount.has_ended()  # it has something to store
        database.execute("ROLLBACK")
    wait_until("the client ends", END_S, mount.has_ended)
    hanging.join()
    assert failed == [errno.ENOTCONN]
    with suppress(OSError):
        os.close(file)
    assert (embedded.mount().path / "file").read_bytes() == b"data"
    embedded.end("it is in use: .*; detaching it")


def _serves_mkdir(volume: Volume, mount: Mount) -> bool:
    """Whether the client is at it, by the stacks of its threads."""
    os.kill(mount.pid, signal.SIGUSR1)
    return "in mkdir" in volume.log.read_text()


def copy(source: Path, target: Path) -> None:
    """cp, by read(2) and write(2)."""
    with source.open("rb") as from_, target.open("wb") as to:
        while piece := from_.read(1 << 20):
            to.write(piece)


@pytest.mark.parametrize("kind", ["served", "embedded"])
def test_two_mounts_copy_into_each_other(kind: str, request: pytest.FixtureRequest) -> None:
    volume: Volume = request.getfixturevalue(kind)
    volume.format()
    one, two = volume.mount(name="one").path, volume.mount(name="two").path
    files = {
        f"f{seed}": content(seed, size) for seed, size in enumerate((0, 10, 70_000, 9_000_000))
    }
    for name, data in files.items():
        (one / name).write_bytes(data)
    for generation in range(4):
        source, target = (one, two) if generation % 2 else (two, one)
        for name in files:
            copy(source / f"{name}{'x' * generation}", target / f"{name}{'x' * (generation + 1)}")
    for root in (one, two):
        for name, data in files.items():
            for generation in range(5):
                assert (root / f"{name}{'x' * generation}").read_bytes() == data
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir())
    assert len(volume.status()["sessions"]) == 2
    volume.end()

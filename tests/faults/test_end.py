"""How a mount ends: by umount, by signals, lazily, under load; and two of one volume at once."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from tests.faults.judge import Worker, await_operations, start
from tests.faults.load import content
from tests.faults.program import Volume, is_mounted, needs_mounts, slicefs, succeed, wait_until

pytestmark = needs_mounts

END_S = 30.0
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
    mount = embedded.mount()
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

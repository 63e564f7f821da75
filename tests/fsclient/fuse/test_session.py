"""Interrupts, blocked threads, stopping and the end of a mount."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsclient.fuse.mount.mount import Mounted, find_mount, mount, umount
from fsclient.fuse.session.session import Session, SessionConfig
from fsclient.kernel.contract import OpenOut
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime
from tests.fsclient.fuse.mounting import END_S, needs_root_and_fuse, serving
from tests.fsclient.fuse.ramfs import RamFS, fail

pytestmark = needs_root_and_fuse


class Blocking(RamFS):
    """Reads wait until they are released or interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.session: Session | None = None
        self.released = False
        self.waiting = threading.Semaphore(0)
        self.interrupted = 0
        self._change = threading.Condition()
        self.opened = OpenOut(0, direct_io=True)
        self.hooks["read"] = self.block

    def block(self) -> None:
        assert self.session is not None
        with self.session.waking(self.wake), self._change:
            self.waiting.release()
            while not self.released:
                if self.session.interrupted():
                    self.interrupted += 1
                    raise fail(4)
                self._change.wait()

    def wake(self) -> None:
        with self._change:
            self._change.notify_all()

    def release_all(self) -> None:
        self.released = True
        self.wake()


@contextmanager
def blocking(root: Path, config: SessionConfig | None = None) -> Iterator[Blocking]:
    fs = Blocking()
    with serving(fs, root, config) as session:
        fs.session = session
        (root / "file").write_bytes(b"data")
        try:
            yield fs
        finally:
            fs.release_all()


def reader(root: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["head", "-c4", root / "file"], stdout=subprocess.PIPE)


def test_a_killed_reader_ends(tmp_path: Path) -> None:
    with blocking(tmp_path / "mnt") as fs, reader(tmp_path / "mnt") as process:
        assert fs.waiting.acquire(timeout=END_S)
        process.kill()
        assert process.wait(END_S) == -signal.SIGKILL
        assert fs.interrupted == 1


def test_more_blocked_readers_than_threads(tmp_path: Path) -> None:
    """Others are served meanwhile, INTERRUPTs are read, and the surplus leaves afterwards."""
    config = SessionConfig(threads=2, threads_max=32)
    with blocking(tmp_path / "mnt", config) as fs:
        processes = [reader(tmp_path / "mnt") for _ in range(10)]
        for _ in processes:
            assert fs.waiting.acquire(timeout=END_S)
        assert (tmp_path / "mnt" / "file").stat().st_size == 4
        for process in processes[:5]:
            process.kill()
            process.communicate(timeout=END_S)
            assert process.returncode == -signal.SIGKILL
        fs.release_all()
        assert [process.communicate()[0] for process in processes[5:]] == [b"data"] * 5
        assert fs.interrupted == 5


def test_threads_are_bounded(tmp_path: Path) -> None:
    config = SessionConfig(threads=1, threads_max=2)
    with blocking(tmp_path / "mnt", config) as fs:
        processes = [reader(tmp_path / "mnt") for _ in range(3)]
        assert fs.waiting.acquire(timeout=END_S)
        assert fs.waiting.acquire(timeout=END_S)
        fs.release_all()
        assert [process.communicate()[0] for process in processes] == [b"data"] * 3


def test_interrupted_is_false_elsewhere(tmp_path: Path) -> None:
    with serving(RamFS(), tmp_path / "mnt") as session:
        assert not session.interrupted()
        with session.waking(lambda: None):
            assert not session.interrupted()


def test_a_file_system_that_ignores_interrupts(tmp_path: Path) -> None:
    """The killed process stays until its request is answered; then the mount can go."""
    with serving(RamFS(), tmp_path / "mnt") as session:
        fs = session._fs
        assert isinstance(fs, RamFS)
        entered, release = threading.Event(), threading.Event()

        def block() -> None:
            entered.set()
            release.wait(END_S)

        fs.hooks["statfs"] = block
        with subprocess.Popen(["stat", "-f", tmp_path / "mnt"]) as process:
            assert entered.wait(END_S)
            process.kill()
            release.set()
            assert process.wait(END_S) == -signal.SIGKILL


def mounted_session(root: Path) -> tuple[Mounted, Session]:
    root.mkdir()
    mounted = mount(str(root), "testvol")
    return mounted, Session(mounted, RamFS(), SystemRuntime())


def test_stop_answers_what_is_under_way(tmp_path: Path) -> None:
    """The mount outlives the session, and another session can go on serving it."""
    root = tmp_path / "mnt"
    fs = Blocking()
    # Nobody will answer the FLUSH of a reader that ends after the session.
    fs.opened = OpenOut(0, direct_io=True, no_flush=True)
    root.mkdir()
    mounted = mount(str(root), "testvol")
    try:
        session = fs.session = Session(mounted, fs, SystemRuntime())
        session.start()
        (root / "file").write_bytes(b"data")
        with reader(root) as process:
            assert fs.waiting.acquire(timeout=END_S)
            session.stop()
            fs.release_all()
            assert process.communicate()[0] == b"data"
        ended = threading.Thread(target=session.wait, daemon=True)
        ended.start()
        ended.join(END_S)
        assert not ended.is_alive()
        assert find_mount(str(root)) is not None
    finally:
        os.close(mounted.fd)
        umount(str(root), lazy=True)


def test_wait_returns_after_umount(tmp_path: Path) -> None:
    mounted, session = mounted_session(tmp_path / "mnt")
    try:
        session.start()
        umount(mounted.mountpoint)
        session.wait()
        session.stop()  # too late, and harmless
    finally:
        os.close(mounted.fd)


def test_unmounted_before_serving(tmp_path: Path) -> None:
    mounted, session = mounted_session(tmp_path / "mnt")
    try:
        umount(mounted.mountpoint, lazy=True)
        with pytest.raises(ConfigError, match="unmounted before"):
            session.start()
    finally:
        os.close(mounted.fd)

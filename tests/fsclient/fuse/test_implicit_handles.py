"""Handles of readers that have none: one for each process, ended when idle or one too many."""

from __future__ import annotations

import threading
from typing import Final

from fsclient.fuse.dispatch.implicit_handles import ImplicitHandles
from fsmeta.runtime import SystemRuntime
from fsmeta.types import Ino
from tests.support.waiting import wait_until

_IDLE_S: Final = 0.05


class _Files:
    """Opens files, and knows which are open."""

    def __init__(self) -> None:
        self.open: dict[int, Ino] = {}
        self.opened = 0
        self.lock = threading.Lock()

    def enter(self, ino: Ino) -> int:
        with self.lock:
            self.opened += 1
            self.open[self.opened] = ino
            return self.opened

    def leave(self, ino: Ino, fh: int) -> None:
        with self.lock:
            assert self.open.pop(fh) == ino


def _handles(files: _Files, idle_s: float = 3600.0, at_most: int = 3) -> ImplicitHandles:
    return ImplicitHandles("test", SystemRuntime(), files.enter, files.leave, idle_s, at_most)


def test_p5_a_process_keeps_its_handle_of_an_inode() -> None:
    files = _Files()
    handles = _handles(files)
    first = handles.take(Ino(5), 1)
    handles.put(first)
    assert handles.take(Ino(5), 1) is first
    assert handles.take(Ino(5), 2) is not first
    assert handles.take(Ino(6), 1) is not first
    handles.close()
    assert not files.open
    assert files.opened == 3


def test_p5_one_too_many_ends_the_oldest_that_nobody_uses() -> None:
    files = _Files()
    handles = _handles(files)
    used = handles.take(Ino(1), 0)
    for ino in (2, 3, 4, 5):
        handles.put(handles.take(Ino(ino), 0))
    assert sorted(files.open.values()) == [1, 4, 5]
    handles.put(used)
    handles.close()
    assert not files.open


def test_p5_what_is_idle_ends_and_what_is_used_does_not() -> None:
    files = _Files()
    handles = _handles(files, _IDLE_S)
    used = handles.take(Ino(1), 0)
    handles.put(handles.take(Ino(2), 0))
    wait_until(lambda: list(files.open.values()) == [1])
    handles.put(used)
    wait_until(lambda: not files.open)
    handles.put(handles.take(Ino(3), 0))  # its thread has ended, and begins again
    wait_until(lambda: not files.open)
    handles.close()


def test_p5_threads_of_a_process_share_one() -> None:
    files = _Files()
    handles = _handles(files)
    together = threading.Barrier(8)

    def read() -> None:
        together.wait()
        for _ in range(50):
            handles.put(handles.take(Ino(7), 3))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(handles) == 1
    assert list(files.open.values()) == [7]
    handles.close()
    assert not files.open

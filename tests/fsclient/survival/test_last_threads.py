"""What a thread that may wait for the mount keeps, and how the supervisor knows it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsclient.fuse.session.detached_calls import DetachedCalls
from fsclient.fuse.session.worker import receive_buffer
from fsclient.survival.last_threads import only_wait
from fsdata.files import reader
from fsmeta.runtime import SystemRuntime

_HOLDER = """
import fcntl, sys, threading
from fsclient.fuse.session.detached_calls import DetachedCalls
from fsmeta.runtime import SystemRuntime
with open(sys.argv[1], "r+") as file, open("/dev/null") as device:
    fcntl.flock(file, fcntl.LOCK_EX)
    calls = DetachedCalls(SystemRuntime(), device.fileno())
    begun = threading.Event()
    def call():
        begun.set()
        threading.Event().wait()
    threading.Thread(target=calls.run, args=(call,), daemon=True).start()
    begun.wait()
    print("begun", flush=True)
    file.close()  # for the process; for the thread it was closed before
    print("closed", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def device() -> Iterator[int]:
    """In place of /dev/fuse."""
    fd = os.open("/dev/null", os.O_RDWR)
    yield fd
    os.close(fd)


def descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/thread-self/fd")}


def test_descriptors_of_a_call(device: int, tmp_path: Path) -> None:
    """The standard ones, that of the mount, and no other; the process keeps its own."""
    calls = DetachedCalls(SystemRuntime(), device)
    with open(tmp_path / "file", "w") as file:
        seen: list[set[int]] = []
        for _ in range(2):  # the second one in the same thread
            calls.run(lambda: seen.append(descriptors()))
        for each in seen:
            assert device in each
            assert file.fileno() not in each
            assert len(each - {0, 1, 2, device}) == 1  # of the listing itself
        file.write("the process has it still")


def test_errors_of_a_call(device: int) -> None:
    calls = DetachedCalls(SystemRuntime(), device)
    with pytest.raises(FileNotFoundError):
        calls.run(lambda: os.unlink("/nowhere"))
    done: list[int] = []
    calls.run(lambda: done.append(1))
    assert done == [1]


def test_locks_do_not_stay_with_a_call(tmp_path: Path) -> None:
    """What the process closes is closed, though a call has not returned."""
    path = tmp_path / "lock"
    path.touch()
    words = [sys.executable, "-c", _HOLDER, str(path)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "begun\n"
        assert holder.stdout.readline() == "closed\n"
        with open(path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder.communicate("")


def test_processes_that_do_not_only_wait(device: int) -> None:
    """One that lives, one that has ended and one that never was."""
    assert not only_wait(os.getpid(), device, "/mnt")
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        assert not only_wait(sleeping.pid, device, "/mnt")
        sleeping.kill()
        os.waitid(os.P_PID, sleeping.pid, os.WEXITED | os.WNOWAIT)
        assert not only_wait(sleeping.pid, device, "/mnt")
        sleeping.wait()
        assert not only_wait(sleeping.pid, device, "/mnt")


def pages_present(begin: int, size: int) -> list[bool]:
    """Which pages of a range of addresses are in place: proc_pid_pagemap(5)."""
    pages = range(begin // mmap.PAGESIZE, (begin + size - 1) // mmap.PAGESIZE + 1)
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(pages.start * 8)
        words = struct.iter_unpack("=Q", file.read(len(pages) * 8))
        return [bool(word >> 63) for (word,) in words]


def buffer_present(view: memoryview) -> list[bool]:
    return pages_present(ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))


def test_requests_find_a_page_while_their_process_is_killed() -> None:
    """Else the kernel has none for them any more, and ends them with EIO."""
    assert all(buffer_present(receive_buffer(1 << 20, resident=True)))
    assert not all(buffer_present(receive_buffer(1 << 20)))


def test_zeros_have_their_pages() -> None:
    """As above: an answer is copied from them."""
    zeros = reader._ZEROS.obj
    assert isinstance(zeros, bytes)
    begin = ctypes.cast(ctypes.c_char_p(zeros), ctypes.c_void_p).value
    assert begin is not None
    assert all(pages_present(begin, len(zeros)))

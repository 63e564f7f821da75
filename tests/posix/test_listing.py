"""P1, issue 3.9: large directories through the kernel: cookies, rewinds, shared offsets, others.

getdents64(2) and lseek(2) are what telldir(3) and seekdir(3) do; Python's os.scandir can't.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.posix.conftest import Twins

_GETDENTS64 = {"x86_64": 217, "aarch64": 61}[os.uname().machine]
_HEAD = struct.Struct("<QQHB")  # ino, the cookie behind this name, length of the record, type
_LIBC = ctypes.CDLL(None, use_errno=True)
BUFFER_BYTES = 8192

COUNTS = {"redis": 4000, "sqlite": 2500, "tikv": 1200}


def _getdents(fd: int, size: int = BUFFER_BYTES) -> list[tuple[str, int]]:
    """The next names, and the cookie behind each."""
    buffer = ctypes.create_string_buffer(size)
    length = _LIBC.syscall(_GETDENTS64, fd, buffer, size)
    assert length >= 0, os.strerror(ctypes.get_errno())
    found, at, raw = [], 0, buffer.raw
    while at < length:
        _, cookie, record, _ = _HEAD.unpack_from(raw, at)
        name = raw[at + _HEAD.size : at + record].partition(b"\0")[0]
        found.append((os.fsdecode(name), cookie))
        at += record
    return found


def _rest(fd: int, size: int = BUFFER_BYTES) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    while more := _getdents(fd, size):
        found += more
    return found


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.fixture(scope="module")
def large(twins: Twins) -> Iterator[str]:
    """A directory of several pages, by its name on either mount."""
    name = "large"
    (twins.first / name).mkdir()
    for number in range(COUNTS[twins.engine]):
        os.mknod(twins.first / name / f"{number:05}")
    yield name
    for entry in os.listdir(twins.first / name):
        os.unlink(twins.first / name / entry)
    os.rmdir(twins.first / name)


def _names(twins: Twins) -> set[str]:
    return {".", "..", *(f"{number:05}" for number in range(COUNTS[twins.engine]))}


@pytest.mark.parametrize("mount", ["first", "second"])
def test_telldir_and_seekdir(twins: Twins, large: str, mount: str) -> None:
    """Any cookie is good for as long as the directory is open, in any order, and after it."""
    chance = random.Random(2)
    with _opened(getattr(twins, mount) / large) as fd:
        found = _rest(fd)
        names = [name for name, _ in found]
        assert len(names) == len(set(names))
        assert set(names) == _names(twins)
        for _ in range(30):
            at = chance.randrange(len(found))
            os.lseek(fd, found[at][1], os.SEEK_SET)
            page = _getdents(fd, 512)
            assert page == found[at + 1 : at + 1 + len(page)]
            assert page or at == len(found) - 1
        os.lseek(fd, found[len(found) // 2][1], os.SEEK_SET)
        assert _rest(fd) == found[len(found) // 2 + 1 :]
        os.lseek(fd, 0, os.SEEK_SET)
        assert {name for name, _ in _rest(fd)} == _names(twins)


def test_a_listing_that_another_open_has_begun(twins: Twins, large: str) -> None:
    """The kernel keeps cookies of a listing and asks later handles to go on behind them."""
    for size in (1024, 1 << 16):
        with _opened(twins.second / large) as first, _opened(twins.second / large) as second:
            begin = _getdents(first, size)
            other = _rest(second)
            os.lseek(second, begin[-1][1], os.SEEK_SET)
            joined = begin + _rest(second)
            assert [name for name, _ in joined] == [name for name, _ in other]
            assert {name for name, _ in begin + _rest(first)} == _names(twins)


def test_p1_what_changes_between_open_and_the_first_read_is_listed(twins: Twins) -> None:
    """As on every file system of Linux, though POSIX leaves it open."""
    path = twins.first / "opened"
    path.mkdir()
    (path / "gone").touch()
    fd = os.open(path, os.O_RDONLY)
    (path / "new").mkdir()
    (path / "gone").rename(path / "renamed")
    assert sorted(os.listdir(fd)) == ["new", "renamed"]
    os.close(fd)
    shutil.rmtree(path)


def test_fork_shares_the_offset(twins: Twins, large: str) -> None:
    """Parent and child read by turns: each name goes to one of the two."""
    with _opened(twins.second / large) as fd:
        mine: list[str] = []
        shared = [name for name, _ in _getdents(fd)]
        while True:
            reader, writer = os.pipe()
            child = os.fork()
            if not child:
                os.write(writer, "\n".join(name for name, _ in _getdents(fd, 2048)).encode())
                os._exit(0)
            os.close(writer)
            with open(reader) as pipe:
                theirs = pipe.read().splitlines()
            assert os.waitpid(child, 0)[1] == 0
            mine = [name for name, _ in _getdents(fd)]
            shared += theirs + mine
            if not theirs and not mine:
                break
    assert len(shared) == len(set(shared))
    assert set(shared) == _names(twins)


def test_listing_while_another_mount_changes_it(twins: Twins, large: str) -> None:
    """Each name that is there throughout comes exactly once, whoever comes and goes elsewhere."""
    stop = threading.Event()
    first = twins.first / large

    def come_and_go() -> None:
        number = 0
        while not stop.is_set():
            for offset in range(20):
                os.mknod(first / f"passing{number + offset}")
            for offset in range(20):
                os.unlink(first / f"passing{number + offset}")
            number += 20

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for size in (600, 4096, 1 << 16):
            with _opened(twins.second / large) as fd:
                names = [name for name, _ in _rest(fd, size)]
                stay = [name for name in names if not name.startswith("passing")]
                assert len(stay) == len(set(stay))
                assert set(stay) == _names(twins)
    finally:
        stop.set()
        thread.join()


def _asked(mount: Path) -> float:
    """How many xattrs the mount was asked for."""
    (number,) = re.findall(
        r'operations_total\{op="getxattr"\} (\S+)', (mount / ".stats").read_text()
    )
    return float(number)


def test_ls_asks_for_no_label_of_each_file(twins: Twins, root: Path) -> None:
    """20,000 files took four times as long as find(1) did: a request for each, and none is kept."""
    for number in range(100):
        (root / f"file{number}").touch()
    with pytest.raises(OSError, match="not supported"):
        os.getxattr(root / "file0", "security.selinux")
    before = _asked(twins.first)
    subprocess.run(["ls", "-la", root], check=True, stdout=subprocess.DEVNULL)
    assert _asked(twins.first) - before < 10
    os.setxattr(root / "file0", "security.selinux", b"a label that was copied here")
    assert os.getxattr(root / "file0", "security.selinux") == b"a label that was copied here"
    assert os.listxattr(root / "file0") == ["security.selinux"]
    os.removexattr(root / "file0", "security.selinux")

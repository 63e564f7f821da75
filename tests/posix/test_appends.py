"""P4: O_APPEND across mounts: nobody overwrites what another one has appended."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import sys
from pathlib import Path

from tests.posix.conftest import Twins

# Appends numbered lines of odd lengths; now and then closes, syncs or reads back what it wrote.
APPENDER = """
import os, random, sys
path, who, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
dice = random.Random(who)
fd = os.open(path, os.O_WRONLY | os.O_APPEND)
reader = os.open(path, os.O_RDONLY)
for number in range(count):
    line = f"{who} {number} ".encode() + b"." * dice.choice((0, 5, 300, 5000)) + b"\\n"
    assert os.write(fd, line) == len(line)
    what = dice.random()
    if what < 0.2:
        os.fsync(fd)
    elif what < 0.4:
        os.close(fd)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    elif what < 0.5:
        os.fstat(fd)
        os.pread(reader, 100, dice.randrange(1000))
os.close(fd)
"""
LINES = 150


def _there(twins: Twins, path: Path) -> Path:
    """The same file on the other mount."""
    return twins.second / path.relative_to(twins.first)


def test_p4_appenders_on_two_mounts_lose_nothing(twins: Twins, root: Path) -> None:
    """Each line is there once, whole, and each appender's in its order; all mounts see the same."""
    path = root / "log"
    path.touch()
    _there(twins, path).stat()
    places = {"a": path, "b": _there(twins, path), "c": path, "d": _there(twins, path)}
    running = [
        subprocess.Popen([sys.executable, "-c", APPENDER, place, who, str(LINES)])
        for who, place in places.items()
    ]
    assert [each.wait(timeout=120) for each in running] == [0] * 4
    twins.settle(f"{root.name}/log")
    content = path.read_bytes()
    assert _there(twins, path).read_bytes() == content
    seen: dict[str, list[int]] = {who: [] for who in places}
    for line in content.splitlines():
        who, number, dots = line.decode().split(" ")
        assert not dots.strip("."), line[:50]
        seen[who].append(int(number))
    assert seen == {who: list(range(LINES)) for who in places}


def test_p4_an_append_goes_to_the_end_that_others_have_moved(twins: Twins, root: Path) -> None:
    """This kernel does not know yet how long the file is, or thinks that it is longer."""
    path = root / "f"
    path.write_bytes(b"first\n")
    there = _there(twins, path)
    fd = os.open(path, os.O_RDWR | os.O_APPEND)
    os.write(fd, b"mine 1\n")
    with there.open("ab") as other:
        other.write(b"theirs, and it is a longer one\n")
    os.write(fd, b"mine 2\n")
    os.fsync(fd)
    want = b"first\ntheirs, and it is a longer one\nmine 1\nmine 2\n"
    twins.wait_until(lambda: os.pread(fd, 1000, 0) == want)
    os.truncate(there, 3)
    os.write(fd, b"mine 3\n")
    os.close(fd)
    for each in (path, there):  # whose kernel may believe the old size for a second
        twins.wait_until(lambda: each.read_bytes() == b"firmine 3\n")  # noqa: B023


def test_p4_appends_and_other_writes_of_one_mount(root: Path) -> None:
    """An append is found by what is written over it, read or truncated before it is stored."""
    dice = random.Random(6)
    held = bytearray()
    plain = os.open(root / "f", os.O_RDWR | os.O_CREAT)
    append = os.open(root / "f", os.O_WRONLY | os.O_APPEND)
    for _ in range(300):
        data = dice.randbytes(dice.randrange(1, 3000))
        what = dice.randrange(6)
        if what < 3:
            os.write(append, data)
            held += data
        elif what == 3:
            pos = dice.randrange(len(held) + 500)
            os.pwrite(plain, data, pos)
            held.extend(bytes(max(0, pos - len(held))))
            held[pos : pos + len(data)] = data
        elif what == 4:
            size = dice.randrange(max(1, len(held)))
            os.ftruncate(plain, size)
            del held[size:]
        else:
            os.fsync(dice.choice((plain, append)))
        assert os.fstat(plain).st_size == len(held)
        pos = dice.randrange(len(held) + 1)
        assert os.pread(plain, 2000, pos) == held[pos : pos + 2000]
    os.close(plain)
    os.close(append)
    assert (root / "f").read_bytes() == held


def test_p4_a_descriptor_begins_to_append(root: Path) -> None:
    """fcntl(2) sets O_APPEND on a file that is open."""
    fd = os.open(root / "f", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"12345")
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    os.write(fd, b"67")
    assert os.pread(fd, 10, 0) == b"1234567"
    os.close(fd)

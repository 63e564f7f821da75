"""P3: flock(2), fcntl(2) and OFD locks, as tmpfs and the disk have them: one mount, and two.

Each test takes two processes, in one directory or in two mounts of it. Where the kernel itself is
the judge (`tmpfs`, `disk`) the test is calibrated; SliceFS then has to do the same. What differs is
decided in docs/SEMANTICS.md.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from tests.posix.lockers import (
    Process,
    Wait,
    eventually,
    in_line,
    in_line_of_the_kernel,
    processes,
)
from tests.posix.volumes import Volume
from tests.support.waiting import wait_until

RW, RO, WO = os.O_RDWR, os.O_RDONLY, os.O_WRONLY
KERNELS = ("tmpfs", "disk")
ONE = ("one-sqlite", "one-redis")
TWO = ("two-sqlite", "two-redis", "two-tikv")
AGAIN, DEADLK = "EAGAIN", "EDEADLK"


class Pair:
    """Two processes, and where each works."""

    def __init__(self, place: str, first: Process, second: Process) -> None:
        self.place = place
        self.one = first
        self.two = second
        self.is_kernel = place in KERNELS

    def come(self, count: int) -> None:
        """Returns when so many requests are in line."""
        folders = {self.one.folder, self.two.folder}
        asked = in_line_of_the_kernel if self.is_kernel else in_line
        wait_until(lambda: asked(*folders) == count)

    def wait(self, *waits: Wait) -> bool:
        """Whether these are in line, as nobody else is, and stay there."""
        self.come(len(waits))
        return all(each.goes_on() for each in waits)

    def fds(self, flags: int = RW) -> tuple[int, int]:
        """The same file, empty and new, opened by both."""
        first = self.one.opens("file", RW | os.O_CREAT | os.O_TRUNC)
        second = self.two.opens("file", flags)
        return first, second


@pytest.fixture(scope="module")
def places(
    volumes: Callable[[str, str], AbstractContextManager[Volume]],
) -> Iterator[Callable[[str], tuple[Path, Path]]]:
    """Both directories of a place, which is made when first asked for."""
    made: dict[str, tuple[Path, Path]] = {}
    with ExitStack() as stack:

        def find(place: str) -> tuple[Path, Path]:
            if place not in made:
                made[place] = make(place)
            return made[place]

        def make(place: str) -> tuple[Path, Path]:
            if place in KERNELS:
                above = "/dev/shm" if place == "tmpfs" else None
                path = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=above)))
                return path, path
            count, engine = place.split("-")
            if ("two-" + engine) not in made:
                volume = stack.enter_context(volumes(engine, f"locks-{engine}"))
                made["two-" + engine] = volume.mount("first"), volume.mount("second")
            first, second = made["two-" + engine]
            return (first, second) if count == "two" else (first, first)

        yield find


@pytest.fixture(params=(*KERNELS, *ONE, *TWO))
def pair(
    request: pytest.FixtureRequest, places: Callable[[str], tuple[Path, Path]]
) -> Iterator[Pair]:
    here, there = places(request.param)
    with processes(here, there) as (one, two):
        yield Pair(request.param, one, two)
    (here / "file").unlink(missing_ok=True)


def test_ranges(pair: Pair) -> None:
    """Splitting, joining and changing; what others see of it."""
    a, b = pair.fds()
    one, two = pair.one, pair.two
    assert one.posix(a, "w", 0, 100) is None
    assert one.posix(a, "u", 40, 20) is None
    assert two.getlk(b, "r") == ("w", 0, 40, one.pid())
    assert two.getlk(b, "r", 40, 20) == ("u", 40, 20, 0)
    assert two.getlk(b, "r", 50, 20) == ("w", 60, 40, one.pid())
    assert two.posix(b, "w", 40, 20) is None
    assert two.posix(b, "w", 40, 21) == AGAIN
    assert one.posix(a, "r", 0, 10) is None
    assert two.getlk(b, "w", 0, 5) == ("r", 0, 10, one.pid())
    assert two.posix(b, "r", 0, 10) is None
    assert one.posix(a, "w", 0, 10) == AGAIN
    assert two.posix(b, "u", 0, 10) is None
    assert one.posix(a, "w", 0, 10) is None
    assert two.getlk(b, "w", 0, 5) == ("w", 0, 40, one.pid())
    assert one.posix(a, "u") is None
    assert two.getlk(b, "w", 60) == ("u", 60, 0, 0)


def test_whence_and_length(pair: Pair) -> None:
    a, b = pair.fds()
    one, two = pair.one, pair.two
    one.write(a, b"x" * 100)
    assert one.posix(a, "w", -10, 10, os.SEEK_END) is None
    assert two.getlk(b, "w") == ("w", 90, 10, one.pid())
    assert one.posix(a, "u") is None
    assert one.posix(a, "w", -20, 5, os.SEEK_CUR) is None
    assert two.getlk(b, "w") == ("w", 80, 5, one.pid())
    assert one.posix(a, "u") is None
    assert one.posix(a, "w", 50, -20) is None  # what is before
    assert two.getlk(b, "w") == ("w", 30, 20, one.pid())
    assert one.posix(a, "w", 0, 0) is None  # to the end, wherever that will be
    assert two.getlk(b, "r", 1 << 40, 1) == ("w", 0, 0, one.pid())
    assert one.posix(a, "u", 10, 0) is None
    assert two.getlk(b, "w") == ("w", 0, 10, one.pid())
    assert one.posix(a, "w", -1, 1) == "EINVAL"
    assert one.posix(a, "w", 5, -6) == "EINVAL"


def test_a_lock_needs_the_right_mode(pair: Pair) -> None:
    one = pair.one
    pair.fds()
    assert one.posix(one.opens("file", RO), "w") == "EBADF"
    assert one.posix(one.opens("file", WO), "r") == "EBADF"
    assert one.flock(one.opens("file", RO), "w") is None


def test_close_drops_all(pair: Pair) -> None:
    """Any descriptor of the file that the process closes; not that of a child."""
    a, b = pair.fds()
    one, two = pair.one, pair.two
    other = one.opens("file", RW)
    again = one.dup(a)
    assert one.posix(a, "w") is None
    one.fork()
    assert one.child("posix", a, "r", 0, 10) == AGAIN
    one.child("close", a)
    one.child("close", other)
    one.child()
    assert two.posix(b, "r") == AGAIN
    one.close(other)
    assert two.posix(b, "r") is None
    assert two.posix(b, "u") is None
    assert one.posix(a, "w") is None
    one.close(again)
    assert two.posix(b, "w") is None
    assert two.posix(b, "u") is None


def test_the_end_of_a_process(pair: Pair) -> None:
    a, b = pair.fds()
    one, two = pair.one, pair.two
    assert one.posix(a, "w") is None
    assert one.flock(a, "r") is None
    assert two.posix(b, "r") == AGAIN
    assert two.flock(b, "w") == AGAIN
    one.kill()
    eventually(lambda: two.posix(b, "w"))
    eventually(lambda: two.flock(b, "w"))


def test_exec_keeps_locks_of_descriptors_that_stay(pair: Pair) -> None:
    a, b = pair.fds()
    one, two = pair.one, pair.two
    one.keep(a)
    assert one.posix(a, "w", 0, 10) is None
    assert one.flock(a, "w") is None
    one.say("exec")
    wait_until(lambda: Path(f"/proc/{one.popen.pid}/comm").read_text() == "sleep\n")
    assert two.posix(b, "w", 0, 10) == AGAIN
    assert two.flock(b, "r") == AGAIN
    one.kill()
    eventually(lambda: two.posix(b, "w", 0, 10))
    eventually(lambda: two.flock(b, "r"))


def test_flock_belongs_to_the_open_file(pair: Pair) -> None:
    """dup(2) and fork(2) share it, another open(2) does not; both kinds don't know each other."""
    a, b = pair.fds()
    one, two = pair.one, pair.two
    again, other = one.dup(a), one.opens("file", RO)
    assert one.flock(a, "w") is None
    assert one.flock(again, "w") is None
    assert one.flock(other, "r") == AGAIN
    assert two.posix(b, "w") is None
    one.fork()
    assert one.child("flock", a, "r") is None
    assert two.flock(b, "r") is None
    assert two.flock(b, "u") is None
    assert one.child("flock", again, "w") is None
    one.close(a)
    one.close(again)
    assert two.flock(b, "r") == AGAIN  # the child has it open
    one.child("flock", a, "u")
    assert two.flock(b, "r") is None
    one.child()
    assert two.flock(b, "w") is None


def test_flock_changes(pair: Pair) -> None:
    """What can't be changed is lost; down always works."""
    a, b = pair.fds()
    one, two = pair.one, pair.two
    assert one.flock(a, "r") is None
    assert two.flock(b, "r") is None
    assert one.flock(a, "w") == AGAIN
    assert two.flock(b, "w") is None
    assert one.flock(a, "r") == AGAIN
    assert two.flock(b, "r") is None
    assert one.flock(a, "r") is None
    assert one.flock(a, "r") is None
    assert one.flock(a, "u") is None
    assert one.flock(a, "u") is None
    waiting = two.starts("flock", b, "w", True)
    assert waiting.result() is None


def test_ofd_locks(pair: Pair) -> None:
    """Of the open file: not shared by the process, kept until the last close."""
    a, b = pair.fds()
    one, two = pair.one, pair.two
    other, again = one.opens("file", RW), one.dup(a)
    assert one.ofd(a, "w", 0, 10) is None
    assert one.ofd(other, "r", 0, 10) == AGAIN
    assert one.posix(a, "w", 0, 10) == AGAIN
    assert two.posix(b, "r", 0, 10) == AGAIN
    assert one.ofd(again, "r", 0, 10) is None
    assert two.posix(b, "r", 0, 10) is None
    assert two.posix(b, "u") is None
    one.close(other)
    one.close(a)
    assert two.ofd(b, "w", 0, 10) == AGAIN
    assert one.ofd(again, "u", 0, 10) is None
    assert two.ofd(b, "w", 0, 10) is None
    assert two.ofd(b, "u") is None
    assert one.ofd(again, "w", 5, 5) is None
    assert two.getlk(b, "w", 0, 0, True)[:3] == ("w", 5, 5)
    one.close(again)
    eventually(lambda: two.ofd(b, "w"))


def test_waiting(pair: Pair) -> None:
    """Who waits has it when it is given up, by unlocking, closing or dying."""
    a, b = pair.fds()
    one, two = pair.one, pair.two
    for command, kind in (("posix", "w"), ("flock", "w"), ("ofd", "w")):
        begin = () if command == "flock" else (0, 0)
        whence = (0,) if command == "posix" else ()
        assert getattr(one, command)(a, kind) is None
        waiting = two.starts(command, b, "r", *begin, *whence, True)
        assert pair.wait(waiting), command
        assert getattr(one, command)(a, "u") is None
        assert waiting.result() is None, command
        assert getattr(two, command)(b, "u") is None
    assert one.posix(a, "w") is None
    assert one.flock(a, "w") is None
    waits = [two.starts("posix", b, "w", 0, 0, 0, True), two.starts("flock", b, "w", True)]
    assert pair.wait(*waits)
    one.kill()
    assert [each.result() for each in waits] == [None, None]


def test_who_waits_is_interrupted(pair: Pair) -> None:
    """By a signal: EINTR, and no longer in line."""
    a, b = pair.fds()
    one, two = pair.one, pair.two
    for command in ("posix", "flock"):
        rest = (0, 0, 0, True) if command == "posix" else (True,)
        assert getattr(one, command)(a, "r") is None
        two.interruptible()
        two.say(command, b, "w", *rest)
        pair.come(1)
        two.popen.send_signal(signal.SIGUSR1)
        assert two.poll_invalidations() == "EINTR"
        third = one.opens("file", RW)
        assert one.flock(third, "r") is None
        assert getattr(one, command)(a, "u") is None
        assert one.flock(third, "u") is None
        assert getattr(one, command)(a, "w") is None
        assert getattr(one, command)(a, "u") is None


def test_who_waits_may_die(pair: Pair) -> None:
    a, b = pair.fds()
    one, two = pair.one, pair.two
    assert one.posix(a, "r") is None
    waiting = two.starts("posix", b, "w", 0, 0, 0, True)
    assert pair.wait(waiting)
    two.popen.send_signal(signal.SIGKILL)
    assert two.popen.wait(60) == -signal.SIGKILL
    other = one.opens("file", RW)
    assert one.posix(other, "w") is None
    assert one.posix(other, "u") is None


def test_deadlock(pair: Pair) -> None:
    a, b = pair.fds()
    one, two = pair.one, pair.two
    assert one.posix(a, "w", 0, 10) is None
    assert two.posix(b, "w", 10, 10) is None
    waiting = one.starts("posix", a, "w", 10, 10, 0, True)
    assert pair.wait(waiting)
    assert two.posix(b, "w", 0, 10, 0, True) == DEADLK
    assert two.posix(b, "u") is None
    assert waiting.result() is None


def test_deadlock_over_two_files(pair: Pair) -> None:
    a, b = pair.fds()
    one, two = pair.one, pair.two
    c, d = one.opens("other", RW | os.O_CREAT), two.opens("other", RW)
    assert one.posix(a, "w") is None
    assert two.posix(d, "w") is None
    waiting = two.starts("posix", b, "r", 0, 0, 0, True)
    assert pair.wait(waiting)
    assert one.posix(c, "r", 0, 0, 0, True) == DEADLK
    assert one.posix(a, "u") is None
    assert waiting.result() is None


def test_readers_together_writers_alone(pair: Pair) -> None:
    a, _ = pair.fds()
    one, two = pair.one, pair.two
    others = [two.opens("file", RO) for _ in range(3)]
    assert one.flock(a, "w") is None
    waits = [two.starts("flock", fd, "r", True) for fd in others]
    assert pair.wait(*waits)
    assert one.flock(a, "u") is None
    assert [each.result() for each in waits] == [None] * 3
    writing = one.starts("flock", a, "w", True)
    assert pair.wait(writing)
    for fd in others:
        assert two.flock(fd, "u") is None
    assert writing.result() is None


def test_what_is_written_under_a_lock_is_read_under_the_next(pair: Pair) -> None:
    """Descriptors stay open: nothing but the lock tells that there is more, or less."""
    a, b = pair.fds()
    expected = b""
    for turn in range(20):
        process, fd = ((pair.one, a), (pair.two, b))[turn % 2]
        assert process.posix(fd, "w", 0, 0, 0, True) is None
        assert process.size(fd) == len(expected), turn
        assert process.read(fd, 0, 1000) == expected, turn
        if turn % 7 == 6:
            process.truncate(fd, 3)
            expected = expected[:3]
        text = b"%d " % turn
        process.write(fd, text, len(expected))
        expected += text
        assert process.posix(fd, "u") is None


def test_appending_under_a_lock(pair: Pair) -> None:
    """O_APPEND goes by the size that the file has, not by that which the kernel has seen."""
    a, b = pair.one.opens("file", RW | os.O_CREAT | os.O_APPEND), 0
    b = pair.two.opens("file", RW | os.O_APPEND)
    expected = b""
    for turn in range(12):
        process, fd = ((pair.one, a), (pair.two, b))[turn % 2]
        assert process.flock(fd, "w", True) is None
        if turn == 7:
            process.truncate(fd, 1)
            expected = expected[:1]
        process.write(fd, b"%d;" % turn)
        expected += b"%d;" % turn
        assert process.read(fd, 0, 1000) == expected, turn
        assert process.flock(fd, "u") is None


@pytest.mark.parametrize("pair", KERNELS[:1] + ONE + TWO, indirect=True)
def test_writers_do_not_starve(pair: Pair) -> None:
    """Readers that come later than a writer get it later, though readers hold it."""
    if pair.is_kernel:
        pytest.skip("Linux lets readers pass, without end")
    a, b = pair.fds()
    one, two = pair.one, pair.two
    third = one.opens("file", RO)
    assert one.flock(a, "r") is None
    writing = two.starts("flock", b, "w", True)
    assert pair.wait(writing)
    reading = one.starts("flock", third, "r", True)
    assert pair.wait(writing, reading)
    assert one.flock(a, "u") is None
    assert writing.result() is None
    assert pair.wait(reading)
    assert two.flock(b, "u") is None
    assert reading.result() is None

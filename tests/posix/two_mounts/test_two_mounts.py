"""P5, P6: what one mount does, as another one sees it: news, files open without a name."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fsclient.kernel.cache_leases import SHORT_S
from tests.posix.conftest import ROUNDS_S, Servers, Twins
from tests.posix.two_mounts.stale_names import CASES
from tests.support.redis_server import RedisServer

TURNS = 5
SIZE = 300_000


def _exists(path: Path) -> Callable[[], bool]:
    return path.exists


def _shows(path: Path, test: Callable[[os.stat_result], bool]) -> Callable[[], bool]:
    return lambda: test(os.stat(path))


def _changes(here: Path, there: Path) -> dict[str, tuple[Callable[[], object], Callable[[], bool]]]:
    """What to do here, and what tells that it is seen there."""
    file, gone, moved = there / "file", here / "gone", there / "moved"
    return {
        "create": ((here / "made").touch, _exists(there / "made")),
        "mkdir": ((here / "dir").mkdir, _exists(there / "dir")),
        "unlink": (gone.unlink, lambda: not (there / "gone").exists()),
        "rename": (
            lambda: (here / "old").rename(here / "moved"),
            lambda: moved.exists() and not (there / "old").exists(),
        ),
        "chmod": (
            lambda: (here / "file").chmod(0o600),
            _shows(file, lambda status: stat.S_IMODE(status.st_mode) == 0o600),
        ),
        "write": (
            lambda: (here / "file").write_bytes(b"12345"),
            lambda: os.stat(file).st_size == 5 and file.read_bytes() == b"12345",
        ),
        "rmdir": ((here / "dir").rmdir, lambda: not (there / "dir").exists()),
    }


def test_news_of_another_mount(twins: Twins) -> None:
    """The kernel there believes the opposite, with an hour to go, until it is told.

    One that is told nothing would ask again SHORT_S later. A machine that has other work to do may
    delay some news by as much, but not those of one kind each time.
    """
    if twins.engine != "redis":
        pytest.skip("without tracking a kernel believes what it saw for a second")
    took: dict[str, list[float]] = {}
    for turn in range(TURNS):
        here, there = twins.first / f"news{turn}", twins.second / f"news{turn}"
        here.mkdir()
        for name in ("file", "gone", "old"):
            (here / name).write_bytes(b"x")
        twins.wait_until(there.is_dir)
        twins.wait_until(lambda: len(os.listdir(there)) == 3)  # noqa: B023
        for name, (change, seen) in _changes(here, there).items():
            assert not seen(), name
            change()
            took.setdefault(name, []).append(twins.wait_until(seen))
    slow = {name: times for name, times in took.items() if min(times) > SHORT_S / 2}
    assert not slow


def test_a_lost_link_ends_what_the_kernel_believes(twins: Twins, servers: Servers) -> None:
    """Names by the hundred, present and absent, and a file that is open."""
    if twins.engine != "redis":
        pytest.skip("without tracking there is no link")
    names = [f"lost{number}" for number in range(100)]
    here, there = twins.first, twins.second
    for name in names:
        (here / name).write_text("old")
    twins.settle(names[-1])
    with (there / names[0]).open() as file:
        for _ in range(2):  # a first look-up is believed for a second only
            assert all((there / name).stat().st_size == 3 for name in names)
        assert not (there / "later").exists()
        before = twins.stat("kernel_notifications_total")
        server = servers("redis")
        assert isinstance(server, RedisServer)
        assert server.ask("CLIENT", "KILL", "TYPE", "pubsub") >= 2, "one of each mount at least"
        for name in names:
            (here / name).rename(here / f"{name}-moved")
        (here / f"{names[0]}-moved").write_text("newer")
        (here / "later").touch()
        twins.wait_until((there / "later").exists)
        twins.wait_until(lambda: not any((there / name).exists() for name in names))
        twins.wait_until(lambda: os.fstat(file.fileno()).st_size == 5)
        assert file.read() == "newer"
    assert twins.stat("kernel_notifications_total") > before


def _let_two_rounds_pass(twins: Twins, turn: int) -> None:
    """Wait until an inode, and then its slices, that were closed just now have been deleted."""
    purged, deleted = twins.stat("inodes_purged_total"), twins.stat("slices_deleted_total")
    closed = twins.first / f"closed{turn}"
    closed.write_bytes(bytes(SIZE))
    closed.unlink()
    twins.wait_until(lambda: twins.stat("inodes_purged_total") > purged, ROUNDS_S, 0.05)
    twins.wait_until(lambda: twins.stat("slices_deleted_total") > deleted, ROUNDS_S, 0.05)


class _Files:
    """Files that are open, here or there or both, and have no names any more."""

    NAMES = ("mine", "theirs", "both", "written")

    def __init__(self, twins: Twins) -> None:
        for name in self.NAMES:
            (twins.first / name).write_bytes(name.encode() * (SIZE // len(name)))
        for name in self.NAMES:
            twins.settle(name)
        first, second = twins.first, twins.second
        roots = {"mine": (first,), "theirs": (second,), "both": (first, second)}
        self._fds = [
            (name, os.open(root / name, os.O_RDONLY)) for name in roots for root in roots[name]
        ]
        self._written = os.open(second / "written", os.O_RDWR)
        self._fds.append(("written", self._written))
        for name in self.NAMES:
            (first / name).unlink()

    def check(self, turn: int) -> None:
        """They are whole and can be written."""
        os.pwrite(self._written, b"W" * 100, turn * 100)
        os.fsync(self._written)
        for name, fd in self._fds:
            held = bytearray(name.encode() * (SIZE // len(name)))
            if name == "written":
                held[: turn * 100 + 100] = b"W" * (turn * 100 + 100)
            assert os.pread(fd, SIZE + 1, 0) == held, name
            assert os.fstat(fd).st_nlink == 0

    def close(self) -> None:
        for _, fd in self._fds:
            os.close(fd)


def _errno_of_listing(path: str) -> int:
    """0 where it can be listed."""
    try:
        os.listdir(path)
    except OSError as error:
        return error.errno or 0
    return 0


class _Directories:
    """Directories without names: open, removed by either mount; and a working directory."""

    def __init__(self, twins: Twins) -> None:
        removers = {"here": twins.first, "there": twins.second, "cwd": twins.first}
        for name in removers:
            (twins.first / name).mkdir()
        twins.wait_until(lambda: all((twins.second / name).is_dir() for name in removers))
        flags = os.O_RDONLY | os.O_DIRECTORY
        self._fds = [os.open(twins.first / name, flags) for name in ("here", "there")]
        self._before = os.getcwd()
        os.chdir(twins.first / "cwd")
        for name, remover in removers.items():
            (remover / name).rmdir()

    def check(self) -> None:
        """stat(2) answers, and nothing is in them nor can be."""
        assert os.stat(".").st_nlink == 0
        for fd in self._fds:
            Twins.wait_until(lambda: os.fstat(fd).st_nlink == 0)  # noqa: B023
            assert os.listdir(fd) == []
            with pytest.raises(FileNotFoundError):
                os.stat("x", dir_fd=fd)
            with pytest.raises(FileNotFoundError):
                os.mkdir("x", dir_fd=fd)

    def check_cwd(self) -> None:
        """It is not open, so it goes; what is known of it the mount that removed it still says."""
        Twins.wait_until(lambda: _errno_of_listing(".") == errno.ESTALE, ROUNDS_S, 0.05)
        assert os.stat(".").st_nlink == 0

    def close(self) -> None:
        os.chdir(self._before)
        for fd in self._fds:
            os.close(fd)


def test_what_is_open_outlives_its_name(twins: Twins, pytestconfig: pytest.Config) -> None:
    """On whatever mount, round after round; what is not open goes. A round takes 3 to 5 s."""
    soak = pytestconfig.getoption("--soak")
    if twins.engine != "redis" and not soak:
        pytest.skip("takes too long to be done for each; run with --soak")
    files, directories = _Files(twins), _Directories(twins)
    try:
        for turn in range(4 if soak else 1):
            _let_two_rounds_pass(twins, turn)
            files.check(turn)
            directories.check()
        directories.check_cwd()
    finally:
        objects = twins.objects()
        files.close()
        directories.close()
    twins.wait_until(lambda: twins.objects() <= objects - len(_Files.NAMES), ROUNDS_S, 0.05)


def test_create_races_a_file_of_another_mount(twins: Twins) -> None:
    """O_CREAT without O_EXCL opens what the kernel here does not know of yet, and truncates it."""
    for turn in range(20):
        name = f"raced{turn}"
        assert not (twins.second / name).exists()  # now the kernel believes so
        (twins.first / name).write_bytes(b"other")
        fd = os.open(twins.second / name, os.O_RDWR | os.O_CREAT | (turn % 2 and os.O_TRUNC))
        assert os.pread(fd, 10, 0) == (b"" if turn % 2 else b"other")
        os.write(fd, b"x")
        os.close(fd)
        os.unlink(twins.second / name)


def test_p1_an_open_shows_the_size_that_was_closed(twins: Twins) -> None:
    """Without news a kernel believed the size that stat(2) had shown, for a second after open."""
    here, there = twins.first / "grows", twins.second / "grows"
    here.touch()
    twins.wait_until(there.exists)
    for turn in range(1, TURNS + 1):
        assert os.stat(there).st_size == len(there.read_bytes())  # what it believes now
        with here.open("ab") as file:
            file.write(b"%d" % turn * 1000)
        twins.settle("grows")
        with there.open("rb", buffering=0) as file:
            assert os.fstat(file.fileno()).st_size == turn * 1000
            assert len(file.read()) == turn * 1000
    here.unlink()


@pytest.mark.parametrize("case", CASES)
def test_p3_a_name_that_is_gone_is_not_opened(twins: Twins, case: str) -> None:
    """Without a trash: what goes stays as long as it is open somewhere."""
    CASES[case](twins.first, twins.second, twins.engine == "redis")

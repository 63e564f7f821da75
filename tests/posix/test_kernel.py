"""Corners that the model's language has no words for, on mounts over each engine."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select
import shutil
import socket
import stat
import struct
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.posix.conftest import Twins

NS = 10**9
TIMES_OVERWRITTEN = 30
USER = 60001
RWF_NOAPPEND = 0x20  # linux/fs.h
FS_IOC_FIEMAP = 0xC020660B  # linux/fiemap.h
FIRST_NS, LAST_NS = -(1 << 63), (1 << 63) - 1  # what SliceFS can say
YEAR_1900_S, YEAR_2400_S = -2_208_988_800, 13_569_465_600
CAPABILITY = struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0)  # cap_net_bind_service=ep


def _times(path: Path | int) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_ctime_ns


def test_times_of_a_write_stay(root: Path) -> None:
    """mtime and ctime move with the write and not with the commit, whatever is asked between."""
    path = root / "f"
    with path.open("wb", buffering=0) as file:
        made = _times(path)
        file.write(b"x" * 5000)
        written = _times(path)
        assert written > made
        assert written == _times(file.fileno())
        os.fsync(file.fileno())
        assert _times(path) == written
        file.write(b"y")
        again = _times(path)
        assert again > written
        path.chmod(0o600)
        changed = _times(path)
        assert changed[0] == again[0]
        assert changed[1] > again[1]
    assert _times(path) == changed
    assert os.stat(path).st_blocks * 512 == 8192


def test_reading_moves_no_atime(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"x" * 5000)
    os.utime(path, ns=(10**18, 10**18 + 7))
    assert path.read_bytes() == b"x" * 5000
    assert os.listdir(root) == ["f"]
    status = path.stat()
    assert (status.st_atime_ns, status.st_mtime_ns) == (10**18, 10**18 + 7)


def test_blocks_of_what_is_being_written(root: Path) -> None:
    """`st_blocks` is not 0 while there is data: tar(1) would take the file for a hole."""
    with (root / "f").open("wb", buffering=0) as file:
        file.write(bytes(10_000))
        assert os.stat(root / "f").st_blocks == 24
        file.seek(1 << 20)
        file.write(b"x")
        assert os.stat(root / "f").st_blocks < 1 << 10
    assert os.stat(root / "f").st_blocks in (24, 32)


def test_an_mtime_to_come(root: Path) -> None:
    path = root / "f"
    path.write_bytes(b"x")
    for size in (100, 0):
        os.utime(path, ns=(0, 4 * 10**18))
        assert os.stat(path).st_mtime_ns == 4 * 10**18
        if size:
            with path.open("ab") as file:
                file.write(b"y" * size)
        else:
            os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
            os.utime(path, ns=(0, 4 * 10**18))
            os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))  # of what is empty already
        assert os.stat(path).st_mtime_ns < 2 * 10**18


@pytest.mark.parametrize(
    ("time_ns", "shown_ns"),
    [
        (-1, -1),
        (YEAR_1900_S * NS + 1, YEAR_1900_S * NS + 1),
        (123_456_789, 123_456_789),
        (LAST_NS, LAST_NS),
        (YEAR_2400_S * NS, LAST_NS),
        (-(1 << 62) * 4, FIRST_NS),
    ],
)
def test_far_times(twins: Twins, time_ns: int, shown_ns: int) -> None:
    path = twins.first / "far"
    path.touch()
    os.utime(path, ns=(time_ns, time_ns))
    status = os.stat(path)
    assert (status.st_atime_ns, status.st_mtime_ns) == (shown_ns, shown_ns)
    path.unlink()


def _as_user(*command: str) -> bytes:
    done = subprocess.run(
        command, user=USER, group=USER, extra_groups=(), check=True, capture_output=True
    )
    return done.stdout


def _setuid_program(root: Path) -> Path:
    """id(1), which runs as root; and anybody may write it."""
    program = root / "id"
    shutil.copy("/usr/bin/id", program)
    program.chmod(0o4777)
    assert _who_runs(program) == 0
    return program


def _who_runs(program: Path) -> int:
    return int(_as_user(str(program), "-u"))


def test_who_overwrites_a_setuid_program_is_not_its_owner(root: Path) -> None:
    """The kernel, too, must know at once that S_ISUID is gone; nobody calls stat(2) meanwhile.

    Many times, because it knew, and was made to forget the answer (test_notices.py).
    """
    program = _setuid_program(root)
    for _ in range(TIMES_OVERWRITTEN):
        program.chmod(0o4777)
        _as_user("/bin/sh", "-c", f"printf x >> {program}")
        assert _who_runs(program) == USER


def test_who_truncates_a_setuid_program_is_not_its_owner(root: Path) -> None:
    """OPEN's answer carries no mode, and who writes the file anew is root, who keeps the bit."""
    program = _setuid_program(root)
    content = program.read_bytes()
    fd = os.open(program, os.O_WRONLY)
    _as_user("/bin/sh", "-c", f": > {program}")
    assert os.write(fd, content) == len(content)
    os.close(fd)
    Twins.wait_until(lambda: _who_runs(program) == USER, every_s=0.02)


def test_who_overwrites_what_became_setuid_elsewhere(root: Path, twins: Twins) -> None:
    """The bit was set on another mount, after the file was opened on this one."""
    path, there = root / "f", twins.second / root.name / "f"
    path.write_bytes(b"12345")
    path.chmod(0o777)
    Twins.wait_until(lambda: there.exists() and os.stat(there).st_mode & 0o777 == 0o777)
    command = ["/bin/sh", "-c", f"exec 3<>{there}; echo; read _; printf x >&3"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, user=USER, stdin=pipe, stdout=pipe) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdout.readline()
        path.chmod(0o4777)
        writer.stdin.write(b"now\n")
        writer.stdin.close()
        assert writer.wait() == 0
    assert stat.S_IMODE(os.stat(there).st_mode) == 0o777
    Twins.wait_until(lambda: stat.S_IMODE(os.stat(path).st_mode) == 0o777)
    assert path.read_bytes() == b"x2345"


def test_who_drops_setgid(root: Path) -> None:
    """USER is a stranger to the file's group, or has it as a supplementary one."""
    path = root / "f"
    path.write_bytes(b"12345")
    commands = (
        f"printf x 1<>{path}",
        f": > {path}",
        f"truncate -s 3 {path}",
        f"fallocate -l 100 {path}",
    )
    for mode, left in ((0o2777, 0o777), (0o2767, 0o767), (0o6767, 0o767)):
        for command in commands:
            path.chmod(mode)
            _as_user("/bin/sh", "-c", command)
            assert stat.S_IMODE(os.stat(path).st_mode) == left, (mode, command)
            path.chmod(mode)
            subprocess.run(
                ["/bin/sh", "-c", command], user=USER, group=USER, extra_groups=(0,), check=True
            )
            kept = left | mode & stat.S_ISGID if mode & 0o010 == 0 else left
            assert stat.S_IMODE(os.stat(path).st_mode) == kept, (mode, command)
    os.chown(path, USER, 0)
    _as_user("/bin/chmod", "2755", str(path))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o755


def test_p1_a_chown_to_nobody_keeps_what_a_directory_has(root: Path) -> None:
    """chown(-1, -1): the kernel sends a request for nothing, as it does before a write."""
    file, folder = root / "f", root / "d"
    file.write_bytes(b"12345")
    folder.mkdir()
    for path, left in ((file, 0o775), (folder, 0o6775)):
        os.chown(path, USER, USER)
        path.chmod(0o6775)
        _as_user("/usr/bin/perl", "-e", "chown(-1, -1, @ARGV) or die $!", str(path))
        assert stat.S_IMODE(os.stat(path).st_mode) == left
    folder.rmdir()


def test_p1_a_stranger_takes_no_bits_away(root: Path) -> None:
    """chown(-1, -1) of somebody else's program; only who has it open for writing looks alike."""
    path = root / "f"
    path.write_bytes(b"12345")
    for mode in (0o6755, 0o2755, 0o2745):
        path.chmod(mode)
        with pytest.raises(subprocess.CalledProcessError):
            _as_user("/usr/bin/perl", "-e", "chown(-1, -1, @ARGV) or die $!", str(path))
        assert stat.S_IMODE(os.stat(path).st_mode) == mode
    path.chmod(0o755)
    _as_user("/usr/bin/perl", "-e", "chown(-1, -1, @ARGV) or die $!", str(path))


def test_truncate_to_the_same_size(root: Path) -> None:
    """truncate(2) and ftruncate(2) set the times then, too; as on tmpfs and ext4."""
    path = root / "f"
    path.write_bytes(b"12345")
    with path.open("r+b") as file:
        for target in (path, file.fileno()):
            before = _times(path)
            os.truncate(target, 5)
            assert _times(path)[0] > before[0]
            assert _times(path)[1] > before[1]


def test_capabilities_go_with_a_write(root: Path) -> None:
    """By root, too; chown and truncate as well."""
    path = root / "f"
    path.write_bytes(b"12345")
    for change in (
        lambda: path.write_bytes(b"x"),
        lambda: os.chown(path, 1, 1),
        lambda: os.truncate(path, 0),
    ):
        os.setxattr(path, "security.capability", CAPABILITY)
        assert os.getxattr(path, "security.capability") == CAPABILITY
        change()
        assert "security.capability" not in os.listxattr(path)
        with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
            os.getxattr(path, "security.capability")


def test_p1_what_fuse_does_not_pass_on(root: Path) -> None:
    """Where Linux answers for us, or asks us for something else than it was asked for."""
    path = root / "f"
    path.write_bytes(b"12345")
    fd = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        os.pwritev(fd, [b"x"], 0, RWF_NOAPPEND)
        assert path.read_bytes() == b"12345x"
    except OSError as error:
        assert error.errno == errno.EOPNOTSUPP  # before Linux 6.9
    with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
        fcntl.ioctl(fd, FS_IOC_FIEMAP, bytes(32))
    with select.epoll() as poll:
        poll.register(fd, select.EPOLLIN)
    os.close(fd)
    program = root / "sleep"
    shutil.copy("/usr/bin/sleep", program)
    with subprocess.Popen([program, "100"]) as running:
        for flags in (os.O_WRONLY, os.O_RDWR):
            with pytest.raises(OSError, match=os.strerror(errno.ETXTBSY)):
                os.open(program, flags | os.O_TRUNC)
        assert os.stat(program).st_size > 0
        with suppress(OSError):  # it may be dead already, for it has lost its pages
            os.close(os.open(program, os.O_RDONLY | os.O_TRUNC))
        assert os.stat(program).st_size == 0
        running.kill()


def test_appends_of_two_descriptors(root: Path) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    fds = [os.open(root / "f", flags) for _ in range(3)]
    expected = b""
    for turn in range(60):
        data = b"%d." % turn
        os.write(fds[turn % 3], data)
        expected += data
        if turn % 7 == 0:
            os.fsync(fds[0])
    for fd in fds:
        os.close(fd)
    assert (root / "f").read_bytes() == expected


def test_mapped_writes(root: Path) -> None:
    """Shared maps, read through another descriptor after msync(2) and after munmap(2)."""
    path = root / "f"
    path.write_bytes(bytes(20_000))
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0) as memory:
            memory[5000:5005] = b"first"
            memory.flush()
            assert path.read_bytes()[5000:5005] == b"first"
            memory[19_999] = 7
        assert path.read_bytes()[-1] == 7
    assert os.stat(path).st_size == 20_000


def test_rename_over_an_open_file(root: Path) -> None:
    old, new = root / "old", root / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    with new.open("r+b", buffering=0) as file:
        old.rename(new)
        assert os.fstat(file.fileno()).st_nlink == 0
        assert file.read() == b"new"
        file.write(b"er")
        os.fchmod(file.fileno(), 0o640)
        os.utime(file.fileno(), ns=(5, 5))
        os.truncate(file.fileno(), 4)
        status = os.fstat(file.fileno())
        shown = (status.st_size, status.st_mtime_ns > 5, stat.S_IMODE(status.st_mode))
        assert shown == (4, True, 0o640)
        with open(f"/proc/self/fd/{file.fileno()}", "rb") as again:
            assert again.read() == b"newe"
    assert new.read_bytes() == b"old"


def test_special_files_and_long_names(root: Path) -> None:
    os.mkfifo(root / "fifo", 0o640)
    os.mknod(root / "device", stat.S_IFBLK | 0o600, os.makedev(4000, 700_000))
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(root / "socket"))
        server.listen()
        client.connect(str(root / "socket"))
    device = os.stat(root / "device")
    assert (os.major(device.st_rdev), os.minor(device.st_rdev)) == (4000, 700_000)
    reader = os.open(root / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(root / "fifo", os.O_WRONLY)
    os.write(writer, b"through")
    assert os.read(reader, 10) == b"through"
    os.close(reader)
    os.close(writer)
    name, target = "n" * 255, "t" * 4095
    os.symlink(target, root / name)
    assert os.readlink(root / name) == target
    assert os.lstat(root / name).st_size == 4095
    for mode in (0o7777, 0o4000, 0o2010, 0o1000, 0):
        (root / "fifo").chmod(mode)
        assert stat.S_IMODE(os.stat(root / "fifo").st_mode) == mode


def test_listing_while_others_unlink(root: Path, twins: Twins) -> None:
    """Each of thousands of names that stay is listed once, and none twice."""
    count = {"redis": 5000, "tikv": 600}.get(twins.engine, 1500)
    for number in range(count):
        os.mknod(root / f"{number:05}")

    def unlink_some() -> None:
        for number in range(0, count, 5):
            os.unlink(root / f"{number:05}")

    thread = threading.Thread(target=unlink_some)
    found: list[str] = []
    with os.scandir(root) as listing:
        found += [next(listing).name for _ in range(10)]
        thread.start()
        found += [entry.name for entry in listing]
    thread.join()
    stay = {f"{number:05}" for number in range(count) if number % 5}
    assert len(found) == len(set(found))
    assert stay <= set(found)
    assert set(os.listdir(root)) == stay


def test_exchange_a_file_and_a_directory(root: Path) -> None:
    """RENAME_EXCHANGE across directories: contents, types and counts of subdirectories."""
    (root / "f").write_bytes(b"file")
    above = root.parent / "exchanged"
    above.mkdir()
    (above / "d").mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(root / "f"), os.fsencode(above / "d")
    assert libc.renameat2(-100, paths[0], -100, paths[1], 2) == 0
    assert (above / "d").read_bytes() == b"file"
    assert (os.stat(root).st_nlink, os.stat(above).st_nlink) == (3, 2)
    (root / "f").rmdir()
    (above / "d").unlink()
    above.rmdir()


def test_hard_links_across_directories(root: Path) -> None:
    """Counts by parent: links and unlinks in several directories, in any order."""
    others = [root.parent / f"links{number}" for number in range(3)]
    (root / "f").write_bytes(b"data")
    for other in others:
        other.mkdir()
        os.link(root / "f", other / "a")
        os.link(root / "f", other / "b")
    assert os.stat(root / "f").st_nlink == 7
    os.rename(others[0] / "a", others[1] / "c")
    os.rename(others[1] / "a", others[1] / "b")  # the same inode: nothing is done
    os.unlink(root / "f")
    assert os.stat(others[1] / "b").st_nlink == 6
    for other in others:
        for name in os.listdir(other):
            assert (other / name).read_bytes() == b"data"
            os.unlink(other / name)
        other.rmdir()

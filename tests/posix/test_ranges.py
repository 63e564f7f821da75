"""P4: fallocate, holes, O_TMPFILE and copy_file_range, on mounts over each engine."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsmeta.types import CHUNK_BYTES
from tests.posix.conftest import ROUNDS_S, Twins
from tests.posix.volumes import slices_of

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
KEEP, PUNCH, COLLAPSE, ZERO, INSERT, UNSHARE = 1, 2, 8, 16, 32, 64  # linux/falloc.h
AT_FDCWD, AT_SYMLINK_FOLLOW = -100, 0x400


def fallocate(fd: int, mode: int, offset: int, length: int) -> int:
    """fallocate(2); the errno, 0 where it worked."""
    return ctypes.get_errno() if _LIBC.fallocate(fd, mode, offset, length) else 0


def link_fd(fd: int, path: Path) -> int:
    """Give an open file a name; the errno, 0 where it worked."""
    old, new = f"/proc/self/fd/{fd}".encode(), os.fsencode(path)
    done = _LIBC.linkat(AT_FDCWD, old, AT_FDCWD, new, AT_SYMLINK_FOLLOW)
    return ctypes.get_errno() if done else 0


def seek(fd: int, offset: int, whence: int) -> int:
    """lseek(2), or minus the errno."""
    try:
        return os.lseek(fd, offset, whence)
    except OSError as error:
        return -(error.errno or 0)


@pytest.fixture
def fd(root: Path) -> Iterator[int]:
    made = os.open(root / "f", os.O_RDWR | os.O_CREAT)
    os.write(made, b"x" * 10_000)
    yield made
    os.close(made)


# --- fallocate -----------------------------------------------------------------------------------


def _blocks(fd: int) -> int:
    return os.fstat(fd).st_blocks


def test_p4_fallocate_answers_as_linux_does(fd: int) -> None:
    """Errnos and sizes of tmpfs, and of ext4 for what tmpfs does not know."""
    for mode, offset, length, code, size in (
        (0, 0, 0, errno.EINVAL, 10_000),
        (0, -1, 5, errno.EINVAL, 10_000),
        (0, 5, -1, errno.EINVAL, 10_000),
        (PUNCH, 0, 5, errno.EOPNOTSUPP, 10_000),
        (PUNCH | ZERO | KEEP, 0, 5, errno.EOPNOTSUPP, 10_000),
        (COLLAPSE, 4096, 4096, errno.EOPNOTSUPP, 10_000),
        (INSERT, 4096, 4096, errno.EOPNOTSUPP, 10_000),
        (UNSHARE, 0, 4096, errno.EOPNOTSUPP, 10_000),
        (0, 1 << 62, 1, errno.EFBIG, 10_000),
        (KEEP, 20_000, 5, 0, 10_000),
        (0, 5, 10, 0, 10_000),
        (0, 10_000, 10, 0, 10_010),
        (PUNCH | KEEP, 20_000, 5, 0, 10_010),
        (ZERO | KEEP, 10_000, 50, 0, 10_010),
        (ZERO, 10_000, 50, 0, 10_050),
    ):
        before = os.fstat(fd)
        assert fallocate(fd, mode, offset, length) == code, (mode, offset, length)
        after = os.fstat(fd)
        assert after.st_size == size
        assert (after.st_mtime_ns > before.st_mtime_ns) == (code == 0)
    assert os.pread(fd, 20_000, 0) == b"x" * 10_000 + bytes(50)


def test_p4_fallocate_wants_a_file_open_for_writing(root: Path, fd: int) -> None:
    read_only = os.open(root / "f", os.O_RDONLY)
    directory = os.open(root, os.O_RDONLY)
    append = os.open(root / "f", os.O_WRONLY | os.O_APPEND)
    assert fallocate(read_only, 0, 0, 10) == errno.EBADF
    assert fallocate(directory, 0, 0, 10) == errno.EBADF
    assert fallocate(append, PUNCH | KEEP, 0, 10) == 0
    for each in (read_only, directory, append):
        os.close(each)
    assert os.pread(fd, 11, 0) == bytes(10) + b"x"


def test_p4_a_punched_hole_reads_as_zeros_and_frees_space(fd: int) -> None:
    """Also of what is not stored yet, and through a map that shows the old pages."""
    with mmap.mmap(fd, 10_000) as memory:
        assert memory[4096:4100] == b"xxxx"
        assert fallocate(fd, PUNCH | KEEP, 4096, 4096) == 0
        assert memory[4096:4100] == bytes(4)
        memory[5000:5003] = b"new"
    assert os.pread(fd, 10, 4998) == b"\0\0new" + bytes(5)
    assert fallocate(fd, PUNCH | KEEP, 0, 10_000) == 0
    assert _blocks(fd) == 0
    assert not any(os.pread(fd, 10_000, 0))


def test_p4_fallocate_drops_setuid(root: Path, fd: int) -> None:
    """As a write does; fs/fuse asks for that by itself."""
    os.fchmod(fd, 0o4755)
    os.fchown(fd, 60001, 60001)
    os.fchmod(fd, 0o4777)
    script = (
        "import ctypes,os,sys;os.setgid(60001);os.setuid(60001);"
        "fd=os.open(sys.argv[1],os.O_RDWR);l=ctypes.CDLL(None);"
        "l.fallocate.argtypes=[ctypes.c_int]*2+[ctypes.c_long]*2;"
        "sys.exit(l.fallocate(fd,3,0,100))"
    )
    root.chmod(0o755)
    subprocess.run(["python3", "-c", script, str(root / "f")], check=True)
    assert os.fstat(fd).st_mode & 0o7777 == 0o777


def test_p4_holes_across_chunks(root: Path) -> None:
    """A range of several chunks: the whole ones go, the others keep what is outside."""
    fd = os.open(root / "long", os.O_RDWR | os.O_CREAT)
    for index in range(4):
        os.pwrite(fd, b"ab" * 1000, index * CHUNK_BYTES + 500)
    before = _blocks(fd)
    assert fallocate(fd, PUNCH | KEEP, 1000, 3 * CHUNK_BYTES) == 0
    assert os.pread(fd, 501, 500) == b"ab" * 250 + b"\0"
    for index in (1, 2):
        assert not any(os.pread(fd, 4000, index * CHUNK_BYTES))
    assert os.pread(fd, 2500, 3 * CHUNK_BYTES)[1000:] == b"ab" * 750
    assert _blocks(fd) < before
    os.close(fd)


def test_p4_fallocate_on_the_other_mount_is_seen(twins: Twins, root: Path, fd: int) -> None:
    os.fsync(fd)
    there = twins.second / root.name / "f"
    other = os.open(there, os.O_RDWR)
    assert fallocate(other, ZERO, 5000, 10_000) == 0
    os.close(other)
    twins.settle(f"{root.name}/f")
    again = os.open(root / "f", os.O_RDONLY)
    assert os.pread(again, 20_000, 0) == b"x" * 5000 + bytes(10_000)
    os.close(again)


# --- lseek ---------------------------------------------------------------------------------------


def test_p4_seek_hole_and_data(root: Path) -> None:
    """Answers of tmpfs and ext4, whose holes begin at pages; before and after it is stored."""
    fd = os.open(root / "sparse", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 1 << 20)
    os.pwrite(fd, b"y" * 4096, 65_536)
    for _ in range(2):
        for offset, data, hole in (
            (0, 65_536, 0),
            (65_536, 65_536, 69_632),
            (65_540, 65_540, 69_632),
            (70_000, -errno.ENXIO, 70_000),
            ((1 << 20) - 1, -errno.ENXIO, (1 << 20) - 1),
            (1 << 20, -errno.ENXIO, -errno.ENXIO),
            (-1, -errno.ENXIO, -errno.ENXIO),
        ):
            assert seek(fd, offset, os.SEEK_DATA) == data, offset
            assert seek(fd, offset, os.SEEK_HOLE) == hole, offset
        os.fsync(fd)
    os.close(fd)


def test_p4_seek_in_a_file_of_a_petabyte(root: Path) -> None:
    """A few chunks of millions hold something: they are found without asking for each."""
    fd = os.open(root / "huge", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 1 << 50)
    at = 5_000_000 * CHUNK_BYTES + 123 * 4096
    os.pwrite(fd, b"z" * 4096, at)
    assert seek(fd, 0, os.SEEK_DATA) == at
    os.fsync(fd)
    assert seek(fd, 0, os.SEEK_DATA) == at
    assert seek(fd, at, os.SEEK_HOLE) == at + 4096
    assert seek(fd, at + 4096, os.SEEK_DATA) == -errno.ENXIO
    os.close(fd)


def test_p4_data_runs_on_over_chunks(root: Path) -> None:
    fd = os.open(root / "runs", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"z" * 10_000, CHUNK_BYTES - 5000)
    assert seek(fd, 0, os.SEEK_DATA) == CHUNK_BYTES - 5000
    assert seek(fd, CHUNK_BYTES - 1, os.SEEK_HOLE) == CHUNK_BYTES + 5000
    assert seek(fd, 5, os.SEEK_HOLE) == 5
    os.close(fd)


# --- O_TMPFILE -----------------------------------------------------------------------------------


def test_p4_a_file_without_a_name_gets_one(root: Path) -> None:
    fd = os.open(root, os.O_TMPFILE | os.O_RDWR, 0o640)
    assert os.fstat(fd).st_nlink == 0
    assert os.fstat(fd).st_mode == 0o100640
    assert os.listdir(root) == []
    os.write(fd, b"hello" * 1000)
    assert link_fd(fd, root / "named") == 0
    assert os.fstat(fd).st_nlink == 1
    assert (root / "named").read_bytes() == b"hello" * 1000
    assert link_fd(fd, root / "twice") == 0
    assert os.fstat(fd).st_nlink == 2
    os.unlink(root / "named")
    os.unlink(root / "twice")
    assert link_fd(fd, root / "again") == errno.ENOENT
    os.close(fd)


def test_p4_a_file_without_a_name_stays_and_goes(twins: Twins, root: Path) -> None:
    """It is whole round after round while it is open; one that got a name outlives them."""
    keep = os.open(root, os.O_TMPFILE | os.O_RDWR)
    named = os.open(root, os.O_TMPFILE | os.O_RDWR)
    os.write(keep, b"k" * 100_000)
    os.write(named, b"n" * 100_000)
    purged = twins.stat("inodes_purged_total")
    os.close(os.open(root, os.O_TMPFILE | os.O_RDWR))  # goes
    twins.wait_until(lambda: twins.stat("inodes_purged_total") > purged, ROUNDS_S, 0.05)
    assert link_fd(named, root / "named") == 0
    os.close(named)
    purged = twins.stat("inodes_purged_total")
    os.close(os.open(root, os.O_TMPFILE | os.O_RDWR))
    twins.wait_until(lambda: twins.stat("inodes_purged_total") > purged, ROUNDS_S, 0.05)
    assert os.pread(keep, 200_000, 0) == b"k" * 100_000
    os.close(keep)
    assert (root / "named").read_bytes() == b"n" * 100_000


def test_p4_an_exclusive_one_never_gets_a_name(root: Path) -> None:
    fd = os.open(root, os.O_TMPFILE | os.O_RDWR | os.O_EXCL)
    assert link_fd(fd, root / "named") == errno.ENOENT
    os.close(fd)


# --- copy_file_range -----------------------------------------------------------------------------


def copy(source: int, target: int, length: int, begin: int, at: int) -> int:
    """copy_file_range(2), or minus the errno."""
    try:
        return os.copy_file_range(source, target, length, begin, at)
    except OSError as error:
        return -(error.errno or 0)


def test_p4_copies_within_a_file_answer_as_tmpfs_does(root: Path) -> None:
    fd = os.open(root / "same", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"0123456789")
    for begin, at, length, answer in (
        (0, 5, 10, -errno.EINVAL),
        (0, 5, 3, 3),
        (0, 0, 5, -errno.EINVAL),
        (0, 4, 5, -errno.EINVAL),
        (20, 0, 5, 0),
        (9, 30, 100, 1),
    ):
        assert copy(fd, fd, length, begin, at) == answer, (begin, at, length)
    assert os.pread(fd, 100, 0) == b"0123401289" + bytes(20) + b"9"
    write_only = os.open(root / "same", os.O_WRONLY)
    append = os.open(root / "same", os.O_WRONLY | os.O_APPEND)
    assert copy(write_only, fd, 1, 0, 0) == -errno.EBADF
    assert copy(fd, append, 1, 0, 0) == -errno.EBADF
    for each in (fd, write_only, append):
        os.close(each)


def test_p4_a_copy_shares_its_data(twins: Twins, root: Path) -> None:
    """No object more, and none fewer until the last of the two is gone."""
    data = random.Random(4).randbytes(3 << 20)
    (root / "one").write_bytes(data)
    subprocess.run(["cp", root / "one", root / "two"], check=True)
    assert slices_of(root / "two") == slices_of(root / "one") != set()
    assert (root / "two").read_bytes() == data
    purged, deleted = twins.stat("inodes_purged_total"), twins.stat("slices_deleted_total")
    os.unlink(root / "one")
    twins.wait_until(lambda: twins.stat("inodes_purged_total") > purged, ROUNDS_S, 0.05)
    (root / "other").write_bytes(data)
    os.unlink(root / "other")  # deleted a round later than the drops of the first
    twins.wait_until(lambda: twins.stat("slices_deleted_total") > deleted, ROUNDS_S, 0.05)
    os.truncate(root / "two", 1 << 20)
    twins.settle(f"{root.name}/two")
    assert (twins.second / root.name / "two").read_bytes() == data[: 1 << 20]


def test_p4_copies_of_what_is_not_stored_yet(twins: Twins, root: Path) -> None:
    """Through descriptors that are dirty, to odd places and over a chunk's end."""
    dice = random.Random(5)
    held = [bytearray(dice.randbytes(200_000)), bytearray()]
    base = CHUNK_BYTES - 100_000
    fds = [os.open(root / name, os.O_RDWR | os.O_CREAT) for name in ("a", "b")]
    os.pwrite(fds[0], held[0], base)
    for _ in range(40):
        source, target = dice.choice(((0, 1), (1, 0)))
        begin, at = dice.randrange(200_000), dice.randrange(200_000)
        length = dice.randrange(1, 60_000)
        want = bytes(held[source][begin : begin + length])
        assert copy(fds[source], fds[target], length, base + begin, base + at) == len(want)
        if want:
            held[target].extend(bytes(max(0, at - len(held[target]))))
            held[target][at : at + len(want)] = want
        scribble = dice.randbytes(50)
        pos = dice.randrange(max(1, len(held[target])))
        os.pwrite(fds[target], scribble, base + pos)
        held[target].extend(bytes(max(0, pos - len(held[target]))))
        held[target][pos : pos + 50] = scribble
        for fd, want_all in zip(fds, held, strict=True):
            assert os.pread(fd, 300_000, base) == want_all
    for fd in fds:
        os.close(fd)
    for name, want_all in zip("ab", held, strict=True):
        twins.settle(f"{root.name}/{name}")
        with (twins.second / root.name / name).open("rb") as file:
            file.seek(base)
            assert file.read() == want_all


def test_p4_a_sparse_file_is_copied_as_one(root: Path) -> None:
    """cp finds the holes, and they stay holes."""
    fd = os.open(root / "sparse", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 5 * CHUNK_BYTES)
    os.pwrite(fd, b"z" * 4096, 2 * CHUNK_BYTES)
    os.close(fd)
    subprocess.run(["cp", root / "sparse", root / "copy"], check=True, timeout=60)
    status = os.stat(root / "copy")
    assert (status.st_size, status.st_blocks) == (5 * CHUNK_BYTES, 8)


# --- the rest of P4 ------------------------------------------------------------------------------


def test_p4_direct_io(root: Path) -> None:
    fd = os.open(root / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    page = mmap.mmap(-1, 8192)
    page.write(b"d" * 8192)
    assert os.pwritev(fd, [page], 4096) == 8192
    page.seek(0)
    page.write(bytes(8192))
    assert os.preadv(fd, [page], 4096) == 8192
    assert page[:] == b"d" * 8192
    os.close(fd)
    page.close()


def test_p4_birth_time(root: Path) -> None:
    """statx(2), as stat(1) shows it."""
    path = root / "born"
    path.touch()
    born = subprocess.run(["stat", "-c", "%W", path], capture_output=True, text=True, check=True)
    assert abs(int(born.stdout) - path.stat().st_ctime) < 5

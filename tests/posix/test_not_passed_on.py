"""P1: what Linux keeps from a FUSE file system, each proven by a call; and names, paths and offsets
at their limits."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.fsclient.fuse.mounting import needs_root_and_fuse
from tests.posix.conftest import Twins
from tests.posix.volumes import Volume, new_volume, run
from tests.support.waiting import wait_until

FICLONE, FICLONERANGE, FIBMAP = 0x40049409, 0x4020940D, 1
FS_IOC_SETFLAGS, FS_IMMUTABLE_FL = 0x40086602, 0x10
OPEN_TREE, MOUNT_SETATTR = 428, 442  # numbers of system calls on every architecture
OPEN_TREE_CLONE, AT_EMPTY_PATH, MOUNT_ATTR_IDMAP = 1, 0x1000, 0x100000
FALLOC_KEEP_SIZE = 1
LAST = (1 << 63) - 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]

Volumes = Callable[[str, str], AbstractContextManager[Volume]]


def _errno_of(call: Callable[[], object]) -> int:
    try:
        call()
    except OSError as error:
        return error.errno or -1
    return 0


def test_p1_reflinks_are_not_passed_on(twins: Twins, root: Path) -> None:
    """FICLONE and FICLONERANGE are EOPNOTSUPP; copy_file_range(2) shares the data instead."""
    del twins
    data = os.urandom(1 << 20)
    (root / "source").write_bytes(data)
    with (root / "source").open("rb") as source, (root / "target").open("w+b") as target:
        asked = struct.pack("=qQQQ", source.fileno(), 0, 0, 0)
        assert _errno_of(lambda: fcntl.ioctl(target, FICLONE, source.fileno())) == errno.EOPNOTSUPP
        assert _errno_of(lambda: fcntl.ioctl(target, FICLONERANGE, asked)) == errno.EOPNOTSUPP
        assert os.copy_file_range(source.fileno(), target.fileno(), len(data)) == len(data)
        assert target.read() == b""
        assert os.pread(target.fileno(), len(data), 0) == data


def test_p1_fibmap_shows_no_block(root: Path) -> None:
    (root / "file").write_bytes(b"x" * 5000)
    with (root / "file").open("rb") as file:
        block = bytearray(struct.pack("=i", 0))
        code = _errno_of(lambda: fcntl.ioctl(file, FIBMAP, block))
        assert code or struct.unpack("=i", block) == (0,)


def test_p1_seek_data_does_not_see_what_a_map_has_not_written(root: Path) -> None:
    """fs/fuse asks for data without writing dirty pages back; msync(2) before it does."""
    with (root / "file").open("w+b") as file:
        file.truncate(1 << 20)
        with mmap.mmap(file.fileno(), 1 << 20) as memory:
            memory[500_000:500_003] = b"new"
            assert _errno_of(lambda: os.lseek(file.fileno(), 0, os.SEEK_DATA)) == errno.ENXIO
            memory.flush()
            assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 500_000 // 4096 * 4096


def test_p1_access_does_not_see_immutable_files(root: Path) -> None:
    """The kernel judges by the mode and asks nothing, while open(2) is refused by the client."""
    path = root / "file"
    path.touch()
    with path.open("rb") as file:
        fcntl.ioctl(file, FS_IOC_SETFLAGS, struct.pack("=l", FS_IMMUTABLE_FL))
        try:
            assert os.access(path, os.W_OK)
            assert _errno_of(lambda: path.open("r+b").close()) == errno.EPERM
        finally:
            fcntl.ioctl(file, FS_IOC_SETFLAGS, struct.pack("=l", 0))


def test_p1_access_sees_immutable_files_where_the_client_judges(volumes: Volumes) -> None:
    with volumes("sqlite", "judged") as volume:
        plain = volume.mount("plain")
        plain.chmod(0o777)
        path = plain / "file"
        path.touch()
        path.chmod(0o666)
        with path.open("rb") as file:
            fcntl.ioctl(file, FS_IOC_SETFLAGS, struct.pack("=l", FS_IMMUTABLE_FL))
        judged = volume.mount("judged", "--squash", "all") / "file"
        assert not os.access(judged, os.W_OK)
        assert os.access(judged, os.R_OK)
        with path.open("rb") as file:
            fcntl.ioctl(file, FS_IOC_SETFLAGS, struct.pack("=l", 0))


def test_p1_idmapped_mounts_are_refused(twins: Twins) -> None:
    """The kernel refuses what its file system has not agreed to."""
    with subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "sh", "-c", "echo; read end"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as mapped:
        assert mapped.stdout is not None
        mapped.stdout.readline()
        users = os.open(f"/proc/{mapped.pid}/ns/user", os.O_RDONLY)
        tree = _LIBC.syscall(OPEN_TREE, -100, bytes(twins.first), OPEN_TREE_CLONE)
        assert tree >= 0, os.strerror(ctypes.get_errno())
        wanted = struct.pack("=QQQQ", MOUNT_ATTR_IDMAP, 0, 0, users)
        done = _LIBC.syscall(MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, wanted, len(wanted))
        assert (done, ctypes.get_errno()) == (-1, errno.EINVAL)
        os.close(tree)
        os.close(users)
        mapped.communicate(b"\n")


@needs_root_and_fuse
def test_p3_a_directory_that_is_gone_is_not_opened(tmp_path: Path) -> None:
    """Another mount has removed it, and the trash still has it: its old name opens nothing."""
    with new_volume(tmp_path / "v", f"sqlite://{tmp_path}/v.db", trash_days=1) as volume:
        first, second = volume.mount("first"), volume.mount("second")
        (first / "gone").mkdir()
        assert (second / "gone").is_dir()
        (first / "gone").rmdir()
        assert _errno_of(lambda: os.listdir(second / "gone")) == errno.ENOENT
        (first / "here").mkdir()
        before = Path.cwd()
        os.chdir(first / "here")
        try:
            (first / "here").rmdir()
            assert os.listdir(".") == [], "where it lost its name on this mount it may be listed"
        finally:
            os.chdir(before)


def test_p1_names_with_every_byte(root: Path) -> None:
    each = [bytes((code,)) for code in range(1, 256) if code not in b"/."]
    names = [b"name " + byte for byte in each] + [byte * 255 for byte in each]
    top = os.fsencode(root)
    for name in names:
        os.close(os.open(os.path.join(top, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    assert sorted(os.listdir(top)) == sorted(names)
    for name in names:
        os.rename(os.path.join(top, name), os.path.join(top, name[::-1]))
        os.unlink(os.path.join(top, name[::-1]))
    assert os.listdir(top) == []
    assert _errno_of(lambda: os.mkdir(os.path.join(top, b"n" * 256))) == errno.ENAMETOOLONG


def test_p1_paths_at_path_max(twins: Twins) -> None:
    """4095 bytes are a path, 4096 are none; deeper ones are walked step by step."""
    top = os.open(twins.first, os.O_RDONLY | os.O_DIRECTORY)
    name, depth = b"d" * 255, 18
    doors = [top]
    for _ in range(depth):
        os.mkdir(name, dir_fd=doors[-1])
        doors.append(os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=doors[-1]))
    relative = b"/".join([name] * 15) + b"/" + b"f" * 255  # 4095 bytes
    assert len(relative) == 4095
    os.close(os.open(relative, os.O_CREAT | os.O_WRONLY, dir_fd=top))
    assert os.stat(relative, dir_fd=top).st_size == 0
    assert _errno_of(lambda: os.stat(b"./" + relative, dir_fd=top)) == errno.ENAMETOOLONG
    link = b"t" * 4095
    os.symlink(link, "link", dir_fd=top)
    assert os.readlink("link", dir_fd=top) == os.fsdecode(link)
    assert _errno_of(lambda: os.symlink(link + b"t", "longer", dir_fd=top)) == errno.ENAMETOOLONG
    os.unlink("link", dir_fd=top)
    os.unlink(relative, dir_fd=top)
    os.close(doors.pop())
    while len(doors) > 1:
        os.rmdir(name, dir_fd=doors[-1])
        os.close(doors.pop())
    os.rmdir(name, dir_fd=top)
    os.close(top)


def test_p1_offsets_at_the_limits(root: Path) -> None:
    """2^63 - 1 is where Linux ends; the largest file is smaller, and what lies beyond is EFBIG."""
    fd = os.open(root / "file", os.O_RDWR | os.O_CREAT)
    try:
        for offset in (LAST, LAST - 1, LAST - 4096, 1 << 62):
            assert _errno_of(lambda at=offset: os.pwrite(fd, b"x", at)) in (  # type: ignore[misc]
                errno.EFBIG, errno.EINVAL
            )  # fmt: skip
            assert os.pread(fd, 10, offset - 10) == b""
            assert _errno_of(lambda at=offset: os.ftruncate(fd, at)) in (  # type: ignore[misc]
                errno.EFBIG, errno.EINVAL
            )  # fmt: skip
            for whence in (os.SEEK_DATA, os.SEEK_HOLE):
                seek = _errno_of(partial(os.lseek, fd, offset, whence))
                assert seek in (errno.ENXIO, errno.EINVAL)
            assert _LIBC.fallocate(fd, 0, offset, 1)
            assert ctypes.get_errno() in (errno.EFBIG, errno.EINVAL)
        assert os.fstat(fd).st_size == 0
        locked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, LAST, 1, 0)
        fcntl.fcntl(fd, fcntl.F_SETLK, locked)
        with subprocess.Popen(["flock", "-x", root / "file", "true"]) as other:
            assert other.wait(60) == 0, "flock(2) is another kind"
    finally:
        os.close(fd)


@pytest.mark.parametrize("mode", [0, FALLOC_KEEP_SIZE])
def test_p4_fallocate_is_refused_without_the_room(volumes: Volumes, mode: int) -> None:
    """It says at once when there is no room in the quota or the volume."""
    with volumes("sqlite", "room") as volume:
        root = volume.mount("mnt")
        (root / "small").mkdir()
        run("quota", "set", volume.meta, "--path", "/small", "--capacity", "1MiB")
        fd = os.open(root / "small" / "file", os.O_RDWR | os.O_CREAT)
        try:
            assert _LIBC.fallocate(fd, mode, 0, 512 << 10) == 0
            assert _LIBC.fallocate(fd, mode, 0, 2 << 20) == -1
            assert ctypes.get_errno() == errno.EDQUOT
            run("config", volume.meta, "--capacity", "4MiB")
            other = os.open(root / "file", os.O_RDWR | os.O_CREAT)
            wait_until(lambda: _LIBC.fallocate(other, mode, 0, 8 << 20))
            assert ctypes.get_errno() == errno.ENOSPC
            os.close(other)
        finally:
            os.close(fd)

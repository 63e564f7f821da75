"""P1: files are found by handle, name_to_handle_at(2), when the kernel has dropped their inodes."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.fsclient.fuse.mounting import needs_root_and_fuse
from tests.posix.volumes import Volume, new_volume

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_HEAD: Final = 8  # of struct file_handle: how many bytes follow, and of which type
_ROOM: Final = 128


class Handle(NamedTuple):
    """A `struct file_handle`."""

    packed: bytes

    @classmethod
    def of(cls, path: Path) -> Handle:
        room = ctypes.create_string_buffer(_ROOM.to_bytes(4, "little"), _HEAD + _ROOM)
        mount = ctypes.c_int()
        if _LIBC.name_to_handle_at(-100, bytes(path), room, ctypes.byref(mount), 0) != 0:
            raise OSError(ctypes.get_errno(), "name_to_handle_at")
        length = int.from_bytes(room.raw[:4], "little")
        return cls(room.raw[: _HEAD + length])

    def open(self, mount: Path, flags: int = os.O_RDONLY) -> int:
        """open_by_handle_at(2) on any mount of the volume."""
        door = os.open(mount, os.O_RDONLY)
        try:
            fd: int = _LIBC.open_by_handle_at(door, self.packed, flags)
        finally:
            os.close(door)
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return fd


Volumes = Callable[[str, str], AbstractContextManager[Volume]]


@pytest.mark.parametrize("engine", ["sqlite", "redis"])
def test_p1_a_handle_opens_what_the_kernel_has_not(volumes: Volumes, engine: str) -> None:
    """A second mount has seen none of it, as one that has dropped it, and as a later one."""
    with volumes(engine, "exported") as volume:
        first = volume.mount("first")
        directory = first / "outer" / "inner"
        directory.mkdir(parents=True)
        (directory / "file").write_bytes(b"bytes")
        os.link(directory / "file", first / "link")
        os.symlink("file", directory / "symlink")
        handles = {path: Handle.of(path) for path in (first, directory, directory / "file")}
        gone = directory / "gone"
        gone.touch()
        deleted = Handle.of(gone)
        gone.unlink()
        second = volume.mount("second")
        fd = handles[directory / "file"].open(second, os.O_RDWR)
        assert os.read(fd, 10) == b"bytes"
        assert os.pwrite(fd, b"BYTES", 0) == 5
        assert os.fstat(fd).st_ino == (directory / "file").stat().st_ino
        os.close(fd)
        fd = handles[directory].open(second, os.O_RDONLY | os.O_DIRECTORY)
        assert sorted(os.listdir(fd)) == ["file", "symlink"]
        assert os.readlink(f"/proc/self/fd/{fd}") == str(second / "outer" / "inner"), "by `..`"
        os.close(fd)
        os.close(handles[first].open(second, os.O_RDONLY))
        for mount in (first, second):
            with pytest.raises(OSError, match="Stale") as caught:
                deleted.open(mount)
            assert caught.value.errno == errno.ESTALE
        (directory / "file").unlink()
        fd = handles[directory / "file"].open(second)  # it has another name
        os.close(fd)
        (first / "link").unlink()
        if engine == "redis":  # else the kernel has the inode for a second
            with pytest.raises(OSError, match="Stale"):
                handles[directory / "file"].open(volume.mount("third"))


@needs_root_and_fuse
def test_p1_what_is_in_the_trash_has_no_handle(tmp_path: Path) -> None:
    with new_volume(tmp_path / "v", f"sqlite://{tmp_path}/v.db", trash_days=1) as volume:
        root = volume.mount("first")
        (root / "file").touch()
        handle = Handle.of(root / "file")
        (root / "file").unlink()
        with pytest.raises(OSError, match="Stale"):
            handle.open(volume.mount("second"))


def test_p1_a_mounted_directory_lets_nobody_out(volumes: Volumes) -> None:
    """A handle is a number: it may be of a file that is outside."""
    with volumes("sqlite", "inside") as volume:
        root = volume.mount("first")
        (root / "inside").mkdir()
        (root / "outside").write_bytes(b"secret")
        handle = Handle.of(root / "outside")
        inside = volume.mount("second", "--subdir", "/inside")
        with pytest.raises(OSError, match="Stale"):
            handle.open(inside)

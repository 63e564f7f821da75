"""Mounts of the kernel: the table, bind mounts, and their end.

No call here follows a symbolic link at a target, or asks a FUSE client anything.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final, NamedTuple

from csi.errors import Code, CsiError, invalid

_MS_RDONLY: Final = 1
_MS_REMOUNT: Final = 32
_MS_BIND: Final = 4096
_KEPT: Final = {"nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048}
_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8
_MS_PRIVATE: Final = 1 << 18
_STACK_MAX: Final = 1000  # mounts on one place that are taken away one by one
_libc = ctypes.CDLL(None, use_errno=True)


class MountLine(NamedTuple):
    """One line of the mount table."""

    path: str
    device: str  # MAJOR:MINOR, which no other file system has as long as this is mounted
    options: frozenset[str]

    @property
    def readonly(self) -> bool:
        """Whether this mount refuses writes, whatever others of the file system do."""
        return "ro" in self.options


def table() -> list[MountLine]:
    """All mounts of this mount namespace, later ones on top."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        rows = [line.split(" ") for line in lines]
    return [MountLine(_plain(row[4]), row[2], frozenset(row[5].split(","))) for row in rows]


def _plain(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def find(path: str) -> MountLine | None:
    """What is mounted on top of exactly this path."""
    found = [each for each in table() if each.path == path]
    return found[-1] if found else None


def places(device: str) -> list[str]:
    """Where a file system is mounted."""
    return [each.path for each in table() if each.device == device]


def bind(source: str, target: str, readonly: bool) -> None:
    """Mount the file system at `source` on the directory `target`, too. Raises: CsiError.

    What is mounted at the target stays below: containers have that, and see what comes on top of it
    (mountPropagation). `source` is made private, so that targets do not share what comes on top.
    """
    _mount("none", source, _MS_PRIVATE)
    fd = _open_target(target)
    try:
        _mount(source, f"/proc/self/fd/{fd}", _MS_BIND)
    finally:
        os.close(fd)
    if readonly:
        remount_readonly(target)


def remount_readonly(target: str) -> None:
    """Let a bind mount refuse writes. Raises: CsiError."""
    found = find(target)
    if found is None:
        raise CsiError(Code.INTERNAL, f"{target} is not mounted any more")
    flags = sum(flag for word, flag in _KEPT.items() if word in found.options)
    fd = _open_target(target)  # of what is mounted there
    try:
        _mount("none", f"/proc/self/fd/{fd}", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | flags)
    finally:
        os.close(fd)


def unmount(target: str, lazy: bool = False, busy_device: str | None = None) -> None:
    """Take away everything that is mounted on `target`. Raises: CsiError.

    With `busy_device` what is not of that device goes lazily: its client is dead.
    """
    for _ in range(_STACK_MAX):
        found = find(target)
        if found is None:
            return
        stale = busy_device is not None and found.device != busy_device
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy or stale else 0)
        if _libc.umount2(os.fsencode(target), flags):
            code = ctypes.get_errno()
            if code != errno.EINVAL:  # it was unmounted meanwhile
                why = "it is in use" if code == errno.EBUSY else os.strerror(code)
                raise CsiError(Code.FAILED_PRECONDITION, f"can't unmount {target}: {why}")


def make_target(target: str) -> None:
    """A directory to mount on; one that is there is taken. Raises: CsiError."""
    try:
        os.makedirs(target, 0o750, exist_ok=True)
    except FileExistsError as error:
        raise invalid(f"the target {target} is not a directory: remove it") from error
    except OSError as error:
        raise CsiError(Code.INTERNAL, f"can't make {target}: {error.strerror}") from error
    os.close(_open_target(target))


def remove_target(target: str) -> None:
    """Remove the directory that was mounted on. Raises: CsiError."""
    try:
        os.rmdir(target)
    except FileNotFoundError:
        pass
    except NotADirectoryError as error:
        raise invalid(f"the target {target} is not a directory: remove it") from error
    except OSError as error:
        raise CsiError(Code.INTERNAL, f"can't remove {target}: {error.strerror}") from error


def _open_target(target: str) -> int:
    try:
        return os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise invalid(
                f"the target {target} is a file or a symbolic link: name a directory"
            ) from error
        raise CsiError(Code.INTERNAL, f"can't open {target}: {error.strerror}") from error


def _mount(source: str, target: str, flags: int) -> None:
    if _libc.mount(os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(flags), None):
        why = os.strerror(ctypes.get_errno())
        raise CsiError(Code.INTERNAL, f"can't mount {source}: {why}")

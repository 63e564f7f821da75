"""Directories and files of this host that only this user, or root, may change.

What a cache or a journal holds is trusted and becomes part of files: in a place where other users
may write, they could plant it. So the owner and the write permissions are checked of each directory
on the way there, and of each file that is used again.

Threading: functions only.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

from fsmeta.errors import ConfigError

LINKS_MAX: Final = 40  # symbolic links on the way to a directory, as the kernel follows them
_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


def require_private(path: str, what: str) -> None:
    """A directory that is there must belong to this user, and no other user may replace it.

    `what` names it for the user. Raises: ConfigError, OSError.
    """
    trusted = {0, os.geteuid(), os.stat("/").st_uid}
    at, left, links = "/", _parts(os.path.abspath(path)), 0
    while True:
        found = os.lstat(at)
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > LINKS_MAX:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            _require_owner(found, at, what, trusted)
            left = _parts(os.readlink(at)) + left
            at = "/" if os.readlink(at).startswith("/") else os.path.dirname(at)
        elif left:
            _require_owner(found, at, what, trusted)
            if found.st_mode & _OTHERS and not found.st_mode & stat.S_ISVTX:
                raise _refusal(what, at, "other users may write to it")
        else:
            _require_owner(found, at, what, {os.geteuid()})
            if found.st_mode & _OTHERS:
                raise _refusal(what, at, "other users may write to it")
            return
        if left:
            at = os.path.normpath(os.path.join(at, left.pop(0)))


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _require_owner(found: os.stat_result, path: str, what: str, owners: set[int]) -> None:
    if found.st_uid not in owners:
        raise _refusal(what, path, f"it belongs to uid {found.st_uid}")


def _refusal(what: str, path: str, why: str) -> ConfigError:
    return ConfigError(
        f"{what}: {path}: {why}, and could put into it what is taken for yours: "
        f"name another directory, or make sure that nothing is planted there and "
        f"`chown {os.geteuid()}` and `chmod go-w` it"
    )


def require_private_files(path: str, what: str) -> None:
    """As `require_private`, and all that is directly in the directory is ours, too.

    Raises: ConfigError, OSError.
    """
    require_private(path, what)
    with os.scandir(path) as entries:
        for entry in entries:
            found = entry.stat(follow_symlinks=False)
            _require_owner(found, entry.path, what, {os.geteuid()})
            if not stat.S_ISREG(found.st_mode) or found.st_mode & _OTHERS:
                raise _refusal(what, entry.path, "it is no file that is yours alone")


def open_private(path: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
    """A descriptor of a file that is ours alone; no link is followed at the end of its path.

    Raises: OSError, EPERM where other users own it or may write to it.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=dir_fd)
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS or not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise OSError(errno.EPERM, "it is no file that is yours alone", path)
    return fd


def open_folder(path: str, flags: int, dir_fd: int | None = None) -> int:
    """A descriptor of a directory that is ours alone.

    Raises: OSError, EPERM where other users own it or may write to it.
    """
    fd = os.open(path, flags | os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
        os.close(fd)
        raise OSError(errno.EPERM, "it is no directory that is yours alone", path)
    return fd


def make_private(path: str) -> None:
    """Make a directory, and those above it, for this user alone. Raises: OSError."""
    above = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(above):
        make_private(above)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise

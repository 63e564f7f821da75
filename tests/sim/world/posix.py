"""System calls by path on one simulated client, as a kernel without caches would make them.

What the workloads of `loads` speak. Raises `OSError` as the call would, and `StoreError` where the
client could not say what became of it. A path that has become stale is walked once more, as Linux
does on ESTALE.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from fsclient.kernel.contract import CopyRange, FileSystem, SetAttr, WriteHow
from fsclient.kernel.later import Later, Outcome
from fsclient.vfs.vfs import VFS
from fsmeta.errors import StoreError
from fsmeta.types import ROOT_CALLER, ROOT_INO, Attr, Dentry, Ino

T = TypeVar("T")

_STALE_RETRIES = 3  # one for each of three clients that replace the same name at once
_READDIR_PAGE = 100


def finish(fs: FileSystem, later: Later[None] | None) -> None:
    """Wait for an answer that comes later, as the kernel does."""
    if later is None:
        return
    assert isinstance(fs, VFS)
    come = fs.locks._runtime.event()
    found: list[Outcome[None]] = []

    def take(outcome: Outcome[None]) -> None:
        try:
            outcome()
            found.append(lambda: None)
        except (OSError, StoreError) as error:
            found.append(partial(_raise, error))
        come.set()

    later.begin(take)
    come.wait()
    found[0]()


def _raise(error: Exception) -> None:
    raise error


def _fits(names: Sequence[Dentry]) -> int:
    return min(len(names), _READDIR_PAGE)


class File:
    """An open file."""

    def __init__(self, fs: FileSystem, ino: Ino, fh: int) -> None:
        self.ino = ino
        self._fs = fs
        self._fh = fh

    @property
    def fh(self) -> int:
        return self._fh

    def read(self, offset: int, size: int) -> bytes:
        return b"".join(self._fs.read(ROOT_CALLER, self.ino, self._fh, offset, size))

    def write(self, offset: int, data: bytes) -> None:
        taken = 0
        while taken < len(data):  # a write that finds room for a part says how much it was
            buffer = bytearray(data[taken:])
            at = offset + taken
            now = self._fs.write(ROOT_CALLER, self.ino, self._fh, at, memoryview(buffer))
            assert 0 < now <= len(buffer)
            buffer[:] = bytes(len(buffer))  # it is the caller's again
            taken += now

    def append(self, data: bytes) -> None:
        """write(2) with O_APPEND by a kernel that believes the size it was told."""
        offset = self.size()
        how = WriteHow(append=True)
        self._fs.write(ROOT_CALLER, self.ino, self._fh, offset, memoryview(data), how)

    def copy(self, target: File, begin: int, at: int, length: int) -> int:
        """copy_file_range(2) to `target`."""
        fs, fh = self._fs, target._fh
        place = CopyRange(self._fh, begin, target.ino, fh, at, length)
        return fs.ranges.copy_file_range(ROOT_CALLER, self.ino, place)

    def punch(self, offset: int, length: int) -> None:
        """fallocate(2) with PUNCH_HOLE."""
        self._fs.ranges.fallocate(ROOT_CALLER, self.ino, self._fh, 3, offset, length)

    def reserve(self, mode: int, offset: int, length: int) -> None:
        """fallocate(2) of any mode that reserves space."""
        self._fs.ranges.fallocate(ROOT_CALLER, self.ino, self._fh, mode, offset, length)

    def size(self) -> int:
        quick = self._fs.fast_lane.stat(self.ino) if isinstance(self._fs, VFS) else None
        return (quick or self._fs.getattr(ROOT_CALLER, self.ino, self._fh)).attr.size

    def truncate(self, size: int) -> None:
        self._fs.setattr(ROOT_CALLER, self.ino, SetAttr(size=size), self._fh)

    def fsync(self) -> None:
        self._fs.fsync(ROOT_CALLER, self.ino, self._fh, False)

    def close(self) -> None:
        """The handle is gone even where this raises."""
        lane = self._fs.fast_lane if isinstance(self._fs, VFS) else None
        try:
            if lane is None or not lane.flush(self.ino, self._fh):
                finish(self._fs, self._fs.flush(ROOT_CALLER, self.ino, self._fh))
        finally:
            if lane is None or not lane.release(self.ino, self._fh):
                self._fs.release(self.ino, self._fh)


class Posix:
    """The calls of one client."""

    def __init__(self, fs: FileSystem) -> None:
        self.fs = fs

    def _again(self, call: Callable[[], T]) -> T:
        for _ in range(_STALE_RETRIES):
            try:
                return call()
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
        return call()

    def _lookup(self, parent: Ino, name: bytes) -> Attr:
        if isinstance(self.fs, VFS) and self.fs.fast_lane.is_absent(parent, name):
            raise FileNotFoundError(errno.ENOENT, "answered without a verb")
        attr = self.fs.lookup(ROOT_CALLER, parent, name).attr
        if attr is None:
            raise FileNotFoundError(errno.ENOENT, "known to be absent")
        return attr

    def _parent(self, path: bytes) -> tuple[Ino, bytes]:
        *parents, name = path.strip(b"/").split(b"/")
        ino = ROOT_INO
        for each in parents:
            ino = self._lookup(ino, each).ino
        return ino, name

    def stat(self, path: bytes) -> Attr:
        return self._again(lambda: self._lookup(*self._parent(path)))

    def exists(self, path: bytes) -> bool:
        try:
            self.stat(path)
        except FileNotFoundError:
            return False
        return True

    def open(self, path: bytes, flags: int = os.O_RDONLY) -> File:
        return self._again(lambda: self._open(path, flags))

    def _open(self, path: bytes, flags: int) -> File:
        parent, name = self._parent(path)
        if flags & os.O_CREAT:
            try:
                attr = self._lookup(parent, name)
            except FileNotFoundError:
                entry, opened = self.fs.create(ROOT_CALLER, parent, name, 0o644, flags)
                assert entry.attr is not None
                return File(self.fs, entry.attr.ino, opened.fh)
            if flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, "the kernel found it")
        else:
            attr = self._lookup(parent, name)
        opened = self.fs.open(ROOT_CALLER, attr.ino, flags & ~(os.O_CREAT | os.O_EXCL))
        return File(self.fs, attr.ino, opened.fh)

    def tmpfile(self, directory: bytes) -> File:
        """open(2) with O_TMPFILE."""
        parent = self.stat(directory).ino
        entry, opened = self.fs.tmpfile(ROOT_CALLER, parent, 0o644, os.O_RDWR)
        assert entry.attr is not None
        return File(self.fs, entry.attr.ino, opened.fh)

    def link_open(self, file: File, path: bytes) -> None:
        """linkat(2) of an open file."""
        self._again(lambda: self.fs.link(ROOT_CALLER, file.ino, *self._parent(path)))

    def mkdir(self, path: bytes) -> None:
        self._again(lambda: self.fs.mkdir(ROOT_CALLER, *self._parent(path), 0o755))

    def rmdir(self, path: bytes) -> None:
        self._again(lambda: self.fs.rmdir(ROOT_CALLER, *self._parent(path)))

    def unlink(self, path: bytes) -> None:
        self._again(lambda: self.fs.unlink(ROOT_CALLER, *self._parent(path)))

    def symlink(self, target: bytes, path: bytes) -> None:
        self._again(lambda: self.fs.symlink(ROOT_CALLER, *self._parent(path), target))

    def link(self, old: bytes, new: bytes) -> None:
        def call() -> None:
            ino = self._lookup(*self._parent(old)).ino
            self.fs.link(ROOT_CALLER, ino, *self._parent(new))

        self._again(call)

    def rename(self, old: bytes, new: bytes, flags: int = 0) -> None:
        def call() -> None:
            self.fs.rename(ROOT_CALLER, *self._parent(old), *self._parent(new), flags)

        self._again(call)

    def listdir(self, path: bytes) -> list[bytes]:
        """The names in a directory, read in one go."""

        def call() -> tuple[Ino, int]:
            ino = self.stat(path).ino if path.strip(b"/") else ROOT_INO
            return ino, self.fs.directories.opendir(ROOT_CALLER, ino).fh

        ino, fh = self._again(call)
        try:
            names: list[bytes] = []
            cookies: Sequence[int] = [0]
            while cookies:
                page, cookies, told = self.fs.directories.readdirplus(
                    ROOT_CALLER, ino, fh, cookies[-1], _fits
                )
                names += [name for name, _, _ in page]
                for entry in told.each(page):
                    if entry is not None and entry.attr is not None:
                        self.fs.forget(entry.attr.ino, 1)
        finally:
            self.fs.directories.releasedir(ino, fh)
        return sorted(name for name in names if name not in (b".", b".."))

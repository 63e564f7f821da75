"""Open files of a volume without a mount: raw files, and files that appear whole at close.

`Client.open` wraps them in the classes of `io`. A handle belongs to the process that opened it: in
a forked child a file that is open for reading opens itself anew, one for writing is EBADF.

Threading: as files of `io`: a raw file by one thread at a time.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple
from uuid import uuid4

from fsclient.kernel.contract import CopyRange, WriteHow
from fsmeta.types import Attr, Ino, SetAttr
from slicefs.client import names
from slicefs.client.paths import CallerView, Path, PathEntry

TEMPORARY: Final = ".slicefs-tmp-"  # names of files that are about to replace another one
READ_BYTES_MAX: Final = 8 << 20  # of one request: its pieces are in memory twice meanwhile
_LETTERS: Final = frozenset("rwaxbt+")
_PLAIN: Final = {
    "r": os.O_RDONLY,
    "w": os.O_CREAT | os.O_TRUNC,
    "a": os.O_CREAT | os.O_APPEND,
    "x": os.O_CREAT | os.O_EXCL,
}


class Mode(NamedTuple):
    """What a mode string asks for."""

    flags: int  # of open(2)
    text: bool

    @property
    def reads(self) -> bool:
        """Whether it is to be read."""
        return self.flags & os.O_ACCMODE != os.O_WRONLY

    @property
    def writes(self) -> bool:
        """Whether it is to be written."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY


def parse_mode(mode: str) -> Mode:
    """`open`'s mode string. Raises: ValueError."""
    letters = set(mode)
    kinds = letters & set(_PLAIN)
    if len(letters) != len(mode) or letters - _LETTERS or len(kinds) != 1 or {"b", "t"} <= letters:
        raise ValueError(f"invalid mode: {mode!r}")
    kind = kinds.pop()
    access = os.O_RDWR if "+" in letters else (os.O_RDONLY if kind == "r" else os.O_WRONLY)
    return Mode(_PLAIN[kind] | access, "b" not in letters)


class RawFile(io.RawIOBase):
    """An open file. `view` is asked for anew in a forked child."""

    def __init__(
        self, view: Callable[[], CallerView], ino: Ino, fh: int, flags: int, name: Any
    ) -> None:
        super().__init__()
        self.name = name
        self.mode = "rb" if flags & os.O_ACCMODE == os.O_RDONLY else "rb+"
        self._view = view
        self._now = view()
        self._connection = self._now.connection
        self.ino = ino
        self._fh = fh
        self._flags = flags
        self._at = 0
        if flags & os.O_APPEND:
            self._at = self._size()

    def _handle(self) -> int:
        """The handle in this process. Raises: EBADF, ValueError after `close`."""
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if self._connection.alive:
            return self._fh
        if self.writable():
            raise OSError(errno.EBADF, "opened before a fork, or its volume was closed", self.name)
        self._now = self._view()
        opened = self._now.vfs.open(self._now.caller, self.ino, os.O_RDONLY)
        self._connection, self._fh = self._now.connection, opened.fh
        return self._fh

    def readable(self) -> bool:
        """Whether it was opened to be read."""
        return self._flags & os.O_ACCMODE != os.O_WRONLY

    def writable(self) -> bool:
        """Whether it was opened to be written."""
        return self._flags & os.O_ACCMODE != os.O_RDONLY

    def seekable(self) -> bool:
        """Yes."""
        return True

    def _size(self) -> int:
        fh = self._handle()
        view = self._now
        return view.run(self.name, lambda: view.vfs.getattr(view.caller, self.ino, fh).attr.size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move; the new position."""
        bases = {os.SEEK_SET: lambda: 0, os.SEEK_CUR: lambda: self._at, os.SEEK_END: self._size}
        if whence not in bases:
            raise ValueError(f"whence {whence}: use SEEK_SET, SEEK_CUR or SEEK_END")
        at = bases[whence]() + offset
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self.name)
        self._at = at
        return at

    def tell(self) -> int:
        """The position."""
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer` as far as the file goes."""
        if not self.readable():
            raise io.UnsupportedOperation("not readable")
        target = memoryview(buffer).cast("B")
        done = self.pread_into(target, self._at)
        self._at += done
        return done

    def readall(self) -> bytes:
        """The rest. `io` would read 8 KiB at a time."""
        if not self.readable():
            raise io.UnsupportedOperation("not readable")
        rest = bytearray(max(0, self._size() - self._at))
        done = bytes(memoryview(rest)[: self.readinto(rest)])
        return done + super().readall()  # the file may have grown

    def pread_into(self, target: memoryview, offset: int) -> int:
        """Fill `target` from `offset` on, as far as the file goes; the position stays."""
        fh = self._handle()
        return read_into(self._now, self.name, (self.ino, fh), offset, target)

    def write(self, data: Any, /) -> int:
        """Take `data`, all of it unless the volume is full."""
        if not self.writable():
            raise io.UnsupportedOperation("not writable")
        fh, view, source = self._handle(), self._now, memoryview(data).cast("B")
        append = self._flags & os.O_APPEND != 0
        how = WriteHow(view.kills, append)
        count = view.run(
            self.name, lambda: view.vfs.write(view.caller, self.ino, fh, self._at, source, how)
        )
        self._at = self._size() if append else self._at + count
        return count

    def copy_from(self, source: RawFile, begin: int, end: int) -> None:
        """Show bytes `begin..end` of another file of the volume at the position, and pass them.

        Raises: EIO where the source ends before `end`.
        """
        view = self._now
        ends = (source.ino, source._handle(), self.ino, self._handle())
        while begin < end:
            at, length = self._at, end - begin

            def copy(begin: int = begin, at: int = at, length: int = length) -> int:
                ino_in, fh_in, ino, fh = ends
                place = CopyRange(fh_in, begin, ino, fh, at, length)
                return view.vfs.ranges.copy_file_range(view.caller, ino_in, place)

            count = view.run(self.name, copy)
            if not count:
                raise OSError(errno.EIO, "the source of a copy became shorter", source.name)
            begin += count
            self._at += count

    def truncate(self, size: int | None = None) -> int:
        """Cut or lengthen the file; the position stays."""
        if not self.writable():
            raise io.UnsupportedOperation("not writable")
        length, fh, view = self._at if size is None else size, self._handle(), self._now
        want = SetAttr(size=length, kill_suid=view.kills)
        view.run(self.name, lambda: view.vfs.setattr(view.caller, self.ino, want, fh))
        return length

    def sync(self) -> None:
        """fsync(2)."""
        fh, view = self._handle(), self._now
        view.run(self.name, lambda: view.vfs.fsync(view.caller, self.ino, fh, False))

    def close(self) -> None:
        """Store what was written. Raises: what could not be."""
        if self.closed:
            return
        try:
            if self._connection.alive and self.writable():
                view = self._now
                view.run(self.name, lambda: view.vfs.flush(view.caller, self.ino, self._fh))
        finally:
            super().close()
            if self._connection.alive:
                self._now.run(None, lambda: self._now.vfs.release(self.ino, self._fh))


class AtomicFile(io.BufferedWriter):
    """A file that appears whole at `close`, in place of what was there, or not at all.

    Until then it has no name. `abort`, an exception in its `with` block and forgetting it leave
    nothing.
    """

    def __init__(self, raw: RawFile, view: CallerView, path: Path, buffer_bytes: int) -> None:
        super().__init__(raw, buffer_bytes)
        self._file = raw
        self._view = view
        self._path = path

    def copy_from(self, source: RawFile, begin: int, end: int) -> None:
        """Append bytes of another file of the volume: metadata alone."""
        self.flush()
        self._file.copy_from(source, begin, end)

    def tell(self) -> int:
        """How much was written."""
        self.flush()  # the position of a buffer knows of no copies
        return self._file.tell()

    def close(self) -> None:
        """Store all, then give it its name. Raises: what failed; then nothing is left."""
        if self.closed:
            return
        try:
            self.flush()
            self._file.sync()
            self._view.run(self._path, self._publish)
        except BaseException:
            self.abort()
            raise
        super().close()

    def abort(self) -> None:
        """Leave nothing."""
        if self.closed:
            return
        try:
            self._file.close()
        finally:
            try:
                super().close()
            except ValueError:
                pass  # what is buffered has no file to go to, and is not to

    def _publish(self) -> None:
        view = self._view
        place = view.place(self._path)
        caller, ino = view.caller, self._file.ino
        if place.attr is not None and not names.is_regular(place.attr):
            number = errno.EISDIR if place.attr.is_dir else errno.EEXIST
            raise OSError(number, os.strerror(number))
        if place.attr is None:
            try:
                view.entry(view.vfs.link(caller, ino, place.parent, place.name))
                return
            except FileExistsError:
                pass  # another client was faster: replace what it has made
        temporary = f"{TEMPORARY}{uuid4().hex}".encode()
        view.entry(view.vfs.link(caller, ino, place.parent, temporary))
        try:
            view.vfs.rename(caller, place.parent, temporary, place.parent, place.name, 0)
        except BaseException:
            view.vfs.unlink(caller, place.parent, temporary)
            raise

    def __exit__(self, *error: Any) -> None:
        if error and error[0] is not None:
            self.abort()
        else:
            self.close()

    def __del__(self) -> None:
        try:
            self.abort()
        except (OSError, AttributeError):
            pass  # it was never made, or its volume is closed


class AtomicText(io.TextIOWrapper):
    """Text in front of an `AtomicFile`, with its promises."""

    def abort(self) -> None:
        """Leave nothing."""
        file: Any = self.buffer
        file.abort()

    def __exit__(self, *error: Any) -> None:
        if error and error[0] is not None:
            self.abort()
        else:
            self.close()

    def __del__(self) -> None:
        try:
            self.abort()
        except (OSError, ValueError, AttributeError):
            pass  # as of an `AtomicFile`


def read_into(
    view: CallerView, path: Path, opened: tuple[Ino, int], offset: int, target: memoryview
) -> int:
    """Fill `target` from `offset` of an open file on; how many bytes there were."""
    ino, fh = opened
    done = 0
    while done < len(target):
        read = partial(
            view.vfs.read,
            view.caller,
            ino,
            fh,
            offset + done,
            min(len(target) - done, READ_BYTES_MAX),
        )
        before = done
        for piece in view.run(path, read):
            target[done : done + len(piece)] = piece
            done += len(piece)
        if done == before:
            break
    return done


def open_raw(view: CallerView, path: Path, flags: int, permissions: int) -> tuple[Ino, int]:
    """open(2): the inode and the handle. Raises: ENOENT, EEXIST, EISDIR, EACCES."""
    exclusive = flags & os.O_EXCL != 0
    place = view.place(path, follow=not exclusive)
    if place.attr is None:
        if not flags & os.O_CREAT:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return _create(view, place, flags, permissions)
    if exclusive:
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    if place.attr.is_dir:
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not names.is_regular(place.attr):
        raise OSError(errno.ENXIO, "is no plain file: a volume without a mount has no pipes")
    ino = place.attr.ino
    opened = view.vfs.open(view.caller, ino, flags & ~os.O_CREAT, view.kills)
    return ino, opened.fh


def _create(view: CallerView, place: PathEntry, flags: int, permissions: int) -> tuple[Ino, int]:
    entry, opened = view.vfs.create(
        view.caller, place.parent, place.name, permissions, flags, view.kills, view.umask
    )
    attr = view.entry(entry)
    return attr.ino, opened.fh


def open_unnamed(view: CallerView, path: Path, permissions: int) -> tuple[Ino, int]:
    """A new file without a name, in the directory where `path` is to be; with its mode, if it is.

    Raises: ENOENT, EACCES, EISDIR.
    """
    place = view.place(path)
    there = place.attr
    if there is not None and there.is_dir:
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    mode = permissions if there is None else there.mode & 0o777
    umask = view.umask if there is None else 0
    entry, opened = view.vfs.tmpfile(view.caller, place.parent, mode, os.O_RDWR, umask)
    attr: Attr | None = entry.attr
    assert attr is not None, "a new file has attributes"
    return attr.ino, opened.fh

"""One file's bytes against a bytearray, as fsx(1) does: every way to read, write and cut it.

`Fsx` does random things by seed through two descriptors, maps that stay open, `O_DIRECT`, holes and
copies, on one mount or on several in turn (whoever opens next sees what was closed). It runs on any
file system: `python -m tests.posix.fsx DIRECTORY… [--seed N] [--ops N]`.

A way that the file system does not know (EOPNOTSUPP) is left out from then on, and said in `lacks`.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import mmap
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

PAGE: Final = mmap.PAGESIZE
SPAN_BYTES: Final = 400_000  # of the file, from its first byte in use on
KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 0x10
_LACKING: Final = (errno.EOPNOTSUPP, errno.ENOSYS)
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class Differs(AssertionError):
    """The file is not what it should be; says where, and what was done last."""


class Fsx:
    """A file called `name` in each of `roots`, which are one directory seen in several ways.

    `begin` puts the action elsewhere in the file. `settle` is called between a close on one root
    and the open on the next.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        name: str,
        seed: int,
        begin: int = 0,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.lacks: set[str] = set()
        self._paths = [root / name for root in roots]
        self._at = 0
        self._dice = random.Random(seed)
        self._begin = begin
        self._settle = settle
        self._held = bytearray()  # from `begin` on; before it the file is a hole
        self._size = 0
        self._log: list[str] = []
        self._map: mmap.mmap | None = None
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._other = os.open(self.path, os.O_RDWR)  # of the same file, at times with O_DIRECT

    @property
    def path(self) -> Path:
        """Where the file is open now."""
        return self._paths[self._at]

    def close(self) -> None:
        self._unmap()
        os.close(self._fd)
        os.close(self._other)

    def run(self, count: int) -> None:
        """Do `count` random things. Raises: Differs."""
        many: dict[str, tuple[int, Callable[[], None]]] = {
            "write": (8, self._write),
            "read": (6, self._read),
            "append": (2, self._append),
            "direct_write": (4, self._direct_write),
            "direct_read": (3, self._direct_read),
            "truncate": (4, self._truncate),
            "map_write": (5, self._map_write),
            "map_read": (4, self._map_read),
            "unmap": (2, self._unmap),
            "sync": (3, self._sync),
            "forget": (2, self._forget),
            "reopen": (2, self._reopen),
            "fallocate": (2, lambda: self._fallocate(0)),
            "keep": (1, lambda: self._fallocate(KEEP_SIZE)),
            "punch": (3, lambda: self._fallocate(PUNCH_HOLE | KEEP_SIZE)),
            "zero": (2, lambda: self._fallocate(ZERO_RANGE)),
            "copy": (2, self._copy),
            "holes": (2, self._holes),
        }
        names, weights = list(many), [weight for weight, _ in many.values()]
        for _ in range(count):
            name = self._dice.choices(names, weights)[0]
            if name in self.lacks:
                continue
            try:
                many[name][1]()
            except OSError as error:
                if error.errno not in _LACKING:
                    raise
                self.lacks.add(name)
            found = os.fstat(self._fd).st_size
            if found != self._size:
                raise Differs(f"size {found} and not {self._size} after {self._told()}")

    def check(self, path: Path | None = None) -> None:
        """The whole file, read through a new descriptor. Raises: Differs."""
        with (path or self.path).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != self._size:
                raise Differs(f"{file.name}: size {size} and not {self._size}: {self._told()}")
            self._compare(0, os.pread(file.fileno(), len(self._held) + 1, self._begin), "check")

    def _told(self) -> str:
        return "; ".join(self._log[-25:])

    def _say(self, what: str, pos: int = 0, length: int = 0) -> None:
        self._log.append(f"{what} {pos}+{length}")

    def _compare(self, pos: int, found: bytes, how: str, length: int | None = None) -> None:
        """`found` must be what is held from `pos` on."""
        held = self._held[pos : pos + (len(found) + 1 if length is None else length)]
        if found == held:
            return
        differ = (at for at, (a, b) in enumerate(zip(found, held, strict=False)) if a != b)
        first = next(differ, min(len(found), len(held)))
        raise Differs(
            f"{how} of {len(found)} bytes at {pos} (held: {len(held)}) differs from {pos + first} "
            f"on: {found[first : first + 8].hex()} and not {held[first : first + 8].hex()}, "
            f"size {self._size}; {self._told()}"
        )

    def _range(self) -> tuple[int, int]:
        """An offset behind `begin` and a length, mostly short."""
        dice = self._dice
        length = dice.choice((1, 5, 100, PAGE, 5000, 40_000, dice.randrange(1, 150_000)))
        pos = dice.randrange(0, SPAN_BYTES)
        return (pos // PAGE * PAGE if dice.random() < 0.3 else pos), length

    def _put(self, pos: int, data: bytes) -> None:
        self._held.extend(bytes(max(0, pos - len(self._held))))
        self._held[pos : pos + len(data)] = data
        if data:
            self._size = max(self._size, self._begin + len(self._held))

    def _write(self) -> None:
        pos, length = self._range()
        self._say("write", pos, length)
        data = self._dice.randbytes(length)
        fd = self._dice.choice((self._fd, self._fd, self._other))
        if os.get_blocking(fd) and os.pwrite(fd, data, self._begin + pos) != length:
            raise Differs("a short write")
        self._put(pos, data)

    def _read(self) -> None:
        pos, length = self._range()
        self._say("read", pos, length)
        fd = self._dice.choice((self._fd, self._other))
        self._compare(pos, os.pread(fd, length, self._begin + pos), "read", length)

    def _append(self) -> None:
        if self._size < self._begin or len(self._held) > SPAN_BYTES:
            return
        data = self._dice.randbytes(self._dice.randrange(1, 9000))
        self._say("append", len(self._held), len(data))
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(fd, data)
        os.close(fd)
        self._put(len(self._held), data)

    def _direct(self, pos: int, length: int) -> tuple[int, int, mmap.mmap]:
        """Whole pages, and memory that begins at one."""
        pos, length = pos // PAGE * PAGE, (length + PAGE - 1) // PAGE * PAGE
        return pos, length, mmap.mmap(-1, length)

    def _direct_write(self) -> None:
        pos, length, memory = self._direct(*self._range())
        self._say("direct write", pos, length)
        memory[:] = self._dice.randbytes(length)
        fd = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        try:
            if os.pwrite(fd, memory, self._begin + pos) != length:
                raise Differs("a short direct write")
            self._put(pos, memory[:])
        finally:
            os.close(fd)

    def _direct_read(self) -> None:
        pos, length, memory = self._direct(*self._range())
        self._say("direct read", pos, length)
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        try:
            count = os.preadv(fd, [memory], self._begin + pos)
        finally:
            os.close(fd)
        self._compare(pos, memory[:count], "direct read", length)

    def _truncate(self) -> None:
        size = self._begin + self._range()[0]
        if self._dice.random() < 0.1:
            size = self._begin
        self._say("truncate", size - self._begin)
        if self._dice.random() < 0.5:
            os.ftruncate(self._fd, size)
        else:
            os.truncate(self.path, size)
        held = size - self._begin
        del self._held[held:]
        self._held.extend(bytes(held - len(self._held)))
        self._size = size

    def _mapped(self) -> mmap.mmap | None:
        """A map of all that is held, which stays; none where there is nothing."""
        if not self._held:
            return None
        if self._map is None or len(self._map) != len(self._held):
            self._unmap()
            self._map = mmap.mmap(self._fd, len(self._held), offset=self._begin)
        return self._map

    def _unmap(self) -> None:
        if self._map is not None:
            self._say("unmap")
            self._map.close()
            self._map = None

    def _map_write(self) -> None:
        memory = self._mapped()
        pos, length = self._range()
        if memory is None or pos >= len(memory):
            return
        data = self._dice.randbytes(length)[: len(memory) - pos]
        self._say("map write", pos, len(data))
        memory[pos : pos + len(data)] = data
        self._put(pos, data)
        if self._dice.random() < 0.4:
            self._say("msync")
            memory.flush()

    def _map_read(self) -> None:
        memory = self._mapped()
        pos, length = self._range()
        if memory is not None:
            self._say("map read", pos, length)
            self._compare(pos, memory[pos : pos + length], "map read", length)

    def _sync(self) -> None:
        """Each makes a commit, and many make the chunk worth compacting."""
        for _ in range(self._dice.randrange(1, 6)):
            self._say("sync")
            self._dice.choice((os.fsync, os.fdatasync))(self._dice.choice((self._fd, self._other)))
            pos = self._dice.randrange(0, max(1, len(self._held)))
            data = self._dice.randbytes(7)
            self._say("write", pos, 7)
            os.pwrite(self._fd, data, self._begin + pos)
            self._put(pos, data)

    def _forget(self) -> None:
        """The kernel drops its pages of the file."""
        self._say("forget")
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _reopen(self) -> None:
        """Close everything, and open it where it comes next."""
        self.close()
        self._settle()
        self._at = (self._at + 1) % len(self._paths)
        self._say(f"reopen on {self._at}")
        self._fd = os.open(self.path, os.O_RDWR)
        self._other = os.open(self.path, os.O_RDWR)
        self.check()

    def _fallocate(self, mode: int) -> None:
        pos, length = self._range()
        self._say(f"fallocate {mode:#x}", pos, length)
        offsets = ctypes.c_int64(self._begin + pos), ctypes.c_int64(length)
        if _LIBC.fallocate64(self._fd, mode, *offsets):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), self.path)
        end = pos + length
        if mode & KEEP_SIZE:
            end = min(end, len(self._held))
        elif end > len(self._held):
            self._held.extend(bytes(end - len(self._held)))
            self._size = self._begin + end
        if mode & (PUNCH_HOLE | ZERO_RANGE) and end > pos:
            self._held[pos:end] = bytes(end - pos)

    def _copy(self) -> None:
        """copy_file_range(2) within the file, where the ranges do not touch."""
        pos, length = self._range()
        target = self._range()[0]
        length = min(length, len(self._held) - pos, abs(target - pos))
        if length <= 0:
            return
        self._say(f"copy to {target}", pos, length)
        begin, fds = self._begin, (self._fd, self._other)
        done = 0
        while done < length:
            left = length - done
            done += os.copy_file_range(*fds, left, begin + pos + done, begin + target + done)
        self._put(target, bytes(self._held[pos : pos + length]))

    def _holes(self) -> None:
        """What SEEK_DATA leaves out is zeros, and what SEEK_HOLE finds is not before it."""
        self._say("holes")
        at = 0
        while at < len(self._held):
            try:
                data = os.lseek(self._other, self._begin + at, os.SEEK_DATA) - self._begin
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                data = len(self._held)
            if any(self._held[at:data]):
                raise Differs(f"a hole from {at} to {data} has data; {self._told()}")
            if data >= len(self._held):
                return
            at = os.lseek(self._other, self._begin + data, os.SEEK_HOLE) - self._begin
            if at <= data:
                raise Differs(f"data at {data} ends at {at}; {self._told()}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("roots", nargs="+", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ops", type=int, default=1000)
    parser.add_argument("--begin", type=int, default=0)
    words = parser.parse_args()
    fsx = Fsx(words.roots, f"fsx{words.seed}", words.seed, words.begin)
    fsx.run(words.ops)
    fsx.close()
    fsx.check()
    fsx.path.unlink()
    print(f"seed {words.seed}: right; lacks {sorted(fsx.lacks)}", file=sys.stderr)


if __name__ == "__main__":
    main()

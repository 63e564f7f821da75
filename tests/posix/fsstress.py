"""Several processes at once doing random things to names in one small tree, as fsstress(1) does.

Started as `python -m tests.posix.fsstress ROOT SEED COUNT`, on one mount each. Errors that the
others may cause are fine; any other ends it, with the call. It prints how often each call worked.

Data is written in records that say of themselves whether they are whole: `broken` finds a file
where a record is neither whole nor all zeros. `tree` is what two mounts must agree on, and counts
links by names.
"""

from __future__ import annotations

import collections
import errno
import os
import random
import stat
import sys
import zlib
from collections.abc import Callable
from typing import Final, NamedTuple

RECORD_BYTES: Final = 64
_NAMES: Final = 8  # in each directory; few, so that the processes meet
_DEPTH: Final = 3
_OPEN_MAX: Final = 4
_FILE_RECORDS: Final = 400
_EXPECTED: Final = frozenset(
    {
        errno.ENOENT,
        errno.EEXIST,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENOTEMPTY,
        errno.EINVAL,  # a directory into itself; readlink(2) of what is no link any more
        errno.ELOOP,
        errno.EPERM,  # link(2) of a directory, user attributes of others than files
        errno.ENXIO,  # a pipe without a reader
        errno.ENODATA,
        errno.ESTALE,  # the other mount has removed it
    }
)


class Node(NamedTuple):
    """What is compared of one name."""

    mode: int
    owner: tuple[int, int]
    size: int
    mtime_ns: int
    nlink: int
    ino: int


def record(dice: random.Random) -> bytes:
    """Some bytes and their check sum."""
    data = dice.randbytes(RECORD_BYTES - 4)
    return data + zlib.crc32(data).to_bytes(4, "big")


def broken(content: bytes) -> int:
    """The first record that is neither whole nor zeros; -1 if there is none."""
    for pos in range(0, len(content), RECORD_BYTES):
        data, crc = content[pos : pos + RECORD_BYTES - 4], content[pos + RECORD_BYTES - 4 :][:4]
        if any(data) and zlib.crc32(data).to_bytes(4, "big") != crc:
            return pos
    return -1


def tree(root: str) -> dict[str, Node]:
    """All names below `root`; wrong counts of links and broken records are asserted here."""
    found: dict[str, Node] = {}
    names: collections.Counter[int] = collections.Counter()
    for folder, folders, files in os.walk(root):
        for name in [".", *files, *(each for each in folders)]:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
            values = (status.st_mode, (status.st_uid, status.st_gid), size, status.st_mtime_ns)
            found[os.path.relpath(path, root)] = Node(*values, status.st_nlink, status.st_ino)
            if name == ".":
                subfolders = [each for each in folders if not os.path.islink(f"{folder}/{each}")]
                assert status.st_nlink == 2 + len(subfolders), f"{folder}: {status.st_nlink} links"
            elif not stat.S_ISDIR(status.st_mode):
                names[status.st_ino] += 1
            if stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    at = broken(file.read())
                assert at < 0, f"{path}: a torn record at {at}"
    for path, node in found.items():
        if not stat.S_ISDIR(node.mode):
            assert node.nlink == names[node.ino], f"{path}: {node.nlink} links"
    return found


class Stress:
    """One process's part; it keeps some files open, whatever becomes of their names."""

    def __init__(self, root: str, seed: int) -> None:
        self.done: collections.Counter[str] = collections.Counter()
        self._root = root
        self._dice = random.Random(seed)
        self._open: list[int] = []

    def run(self, count: int) -> None:
        """Do `count` random things. Raises: OSError."""
        many: tuple[tuple[int, Callable[[], None]], ...] = (
            (10, self.write),
            (6, self.mkdir),
            (3, self.symlink),
            (2, self.mknod),
            (8, self.link),
            (14, self.rename),
            (8, self.unlink),
            (5, self.rmdir),
            (4, self.truncate),
            (4, self.chmod),
            (3, self.utime),
            (3, self.setxattr),
            (8, self.listdir),
            (6, self.read),
            (6, self.held),
        )
        verbs, weights = [verb for _, verb in many], [weight for weight, _ in many]
        for _ in range(count):
            verb = self._dice.choices(verbs, weights)[0]
            try:
                verb()
            except OSError as error:
                if error.errno not in _EXPECTED:
                    raise
            else:
                self.done[verb.__name__] += 1
        for fd in self._open:
            os.close(fd)

    def _path(self) -> str:
        depth = self._dice.randrange(1, _DEPTH + 1)
        parts = [f"n{self._dice.randrange(_NAMES)}" for _ in range(depth)]
        return os.path.join(self._root, *parts)

    def _put(self, fd: int) -> None:
        records = b"".join(record(self._dice) for _ in range(self._dice.randrange(1, 40)))
        os.pwrite(fd, records, self._dice.randrange(_FILE_RECORDS) * RECORD_BYTES)

    def write(self) -> None:
        flags = os.O_RDWR | os.O_NONBLOCK | self._dice.choice((os.O_CREAT, os.O_CREAT | os.O_EXCL))
        fd = os.open(self._path(), flags | self._dice.choice((0, 0, 0, os.O_TRUNC)), 0o644)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            return
        self._open.append(fd)
        self._put(fd)
        if len(self._open) > _OPEN_MAX or self._dice.random() < 0.5:
            os.close(self._open.pop(self._dice.randrange(len(self._open))))

    def held(self) -> None:
        """Something with what is open, whose name may be gone."""
        if self._open:
            fd = self._dice.choice(self._open)
            self._put(fd)
            self._dice.choice((os.fsync, os.fdatasync, lambda _: os.fchmod(fd, 0o600)))(fd)
            assert broken(os.pread(fd, _FILE_RECORDS * RECORD_BYTES, 0)) < 0  # others may cut it

    def mkdir(self) -> None:
        os.mkdir(self._path())

    def symlink(self) -> None:
        os.symlink(f"n{self._dice.randrange(_NAMES)}", self._path())

    def mknod(self) -> None:
        os.mknod(self._path(), stat.S_IFIFO | 0o600)

    def link(self) -> None:
        os.link(self._path(), self._path(), follow_symlinks=False)

    def rename(self) -> None:
        os.rename(self._path(), self._path())

    def unlink(self) -> None:
        os.unlink(self._path())

    def rmdir(self) -> None:
        os.rmdir(self._path())

    def truncate(self) -> None:
        os.truncate(self._path(), self._dice.randrange(_FILE_RECORDS) * RECORD_BYTES)

    def chmod(self) -> None:
        os.chmod(self._path(), self._dice.choice((0o600, 0o755, 0o1777, 0o640)))

    def utime(self) -> None:
        os.utime(self._path(), ns=(1, self._dice.randrange(10**18)), follow_symlinks=False)

    def setxattr(self) -> None:
        path, name = self._path(), f"user.{self._dice.randrange(3)}"
        if self._dice.random() < 0.6:
            os.setxattr(path, name, self._dice.randbytes(20))
        else:
            os.removexattr(path, name)

    def listdir(self) -> None:
        folder = os.path.dirname(self._path())
        names = os.listdir(folder)
        assert len(names) == len(set(names)), names
        for name in names:
            if os.path.lexists(os.path.join(folder, name)):
                os.lstat(os.path.join(folder, name))

    def read(self) -> None:
        fd = os.open(self._path(), os.O_RDONLY | os.O_NONBLOCK)
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                assert broken(os.read(fd, 1 << 20)) < 0
        finally:
            os.close(fd)


def main() -> None:
    root, seed, count = sys.argv[1:]
    stress = Stress(root, int(seed))
    stress.run(int(count))
    print(dict(stress.done))


if __name__ == "__main__":
    main()

"""Cache disks of a simulated host: files in memory, with errors, a vandal, and crashes in between.

A client that dies leaves files half-written; what it wrote is not lost, because the host lives.
`SimDisks.spoil` tears, flips, exchanges and loses files, as disks and people do.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from weakref import WeakValueDictionary

from fsdata.disk_cache.directory.file_io import CacheFile, CacheFiles, Listed, Space
from fsdata.objects.contract import Buffer
from fsmeta.runtime import Lock
from tests.sim.world.scheduler import SimRuntime

PAGE = 4096
TOTAL = 1 << 30


class _Data:
    """What a file holds, whatever its name."""

    def __init__(self, now_ns: int) -> None:
        self.content = bytearray()
        self.mtime_ns = now_ns
        self.locked = WeakValueDictionary[int, SimFile]()  # a client that dies lets go of them


class SimFile:
    """An open file."""

    def __init__(self, disks: SimDisks, data: _Data) -> None:
        self._disks = disks
        self._data = data

    def lock_byte(self, at: int) -> bool:
        self._disks.seam()
        return self._data.locked.setdefault(at, self) is self

    def unlock_byte(self, at: int) -> None:
        if self._data.locked.get(at) is self:
            del self._data.locked[at]

    def read(self, size: int, at: int) -> bytes:
        self._disks.seam()
        return bytes(self._data.content[at : at + size])

    def read_into(self, pieces: Sequence[Buffer], at: int) -> int:
        self._disks.seam()
        got = 0
        for piece in pieces:
            part = self._data.content[at + got : at + got + len(piece)]
            memoryview(piece)[: len(part)] = part
            got += len(part)
        return got

    def write(self, pieces: Sequence[Buffer], at: int) -> None:
        for piece in pieces:
            for begin in range(0, len(piece), 20_000):  # a crash may come in between
                self._disks.seam(writing=True)
                part = bytes(memoryview(piece)[begin : begin + 20_000])
                content = self._data.content
                content.extend(bytes(max(0, at - len(content))))
                content[at : at + len(part)] = part
                at += len(part)
        self.touch(self._disks.now_ns())

    def in_memory(self, at: int, size: int) -> bool:
        return (at ^ size) & 4096 == 0  # as good as chance, and the same each time

    def touch(self, now_ns: int) -> None:
        self._data.mtime_ns = now_ns

    def used_bytes(self) -> int:
        return -(-len(self._data.content) // PAGE) * PAGE

    def mtime_ns(self) -> int:
        return self._data.mtime_ns


class SimDisks:
    """Every disk of one host."""

    def __init__(self, sim: SimRuntime, seed: int, error_rate: float = 0.002) -> None:
        self._sim = sim
        self._dice = random.Random(seed)
        self._rate = error_rate
        self.now_ns = sim.now_ns
        self._files: dict[str, _Data] = {}
        self._folders = {"/"}
        self._locks: dict[str, Lock] = {}
        self.spoilt = 0

    def seam(self, writing: bool = False) -> None:
        """Others go on here; now and then an error."""
        self._sim.yield_point()
        if self._dice.random() < self._rate:
            number = errno.ENOSPC if writing and self._dice.random() < 0.5 else errno.EIO
            raise OSError(number, os.strerror(number))

    def heal(self) -> None:
        """No errors any more."""
        self._rate = 0.0

    def _find(self, path: str) -> _Data:
        found = self._files.get(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    def _require_folder(self, path: str) -> None:
        folder = path.rpartition("/")[0] or "/"
        if folder not in self._folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def open(self, path: str, write: bool = False) -> CacheFile:
        self.seam(write)
        return SimFile(self, self._find(path))

    def create(self, path: str, pieces: Sequence[Buffer]) -> CacheFile:
        self._require_folder(path)
        assert path not in self._files, path
        data = self._files[path] = _Data(self.now_ns())
        made = SimFile(self, data)
        made.write(pieces, 0)
        return made

    def rename(self, path: str, target: str) -> None:
        self.seam(writing=True)
        data = self._find(path)
        self._require_folder(target)
        self._files[target] = data
        del self._files[path]

    def unlink(self, path: str) -> None:
        self.seam()
        self._find(path)
        del self._files[path]

    def make_directory(self, path: str) -> None:
        self._require_folder(path)
        self._folders.add(path)

    def list(self, path: str) -> list[Listed]:
        self.seam()
        found: list[Listed] = []
        for name, data in self._files.items():
            folder, _, last = name.rpartition("/")
            if folder == path:
                found.append(Listed(last, SimFile(self, data).used_bytes(), data.mtime_ns))
        return found

    def space(self, path: str) -> Space:
        self.seam()
        self._require_folder(path)
        return Space(TOTAL, TOTAL // 2, 1.0)

    def device(self, path: str) -> int:
        if path not in self._folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return 1

    def locked(self, path: str) -> AbstractContextManager[CacheFile]:
        return self._locked(path)

    @contextmanager
    def _locked(self, path: str) -> Iterator[CacheFile]:
        self._require_folder(path)
        with self._locks.setdefault(path, self._sim.lock()):
            data = self._files.setdefault(path, _Data(self.now_ns()))
            yield SimFile(self, data)

    def open_locks(self, path: str) -> CacheFile:
        self.seam()
        self._require_folder(path)
        return SimFile(self, self._files.setdefault(path, _Data(self.now_ns())))

    # --- the vandal ------------------------------------------------------------------------------

    def copies(self) -> Sequence[str]:
        """The paths of all cache files."""
        return sorted(path for path in self._files if "/chunks-" in path)

    def spoil(self) -> None:
        """Do something bad to a cache file, if there is one."""
        paths = self.copies()
        if not paths:
            return
        self.spoilt += 1
        path = self._dice.choice(paths)
        data = self._files[path]
        what = self._dice.randrange(4)
        if what == 0:
            del data.content[self._dice.randrange(len(data.content) + 1) :]
        elif what == 1 and data.content:
            at = self._dice.randrange(len(data.content))
            data.content[at] ^= 1 << self._dice.randrange(8)
        elif what == 2:
            other = self._files[self._dice.choice(paths)]
            data.content, other.content = other.content, data.content
        else:
            del self._files[path]


_CONFORMS: Callable[[SimRuntime, int], CacheFiles] = SimDisks

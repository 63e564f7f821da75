"""The disk of a simulated host that a journal lies on: it outlives its process, torn where it died.

Writes come in two parts, between which the process may crash. A loss of power keeps what was synced
and any part of what was not: bytes, sizes, and names that were made, changed or removed. A sync may
fail, once: the kernel then takes for written what is not.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence

from fsdata.objects.contract import Buffer
from fsdata.staging.disk import StagingDisk
from tests.sim.world.scheduler import SimRuntime


class _File:
    """What a file holds, whatever its name."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.synced = bytearray()  # what a loss of power leaves for certain
        self.dirty: list[tuple[int, int]] = []  # written since the last sync
        self.cut: int | None = None  # how short it was since then

    def write(self, offset: int, data: bytes) -> None:
        """Write at `offset`."""
        self.data.extend(bytes(max(0, offset - len(self.data))))
        self.data[offset : offset + len(data)] = data
        self.dirty.append((offset, offset + len(data)))

    def shorten(self, size: int) -> None:
        """End at `size`."""
        del self.data[size:]
        self.cut = size if self.cut is None else min(self.cut, size)
        dirty = [(begin, min(end, size)) for begin, end in self.dirty]
        self.dirty = [(begin, end) for begin, end in dirty if begin < end]

    def take(self) -> _File:
        """What a sync that begins now is to write."""
        taken = _File()
        taken.data, taken.dirty, taken.cut = self.data[:], self.dirty, self.cut
        self.dirty, self.cut = [], None
        return taken

    def settle(self, taken: _File) -> None:
        """A sync has written that."""
        if taken.cut is not None:
            del self.synced[taken.cut :]
        for begin, end in taken.dirty:
            self.synced.extend(bytes(max(0, end - len(self.synced))))
            self.synced[begin:end] = taken.data[begin:end]


class SimDisk:
    """See `StagingDisk`."""

    place = "a simulated disk"

    def __init__(self, sim: SimRuntime, seed: int) -> None:
        self.full = False
        self.dead = False  # it was pulled out: every call fails
        self._sim = sim
        self._dice = random.Random(seed)
        self._files: dict[str, _File] = {}
        self._kept: dict[str, _File] = {}  # the directory as it was synced
        # what has become of it since: a name, where its file is now, or None where it was removed
        self._changes: list[tuple[str, _File | None, str]] = []
        self.flaky = 0.0  # how often a sync fails; what it was of is never written then
        self.unreadable = 0.0  # how often a read fails, and the next may not

    def _require_there(self) -> None:
        if self.dead:
            raise OSError(errno.EIO, "simulated: the disk is gone")

    def names(self) -> list[str]:
        self._require_there()
        return sorted(self._files)

    def write(self, name: str, offset: int, pieces: Sequence[Buffer]) -> None:
        data = b"".join(pieces)
        self._sim.sleep(self._dice.random() * 0.0005)
        self._require_there()
        if self.full:
            raise OSError(errno.ENOSPC, "simulated: no space left")
        half = self._dice.randrange(len(data) + 1)
        self._put(name, offset, data[:half])
        self._sim.yield_point()
        self._require_there()
        self._put(name, offset + half, data[half:])

    def _put(self, name: str, offset: int, data: bytes) -> None:
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = _File()
            self._changes.append((name, file, ""))
        file.write(offset, data)

    def read(self, name: str, offset: int, size: int) -> bytes:
        self._sim.yield_point()
        self._require_there()
        if self.unreadable and self._dice.random() < self.unreadable:
            number = self._dice.choice((errno.EMFILE, errno.EIO, errno.ENOMEM))
            raise OSError(number, "simulated: not now")
        if name not in self._files:
            raise FileNotFoundError(errno.ENOENT, name)
        return bytes(self._files[name].data[offset : offset + size])

    def sync(self, name: str) -> None:
        file = self._files[name]
        taken = file.take()
        self._work()
        file.settle(taken)
        if self._kept.get(name) is not file:
            self._keep_names()

    def sync_names(self) -> None:
        self._work()
        self._keep_names()

    def _work(self) -> None:
        """What a sync takes."""
        self._sim.sleep(self._dice.random() * 0.005)
        self._require_there()
        if self.flaky and self._dice.random() < self.flaky:
            raise OSError(errno.EIO, "simulated: not written, and forgotten")

    def _keep_names(self) -> None:
        self._kept = dict(self._files)
        self._changes.clear()

    def cut(self, name: str, size: int) -> None:
        self._require_there()
        self._files[name].shorten(size)

    def rename(self, name: str, new: str) -> None:
        self._require_there()
        assert name in self._files, name
        assert new not in self._files, new
        file = self._files[new] = self._files.pop(name)
        self._changes.append((new, file, name))

    def remove(self, name: str) -> None:
        self._require_there()
        if self._files.pop(name, None) is not None:
            self._changes.append((name, None, ""))

    def close(self) -> None:
        """Nothing is open."""

    def lose_power(self) -> None:
        """What was not synced is there in part, or not at all; what was removed may be back."""
        self._files = self._names_left()
        for file in self._files.values():
            kept = self._dice.randrange(len(file.data) + 1)
            data = file.data[:kept] + file.synced[kept:]
            if self._dice.random() < 0.3:  # the size was written, and the rest was not
                data.extend(bytes(self._dice.randrange(100)))
            file.data, file.synced = data, data[:]
            file.dirty, file.cut = [], None
        self._keep_names()

    def _names_left(self) -> dict[str, _File]:
        """The directory with the first changes since it was synced, or with any of them."""
        first = self._dice.randrange(len(self._changes) + 1)
        in_order = self._dice.random() < 0.5
        names = dict(self._kept)
        for at, (name, file, before) in enumerate(self._changes):
            if at >= first if in_order else self._dice.random() < 0.5:
                continue
            if file is None:
                names.pop(name, None)
            elif not before or names.get(before) is file:
                names.pop(before, None)
                names[name] = file
        return names


def _conforms(disk: SimDisk) -> StagingDisk:
    return disk

"""The disk of a simulated host that a journal lies on: it outlives its process, torn where it died.

Writes come in two parts, between which the process may crash. A loss of power keeps what was synced
and any part of what was not. A sync may fail, once: the kernel then takes for written what is not.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence

from fsdata.objects import Buffer
from fsdata.staging_disk import StagingDisk
from tests.sim.scheduler import SimRuntime


class SimDisk:
    """See `StagingDisk`."""

    place = "a simulated disk"

    def __init__(self, sim: SimRuntime, seed: int) -> None:
        self.full = False
        self.dead = False  # it was pulled out: every call fails
        self._sim = sim
        self._dice = random.Random(seed)
        self._files: dict[str, bytearray] = {}
        self._synced: dict[str, bytes] = {}
        self.flaky = 0.0  # how often a sync fails; what it was of is never written then
        self.unreadable = 0.0  # how often a read fails, and the next may not
        self._dirty: dict[str, list[tuple[int, int]]] = {}  # written since the last sync
        self._before: dict[str, str] = {}  # names that a loss of power may bring back

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
        file = self._files.setdefault(name, bytearray())
        file.extend(bytes(max(0, offset - len(file))))
        file[offset : offset + len(data)] = data
        self._dirty.setdefault(name, []).append((offset, offset + len(data)))

    def read(self, name: str, offset: int, size: int) -> bytes:
        self._sim.yield_point()
        self._require_there()
        if self.unreadable and self._dice.random() < self.unreadable:
            number = self._dice.choice((errno.EMFILE, errno.EIO, errno.ENOMEM))
            raise OSError(number, "simulated: not now")
        if name not in self._files:
            raise FileNotFoundError(errno.ENOENT, name)
        return bytes(self._files[name][offset : offset + size])

    def sync(self, name: str) -> None:
        before, dirty = bytes(self._files[name]), self._dirty.pop(name, [])
        self._sim.sleep(self._dice.random() * 0.005)
        self._require_there()
        if self.flaky and self._dice.random() < self.flaky:
            raise OSError(errno.EIO, "simulated: not written, and forgotten")
        synced = bytearray(self._synced.get(name, b""))
        for begin, end in dirty:
            synced.extend(bytes(max(0, end - len(synced))))
            synced[begin:end] = before[begin:end]
        self._synced[name] = bytes(synced)
        self._before.pop(name, None)

    def cut(self, name: str, size: int) -> None:
        self._require_there()
        del self._files[name][size:]
        if name in self._synced:
            self._synced[name] = self._synced[name][:size]
        dirty = [(begin, min(end, size)) for begin, end in self._dirty.pop(name, [])]
        self._dirty[name] = [(begin, end) for begin, end in dirty if begin < end]

    def rename(self, name: str, new: str) -> None:
        self._require_there()
        assert name in self._files, name
        assert new not in self._files, new
        self._files[new] = self._files.pop(name)
        if name in self._synced:
            self._synced[new] = self._synced.pop(name)
        self._dirty[new] = self._dirty.pop(name, [])
        self._before[new] = self._before.pop(name, name)

    def remove(self, name: str) -> None:
        self._require_there()
        self._files.pop(name, None)
        self._synced.pop(name, None)
        self._dirty.pop(name, None)
        self._before.pop(name, None)

    def close(self) -> None:
        """Nothing is open."""

    def lose_power(self) -> None:
        """What was not synced is there in part, or not at all."""
        for name, file in list(self._files.items()):
            synced = self._synced.pop(name, None)
            del self._files[name]
            if name in self._before and self._dice.random() < 0.5:
                name = self._before[name]  # its bytes were written, and the new name was not
            elif synced is None and self._dice.random() < 0.5:
                continue
            kept = self._dice.randrange(len(file) + 1)
            data = file[:kept] + (synced or b"")[kept:]
            if self._dice.random() < 0.3:  # the size was written, and the rest was not
                data.extend(bytes(self._dice.randrange(100)))
            self._files[name] = data
            self._synced[name] = bytes(data)
        self._before.clear()
        self._dirty.clear()


def _conforms(disk: SimDisk) -> StagingDisk:
    return disk

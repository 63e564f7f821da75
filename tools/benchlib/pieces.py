"""One chunk of 64 MiB, changed by the page in random order: punched, written over, synced, read.

What a change costs must not grow with the number of those before it, so each row of the first tenth
of the changes stands beside that of the last tenth.
"""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tools.benchlib.results import Metric
from tools.benchlib.volume import BenchVolume
from tools.benchlib.workloads import MIB, SEED, Options

CHANGES: Final = 10_000
SYNCED: Final = 2_000  # of writes that are synced one by one: each is an object
PAGE: Final = 4096
APPENDED: Final = 100  # bytes
CHUNK: Final = 64 * MIB
_PUNCH: Final = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, linux/falloc.h
_Change = Callable[[int, int], object]  # a descriptor and an offset

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def pieces(volume: BenchVolume, options: Options) -> Iterator[Metric]:
    """Random changes of one page each, in a file of its own for each kind."""
    count = min(options.count_or(CHANGES), CHUNK // PAGE)
    data = random.Random(SEED).randbytes(PAGE)

    def synced(fd: int, offset: int) -> None:
        os.pwrite(fd, data, offset)
        os.fdatasync(fd)

    def read_too(fd: int, offset: int) -> None:
        os.pwrite(fd, data, offset)
        os.pread(fd, PAGE, CHUNK - PAGE - offset)

    root = volume.mountpoint

    def append(fd: int, _: int) -> None:
        os.lseek(fd, 0, os.SEEK_END)
        os.write(fd, data[:APPENDED])

    def write(fd: int, offset: int) -> None:
        os.pwrite(fd, data, offset)

    def row(name: str, change: _Change, at_most: int = CHANGES) -> Iterator[Metric]:
        return _row(volume, root / name.partition(" ")[0], name, min(count, at_most), change)

    yield from row("punch 4 KiB", _punch)
    yield from row("write 4 KiB", write)
    yield from row("append 100 B", append)
    yield from row("read and write 4 KiB", read_too)
    yield from row("write+fdatasync 4 KiB", synced, SYNCED)


def _row(
    volume: BenchVolume, path: Path, name: str, count: int, change: _Change
) -> Iterator[Metric]:
    offsets = [page * PAGE for page in random.Random(SEED).sample(range(CHUNK // PAGE), count)]
    took: list[float] = []
    tenth = max(1, count // 10)
    cpu_s: dict[int, float] = {}  # of the client, by the number of changes that were made
    with path.open("wb+", buffering=0) as file:
        for _ in range(CHUNK // MIB):
            file.write(bytes(MIB))
        os.fsync(file.fileno())
        for offset in offsets:
            if len(took) in (0, tenth, count - tenth):
                cpu_s[len(took)] = volume.cpu_seconds()
            begin = time.perf_counter()
            change(file.fileno(), offset)
            took.append((time.perf_counter() - begin) * 1e6)
        cpu_s[count] = volume.cpu_seconds()
        begin = time.perf_counter()
        os.fsync(file.fileno())
        stored = (time.perf_counter() - begin) * 1e6
    yield Metric(f"{name}, in random order", (sum(took) + stored) / count, "µs/op")
    yield Metric(f"{name}, the first tenth", sum(took[:tenth]) / tenth, "µs/op")
    yield Metric(f"{name}, the last tenth", sum(took[-tenth:]) / tenth, "µs/op")
    first, last = cpu_s[tenth] - cpu_s[0], cpu_s[count] - cpu_s[count - tenth]
    yield Metric(f"{name}, the first tenth", first * 1e6 / tenth, "client µs/op")
    yield Metric(f"{name}, the last tenth", last * 1e6 / tenth, "client µs/op")


def _punch(fd: int, offset: int) -> None:
    if _libc.fallocate(fd, _PUNCH, offset, PAGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))

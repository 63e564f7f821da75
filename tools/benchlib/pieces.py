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
from tools.benchlib.volume import Volume
from tools.benchlib.workloads import MIB, SEED, Options

CHANGES: Final = 10_000
SYNCED: Final = 2_000  # of writes that are synced one by one: each is an object
PAGE: Final = 4096
CHUNK: Final = 64 * MIB
_PUNCH: Final = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, linux/falloc.h
_Change = Callable[[int, int], object]  # a descriptor and an offset

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def pieces(volume: Volume, options: Options) -> Iterator[Metric]:
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
    yield from _row(root / "punched", "punch 4 KiB", count, _punch)
    yield from _row(root / "written", "write 4 KiB", count, lambda fd, at: os.pwrite(fd, data, at))
    yield from _row(root / "read", "write and read 4 KiB", count, read_too)
    yield from _row(root / "synced", "write+fdatasync 4 KiB", min(count, SYNCED), synced)


def _row(path: Path, name: str, count: int, change: _Change) -> Iterator[Metric]:
    offsets = [page * PAGE for page in random.Random(SEED).sample(range(CHUNK // PAGE), count)]
    took: list[float] = []
    with path.open("wb+", buffering=0) as file:
        for _ in range(CHUNK // MIB):
            file.write(bytes(MIB))
        os.fsync(file.fileno())
        for offset in offsets:
            begin = time.perf_counter()
            change(file.fileno(), offset)
            took.append((time.perf_counter() - begin) * 1e6)
        begin = time.perf_counter()
        os.fsync(file.fileno())
        stored = (time.perf_counter() - begin) * 1e6
    tenth = max(1, count // 10)
    yield Metric(f"{name}, in random order", (sum(took) + stored) / count, "µs/op")
    yield Metric(f"{name}, the first tenth", sum(took[:tenth]) / tenth, "µs/op")
    yield Metric(f"{name}, the last tenth", sum(took[-tenth:]) / tenth, "µs/op")


def _punch(fd: int, offset: int) -> None:
    if _libc.fallocate(fd, _PUNCH, offset, PAGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))

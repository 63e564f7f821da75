"""P6: who keeps a file open on one mount while another one adds to it: tail -f, HDF5's SWMR."""

from __future__ import annotations

import os
import struct
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.posix.conftest import Twins
from tests.support.waiting import wait_until

LINES = 30
LATE_S = 60.0
RECORDS = 30
_HEAD = struct.Struct("<QQ")  # how many records there are, and how often they were flushed
_RECORD = struct.Struct("<Q4088x")
_AT = 4096  # of the first record


def _has(shown: list[bytes], count: int) -> bool:
    return len(shown) == count


def test_p6_tail_follows_another_mount(twins: Twins, root: Path) -> None:
    """Each line is shown once and whole after it was fsynced, also in a page that tail has read."""
    file, there = root / "log", twins.second / root.name / "log"
    file.write_bytes(b"line 0\n")
    Twins.wait_until(there.exists)
    words = ["tail", "-s", "0.1", "-n", "+1", "-f", str(there)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as tail:
        assert tail.stdout is not None
        shown: list[bytes] = []
        lines = iter(tail.stdout.readline, b"")
        reader = threading.Thread(target=lambda: shown.extend(lines))
        reader.start()
        try:
            wait_until(lambda: shown == [b"line 0\n"], LATE_S)
            with file.open("ab", buffering=0) as log:
                for number in range(1, LINES):
                    log.write(b"line %d\n" % number)
                    os.fsync(log.fileno())
                    if number % 5 == 0:
                        wait_until(partial(_has, shown, number + 1), LATE_S)
            wait_until(lambda: len(shown) == LINES, LATE_S)
        finally:
            tail.kill()
            reader.join()
    assert shown == [b"line %d\n" % number for number in range(LINES)]


def _write_records(path: Path, told: Callable[[int], object]) -> None:
    """As a writer in SWMR mode: data, fsync, then the head that names them, fsync."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        for number in range(1, RECORDS + 1):
            at = _AT + (number - 1) * _RECORD.size
            os.pwrite(descriptor, _RECORD.pack(number), at)
            os.fsync(descriptor)
            os.pwrite(descriptor, _HEAD.pack(number, number), 0)
            os.fsync(descriptor)
            told(number)
    finally:
        os.close(descriptor)


def _count(descriptor: int) -> int:
    """How many records a reader finds, all of which must be there."""
    count, flushed = _HEAD.unpack(os.pread(descriptor, _HEAD.size, 0))
    assert count == flushed
    for number in range(1, count + 1):
        packed = os.pread(descriptor, _RECORD.size, _AT + (number - 1) * _RECORD.size)
        if not packed:
            return number - 1  # the kernel believes an older size
        assert _RECORD.unpack(packed) == (number,)
    return int(count)


def test_p6_single_writer_multiple_readers(twins: Twins, root: Path) -> None:
    """On Redis readers keep the file open; elsewhere they open it anew for each look."""
    file, there = root / "swmr", twins.second / root.name / "swmr"
    file.write_bytes(_HEAD.pack(0, 0).ljust(_AT, b"\0"))
    Twins.wait_until(lambda: there.exists() and there.stat().st_size == _AT)
    written: list[int] = [0]
    writer = threading.Thread(target=_write_records, args=(file, written.append))
    counts: list[int] = []
    kept = os.open(there, os.O_RDONLY)

    def look() -> bool:
        descriptor = kept if twins.engine == "redis" else os.open(there, os.O_RDONLY)
        try:
            counts.append(_count(descriptor))
        finally:
            if descriptor != kept:
                os.close(descriptor)
        return counts[-1] == RECORDS

    writer.start()
    try:
        wait_until(look, LATE_S)
    finally:
        writer.join()
        os.close(kept)
    assert counts == sorted(counts)

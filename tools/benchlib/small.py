"""Many small files: written by four threads, and read in shuffled order, as an epoch of training.

Where close(2) answers before the store has the data (`--writeback`), the row of writing alone says
little, so one says how long it took until the store had all of it. Requests are counted where they
are delayed (`--delay-ms`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from tools.benchlib import client, machine, procs
from tools.benchlib.checkpoint import STORED_S_MAX, is_stored
from tools.benchlib.results import Metric
from tools.benchlib.volume import BenchVolume
from tools.benchlib.workloads import MIB, SEED, SMALL_FILE_BYTES, SMALL_FILE_THREADS, Options

FILES: Final = 2000
FOLDER: Final = "small"


class _Requests:
    """Counts those that a phase made, for each file."""

    def __init__(self, volume: BenchVolume, files: int) -> None:
        self._volume = volume
        self._files = files
        self._before = volume.requests()

    def made(self, name: str) -> Iterator[Metric]:
        """Since the last call; nothing where they are not counted."""
        now = self._volume.requests()
        if now is not None and self._before is not None:
            yield Metric(f"requests, {name}", (now - self._before) / self._files, "/file")
        self._before = now


def smallfiles(volume: BenchVolume, options: Options) -> Iterator[Metric]:
    """Many files of 100 KiB."""
    files = options.count_or(FILES)
    sizes = (volume.mountpoint / FOLDER, SMALL_FILE_THREADS, files, SMALL_FILE_BYTES)
    machine.touch_memory(3 * files * SMALL_FILE_BYTES)
    requests = _Requests(volume, files)
    begin = time.monotonic()
    (timing,) = client.run("dataloop", "writemany", *sizes)
    if not procs.wait_until(lambda: is_stored(volume, FOLDER), STORED_S_MAX):
        raise RuntimeError(f"{volume.system.name} does not store {FOLDER}")
    stored_s = time.monotonic() - begin
    yield Metric("write+close 100 KiB", timing.us_per_op, "µs/op")
    yield Metric("write 100 KiB, until the store has it", stored_s / files * 1e6, "µs/op")
    yield from requests.made("until the store has it")
    for state in ("cold", "cached", "warm"):
        if state != "warm":
            volume.remount(keep_cache=state == "cached")
            machine.touch_memory(3 * files * SMALL_FILE_BYTES)
            name = "until it is mounted anew" if state == "cold" else "between"
            rest = list(requests.made(name))
            yield from rest if state == "cold" else ()
        (timing,) = client.run("dataloop", "readmany", *sizes, SEED)
        yield Metric(f"open+read+close 100 KiB, {state}", timing.us_per_op, "µs/op")
        yield from requests.made(f"reading, {state}")
    yield Metric("peak memory of the client", volume.peak_rss_bytes() / MIB, "MiB")

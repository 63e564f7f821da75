"""A program that writes checkpoints, and who watches them from another mount.

A checkpoint is a directory of shards and a marker that is made last, in one of the ways programs
have. Each step is noted when its call returned, so a judge knows what was promised.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.faults.load import content

MARKER: Final = "complete"


def shard(number: int, size: int) -> bytes:
    """What shard `number` holds."""
    return content(1000 + number, size)


class Writer:
    """Writes one checkpoint, until it is done or its mount is gone."""

    def __init__(self, folder: Path, shards: int, size: int, chance: random.Random) -> None:
        self.folder = folder
        self.size = size
        self.shards = shards
        self.acknowledged = 0  # shards whose close has returned
        self.complete = False  # the call that makes the marker has returned
        self.failure: OSError | None = None
        self._ways: list[Callable[[], None]] = [self._touch, self._write, self._rename, self._link]
        self._way = chance.choice(self._ways)
        self._sync = chance.random() < 0.3
        self._rename_shards = chance.random() < 0.5
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the writer hangs"

    def _run(self) -> None:
        try:
            self.write()
        except OSError as error:
            self.failure = error

    def write(self) -> None:
        self.folder.mkdir()
        for number in range(self.shards):
            self._shard(number)
            self.acknowledged = number + 1
        self._way()
        self.complete = True

    def _shard(self, number: int) -> None:
        final = self.folder / f"shard{number}"
        path = self.folder / f".tmp{number}" if self._rename_shards else final
        with open(path, "wb") as file:
            file.write(shard(number, self.size))
            file.flush()
            if self._sync:
                os.fsync(file.fileno())
        if path != final:
            path.rename(final)

    def _touch(self) -> None:
        (self.folder / MARKER).touch()

    def _write(self) -> None:
        (self.folder / MARKER).write_bytes(b"all is there")

    def _rename(self) -> None:
        (self.folder / "marker.tmp").write_bytes(b"all is there")
        (self.folder / "marker.tmp").rename(self.folder / MARKER)

    def _link(self) -> None:
        os.link(self.folder / "shard0", self.folder / MARKER)

    def judge(self, folder: Path) -> tuple[int, bool]:
        """Whole shards and whether the marker is there, seen in `folder`; both must be a prefix."""
        complete = (folder / MARKER).exists()  # first: the shards are older than it
        whole = [self._is_whole(folder, number) for number in range(self.shards)]
        count = whole.index(False) if False in whole else self.shards
        assert not any(whole[count:]), f"{folder}: out of order: {whole}"
        assert not complete or count == self.shards, f"{folder}: complete before {whole}"
        return count, complete

    def _is_whole(self, folder: Path, number: int) -> bool:
        """Whether a shard is all there. Its bytes are never others than those written."""
        try:
            data = (folder / f"shard{number}").read_bytes()
        except FileNotFoundError:
            return False
        wanted = shard(number, self.size)
        assert wanted.startswith(data), f"{folder}/shard{number}: other bytes"
        return data == wanted


class Watcher:
    """Looks at a checkpoint from another mount, again and again."""

    def __init__(self, writer: Writer, folder: Path) -> None:
        self.looks = 0
        self.seen: set[tuple[int, bool]] = set()
        self._writer = writer
        self._folder = folder
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._folder.exists():
                    self.seen.add(self._writer.judge(self._folder))
                    self.looks += 1
                self._stopping.wait(0.01)
        except (OSError, AssertionError) as error:
            self._failure = error

    def stop(self) -> None:
        """Raises: what it saw and must not have seen, EIO included."""
        self._stopping.set()
        self._thread.join(60)
        if self._failure is not None:
            raise self._failure

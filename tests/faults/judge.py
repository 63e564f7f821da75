"""Does a directory hold what `load`'s journals promise?

Contents are kept as pieces (seed, size), so that a judge remembers much with little.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.faults.load import content
from tests.faults.program import REPOSITORY, wait_until

END_S = 60.0

Pieces = tuple[tuple[int, int], ...]


def data_of(pieces: Pieces) -> bytes:
    return b"".join(content(seed, size) for seed, size in pieces)


class Worker:
    """A load process in `folder`, and what it must have left behind."""

    def __init__(self, folder: Path, journal: Path, seed: int) -> None:
        self.folder = folder
        self._journal = journal
        self._seed = seed
        self._files: dict[str, Pieces] = {}  # what is certain
        self._doubtful: dict[str, Any] | None = None  # the operation that may have happened
        self._process: subprocess.Popen[bytes] | None = None
        self.done = 0  # operations, ever
        self.failure: dict[str, Any] | None = None  # the journal's last line, if one failed

    def launch(self) -> None:
        """Make the directory if need be and have a process begin to work in it."""
        self.folder.mkdir(exist_ok=True)
        self._journal.write_text("")
        self._seed += 1
        arguments = [str(self.folder), str(self._journal), str(self._seed)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.load", *arguments], cwd=REPOSITORY
        )

    def await_start(self) -> None:
        """Wait until it works."""
        wait_until("the load begins", END_S, lambda: self._journal.stat().st_size > 0)

    def stop(self) -> None:
        """Tell it to end behind its operation."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self.wait()

    def wait(self) -> None:
        """Wait until it has ended by itself, and read its journal."""
        assert self._process is not None
        assert self._process.wait(END_S) == 0, "the load process itself has failed"
        self._process = None
        self._read()

    def operations(self) -> int:
        """How many operations it has done since it was started."""
        return self._journal.read_text().count('"done"')

    def abandon(self) -> None:
        """After a test that failed: leave no process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        self.failure = self._doubtful = None
        begun: dict[str, Any] = {}
        for line in self._journal.read_text().splitlines():
            entry = json.loads(line)
            if "begin" in entry:
                begun = entry["begin"]
            elif "done" in entry:
                self.done += 1
                self._apply(begun)
            elif entry["end"] == "failed":
                self.failure, self._doubtful = entry, begun

    def _apply(self, op: dict[str, Any]) -> None:
        name = op["name"]
        match op["verb"]:
            case "write" | "replace":
                self._files[name] = ((op["seed"], op["size"]),)
            case "append":
                self._files[name] = (*self._files[name], (op["seed"], op["size"]))
            case "rename":
                self._files[op["to"]] = self._files.pop(name)
            case "unlink":
                del self._files[name]

    def judge(self) -> None:
        """Compare with the directory; afterwards what was in doubt is certain."""
        found = {name: (self.folder / name).read_bytes() for name in os.listdir(self.folder)}
        found.pop("tmp", None)
        op = self._doubtful
        if op is not None:
            self._judge_doubtful(op, found)
        assert sorted(found) == sorted(self._files), (self.folder, op)
        for name, pieces in self._files.items():
            assert found[name] == data_of(pieces), f"{self.folder}/{name}: other bytes; {op}"

    def _judge_doubtful(self, op: dict[str, Any], found: dict[str, bytes]) -> None:
        """Take note of whether `op` has happened; a file half written is removed."""
        name = op["name"]
        before = data_of(self._files[name]) if name in self._files else None
        match op["verb"]:
            case "replace":
                if found.get(name) != before:
                    self._apply(op)
            case "rename":
                if name not in found:
                    self._apply(op)
            case "unlink":
                if name not in found:
                    self._apply(op)
            case _:
                self._judge_half_written(op, name, before, found)

    def _judge_half_written(
        self, op: dict[str, Any], name: str, before: bytes | None, found: dict[str, bytes]
    ) -> None:
        now, new = found.pop(name, None), content(op["seed"], op["size"])
        whole = (before or b"") + new if op["verb"] == "append" else new
        assert now is None or now == before or whole.startswith(now), f"{self.folder}/{name}: {op}"
        assert now is not None or before is None, f"{self.folder}/{name} is gone: {op}"
        self._files.pop(name, None)
        if now is not None:
            (self.folder / name).unlink()


def start(workers: list[Worker]) -> None:
    """Have all begin; returns when they work."""
    for worker in workers:
        worker.launch()
    for worker in workers:
        worker.await_start()


def await_operations(workers: list[Worker], more: int) -> None:
    """Wait until each has done so many more."""
    goals = [worker.operations() + more for worker in workers]
    wait_until(
        f"{more} operations of each",
        END_S,
        lambda: all(w.operations() >= goal for w, goal in zip(workers, goals, strict=True)),
    )


def failing(workers: list[Worker]) -> list[str]:
    """What stopped those that were not told to stop."""
    return [f"{w.folder.name}: {w.failure}" for w in workers if w.failure is not None]

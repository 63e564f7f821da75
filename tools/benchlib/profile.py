"""py-spy beside a mount: one profile for each time that it is mounted."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SUFFIXES = {"flamegraph": "svg", "raw": "txt"}
STOP_S = 60.0  # it writes the picture when it is told to stop


class Profiler:
    """Makes the `on_mount` of a Volume; files are DIRECTORY/NAME-1.svg and so on."""

    def __init__(self, directory: Path, name: str, form: str) -> None:
        self._directory = directory
        self._name = name
        self._form = form
        self._numbers = itertools.count(1)

    def __call__(self, pids: list[int]) -> Callable[[], None]:
        """Start recording the processes of a mount; returns what stops it."""
        number = next(self._numbers)
        running = [self._record(number, pid) for pid in pids]
        return lambda: _stop(running)

    def _record(self, number: int, pid: int) -> subprocess.Popen[bytes]:
        self._directory.mkdir(parents=True, exist_ok=True)
        stem = f"{self._name}-{number}-{pid}"
        output = self._directory / f"{stem}.{SUFFIXES[self._form]}"
        program = str(Path(sys.executable).parent / "py-spy")
        options = ["--pid", str(pid), "--format", self._form, "--output", str(output)]
        with (self._directory / f"{stem}.log").open("wb") as log:
            return subprocess.Popen(
                [program, "record", "--threads", "--rate", "200", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


def _stop(recorders: list[subprocess.Popen[bytes]]) -> None:
    for recorder in recorders:
        recorder.send_signal(signal.SIGINT)
    for recorder in recorders:
        try:
            recorder.wait(STOP_S)
        except subprocess.TimeoutExpired:
            recorder.kill()
            recorder.wait()

"""An embedded volume, driven by the `slicefs` program as a user would."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

COMMAND_S: Final = 120
NAME: Final = "demo"
_START: Final = "from fsclient.cli.main import main; main()"


def program() -> list[str]:
    """`slicefs` beside this Python, or what it would run."""
    beside = shutil.which("slicefs", path=os.path.dirname(sys.executable))
    return [beside] if beside else [sys.executable, "-c", _START]


class DemoVolume:
    """SQLite, a directory of blocks and mount points below `base`."""

    def __init__(self, base: Path) -> None:
        self.meta = f"sqlite://{base}/meta.db"
        self.bucket = base / "bucket"
        self.log = base / "log"
        self._mounted: dict[Path, int] = {}  # and the client that serves it

    def run(self, words: Sequence[str]) -> str:
        """What `slicefs words` prints. Raises: RuntimeError with what it says where it fails."""
        done = subprocess.run(
            [*program(), *words], capture_output=True, text=True, check=False, timeout=COMMAND_S
        )
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip() or done.stdout.strip())
        return done.stdout

    def format(self) -> None:
        """Make it. Raises: RuntimeError."""
        place = ["--bucket", str(self.bucket)]
        self.run(["format", self.meta, NAME, *place, "--trash-days", "0"])  # all is to be gone

    def mount(self, path: Path) -> None:
        """Mount on the new directory `path`. Raises: RuntimeError."""
        path.mkdir()
        self.run(["mount", "-d", "--log", str(self.log), self.meta, str(path)])
        self._mounted[path] = json.loads((path / ".config").read_bytes())["mount"]["pid"]

    def umount(self, path: Path) -> None:
        """Raises: RuntimeError, also where the mount or its client is still there."""
        self.run(["umount", str(path)])
        client = self._mounted.pop(path)
        if os.path.ismount(path) or _runs(client):
            raise RuntimeError(f"slicefs umount returned, and client {client} of {path} runs")

    def fsck(self) -> Any:
        """The report of a check of everything. Raises: RuntimeError where something is wrong."""
        return json.loads(self.run(["fsck", "--data", "--json", self.meta]))

    def objects(self) -> int:
        """How many blocks there are."""
        return sum(path.is_file() for path in (self.bucket / NAME / "chunks").rglob("*"))

    def complaints(self) -> list[str]:
        """Lines of the log that a mount without trouble does not write."""
        if not self.log.exists():
            return []
        words = (" WARNING ", " ERROR ", "Traceback")
        lines = self.log.read_text().splitlines()
        return [line for line in lines if any(word in line for word in words)]

    def leave(self) -> None:
        """Unmount whatever is mounted still, lazily as a last resort, and end its client.

        Says nothing where that fails: it is called because something else has.
        """
        for path, client in list(self._mounted.items()):
            try:
                self.umount(path)
            except (RuntimeError, subprocess.SubprocessError):
                with suppress(RuntimeError, subprocess.SubprocessError):
                    self.run(["umount", "--lazy", str(path)])
                with suppress(ProcessLookupError):
                    os.kill(client, signal.SIGTERM)
        self._mounted.clear()


def _runs(pid: int) -> bool:
    """Whether a process does anything still; init may take a moment to bury it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")

"""An embedded volume, driven by the `slicefs` program as a user would."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

COMMAND_S: Final = 120
NAME: Final = "demo"
_START: Final = "from fsclient.cli.main import main; main()"


def program() -> list[str]:
    """`slicefs` beside this Python, or what it would run."""
    beside = shutil.which("slicefs", path=os.path.dirname(sys.executable))
    return [beside] if beside else [sys.executable, "-c", _START]


class Volume:
    """SQLite, a directory of blocks and mount points below `base`."""

    def __init__(self, base: Path) -> None:
        self.meta = f"sqlite://{base}/meta.db"
        self.bucket = base / "bucket"
        self.log = base / "log"
        self._base = base
        self._mounted: list[Path] = []

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
        self.run(["format", self.meta, NAME, "--bucket", str(self.bucket)])

    def mount(self, name: str) -> Path:
        """Mount on the new directory `name`. Raises: RuntimeError."""
        path = self._base / name
        path.mkdir()
        self.run(["mount", "-d", "--log", str(self.log), self.meta, str(path)])
        self._mounted.append(path)
        return path

    def umount(self, path: Path) -> None:
        """Raises: RuntimeError."""
        self.run(["umount", str(path)])
        self._mounted.remove(path)

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
        """Unmount whatever is mounted still, lazily as a last resort."""
        for path in list(self._mounted):
            try:
                self.umount(path)
            except (RuntimeError, subprocess.SubprocessError):
                self.run(["umount", "--lazy", str(path)])
                self._mounted.remove(path)

"""Real volumes: made, mounted and checked by the `slicefs` command, as a user would."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.waiting import STOOD_STILL

_BESIDE = Path(sys.executable).with_name("slicefs")
_IN_TREE = Path(__file__).parents[2] / ".venv" / "bin" / "slicefs"  # torch's own has none
_SLICEFS = _BESIDE if _BESIDE.exists() else _IN_TREE
HEARTBEAT_S = 0.2  # deletion rounds take two or three of these
PATIENCE_S = 120  # of calls: SQLite waits for a disk that others write to
_WORRY = re.compile(r" (WARNING|ERROR|CRITICAL) |Traceback")


def run(*words: str | Path) -> str:
    """Run `slicefs`; what it prints."""
    done = subprocess.run([_SLICEFS, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"slicefs {words} → {done.returncode}: {done.stderr}{done.stdout}"
    return done.stdout


def slices_of(path: Path) -> set[int]:
    """The ids of the slices that a file on a mount lists."""
    shown = json.loads(run("info", path, "--json"))
    return {each["id"] for chunk in shown["chunks"] for each in chunk["slices"]}


class Volume:
    """A volume in `folder`, with its metadata in `meta`; data in a file store."""

    def __init__(self, folder: Path, meta: str, trash_days: int = 0) -> None:
        self.folder = folder
        self.meta = meta
        self._mounts: list[Path] = []
        self.expected: re.Pattern[str] | None = None  # what logs may complain of
        trash = ("--trash-days", str(trash_days))
        run("format", meta, "testvol", "--bucket", folder / "data", *trash)

    def mount(self, name: str = "mnt", *more: str) -> Path:
        """Mount the volume once more, with `more` options; the mountpoint."""
        root = self.folder / name
        root.mkdir()
        log = self.folder / f"{name}.log"
        waits = ("--heartbeat", str(HEARTBEAT_S), "--meta-timeout", str(PATIENCE_S))
        options = (*waits, "--log", str(log), "--buffer-size", "64MiB")
        run("mount", "-d", *options, *more, self.meta, root)
        self._mounts.append(root)
        return root

    def end(self) -> None:
        """Unmount everywhere: nothing was worth a warning, nothing is wrong or left over."""
        for root in self._mounts:
            run("umount", root)
        worries = [
            line
            for root in self._mounts
            for line in (self.folder / f"{root.name}.log").read_text().splitlines()
            if _WORRY.search(line)
            and "Redis keeps nothing on disk" not in line  # as we told it
            and not re.search(STOOD_STILL, line)
            and not (self.expected and self.expected.search(line))
        ]
        assert not worries, "\n".join(worries[:20])
        report = json.loads(run("fsck", self.meta, "--data", "--json"))
        assert not report["problems"], report
        assert not report["leaked_objects"], report

    def abandon(self) -> None:
        """Whatever happened, no mount stays."""
        for root in self._mounts:
            if root.is_mount():
                subprocess.run(["umount", "-l", root], check=False)


@contextmanager
def new_volume(folder: Path, meta: str, trash_days: int = 0) -> Iterator[Volume]:
    """A volume for a while; it must be clean in the end."""
    folder.mkdir()
    volume = Volume(folder, meta, trash_days)
    try:
        yield volume
        volume.end()
    finally:
        volume.abandon()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A directory that every user can reach, which pytest's own is not."""
    path = Path(tempfile.mkdtemp(prefix="slicefs-posix-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def can_mount() -> bool:
    """Whether this process may mount."""
    return os.geteuid() == 0 and os.path.exists("/dev/fuse")

"""The tutorial does what it says: its commands run in one shell, and each of them succeeds."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fuse.mounting import needs_root_and_fuse

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = Path("/tmp/tutorial")  # as the page has it
LAST_S = 240.0


def commands(page: str) -> str:
    """The indented lines of a page, as a script."""
    return "\n".join(line[4:] for line in page.splitlines() if line.startswith("    "))


@needs_root_and_fuse
def test_every_command_of_the_tutorial_succeeds() -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server")
    if FOLDER.exists():
        pytest.skip(f"{FOLDER} is in use")
    script = commands((REPOSITORY / "docs" / "TUTORIAL.md").read_text(encoding="utf-8"))
    try:
        done = subprocess.run(
            ["bash", "-exc", script],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=LAST_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert not FOLDER.exists()
    finally:
        _clean_up()


def _clean_up() -> None:
    """Unmount and end what a script that failed has left."""
    for name in ("mnt", "mnt2"):
        if os.path.ismount(FOLDER / name):
            subprocess.run(["umount", "-l", FOLDER / name], check=False)
    if FOLDER.exists():
        subprocess.run(["redis-cli", "-p", "6391", "shutdown"], check=False, capture_output=True)
        shutil.rmtree(FOLDER, ignore_errors=True)

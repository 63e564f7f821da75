"""The demo does what it shows, leaves nothing behind, and fails where it should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.program import REPOSITORY, needs_mounts
from tools.demolib import trees
from tools.demolib.sources import sources

DEMO_S = 240  # a hang; a quiet machine needs 40 s, one with other work to do a multiple


def demo(*words: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end; where it hangs it is told to clean up."""
    command = [sys.executable, "-m", "tools.demo", *words]
    out = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=out, text=True) as process:
        try:
            said = process.communicate(timeout=DEMO_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            raise
        return subprocess.CompletedProcess(command, process.returncode, *said)


@needs_mounts
def test_the_demo(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    done = demo("--dir", str(work))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"all right: 1\d steps in \d+ s, nothing left behind", last_line(done))
    assert "clean: 1 inode, 0 objects" in done.stdout
    assert "integrity_check ok" in done.stdout
    assert list(work.iterdir()) == []
    assert str(work) not in Path("/proc/self/mountinfo").read_text()


def test_a_demo_that_can_not_work(tmp_path: Path) -> None:
    done = demo("--offline", "--cache", str(tmp_path), "--dir", "/proc")
    assert done.returncode == 1
    assert last_line(done).startswith("FAILED: ")


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.splitlines()[-1]


def test_without_a_network_python_stands_in(tmp_path: Path) -> None:
    [source] = sources(tmp_path / "cache", offline=True)
    assert source.name.startswith("python-3")
    source.unpack(tmp_path / "one")
    source.unpack(tmp_path / "two")
    assert trees.compare(tmp_path / "one", tmp_path / "two") > 500


def test_differences_are_seen(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("same")
    with pytest.raises(trees.Differs, match="1 of 1 differ: file: Seen"):
        trees.compare(tmp_path / "one", tmp_path / "two")

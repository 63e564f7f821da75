"""The demo does what it shows, leaves nothing behind, and fails where it should."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.program import REPOSITORY, needs_mounts
from tools.demolib import trees
from tools.demolib.sources import sources
from tools.demolib.volume import Volume

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
    assert "each right on the other mount" in done.stdout
    assert list(work.iterdir()) == []
    assert str(work) not in Path("/proc/self/mountinfo").read_text()


def test_a_demo_that_can_not_work(tmp_path: Path) -> None:
    done = demo("--offline", "--cache", str(tmp_path), "--dir", "/proc")
    assert done.returncode == 1
    assert last_line(done).startswith("FAILED: ")


def test_leaving_hides_no_failure(tmp_path: Path) -> None:
    """An unmount that had failed was once reported as the second one, which found no mount."""
    volume = Volume(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as client:
        volume._mounted[tmp_path] = client.pid
        volume.leave()
        assert client.wait(5) == -signal.SIGTERM


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.splitlines()[-1]


def test_without_a_network_python_stands_in(tmp_path: Path) -> None:
    [source] = sources(tmp_path / "cache", offline=True)
    assert source.name.startswith("python-3")
    source.unpack(tmp_path / "one")
    source.unpack(tmp_path / "two")
    assert trees.compare(tmp_path / "one", tmp_path / "two") > 500


def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two trees that are the same."""
    for name in ("one", "two"):
        tree = tmp_path / name
        tree.mkdir()
        (tree / "file").write_text("same")
        (tree / "other").hardlink_to(tree / "file")
        (tree / "link").symlink_to("file")
        (tree / "folder").mkdir()
        for each in tree.iterdir():
            os.utime(each, ns=(0, 10**18), follow_symlinks=False)
    assert trees.compare(tmp_path / "one", tmp_path / "two") == 4
    return tmp_path / "one", tmp_path / "two"


def with_same_times(path: Path, act: Callable[[Path], object]) -> None:
    act(path)
    os.utime(path, ns=(0, 10**18), follow_symlinks=False)


def other_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("filf")


def no_hard_link(path: Path) -> None:
    path.unlink()
    path.write_text("same")


@pytest.mark.parametrize(
    ("name", "act", "differing"),
    [
        ("file", lambda path: path.write_text("sane"), "2 of 4"),  # it has two names
        ("file", lambda path: path.chmod(0o600), "2 of 4"),
        ("folder", lambda path: path.chmod(0o700), "1 of 4"),
        ("link", other_link, "1 of 4"),
        ("other", no_hard_link, "2 of 4"),
        ("new", lambda path: path.touch(), "1 of 5"),
    ],
)
def test_differences_are_seen(
    tmp_path: Path, name: str, act: Callable[[Path], object], differing: str
) -> None:
    one, two = pair(tmp_path)
    with_same_times(two / name, act)
    with pytest.raises(trees.Differs, match=f"{differing} differ: .*Seen"):
        trees.compare(one, two)


def test_other_times_are_seen(tmp_path: Path) -> None:
    one, two = pair(tmp_path)
    os.utime(two / "link", ns=(0, 10**18 + 1), follow_symlinks=False)
    with pytest.raises(trees.Differs, match="1 of 4 differ: link: Seen"):
        trees.compare(one, two)

"""T2: `slicefs clone` of a directory on a mount."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsclient.control.clone_jobs import progress_of_clone
from tests.posix.conftest import Twins
from tests.posix.volumes import run, slices_of

_SLICEFS = str(Path(sys.executable).with_name("slicefs"))


@pytest.fixture
def root(twins: Twins, request: pytest.FixtureRequest) -> Iterator[Path]:
    path = twins.first / str(request.node.originalname)
    path.mkdir()
    yield path
    subprocess.run(["rm", "-r", path], check=True)


def _plant(root: Path) -> Path:
    top = root / "top"
    (top / "sub" / "deep").mkdir(parents=True)
    (top / "sub" / "file").write_bytes(random.Random(8).randbytes(300_000))
    os.link(top / "sub" / "file", top / "same")
    (top / "link").symlink_to("sub/file")
    os.setxattr(top / "same", "user.a", b"value")
    os.utime(top / "sub", ns=(10**18, 10**18))
    return top


def test_t2_a_clone_shares_everything_and_is_the_same(twins: Twins, root: Path) -> None:
    """Also what was written and is not stored yet."""
    top = _plant(root)
    with (top / "open").open("wb", buffering=0) as file:
        file.write(b"not stored yet")
        run("clone", top, root / "copy")
        assert (root / "copy" / "open").read_bytes() == b"not stored yet"
    run("clone", "--preserve", top, root / "again")
    for copy in (root / "copy", root / "again"):
        for name in ("open", "same", "sub/file"):
            assert slices_of(copy / name) == slices_of(top / name) != set()
        subprocess.run(["diff", "-r", "--no-dereference", top, copy], check=True)
        assert os.stat(copy / "same").st_ino == os.stat(copy / "sub" / "file").st_ino
        assert os.getxattr(copy / "same", "user.a") == b"value"
        assert os.stat(copy / "sub").st_mtime_ns == 10**18
    subprocess.run(["rm", "-r", top], check=True)
    there = twins.second / root.name / "copy" / "same"
    Twins.wait_until(there.exists)
    assert there.read_bytes() == random.Random(8).randbytes(300_000)


def test_t2_a_file_is_cloned(root: Path) -> None:
    """It is there at once and whole, and shares its data."""
    top = _plant(root)
    file = top / "sub" / "file"
    os.chown(file, 4711, 4712)
    file.chmod(0o4751)
    os.utime(file, ns=(10**18, 10**18 + 1))
    assert run("clone", file, root / "copy") == f"{root / 'copy'}: 1 inode\n"
    run("clone", "--preserve", file, root / "kept")
    for copy, mode, owner in (
        (root / "copy", 0o751, (0, 0)),
        (root / "kept", 0o4751, (4711, 4712)),
    ):
        status = copy.stat()
        assert slices_of(copy) == slices_of(file) != set()
        assert copy.read_bytes() == file.read_bytes()
        assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (mode, *owner)
        assert status.st_mtime_ns == 10**18 + 1
        assert status.st_nlink == 1
        assert os.getxattr(copy, "user.a") == b"value"
    copy.write_bytes(b"other")
    assert len(file.read_bytes()) == 300_000


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ("top", "top/sub/x", "is in .*choose a place outside of it"),
        ("top", "top", "exists already: choose another name"),
        ("top", "none/x", "is no directory: make it first"),
        ("top", "/dev/shm/x", "are not on the same mount: use `cp -r`"),
        ("top/same", "top/link", "exists already: choose another name"),
        ("top/fifo", "x", "is neither a directory nor a file: use `cp -a`"),
    ],
)
def test_t2_bad_input_is_one_line(root: Path, source: str, target: str, why: str) -> None:
    os.mkfifo(_plant(root) / "fifo")
    done = subprocess.run(
        [_SLICEFS, "clone", root / source, root / target],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert re.search(why, done.stderr), done.stderr
    assert sorted(os.listdir(root)) == ["top"]


def test_t2_a_number_opens_no_way(root: Path) -> None:
    """Regression: who named a directory by its number got a copy, whatever is above it."""
    hidden = root / "private" / "shared"
    hidden.mkdir(parents=True)
    (hidden / "file").write_bytes(b"not yours")
    (root / "private").chmod(0o700)
    (root / "mine").mkdir()
    os.chown(root / "mine", 1000, 1000)
    number = os.stat(hidden).st_ino

    def ask_as(uid: int, name: str) -> int:
        wish = json.dumps({"source": number, "name": name, "preserve": False})
        words = ["setfattr", "-n", f"user.slicefs.clone.{name}", "-v", wish, str(root / "mine")]
        subprocess.run(words, user=uid, group=uid, check=True)
        report = {"done": False}
        os.seteuid(uid)  # a job answers the user who began it
        try:
            while not report["done"]:
                report = progress_of_clone(str(root / "mine"), name)
        finally:
            os.seteuid(0)
        return int(report["errno"])

    assert ask_as(1000, "taken") == errno.EACCES
    assert os.listdir(root / "mine") == []
    os.chmod(root / "private", 0o711)
    assert ask_as(1000, "given") == 0


def test_t2_somewhere_else(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    done = subprocess.run(
        [_SLICEFS, "clone", tmp_path / "a", tmp_path / "b"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)

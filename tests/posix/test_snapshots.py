"""T2: snapshots on mounts, and mounts of them; F2: mounts of a directory."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from fsclient.cli.options.jobs import run_job
from fsclient.files.quota_precheck import ROOM_TTL_S
from tests.posix.conftest import Twins
from tests.posix.volumes import Volume, can_mount, run, slices_of, temporary_folder
from tests.support.outcome import errno_of

_SLICEFS = str(Path(sys.executable).with_name("slicefs"))
_DATA = random.Random(5).randbytes(300_000)
_BAD: Final = [
    (("create", "{}/top", "taken"), "has a snapshot of that name already: choose another"),
    (("create", "{}/top", "a/b"), "can't have a snapshot of that name"),
    (("create", "{}/top", "n" * 256), "longer than 255 bytes"),
    (("create", "{}/top/same"), "is a file"),
    (("create", "{}/top/.snapshots/taken"), "is in a snapshot itself"),
    (("create", "/dev/shm"), "is not on a SliceFS mount"),
    (("list", "/dev/shm"), "is not on a SliceFS mount"),
    (("delete", "{}/top", "other"), "has no snapshot other: see `slicefs snapshot list"),
    (("delete", "{}/top", "../top"), "is no name of a snapshot"),
]


def _fails(*words: str | Path) -> str:
    """The one line that a command fails with."""
    done = subprocess.run([_SLICEFS, *words], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.fixture
def root(twins: Twins, request: pytest.FixtureRequest) -> Iterator[Path]:
    path = twins.first / str(request.node.originalname)
    path.mkdir()
    yield path
    for top, _, _ in os.walk(path, topdown=False):
        snapshot_dir = Path(top) / ".snapshots"
        for each in os.listdir(snapshot_dir) if snapshot_dir.is_dir() else []:
            if (snapshot_dir / each).is_dir():
                os.rmdir(snapshot_dir / each)
    subprocess.run(["rm", "-r", path], check=True)


def _plant(root: Path) -> Path:
    top = root / "top"
    (top / "sub" / "deep").mkdir(parents=True)
    (top / "sub" / "file").write_bytes(_DATA)
    os.link(top / "sub" / "file", top / "same")
    os.link(top / "same", root / "outside")
    (top / "link").symlink_to("sub/file")
    os.setxattr(top / "same", "user.a", b"value")
    os.chown(top / "sub", 1000, 1000)
    return top


def test_t2_a_snapshot_stays_what_it_was(root: Path) -> None:
    """Also of what was written and is not stored yet; and nothing in it can be changed."""
    top = _plant(root)
    with (top / "open").open("wb", buffering=0) as file:
        file.write(b"not stored yet")
        made = json.loads(run("snapshot", "create", top, "one", "--json"))["snapshot"]
        assert made["changed"] == 0
        one = Path(made["path"])
        for name in ("open", "same"):
            assert slices_of(one / name) == slices_of(top / name) != set()
        assert (one / "open").read_bytes() == b"not stored yet"
        file.write(b", changed")
    subprocess.run(["cp", "-a", one, root / "kept"], check=True)
    (top / "same").write_bytes(b"other")
    (top / "sub" / "deep").rename(top / "moved")
    subprocess.run(["diff", "-r", "--no-dereference", one, root / "kept"], check=True)
    shown = os.stat(one / "same")
    assert (shown.st_nlink, shown.st_ino) == (2, os.stat(one / "sub" / "file").st_ino)
    assert os.stat(one / "sub").st_uid == 1000
    assert ".snapshots" not in os.listdir(top)
    calls: list[Callable[[], object]] = [
        lambda: (one / "new").write_bytes(b""),
        lambda: (one / "same").write_bytes(b""),
        lambda: os.truncate(one / "same", 1),
        lambda: (one / "same").unlink(),
        lambda: (one / "sub").rename(root / "out"),
        lambda: (root / "outside").rename(one / "in"),
        lambda: os.mkdir(one / "dir"),
        lambda: os.mkdir(top / ".snapshots" / "two"),
        lambda: os.chmod(one / "same", 0o777),
        lambda: os.utime(one / "same"),
        lambda: os.setxattr(one / "same", "user.a", b"other"),
        lambda: os.symlink("x", one / "sub" / "x"),
        lambda: os.open(one, os.O_TMPFILE | os.O_RDWR),
    ]
    assert [errno_of(call) for call in calls] == [errno.EROFS] * len(calls)
    assert errno_of(lambda: os.link(one / "same", root / "out")) == errno.EXDEV
    subprocess.run(["diff", "-r", "--no-dereference", one, root / "kept"], check=True)
    run("clone", one, root / "back")
    subprocess.run(["diff", "-r", "--no-dereference", root / "back", root / "kept"], check=True)


def test_t2_on_two_mounts(twins: Twins, root: Path) -> None:
    """What one has taken the other sees and deletes; a directory that has some stays."""
    top = _plant(root)
    there = twins.second / root.name / "top"
    Twins.wait_until(there.exists)
    assert not (there / ".snapshots").exists()
    run("snapshot", "create", top, "one")
    Twins.wait_until(lambda: (there / ".snapshots" / "one" / "same").exists())
    assert (there / ".snapshots" / "one" / "same").read_bytes() == _DATA
    subprocess.run(["rm", "-r", top], check=False, stderr=subprocess.DEVNULL)
    assert os.listdir(top) == []
    assert errno_of(top.rmdir) == errno.ENOTEMPTY
    moved = top.rename(root / "elsewhere")
    assert (moved / ".snapshots" / "one" / "same").read_bytes() == _DATA
    there = there.with_name("elsewhere")
    Twins.wait_until(there.exists)
    run("snapshot", "delete", there, "one")
    Twins.wait_until(lambda: not (moved / ".snapshots").exists())
    moved.rmdir()


def test_t2_a_name_that_is_taken(root: Path) -> None:
    """Who has a file of that name keeps it, and can still make one."""
    own = root / "own"
    (own / ".snapshots").mkdir(parents=True)
    (own / ".snapshots" / "mine").write_bytes(b"mine")
    made = run("snapshot", "create", root, "whole")
    assert made.splitlines()[-1].split()[0] == "whole"
    copied = root / ".snapshots" / "whole" / "own" / ".snapshots" / "mine"
    assert copied.read_bytes() == b"mine"
    assert "rename it" in _fails("snapshot", "delete", own, "mine")
    assert (own / ".snapshots" / "mine").read_bytes() == b"mine"


def test_t2_bad_input_is_one_line(root: Path) -> None:
    top = _plant(root)
    run("snapshot", "create", top, "taken")
    for words, why in _BAD:
        assert re.search(why, _fails("snapshot", *(word.format(root) for word in words))), words
    (only,) = json.loads(run("snapshot", "list", top, "--json"))["snapshots"]
    assert only["name"] == "taken"


def test_t2_snapshots_are_roots(root: Path) -> None:
    top = _plant(root)
    run("snapshot", "create", top, "one")
    os.chown(top, 1000, 1000)

    def as_user(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, user=1000, group=1000, capture_output=True, text=True, check=False
        )

    assert as_user("rmdir", top / ".snapshots" / "one").returncode != 0
    wish = json.dumps({"source": 1, "name": "x", "preserve": False, "snapshot": True})
    done = as_user("setfattr", "-n", "user.slicefs.clone.word", "-v", wish, top)
    assert "not permitted" in done.stderr
    assert as_user("cksum", top / ".snapshots" / "one" / "same").returncode == 0
    assert len(json.loads(run("snapshot", "list", top, "--json"))["snapshots"]) == 1


@contextmanager
def _volume() -> Iterator[Volume]:
    if not can_mount():
        pytest.skip("needs root and /dev/fuse")
    with temporary_folder() as folder:
        volume = Volume(folder, f"sqlite://{folder}/meta.db")
        try:
            yield volume
            volume.end()
        finally:
            volume.abandon()


def test_t2_a_snapshot_is_mounted() -> None:
    with _volume() as volume:
        whole = volume.mount()
        top = _plant(whole)
        run("snapshot", "create", top, "one")
        run("snapshot", "create", whole, "all")
        (top / "same").unlink()
        one = volume.mount("one", "--subdir", "/top", "--snapshot", "one")
        everything = volume.mount("all", "-o", "snapshot=all")
        assert (one / "same").read_bytes() == _DATA
        assert (everything / "top" / "same").read_bytes() == _DATA
        for mount in (one, everything):
            assert errno_of((mount / "new").touch) == errno.EROFS
        for words in (("--subdir", "none"), ("--subdir", "outside"), ("--snapshot", "none")):
            (volume.folder / "bad").mkdir(exist_ok=True)
            line = _fails("mount", *words, volume.meta, volume.folder / "bad")
            assert words[1] in line
        run("snapshot", "delete", top, "one")
        run("snapshot", "delete", whole, "all")


def test_f2_a_directory_is_mounted() -> None:
    """Its root is the directory, for every call; df(1) shows the quota of it."""
    with _volume() as volume:
        whole = volume.mount()
        top = whole / "users" / "alice"
        (top / "sub").mkdir(parents=True)
        run("quota", "set", volume.meta, "--path", "/users/alice", "--capacity", "1MiB")
        mount = volume.mount("alice", "--subdir", "users/alice")
        assert os.statvfs(mount).f_blocks * os.statvfs(mount).f_frsize == 1 << 20
        assert os.stat(mount).st_ino == os.stat(top).st_ino
        assert sorted(os.listdir(mount)) == ["sub"]
        (mount / "file").write_bytes(_DATA)
        (mount / "file").rename(mount / "sub" / "file")
        (mount / "sub" / "file").rename(mount / "back")
        os.link(mount / "back", mount / "linked")
        os.chmod(mount, 0o711)
        os.setxattr(mount, "user.a", b"1")
        Twins.wait_until(lambda: os.stat(top).st_mode & 0o777 == 0o711)
        Twins.wait_until((top / "linked").exists)
        assert (top / "back").read_bytes() == _DATA
        time.sleep(ROOM_TTL_S)  # or write(2) takes more than close(2) can store, which is logged
        assert errno_of(lambda: (mount / "more").write_bytes(bytes(1 << 20))) == errno.EDQUOT
        (mount / "more").unlink(missing_ok=True)
        assert not (mount / ".trash").exists()
        assert "slicefs" in (mount / ".stats").read_text()
        (top / "news").touch()
        Twins.wait_until((mount / "news").exists)
        run("clone", mount / "sub", mount / "copy")
        assert (mount / "copy").is_dir()
        (mount / ".trash").mkdir()  # a name like others where it is not the volume's root
        (mount / ".trash").rmdir()


def test_f2_nothing_leads_out_of_a_directory_that_is_mounted() -> None:
    """Q3: not even a number that root has learnt."""
    with _volume() as volume:
        whole = volume.mount()
        for user in ("alice", "bob"):
            (whole / "users" / user / "sub").mkdir(parents=True)
        mount = volume.mount("alice", "--subdir", "users/alice")
        for source in (whole, whole / "users", whole / "users" / "bob" / "sub"):
            for snapshot in (True, False):
                wish = {"source": os.stat(source).st_ino, "name": "copy", "preserve": True}
                report = run_job(str(mount), wish | {"snapshot": snapshot}, True)
                assert report["errno"] == errno.EACCES, source
        wish = {"source": os.stat(mount).st_ino, "name": "copy", "preserve": True}
        assert run_job(str(mount / "sub"), wish, True)["errno"] == 0
        assert sorted(os.listdir(whole / "users" / "alice")) == ["sub"]
        assert os.listdir(mount / "sub" / "copy") == ["sub"]


def test_t2_the_mount_is_killed_while_it_takes_one() -> None:
    """Nothing of it is ever seen, and what it had built goes."""
    with _volume() as volume:
        whole = volume.mount("mnt", "--no-supervisor")
        for number in range(800):
            (whole / f"file{number}").touch()
        taking = subprocess.Popen(
            [_SLICEFS, "snapshot", "create", whole, "one"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        config = json.loads((whole / ".config").read_text())
        os.kill(config["mount"]["pid"], signal.SIGKILL)
        taking.wait()
        subprocess.run(["umount", "-l", whole], check=False)
        volume._mounts.remove(whole)
        again = volume.mount("again")
        found = json.loads(run("snapshot", "list", again, "--json"))["snapshots"]
        assert all(each["inodes"] == 801 for each in found)
        for each in found:
            run("snapshot", "delete", again, each["name"])

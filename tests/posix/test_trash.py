"""T1: the trash of a mounted volume, and `slicefs restore` beside the mount."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.posix.conftest import Databases, Twins
from tests.posix.two_mounts.stale_names import CASES
from tests.posix.volumes import Volume, can_mount, new_volume, run
from tests.support.outcome import errno_of

_SLICEFS = Path(sys.executable).with_name("slicefs")
USER = 60001


@pytest.fixture(scope="module", params=("sqlite", "redis"))
def volume(request: pytest.FixtureRequest, folder: Path, databases: Databases) -> Iterator[Volume]:
    """A mounted volume that keeps what is deleted for a day."""
    if not can_mount():
        pytest.skip("needs root and /dev/fuse")
    name = f"trash-{request.param}"
    on_disk = request.param == "sqlite"
    meta = f"sqlite://{folder / name}.db" if on_disk else databases("redis")
    with new_volume(folder / name, meta, trash_days=1) as made:
        made.mount()
        yield made


@pytest.fixture
def root(volume: Volume, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory, and an empty trash, before and after."""
    mount = volume.folder / "mnt"
    path = mount / str(request.node.originalname)
    path.mkdir()
    yield path
    shutil.rmtree(path)
    for hour in os.listdir(mount / ".trash"):
        for name in os.listdir(mount / ".trash" / hour):
            there = mount / ".trash" / hour / name
            (os.rmdir if there.is_dir() and not there.is_symlink() else os.unlink)(there)


def _trash(root: Path) -> list[Path]:
    return sorted((root.parent / ".trash").glob("*/*"), key=lambda path: path.name)


def test_t1_the_trash_is_reached_and_not_listed(root: Path) -> None:
    (root / "f").write_bytes(b"kept" * 1000)
    ino, parent = os.stat(root / "f").st_ino, os.stat(root).st_ino
    os.unlink(root / "f")
    assert not (root / "f").exists()
    assert ".trash" not in os.listdir(root.parent)
    (found,) = _trash(root)
    assert found.name == f"{parent}-{ino}-f"
    assert found.read_bytes() == b"kept" * 1000
    assert os.stat(root.parent / ".trash").st_mode == 0o40700
    with pytest.raises(FileNotFoundError):
        os.stat(root.parent / ".trash" / "1999-01-01-00")


def test_t1_nothing_is_made_in_it(root: Path) -> None:
    (root / "f").touch()
    os.unlink(root / "f")
    (thing,) = _trash(root)
    hour, trash = thing.parent, root.parent / ".trash"
    (root / "g").touch()
    attempts: tuple[Callable[[], object], ...] = (
        lambda: (hour / "new").touch(),
        lambda: (hour / "dir").mkdir(),
        lambda: (trash / "dir").mkdir(),
        lambda: os.rename(root / "g", hour / "g"),
        lambda: os.symlink("x", hour / "symlink"),
        lambda: os.rmdir(hour),
        lambda: os.chmod(trash, 0o755),
        lambda: os.setxattr(hour, "user.a", b"x"),
        lambda: os.rename(trash, root / "elsewhere"),
    )
    for attempt in attempts:
        with pytest.raises(OSError, match="not permitted"):
            attempt()
    with pytest.raises(FileNotFoundError):  # as Linux says of what has no link any more
        os.link(thing, root / "link")
    os.rename(thing, root / "back")
    assert _trash(root) == []


def test_t1_only_root_may_look(root: Path) -> None:
    script = "import os,sys;os.setuid(60001);os.listdir(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", script, root.parent / ".trash"], capture_output=True, check=False
    )
    assert b"PermissionError" in done.stderr


def test_t1_what_is_open_stays_whole(root: Path) -> None:
    """It can be read and written in the trash, too; only its link count tells."""
    with (root / "f").open("w+b", buffering=0) as file:
        file.write(b"before")
        os.unlink(root / "f")
        file.write(b" after")
        assert os.pread(file.fileno(), 100, 0) == b"before after"
    (thing,) = _trash(root)
    assert thing.read_bytes() == b"before after"


def test_t1_what_is_open_and_in_the_trash_has_no_link(root: Path) -> None:
    """Programs test st_nlink for whether what they hold is still there: log writers, databases."""
    (root / "f").touch()
    (root / "more").hardlink_to(root / "f")
    (root / "d").mkdir()
    fds = [os.open(root / name, os.O_RDONLY) for name in ("f", "d")]
    (root / "more").unlink()
    assert os.fstat(fds[0]).st_nlink == 1
    (root / "f").unlink()
    (root / "d").rmdir()
    assert [os.fstat(fd).st_nlink for fd in fds] == [0, 0]
    file = next(path for path in _trash(root) if path.name.endswith("-f"))
    assert file.stat().st_nlink == 0
    os.rename(file, root / "again")
    assert os.fstat(fds[0]).st_nlink == (root / "again").stat().st_nlink == 1
    (root / "last").touch()
    os.rename(root / "last", root / "again")
    assert os.fstat(fds[0]).st_nlink == 0
    for fd in fds:
        os.close(fd)


def test_t1_a_tree_is_restored(volume: Volume, root: Path) -> None:
    (root / "tree" / "sub").mkdir(parents=True)
    (root / "tree" / "sub" / "file").write_bytes(b"x" * 5000)
    (root / "tree" / "link").symlink_to("sub/file")
    before = sorted(str(path) for path in (root / "tree").rglob("*"))
    subprocess.run(["rm", "-r", root / "tree"], check=True)
    hours = sorted({path.parent.name for path in _trash(root)})
    shown = run("restore", volume.meta, *hours)
    assert "sub" in shown
    assert len(_trash(root)) == 4
    run("restore", volume.meta, *hours, "--put-back")
    _wait_for(root / "tree" / "sub" / "file")
    assert sorted(str(path) for path in (root / "tree").rglob("*")) == before
    assert (root / "tree" / "link").read_bytes() == b"x" * 5000
    assert json.loads(run("restore", volume.meta, "--json"))["hours"] == []


def _wait_for(path: Path) -> None:
    """Without news a kernel that saw a directory without it may believe so for a second."""
    Twins.wait_until(path.exists)


def test_t1_one_path_is_restored(volume: Volume, root: Path) -> None:
    for content in (b"old", b"new"):
        (root / "f").write_bytes(content)
        os.unlink(root / "f")
    path = f"/{root.name}/f"
    (record,) = map(json.loads, run("restore", volume.meta, "--path", path, "--json").splitlines())
    assert (record["name"], record["size"]) == ("f", 3)
    run("restore", volume.meta, "--path", path, "--put-back")
    _wait_for(root / "f")
    assert (root / "f").read_bytes() == b"new"
    failed = _restore(volume, "--path", path, "--put-back")
    assert failed.returncode == 1
    assert "the name exists: it stays in the trash" in failed.stderr


def _restore(volume: Volume, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(_SLICEFS), "restore", volume.meta, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("yesterday",), "'yesterday' is no hour of the trash: write it like 2026-11-21-19"),
        (("2020-01-01-00",), "2020-01-01-00: the trash has nothing of that hour"),
        (("--put-back",), "--put-back: name the hours to restore, or a --path"),
        (("--path", "/x", "2026-11-21-19"), "--path: leave out the hours, or the path"),
        (("--path", "/none/x"), "/none/x: the directory 'none' is not there: restore it first"),
        (("--path", "/none"), "/none: nothing of that name is in the trash"),
    ],
)
def test_t1_bad_input_is_one_line(volume: Volume, words: tuple[str, ...], why: str) -> None:
    done = _restore(volume, *words)
    assert (done.returncode, done.stderr) == (1, f"slicefs: {why}\n")


def test_t1_a_full_volume_empties_its_trash(
    folder: Path, volumes: Callable[[str, str], AbstractContextManager[Volume]]
) -> None:
    """Deleting helps: what is in the trash goes early when room is short."""
    del volumes
    if not can_mount():
        pytest.skip("needs root and /dev/fuse")
    place = folder / "trash-full"
    place.mkdir()
    meta = f"sqlite://{place}/meta.db"
    run("format", meta, "full", "--bucket", place / "data", "--capacity", "40MiB")
    root = place / "mnt"
    root.mkdir()
    run("mount", "-d", "--heartbeat", "0.2", "--log", place / "log", meta, root)
    try:
        for number in range(9):
            (root / f"f{number}").write_bytes(bytes(4 << 20))
        assert errno_of(lambda: (root / "more").write_bytes(bytes(8 << 20))) == errno.ENOSPC
        for number in range(9):
            os.unlink(root / f"f{number}")
        Twins.wait_until(
            lambda: not errno_of(lambda: (root / "more").write_bytes(bytes(8 << 20))), 90, 0.5
        )
    finally:
        run("umount", root)
    assert json.loads(run("fsck", meta, "--json"))["problems"] == []


@pytest.fixture(scope="module")
def second(volume: Volume) -> Path:
    """The same volume mounted once more."""
    return volume.mount("second")


@pytest.mark.parametrize("case", CASES)
def test_p3_what_is_in_the_trash_is_not_opened_by_its_old_name(
    volume: Volume, root: Path, second: Path, case: str
) -> None:
    here, there = (path / f"p3-{case}" for path in (root.parent, second))
    here.mkdir()
    CASES[case](here, there, volume.meta.startswith("redis"))
    here.rmdir()
    kept = {path.read_bytes() for path in _trash(root) if path.is_file()}
    assert kept <= {b"journal", b"journalmore", b"new", b"second"}
    assert not kept.isdisjoint({b"journal", b"journalmore"})

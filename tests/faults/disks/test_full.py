"""No space: ENOSPC where data is written, nothing acknowledged is lost, and it goes on after."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.load import content
from tests.faults.program import Volume, needs_mounts, wait_until

pytestmark = needs_mounts

MIB = 1 << 20
DISK = 32 * MIB
FILE = 3 * MIB
LOST_LOG = "data written and not stored is lost: .*(No space left|quota is full)"
FREED_S = 100.0  # deletion is the background's work: a few of its turns


@pytest.fixture
def small_disk(base: Path) -> Iterator[Path]:
    """A file system of 32 MiB where volumes keep their data."""
    path = base / "bucket"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=0700", "none", str(path)]
    subprocess.run(command, check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def put(path: Path, data: bytes) -> None:
    """Write, fsync, close. Raises what any of them says."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        wrote = 0
        while wrote < len(data):  # write(2) that finds room for a part says how much it was
            wrote += os.write(fd, data[wrote:])
        os.fsync(fd)
    finally:
        os.close(fd)


def has_room(path: Path) -> bool:
    """Whether a file can be written now; it is removed again."""
    room = put_if_room(path, content(0, FILE))
    path.unlink(missing_ok=True)
    return room


def put_if_room(path: Path, data: bytes) -> bool:
    """Whether there was space for it."""
    try:
        put(path, data)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


def fill(root: Path) -> dict[str, bytes]:
    """Write files until there is no space; those that were acknowledged."""
    kept: dict[str, bytes] = {}
    for seed in range(100):
        name, data = f"f{seed}", content(seed, FILE)
        if not put_if_room(root / name, data):
            (root / name).unlink()
            return kept
        kept[name] = data
    raise AssertionError("it is never full")


def check(root: Path, kept: dict[str, bytes]) -> None:
    """Exactly the files that were acknowledged, and right."""
    assert sorted(path.name for path in root.iterdir()) == sorted(kept)
    for name, data in kept.items():
        assert (root / name).read_bytes() == data


def fill_and_free(volume: Volume, expected: Callable[[int], bool]) -> None:
    mount = volume.mount()
    kept = fill(mount.path)
    assert expected(len(kept)), len(kept)
    check(mount.path, kept)
    mount.umount()
    mount = volume.mount()
    check(mount.path, kept)
    for name in list(kept)[:3]:
        (mount.path / name).unlink()
        del kept[name]
    wait_until("room again", FREED_S, lambda: has_room(mount.path / "again"))
    check(mount.path, kept)


@pytest.mark.usefixtures("small_disk")
def test_disk_full(embedded: Volume) -> None:
    embedded.format()
    fill_and_free(embedded, lambda files: files == DISK // FILE)
    embedded.end(LOST_LOG)


@pytest.mark.usefixtures("small_disk")
def test_disk_full_with_redis(served: Volume) -> None:
    served.format()
    fill_and_free(served, lambda files: files == DISK // FILE)
    served.end(LOST_LOG)


def test_capacity(embedded: Volume) -> None:
    embedded.format("--capacity", "32MiB")
    fill_and_free(embedded, lambda files: files == DISK // FILE)
    root = embedded.base / "mnt"
    df = os.statvfs(root)
    assert df.f_blocks * df.f_frsize == DISK
    used = embedded.status()["usage"]["space_used"]
    assert df.f_bavail * df.f_frsize == DISK - used
    embedded.end(LOST_LOG)


def test_inodes(embedded: Volume) -> None:
    embedded.format("--inodes", "10")
    root = embedded.mount().path
    for number in range(9):  # the root is one
        (root / f"f{number}").touch()
    acts: list[Callable[[], None]] = [(root / "f9").touch, (root / "d").mkdir]
    for act in acts:
        with pytest.raises(OSError, match="No space") as caught:
            act()
        assert caught.value.errno == errno.ENOSPC
    (root / "f0").write_text("a file that exists can grow")
    df = os.statvfs(root)
    assert (df.f_files, df.f_ffree) == (10, 0)
    (root / "f1").unlink()
    (root / "d").mkdir()
    embedded.end()

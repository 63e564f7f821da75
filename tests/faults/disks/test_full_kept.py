"""A limit or a disk is full: what fits is kept, and the first write(2) that does not fit says so.

Programs here don't fsync: write(2) itself has to say it. Where several mounts write at the same
time, close(2) may be the first to know.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faults.disks.test_full import LOST_LOG, MIB, small_disk
from tests.faults.load import content
from tests.faults.program import Mount, Volume, needs_mounts, succeed
from tests.faults.test_quota import set_quota
from tests.support.tikv_server import TikvServer
from tests.support.waiting import wait_until

__all__ = ["small_disk"]
pytestmark = needs_mounts

CAPACITY = 40 * MIB
WANTED = 60 * MIB
PIECE = MIB + 12345  # not a whole number of anything
FULL_LOG = f"{LOST_LOG}|quota of .*% full|volume is .*% full"
DISK = 32 * MIB  # of `small_disk`


class Outcome(NamedTuple):
    """What a program was told that wrote until it was refused."""

    accepted: int  # bytes that write(2) has taken
    refused: int  # the errno of the write that was refused; 0: none was
    at_close: int  # that of close(2)


def write_all(path: Path, size: int = WANTED, flags: int = 0, seed: int = 1) -> Outcome:
    """As dd(1): write until all is written or refused, and close."""
    data = memoryview(content(seed, size))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o644)
    accepted = refused = at_close = 0
    try:
        while accepted < size:
            accepted += os.write(fd, data[accepted : accepted + PIECE])
    except OSError as error:
        refused = error.errno or -1
    try:
        os.close(fd)
    except OSError as error:
        at_close = error.errno or -1
    return Outcome(accepted, refused, at_close)


def at_once(paths: Sequence[Path], size: int = WANTED, flags: int = 0) -> list[Outcome]:
    """What several programs that write at the same time are told."""
    with ThreadPoolExecutor(len(paths)) as pool:
        return list(pool.map(lambda path: write_all(path, size, flags), paths))


def is_prefix(path: Path, seed: int = 1) -> bool:
    """Whether a file is the begin of what was written to it."""
    found = path.read_bytes()
    return found == content(seed, len(found))


@pytest.fixture(params=["", "writeback"])
def options(request: pytest.FixtureRequest, base: Path) -> Sequence[str]:
    """How a volume is mounted: without and with write-back."""
    return ("--writeback", "--cache-dir", str(base / "cache")) if request.param else ()


@pytest.fixture(params=["sqlite", "redis", "tikv"])
def volume(request: pytest.FixtureRequest, base: Path) -> Iterator[Volume]:
    """A volume on each engine, not formatted yet."""
    meta = ""
    if request.param == "tikv":
        server: TikvServer = request.getfixturevalue("tikv_server")
        meta = server.empty_url()
    elif request.param == "redis":
        meta = request.getfixturevalue("durable_redis").url()
    made = Volume(base, meta)
    yield made
    made.clean_up()


def test_a_volume_keeps_what_fits(volume: Volume, options: Sequence[str]) -> None:
    volume.format("--capacity", "40MiB")
    root = volume.mount(*options).path
    path = root / "f"
    assert write_all(path) == Outcome(CAPACITY, errno.ENOSPC, 0)
    assert path.stat().st_size == CAPACITY
    assert write_all(root / "g") == Outcome(0, errno.ENOSPC, 0)
    fd = os.open(path, os.O_RDWR)
    assert os.pwrite(fd, b"over what is there", 5000) == 18  # takes no space
    with pytest.raises(OSError, match="No space"):
        os.pwrite(fd, b"behind it", CAPACITY)
    os.close(fd)
    expected = bytearray(content(1, CAPACITY))
    expected[5000:5018] = b"over what is there"
    assert path.read_bytes() == expected
    os.truncate(path, CAPACITY - MIB)
    assert write_all(root / "g") == Outcome(MIB, errno.ENOSPC, 0)
    succeed("config", volume.meta, "--capacity", "41MiB")
    assert write_all(root / "h", seed=2) == Outcome(MIB, errno.ENOSPC, 0)  # at once
    assert is_prefix(root / "h", seed=2)
    volume.end(FULL_LOG)


def test_two_programs_on_one_mount_keep_what_fits(volume: Volume, options: Sequence[str]) -> None:
    volume.format("--capacity", "40MiB")
    root = volume.mount(*options).path
    paths = [root / "a", root / "b"]
    told = at_once(paths)
    assert [(each.refused, each.at_close) for each in told] == [(errno.ENOSPC, 0)] * 2
    assert [path.stat().st_size for path in paths] == [each.accepted for each in told]
    assert sum(path.stat().st_blocks * 512 for path in paths) == CAPACITY
    assert all(map(is_prefix, paths))
    volume.end(FULL_LOG)


def two_mounts(volume: Volume, options: Sequence[str]) -> list[Mount]:
    cache = volume.base / "cache2"
    others = ("--writeback", "--cache-dir", str(cache)) if options else ()
    return [volume.mount(*options), volume.mount(*others, name="other")]


@pytest.mark.parametrize("size", [30 * MIB, WANTED])
def test_two_mounts_keep_what_fits(volume: Volume, size: int) -> None:
    """Neither knows what the other is about to store: 30 MiB each would fit."""
    volume.format("--capacity", "40MiB")
    mounts = two_mounts(volume, ())
    paths = [mounts[0].path / "a", mounts[1].path / "b"]
    told = at_once(paths, size)
    assert errno.ENOSPC in [each.refused or each.at_close for each in told], told
    wait_until(lambda: sum(path.stat().st_blocks * 512 for path in paths) == CAPACITY)
    for path, each in zip(paths, told, strict=True):
        assert is_prefix(path)
        if not each.at_close:
            assert path.stat().st_size == each.accepted
    volume.end(FULL_LOG)


def test_appends_of_two_mounts_keep_what_fits(volume: Volume) -> None:
    volume.format("--capacity", "40MiB")
    mounts = two_mounts(volume, ())
    paths = [mount.path / "log" for mount in mounts]
    paths[0].touch()
    told = at_once(paths, flags=os.O_APPEND)
    assert errno.ENOSPC in [each.refused or each.at_close for each in told], told
    wait_until(lambda: paths[0].stat().st_size == CAPACITY)
    volume.end(FULL_LOG)


def test_a_quota_keeps_what_fits(served: Volume, options: Sequence[str]) -> None:
    """Several files at once are each within the quota, and together are not."""
    served.format()
    root = served.mount(*options).path
    (root / "d").mkdir()
    set_quota(served, "--path", "/d", "--capacity", "40MiB")
    (root / "d/new").mkdir()  # with its next commit the mount knows that there are quotas
    paths = [root / "d/a", root / "d/b"]
    told = at_once(paths, 30 * MIB)
    assert errno.EDQUOT in [each.refused or each.at_close for each in told], told
    wait_until(lambda: sum(path.stat().st_blocks * 512 for path in paths) == CAPACITY)
    assert all(map(is_prefix, paths))
    served.end(FULL_LOG)


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_keeps_what_fits(embedded: Volume, options: Sequence[str]) -> None:
    embedded.format()
    root = embedded.mount(*options).path
    told = write_all(root / "f")
    assert (told.refused, told.at_close) == (errno.ENOSPC, 0)
    assert told.accepted == (root / "f").stat().st_size > DISK - 4 * MIB
    assert is_prefix(root / "f")
    df = os.statvfs(root)
    assert df.f_bavail * df.f_frsize < 4 * MIB
    embedded.end(FULL_LOG)


@pytest.mark.usefixtures("small_disk")
def test_a_disk_that_another_fills_keeps_what_fits(embedded: Volume) -> None:
    """What write(2) has let pass is refused by the disk itself."""
    embedded.format()
    mount = embedded.mount()
    path = mount.path / "f"
    data = content(1, 14 * MIB)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    assert os.write(fd, data[:MIB]) == MIB  # now it believes in what it has seen
    theirs = embedded.bucket / "theirs"
    theirs.write_bytes(bytes(DISK - 9 * MIB))

    def write_the_rest() -> None:
        for at in range(MIB, len(data), MIB):  # refused here, if that takes a second
            os.pwrite(fd, data[at : at + MIB], at)
        os.fsync(fd)

    with pytest.raises(OSError, match="No space"):
        write_the_rest()
    theirs.unlink()
    with contextlib.suppress(OSError):
        os.fsync(fd)  # what an upload thread has met
    os.fsync(fd)
    os.close(fd)
    assert path.stat().st_size >= 4 * MIB
    assert is_prefix(path)
    embedded.end(FULL_LOG)


@pytest.mark.usefixtures("small_disk")
def test_df_shows_what_leaves_least(embedded: Volume) -> None:
    """The disk, the volume or a quota; a new limit at once."""
    embedded.format()
    root = embedded.mount().path

    def free(path: Path = root) -> int:
        df = os.statvfs(path)
        assert df.f_bavail <= df.f_blocks
        return df.f_bavail * df.f_frsize

    assert DISK - MIB < free() <= DISK
    for limit in (10, 20, 5):
        succeed("config", embedded.meta, "--capacity", f"{limit}MiB")
        assert free() == limit * MIB
    (root / "d").mkdir()
    set_quota(embedded, "--path", "/d", "--capacity", "3MiB")
    (root / "d/in").mkdir()
    assert (free(root / "d"), free()) == (3 * MIB, 5 * MIB)
    (embedded.bucket / "theirs").write_bytes(bytes(DISK - 2 * MIB))
    assert free() <= 2 * MIB >= free(root / "d")
    (embedded.bucket / "theirs").unlink()
    embedded.end(FULL_LOG)

"""P4, Q1, W2: space that fallocate(2) reserves, on mounts over each engine, on ext4 and tmpfs."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from fsmeta.rules.settings import RESERVED_VERSION
from fsmeta.types import CHUNK_BYTES
from tests.fsclient.fuse.mounting import needs_root_and_fuse
from tests.posix.volumes import Volume, run
from tests.support.waiting import wait_until

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
KEEP, PUNCH, ZERO = 1, 3, 16  # linux/falloc.h; a hole is punched with the size kept
KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096

Volumes = Callable[[str, str], AbstractContextManager[Volume]]
pytestmark = needs_root_and_fuse


def fallocate(fd: int, mode: int, offset: int, length: int) -> int:
    """fallocate(2); the errno, 0 where it worked."""
    return ctypes.get_errno() if _LIBC.fallocate(fd, mode, offset, length) else 0


def seek(fd: int, offset: int, whence: int) -> int:
    """lseek(2), or minus the errno."""
    try:
        return os.lseek(fd, offset, whence)
    except OSError as error:
        return -(error.errno or 0)


@contextmanager
def opened(path: Path, flags: int = 0) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | flags)
    try:
        yield fd
    finally:
        os.close(fd)


def _errno_of_write(fd: int, data: bytes, offset: int) -> int:
    """Of the write, or of the fsync behind it."""
    try:
        done = os.pwrite(fd, data, offset)
        os.fsync(fd)
    except OSError as error:
        return error.errno or -1
    return 0 if done == len(data) else -1


# --- as Linux has it -----------------------------------------------------------------------------


@contextmanager
def _ext4(folder: Path) -> Iterator[Path]:
    image, root = folder / "image", folder / "ext4"
    root.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", "-b", "4096", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, root], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs loop devices and mkfs.ext4: {error}")
    try:
        yield root
    finally:
        subprocess.run(["umount", root], check=True)


@contextmanager
def _tmpfs(folder: Path) -> Iterator[Path]:
    root = folder / "tmpfs"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root], check=True)
    try:
        yield root
    finally:
        subprocess.run(["umount", root], check=True)


@pytest.fixture(params=["ext4", "tmpfs", "sqlite", "redis", "tikv"])
def place(request: pytest.FixtureRequest, tmp_path: Path, volumes: Volumes) -> Iterator[Path]:
    """A file system of some kind."""
    if request.param in ("ext4", "tmpfs"):
        with (_ext4 if request.param == "ext4" else _tmpfs)(tmp_path) as root:
            yield root
    else:
        with volumes(request.param, "place") as volume:
            yield volume.mount()


def test_p4_sizes_blocks_and_holes_as_ext4_and_tmpfs_have_them(place: Path) -> None:
    """A reserved range is a hole for lseek(2), and counts in st_blocks."""
    with opened(place / "f") as fd:

        def shown() -> tuple[int, int]:
            os.fsync(fd)
            found = os.fstat(fd)
            return found.st_size, found.st_blocks // 8

        assert fallocate(fd, 0, 0, MIB) == 0
        assert shown() == (MIB, 256)
        assert (seek(fd, 0, os.SEEK_DATA), seek(fd, 0, os.SEEK_HOLE)) == (-errno.ENXIO, 0)
        at = 64 * PAGE  # nearer to the begin ext4 writes zeros before it
        os.pwrite(fd, b"x" * PAGE, at)
        for _ in range(2):
            assert seek(fd, 0, os.SEEK_DATA) == at
            assert seek(fd, at, os.SEEK_HOLE) == at + PAGE
            assert seek(fd, at + PAGE, os.SEEK_DATA) == -errno.ENXIO
            assert shown() == (MIB, 256)
        # ext4 takes pages that were read for data
        assert os.pread(fd, 2 * MIB, 0) == bytes(at) + b"x" * PAGE + bytes(MIB - PAGE - at)
        assert fallocate(fd, PUNCH, 0, MIB) == 0
        assert shown() == (MIB, 0)
        os.ftruncate(fd, 0)
        assert fallocate(fd, KEEP, 0, MIB) == 0
        assert shown() == (0, 256)
        os.pwrite(fd, b"x", 100)
        assert shown() == (101, 256)
        for size in (101, 50):  # a truncation to the same size gives back what is beyond
            os.ftruncate(fd, size)
            assert shown() == (size, 1)
            assert fallocate(fd, KEEP, 0, MIB) == 0
            assert shown() == (size, 256)
        os.ftruncate(fd, 200_000)
        assert shown() == (200_000, 256)
        os.ftruncate(fd, 2 * MIB)
        assert shown() == (2 * MIB, 256)
        os.ftruncate(fd, 0)
        assert shown() == (0, 0)
        assert fallocate(fd, KEEP, 2 * MIB, MIB) == 0
        assert fallocate(fd, 0, 100, 10) == 0
        assert shown() == (110, 257)
    with opened(place / "f", os.O_TRUNC) as fd:
        assert shown() == (0, 0), "O_TRUNC gives back what is beyond the end, too"


def test_p4_a_zeroed_range_stays_reserved(place: Path) -> None:
    """FALLOC_FL_ZERO_RANGE, which tmpfs does not know."""
    if place.name == "tmpfs":
        pytest.skip("tmpfs has no FALLOC_FL_ZERO_RANGE")
    with opened(place / "f") as fd:
        os.pwrite(fd, b"x" * MIB, 0)
        os.fsync(fd)
        assert fallocate(fd, ZERO, 0, MIB) == 0
        assert (os.fstat(fd).st_size, os.fstat(fd).st_blocks) == (MIB, 2048)
        assert seek(fd, 0, os.SEEK_DATA) == -errno.ENXIO
        assert os.pread(fd, MIB, 0) == bytes(MIB)
        assert fallocate(fd, ZERO, 0, 2 * MIB) == 0
        assert (os.fstat(fd).st_size, os.fstat(fd).st_blocks) == (2 * MIB, 4096)
        assert fallocate(fd, ZERO | KEEP, 0, 4 * MIB) == 0
        assert (os.fstat(fd).st_size, os.fstat(fd).st_blocks) == (2 * MIB, 8192)


def test_p4_holes_are_dug_as_on_linux(place: Path) -> None:
    """fallocate(1): `-d` frees zeros that were written, `-p` what was reserved."""
    file = place / "f"
    subprocess.run(["fallocate", "-l", str(MIB), file], check=True)
    with opened(file) as fd:
        os.pwrite(fd, b"x" * (64 * KIB) + bytes(128 * KIB), 0)
        os.fsync(fd)
        assert os.fstat(fd).st_blocks == 2048
        subprocess.run(["fallocate", "-d", file], check=True)
        dug = 2048 - os.fstat(fd).st_blocks
        assert 256 <= dug <= 384, "the last block that it reads goes as a whole"
        subprocess.run(["fallocate", "-p", "-o", str(512 * KIB), "-l", str(MIB), file], check=True)
        assert os.fstat(fd).st_blocks == 2048 - dug - 1024
        assert os.pread(fd, 2 * MIB, 0) == b"x" * (64 * KIB) + bytes(MIB - 64 * KIB)


# --- limits --------------------------------------------------------------------------------------

KINDS = ("sqlite", "redis", "tikv", "sqlite writeback", "redis writeback")


@pytest.fixture(params=KINDS)
def mounts(request: pytest.FixtureRequest, volumes: Volumes) -> Iterator[tuple[Volume, Path, Path]]:
    """A volume, mounted twice."""
    engine, *staged = request.param.split()
    with volumes(engine, "reserved") as volume:
        volume.expected = re.compile(r"quota_alerts: quota of /d: ")
        found = []
        for name in ("first", "second"):
            cache = ("--writeback", "--cache-dir", volume.folder / f"cache-{name}")
            found.append(volume.mount(name, *(map(str, cache) if staged else ())))
        yield volume, found[0], found[1]


@pytest.mark.parametrize("mode", [0, KEEP])
def test_q1_no_quota_refuses_a_write_into_what_is_reserved(
    mounts: tuple[Volume, Path, Path], mode: int
) -> None:
    """On either mount, buffered, mapped and by O_DIRECT; EDQUOT comes from fallocate(2)."""
    volume, first, second = mounts
    (first / "d").mkdir()
    run("quota", "set", volume.meta, "--path", "/d", "--capacity", "1MiB")
    with opened(first / "d" / "f") as fd, opened(first / "d" / "rest") as rest:
        assert fallocate(fd, mode, 0, 768 * KIB) == 0
        assert fallocate(rest, mode, 0, 512 * KIB) == errno.EDQUOT
        run("flush", first)
        assert _errno_of_write(rest, b"r" * (256 * KIB), 0) == 0
        assert _errno_of_write(rest, b"r" * (256 * KIB), 256 * KIB) == errno.EDQUOT
        assert _errno_of_write(fd, b"a" * (256 * KIB), 0) == 0
        with opened(second / "d" / "f") as other:
            assert _errno_of_write(other, b"b" * (256 * KIB), 256 * KIB) == 0
        run("flush", second)
        if not mode & KEEP:
            with mmap.mmap(fd, 768 * KIB) as memory:
                memory[512 * KIB : 640 * KIB] = b"c" * (128 * KIB)
                memory.flush()
        else:
            assert _errno_of_write(fd, b"c" * (128 * KIB), 512 * KIB) == 0
        direct, page = os.open(first / "d" / "f", os.O_RDWR | os.O_DIRECT), mmap.mmap(-1, 128 * KIB)
        page.write(b"d" * (128 * KIB))
        assert os.pwritev(direct, [page], 640 * KIB) == 128 * KIB
        os.fsync(direct)
        os.close(direct)
        assert _errno_of_write(fd, b"e" * PAGE, 768 * KIB) == errno.EDQUOT
        run("flush", first)
        wanted = b"".join(each * (128 * KIB) for each in (b"aa", b"bb", b"c", b"d"))
        assert os.pread(fd, MIB, 0) == wanted
        assert os.fstat(fd).st_blocks == 1536
        assert fallocate(fd, PUNCH, 0, 512 * KIB) == 0
        assert fallocate(rest, KEEP, 0, 768 * KIB) == 0
    shown = json.loads(run("quota", "check", volume.meta, "--json"))
    assert shown, "the quota is still what its files cover"


@pytest.mark.parametrize("staged", [False, True])
def test_q1_a_full_volume_takes_what_was_reserved(volumes: Volumes, staged: bool) -> None:
    """And a reservation takes nothing away from what write(2) has accepted."""
    with volumes("sqlite", "full") as volume:
        run("config", volume.meta, "--capacity", "8MiB")
        cache = ("--writeback", "--cache-dir", str(volume.folder / "cache")) if staged else ()
        root = volume.mount("mnt", *cache)
        with opened(root / "f") as fd, opened(root / "g") as other:
            assert os.pwrite(other, b"o" * (4 * MIB), 0) == 4 * MIB  # pending
            assert fallocate(fd, 0, 0, 6 * MIB) == errno.ENOSPC
            assert fallocate(fd, 0, 0, 3 * MIB) == 0
            taken = 0
            try:
                while taken < 2 * MIB:
                    taken += os.pwrite(other, b"o" * (512 * KIB), 4 * MIB + taken)
            except OSError as error:
                assert error.errno == errno.ENOSPC
            assert taken == MIB, "all of the rest, and no more"
            os.fsync(other)
            assert os.statvfs(root).f_bavail == 0
            for at in range(0, 3 * MIB, 256 * KIB):
                assert os.pwrite(fd, b"f" * (256 * KIB), at) == 256 * KIB
            os.fsync(fd)
            assert fallocate(fd, ZERO, 0, 3 * MIB) == 0, "what is covered needs no room"
            assert fallocate(fd, KEEP, 3 * MIB, PAGE) == errno.ENOSPC
            assert os.pread(other, 8 * MIB, 0) == b"o" * (5 * MIB)


def test_p4_ranges_across_chunks_and_far_beyond_the_end(place: Path) -> None:
    if place.name in ("ext4", "tmpfs"):
        pytest.skip("64 MiB are all that they have")
    with opened(place / "f") as fd:
        assert fallocate(fd, 0, CHUNK_BYTES - PAGE, CHUNK_BYTES + 2 * PAGE) == 0
        found = os.fstat(fd)
        assert (found.st_size, found.st_blocks) == (
            2 * CHUNK_BYTES + PAGE, CHUNK_BYTES // 512 + 16,
        )  # fmt: skip
        far = 4 << 30
        assert fallocate(fd, KEEP, 100 * CHUNK_BYTES, far) == 0
        assert os.fstat(fd).st_blocks == found.st_blocks + far // 512
        os.ftruncate(fd, 101 * CHUNK_BYTES)
        assert os.fstat(fd).st_blocks == found.st_blocks + far // 512, "a file that grows keeps it"
        os.ftruncate(fd, 101 * CHUNK_BYTES)
        assert os.fstat(fd).st_blocks == found.st_blocks + CHUNK_BYTES // 512
        assert fallocate(fd, KEEP, 0, (1 << 44) + 1) == errno.ENOSPC
        os.ftruncate(fd, 0)
        assert os.fstat(fd).st_blocks == 0


# --- the volume ----------------------------------------------------------------------------------


def _version(volume: Volume) -> int:
    found: int = json.loads(run("config", volume.meta, "--json"))["version"]
    return found


def test_m5_the_first_reservation_raises_the_version(volumes: Volumes) -> None:
    """A volume without any is what earlier clients know."""
    with volumes("sqlite", "version") as volume:
        first, second = volume.mount("first"), volume.mount("second")
        before = _version(volume)
        with opened(first / "f") as fd:
            os.pwrite(fd, b"x" * MIB, 0)
            assert fallocate(fd, PUNCH, 0, PAGE) == 0
            assert _version(volume) == before < RESERVED_VERSION
            assert fallocate(fd, 0, 0, 2 * MIB) == 0
        assert _version(volume) == RESERVED_VERSION
        with opened(second / "g") as fd:
            assert fallocate(fd, 0, 0, 2 * MIB) == 0
            assert os.fstat(fd).st_blocks == 4096
        report = json.loads(run("gc", volume.meta, "--json"))
        assert report is not None
        run("scrub", volume.meta)


def _records(path: Path) -> int:
    """How many records the first chunk of a file has."""
    first, *_ = json.loads(run("info", path, "--json"))["chunks"]
    return len(first["slices"])


@pytest.mark.parametrize("staged", [False, True])
def test_p4_what_is_reserved_and_freed_again_and_again_is_compacted(
    volumes: Volumes, staged: bool
) -> None:
    """In a chunk that is not the last one; else a user could let its record grow for ever."""
    with volumes("redis", "again") as volume:
        cache = ("--writeback", "--cache-dir", str(volume.folder / "cache")) if staged else ()
        path = volume.mount("mnt", *cache) / "f"
        with opened(path) as fd:
            os.pwrite(fd, b"x" * PAGE, 0)
            os.pwrite(fd, b"x" * PAGE, 2 * CHUNK_BYTES)
            os.fsync(fd)
            for _ in range(60):
                assert fallocate(fd, KEEP, PAGE, PAGE) == 0
                assert fallocate(fd, PUNCH, PAGE, PAGE) == 0
            wait_until(lambda: _records(path) < 60)
            assert os.pread(fd, 2 * PAGE, 0) == b"x" * PAGE + bytes(PAGE)

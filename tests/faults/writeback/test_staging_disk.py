"""W1, W2, W3: the disk with the journal: it works early, and it is taken away from under a mount.

The disk is an ext4 file system of its own on a loop device, and what takes it away is ext4's
shutdown: from then on each call fails with EIO, as when the device is gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdata.staging.disk import DirectoryDisk
from fsmeta.runtime import SystemRuntime
from tests.faults.checkpoint import Watcher, Writer
from tests.faults.program import Volume, needs_mounts, slicefs, succeed, wait_until

pytestmark = needs_mounts

SHARDS = 16
SHARD_BYTES = 1_000_000
DISK_BYTES = 64 << 20
STAGED_BYTES = 8 << 20
SECTOR_BYTES = 512
SHUTDOWN = 2 << 30 | 4 << 16 | ord("X") << 8 | 125  # EXT4_IOC_SHUTDOWN of linux/ext4.h
NO_FLUSH = 2  # EXT4_GOING_FLAGS_NOLOGFLUSH
EIO = os.strerror(errno.EIO)
COMPLAINTS = (
    "staging disk: .*Input/output error|staging journal: .*Input/output error|"
    "staging (disk|journal): .*could not be synced|"
    "the staging disk can't be read: Input/output error|"
    "changes, .* are not in the store yet|"
    "what was written there before is lost"  # each EIO is an ERROR
)


class Disk:
    """A disk that can be pulled out."""

    def __init__(self, base: Path) -> None:
        self.path = base / "ssd"
        self.path.mkdir()
        image = base / "image"
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, self.path], check=True)

    def written_bytes(self) -> int:
        """What the device was given to write so far."""
        number = os.stat(self.path).st_dev
        stat = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
        return int(stat.read_text().split()[6]) * SECTOR_BYTES

    def pull(self) -> None:
        """Nothing on it can be read or written any more."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_FLUSH))
        finally:
            os.close(fd)


def _takes(directory: Path) -> bool:
    """Whether a directory takes changes; a new name each time, as an old one is refused anyway."""
    try:
        tempfile.mkdtemp(dir=directory)
    except OSError:
        return False
    return True


@pytest.fixture
def disk(base: Path) -> Iterator[Disk]:
    try:
        made = Disk(base)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs loop devices and mkfs.ext4: {error}")
    yield made
    subprocess.run(["umount", "-l", made.path], check=True)


def test_w3_the_disk_begins_before_anybody_waits_for_it(disk: Disk) -> None:
    """What is staged is written out at once, and fsync(2) finds it done; else it takes 30 s."""
    staging = DirectoryDisk(SystemRuntime(), str(disk.path))
    before = disk.written_bytes()
    half = os.urandom(STAGED_BYTES // 2 + 100)  # so that the second begins within a page
    for at in range(2):
        staging.write("data-1", at * len(half), [half[:100], half[100:]])
    whole = 2 * len(half) // 4096 * 4096
    wait_until(
        "all whole pages are on the disk", 25, lambda: disk.written_bytes() >= before + whole
    )
    assert staging.read("data-1", len(half), len(half)) == half
    staging.close()


def test_w2_a_disk_pulled_out_under_a_mount(disk: Disk, served: Volume) -> None:
    """Others see a prefix, the program is told, and what comes elsewhere is written through."""
    served.format()
    slow = ("--upload-limit", "1MiB", "--max-uploads", "1")  # a quarter of a minute for all
    quick = ("--drain-timeout", "5")
    mine = served.mount("--writeback", "--staging-dir", str(disk.path), *slow, *quick)
    other = served.mount(name="other")
    (mine.path / "next").mkdir()
    writer = Writer(mine.path / "step", SHARDS, SHARD_BYTES, random.Random(3))
    watcher = Watcher(writer, other.path / "step")
    writer.write()  # of which eight megabytes may be on their way to the store
    time.sleep(0.5)
    disk.pull()
    with open(mine.path / "next/shard", "wb") as file:  # a directory that has lost nothing
        file.write(b"x" * 300_000)
        os.fsync(file.fileno())
    wait_until("what comes there is refused", 250, lambda: not _takes(mine.path / "step"))
    watcher.stop()
    assert (other.path / "next/shard").read_bytes() == b"x" * 300_000
    whole, complete = writer.judge(other.path / "step")
    assert whole < SHARDS, "nothing was lost: the test pulled too late"
    assert not complete
    with pytest.raises(OSError, match=EIO):  # whoever goes on does so from what is not there
        (mine.path / "step" / "complete2").touch()
    done = slicefs("flush", "--wait", mine.path / "step")
    assert done.code == 1, done
    assert EIO in done.err
    succeed("flush", "--wait", mine.path / "next")
    (mine.path / "next/second").write_bytes(b"second")
    assert (other.path / "next/second").read_bytes() == b"second"
    done = slicefs("umount", mine.path)
    assert done.code == 3, done  # the journal can't be removed, and what was lost is in it
    assert str(disk.path) in done.err
    again = served.mount("--writeback", "--staging-dir", str(served.base / "staging"))
    rest = Writer(again.path / "step2", SHARDS, 1000, random.Random(4))
    rest.write()
    (again.path / "step" / "complete2").touch()
    succeed("flush", "--wait", again.path)
    assert rest.judge(other.path / "step2") == (SHARDS, True)
    served.end(COMPLAINTS)

"""What the kernel does by itself on mounts of snapshots, and goes on doing under another client."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path
from typing import Final

import pytest

from tests.faults.fixtures import base, embedded
from tests.faults.program import Volume, needs_mounts, succeed, wait_until
from tests.fsclient.survival.supervised import Supervised

__all__ = ["base", "embedded"]

pytestmark = needs_mounts

KILLED: Final = "slicefs.supervisor process .* ended with signal 9"
LEVELS: Final = ("memory", "disk", "store")
PATIENCE_S: Final = 60.0
DATA: Final = {f"{at}": random.Random(at).randbytes((3 << 20) + at) for at in range(3)}


@pytest.fixture
def snapshot(embedded: Volume) -> Volume:
    """A volume with a snapshot of three files."""
    embedded.format()
    mount = embedded.mount()
    for name, data in DATA.items():
        (mount.path / name).write_bytes(data)
    succeed("snapshot", "create", mount.path, "one")
    mount.umount()
    return embedded


def counted(supervised: Supervised, name: str) -> float:
    return supervised.mount.numbers()[name]


def make_whole(supervised: Supervised, name: str) -> Path:
    """Open a file until the kernel reads it by itself; nothing has it open then."""
    path = supervised.path / name
    before = counted(supervised, "passthrough_opens_total")

    def is_passed() -> bool:
        assert path.read_bytes() == DATA[name]
        return counted(supervised, "passthrough_opens_total") > before

    wait_until("the whole file", PATIENCE_S, is_passed)
    return path


def reads(supervised: Supervised) -> float:
    """Reads of the volume's data that a client has answered, without those of `.stats`."""
    numbers = supervised.mount.numbers()
    return sum(numbers[f'cache_level_hits_total{{level="{level}"}}'] for level in LEVELS)


def test_passthrough(snapshot: Volume) -> None:
    """Descriptors from before read on; opens that come later agree with them, until the last close;
    then the cache disk is let go."""
    cache = ("--cache-dir", str(snapshot.base / "cache"))
    supervised = Supervised(snapshot, "--snapshot", "one", "--passthrough", *cache)
    path = make_whole(supervised, "0")
    plain = supervised.path / "1"
    with (
        plain.open("rb") as asks,
        path.open("rb", buffering=0) as first,
        mmap.mmap(first.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        before = reads(supervised)
        assert asks.read() == DATA["1"]
        assert reads(supervised) > before  # so they are counted
        asks.seek(0)
        for _ in range(2):
            supervised.kill()
            supervised.await_next()
            before = reads(supervised)
            assert os.pread(first.fileno(), 1 << 20, 1 << 20) == DATA["0"][1 << 20 : 2 << 20]
            assert mapped[:] == DATA["0"]
            with path.open("rb") as second:
                assert second.read() == DATA["0"]
            assert reads(supervised) == before
            with plain.open("rb") as other:  # which is open in the usual way
                assert other.read() == asks.read() == DATA["1"]
            asks.seek(0)
    make_whole(supervised, "1")
    make_whole(supervised, "0")
    supervised.mount.umount()
    snapshot.end(KILLED)
    supervised.clean_up()


def test_opens_without_requests(snapshot: Volume) -> None:
    """Files that the kernel has opened without asking are read on, by old and new descriptors; what
    was opened for their readers ends with the mount."""
    supervised = Supervised(snapshot, "--snapshot", "one")
    fd = os.open(supervised.path / "0", os.O_RDONLY)
    assert os.pread(fd, 1000, 0) == DATA["0"][:1000]
    virtual = os.open(supervised.path / ".stats", os.O_RDONLY)
    with os.scandir(supervised.path) as listing:
        seen = {next(listing).name}
        for _ in range(2):
            supervised.kill()
            supervised.await_next()
            assert os.pread(fd, 1 << 20, 1 << 20) == DATA["0"][1 << 20 : 2 << 20]
            assert (supervised.path / "1").read_bytes() == DATA["1"]
            assert os.pread(virtual, 7, 0) == b"slicefs"
        seen |= {entry.name for entry in listing}
    assert DATA.keys() <= seen
    assert counted(supervised, "open_handles") >= 3  # of both clients before, and of this one
    assert counted(supervised, 'operations_total{op="read"}') > 0
    numbers = supervised.mount.numbers()
    assert numbers.get('operations_total{op="open"}', 0) == 0
    os.close(fd)
    os.close(virtual)
    supervised.mount.umount()
    snapshot.end(KILLED)
    supervised.clean_up()

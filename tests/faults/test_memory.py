"""C4: the client's memory stays below its cap while much more than that passes through it."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from tests.faults.program import Mount, Volume, needs_mounts, wait_until

pytestmark = needs_mounts

MIB = 1 << 20
CAP = 64 * MIB
BESIDES = 80 * MIB  # threads' buffers of 1 MiB, blocks being fetched, encoders, the allocator


def write(path: Path, size: int) -> str:
    """Write `size` bytes that don't repeat; their digest."""
    digest = hashlib.blake2b()
    base = bytearray(random.Random(7).randbytes(MIB))
    with path.open("wb", buffering=0) as file:
        for number in range(size // MIB):
            base[:8] = number.to_bytes(8, "big")
            digest.update(base)
            assert file.write(base) == MIB
    return digest.hexdigest()


def read(path: Path) -> str:
    digest = hashlib.blake2b()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(MIB):
            digest.update(piece)
    return digest.hexdigest()


def stays_below(mount: Mount, before: int) -> None:
    most = mount.memory("VmHWM")
    assert most - before < CAP + BESIDES, f"{(most - before) / MIB:.0f} MiB more than at the start"
    assert mount.numbers()["buffer_limit_bytes"] == CAP


def pass_through(volume: Volume, size: int, way: str = "--no-supervisor") -> None:
    volume.format()
    mount = volume.mount("--buffer-size", "64MiB", way)
    before = mount.memory()
    written = write(mount.path / "big", size)
    stays_below(mount, before)
    mount.umount()  # so that the kernel's pages are gone, too
    mount = volume.mount("--buffer-size", "64MiB", way)
    before = mount.memory()
    assert read(mount.path / "big") == written
    stays_below(mount, before)
    (mount.path / "big").unlink()
    wait_until("its blocks are deleted", 100, lambda: not volume.objects())
    volume.end()


def test_a_gigabyte(embedded: Volume) -> None:
    pass_through(embedded, 1024 * MIB)


def test_writes_that_are_kept_for_the_next_client(embedded: Volume) -> None:
    """They are in shared memory besides, which the cap bounds, too."""
    pass_through(embedded, 256 * MIB, "--supervisor")


@pytest.mark.soak
def test_four_gigabytes(embedded: Volume) -> None:
    pass_through(embedded, 4096 * MIB)

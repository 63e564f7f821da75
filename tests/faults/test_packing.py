"""O6: the real program packs small files, and reads them with few requests."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

from tests.faults.places import s3_place
from tests.faults.program import Mount, Volume, needs_mounts, wait_until
from tests.support.ceph_cluster import CephCluster

pytestmark = needs_mounts
FILES = 400
BYTES = 10_000
# who leaves packs for a few seconds only, which on a busy machine is not enough for all
_PATIENT = """
import sys
from fsclient.background import background
from fsclient.client import client
background.LEAVE_S = client.DRAIN_S = 60.0
from fsclient.cli.main import main
sys.argv[0] = "slicefs"
main()
"""
PATIENT = (sys.executable, "-c", _PATIENT)


def gets(mount: Mount) -> float:
    """Requests for data so far."""
    return mount.numbers()["object_get_count_total"]


@pytest.mark.parametrize("options", [(), ("--compress", "lz4")])
def test_an_epoch_of_small_files_takes_few_requests(
    base: Path, ceph: CephCluster, options: tuple[str, ...]
) -> None:
    """On S3 without being asked; what was written last is packed when the volume is left."""
    volume = Volume(base, place=s3_place(base, ceph.endpoint))
    try:
        volume.format(*options)
        mount = volume.mount(program=PATIENT)
        content = {}
        for number in range(FILES):
            path = mount.path / f"{number:04}"
            content[path.name] = os.urandom(BYTES + number)
            path.write_bytes(content[path.name])
        mount.umount()
        mount = volume.mount(program=PATIENT)
        names = list(content)
        random.Random(1).shuffle(names)
        for name in names:
            assert (mount.path / name).read_bytes() == content[name]
        assert gets(mount) <= FILES / 20
        for name in names[: FILES - 5]:
            (mount.path / name).unlink()
        mount.umount()
        volume.end()
    finally:
        volume.clean_up()


def test_small_files_behind_a_journal_are_stored_with_few_requests(
    base: Path, ceph: CephCluster
) -> None:
    """Others see all; who is killed in the midst packs the rest when it is back."""
    volume = Volume(base, place=s3_place(base, ceph.endpoint))
    back = ("--writeback", "--staging-dir", str(base / "staging"), "--no-supervisor")
    try:
        volume.format()
        mount = volume.mount(*back, program=PATIENT)
        content = {}
        for number in range(FILES):
            path = mount.path / f"{number:04}"
            content[path.name] = os.urandom(BYTES + number)
            path.write_bytes(content[path.name])
            if number == FILES // 2:
                mount.kill()
                mount = volume.mount(*back, program=PATIENT)
        wait_until("all is published", 100, lambda: not mount.numbers()["staging_changes"])
        assert mount.numbers()["object_put_count_total"] <= FILES / 4
        mount.umount()
        mount = volume.mount(program=PATIENT)
        for name, data in content.items():
            assert (mount.path / name).read_bytes() == data
        # a pack has what was written while the one before it was stored: fewer on a slow machine
        assert gets(mount) <= FILES / 4
        mount.umount()
        volume.end()
    finally:
        volume.clean_up()

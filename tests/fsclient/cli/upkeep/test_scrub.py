"""O4, R1: `slicefs scrub` finds what is damaged and missing, and says whose it is."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from fsclient.cli.options.key_options import PASSPHRASE
from fsmeta.schema import keys
from tests.faults.disks.test_damage import DAMAGE, object_of, with_files
from tests.faults.load import content
from tests.faults.places import rados_place, s3_place
from tests.faults.program import SLICEFS, Volume, needs_mounts, slicefs, succeed
from tests.support.ceph_cluster import CephCluster

pytestmark = needs_mounts


def scrub(volume: Volume, *words: str | Path, code: int = 0) -> Any:
    done = slicefs("scrub", volume.meta, "--json", *words)
    assert (done.code, done.err) == (code, ""), done
    return json.loads(done.out)


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_damage_is_told_with_the_files_that_have_it(embedded: Volume, damage: str) -> None:
    with_files(embedded)
    mount = embedded.mount()
    (mount.path / "dir").mkdir()
    (mount.path / "b").rename(mount.path / "dir/b")
    block = object_of(mount, "dir/b", embedded)
    mount.umount()
    assert succeed("scrub", embedded.meta).splitlines()[-1] == "clean"
    right = block.read_bytes()
    block.write_bytes(DAMAGE[damage](right))
    found = scrub(embedded, code=3)
    [problem] = found["problems"]
    assert (problem["what"], problem["path"]) == ("damaged", "/dir/b")
    assert problem["object"].endswith(block.name)
    done = slicefs("scrub", embedded.meta)
    assert done.code == 3
    assert done.err.startswith("problem: object chunks/")
    assert done.err.endswith(": /dir/b\n")
    block.write_bytes(right)
    embedded.end()


def test_missing_objects_and_paths(embedded: Volume) -> None:
    with_files(embedded)
    mount = embedded.mount()
    (mount.path / "dir").mkdir()
    (mount.path / "b").rename(mount.path / "dir/b")
    (mount.path / "dir/again").hardlink_to(mount.path / "dir/b")
    block = object_of(mount, "dir/b", embedded)
    mount.umount()
    right = block.read_bytes()
    block.unlink()
    [problem] = scrub(embedded, code=3)["problems"]
    assert problem["what"] == "missing"
    assert problem["path"] in ("/dir/b", "/dir/again")
    assert scrub(embedded, "/a", "/c")["blocks"] == 2
    assert scrub(embedded, "/dir", code=3)["problem_count"] == 1
    done = slicefs("scrub", embedded.meta, "/nowhere")
    assert (done.code, done.out) == (1, "")
    assert "/nowhere is not in the volume" in done.err
    block.write_bytes(right)
    embedded.end()


def test_rate_and_sample(embedded: Volume) -> None:
    embedded.format("--block-size", "64KiB")
    mount = embedded.mount()
    (mount.path / "file").write_bytes(content(1, 6_400_000))
    mount.umount()
    begun = time.monotonic()
    assert scrub(embedded, "--rate", "2MiB")["blocks"] == 98
    assert time.monotonic() - begun > 1.5
    assert 0 < scrub(embedded, "--sample", "30")["blocks"] < 80
    embedded.end()


def test_a_scrub_that_was_killed_goes_on(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount()
    for number in range(1500):
        (mount.path / str(number)).write_bytes(b"x" * 1000)
    mount.umount()
    cursor = embedded.base / "cursor"
    words = ["scrub", embedded.meta, "--cursor", str(cursor), "--threads", "1"]
    process = subprocess.Popen([SLICEFS, *words, "--rate", "64KiB"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not cursor.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    kept = json.loads(cursor.read_text())
    assert 0 < kept["read"]["blocks"] < 1500
    found = json.loads(succeed(*words, "--json"))
    assert (found["inodes"], found["blocks"]) == (1501, 1500)
    assert not cursor.exists(), "the next run begins anew"
    cursor.write_text(json.dumps({**kept, "volume": "other"}))
    assert "is of another volume" in slicefs(*words).err
    cursor.write_text("{")
    assert "can't be read: remove it" in slicefs(*words).err
    assert "leave out the paths" in slicefs(*words, "/1").err
    cursor.unlink()
    done = slicefs("scrub", embedded.meta, "--cursor", cursor.parent / "none/cursor")
    assert "none/cursor: name a file in a directory that you may write to" in done.err
    assert (done.code, done.out) == (1, ""), "said before the volume is read"
    embedded.end()


def test_what_copies_share_is_read_once(embedded: Volume) -> None:
    """Neighbours ask for the same block before it has been read; so do the files of a segment."""
    embedded.format()
    mount = embedded.mount()
    (mount.path / "file").write_bytes(content(1, 2_000_000))
    block = object_of(mount, "file", embedded)
    for number in range(20):
        with open(mount.path / "file", "rb") as file, open(mount.path / str(number), "wb") as copy:
            assert os.copy_file_range(file.fileno(), copy.fileno(), 2_000_000) == 2_000_000
    mount.umount()
    found = scrub(embedded)
    assert (found["inodes"], found["blocks"]) == (22, 1)
    right = block.read_bytes()
    block.write_bytes(DAMAGE["end"](right))
    found = scrub(embedded, code=3)
    assert (found["problem_count"], found["blocks"]) == (21, 1), "each file that has it is named"
    block.write_bytes(right)
    embedded.end()


def test_without_the_key(embedded: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSPHRASE, "correct horse battery")
    embedded.format("--encrypt-passphrase")
    mount = embedded.mount()
    (mount.path / "file").write_bytes(content(1, 100_000))
    block = object_of(mount, "file", embedded)
    mount.umount()
    assert scrub(embedded)["authenticated"]
    monkeypatch.delenv(PASSPHRASE)
    assert not scrub(embedded)["authenticated"]
    assert "without its key only checksums" in succeed("scrub", embedded.meta)
    right = block.read_bytes()
    block.write_bytes(DAMAGE["end"](right))
    assert scrub(embedded, code=3)["problem_count"] == 1
    block.write_bytes(right)
    embedded.end()


@pytest.mark.parametrize("store", ["s3", "rados"])
def test_on_real_stores(base: Path, ceph: CephCluster, store: str) -> None:
    place = s3_place(base, ceph.endpoint) if store == "s3" else rados_place(ceph)
    volume = Volume(base, place=place)
    try:
        volume.format("--block-size", "64KiB", "--compress", "zstd")
        mount = volume.mount()
        (mount.path / "file").write_bytes(content(1, 500_000) + bytes(500_000))
        mount.umount()
        assert scrub(volume)["blocks"] == 16
        volume.end()
    finally:
        volume.clean_up()


def test_repair_from_the_command_line(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount()
    (mount.path / "file").write_bytes(content(1, 10_000))
    done = slicefs("fsck", embedded.meta, "--repair")
    assert (done.code, done.out) == (8, "")
    assert "the volume is used by 1 client(s)" in done.err
    mount.umount()
    assert succeed("fsck", embedded.meta, "--repair").splitlines()[-1] == "clean"
    embedded.set_value(keys.USAGE, keys.SPACE, b"7")
    assert slicefs("fsck", embedded.meta).code == 4
    planned = slicefs("fsck", embedded.meta, "--repair", "--dry-run")
    assert planned.code == 4
    assert any(line.startswith("would repair: ") for line in planned.out.splitlines())
    assert slicefs("fsck", embedded.meta).code == 4
    repaired = slicefs("fsck", embedded.meta, "--repair")
    assert repaired.code == 1
    said = repaired.out.splitlines()
    assert (said[0], said[-1]) == ("repaired: space was 7 and is 12288", "clean")
    embedded.end()

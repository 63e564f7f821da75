"""`slicefs dump` and `load` as a user runs them (M4)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

from tests.faults.program import SLICEFS, Volume, needs_mounts, slicefs, succeed
from tests.support.waiting import wait_until


def _tree(root: Path) -> dict[str, tuple[int, int, str]]:
    """Mode, mtime and contents of everything below `root`."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.name in (".stats", ".config"):
            continue
        status = path.lstat()
        body = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        digest = hashlib.sha256(body).hexdigest()
        found[str(path.relative_to(root))] = (status.st_mode, status.st_mtime_ns, digest)
    return found


@needs_mounts
def test_a_volume_moves_to_another_engine(served: Volume, tmp_path: Path) -> None:
    """From Redis to SQLite, dumped while it is mounted, through a pipe as well."""
    served.format()
    mount = served.mount()
    for number in range(20):
        path = mount.path / f"d{number % 3}" / f"file {number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.urandom(1000 * number))
    (mount.path / "link").symlink_to("d0")
    before = _tree(mount.path)
    file = tmp_path / "volume.dump"
    assert "25 inodes" in succeed("dump", served.meta, file)  # 20 files, 3 directories, link, root
    piped = subprocess.run([SLICEFS, "dump", served.meta], capture_output=True, check=True)
    assert len(piped.stdout) > 100
    mount.umount()

    moved = f"sqlite://{tmp_path}/moved.db"
    assert "and verified" in succeed("load", moved, file, "--verify")
    succeed("fsck", moved, "--data")
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    succeed("mount", moved, mountpoint, "-d")
    try:
        assert _tree(mountpoint) == before
        (mountpoint / "new").write_bytes(b"new")
    finally:
        succeed("umount", mountpoint)
    succeed("fsck", moved, "--data")
    again = slicefs("load", moved, file)
    assert again.code == 1
    assert "already" in again.err


def test_bad_input(embedded: Volume, tmp_path: Path) -> None:
    embedded.format()
    file = tmp_path / "volume.dump"
    succeed("dump", embedded.meta, file)
    whole = file.read_bytes()
    fresh = f"sqlite://{tmp_path}/fresh.db"
    cases = [
        (("load", fresh, tmp_path / "none"), "No such file"),
        (("load", fresh, "-", "--verify"), "name a file"),
        (("dump", embedded.meta, tmp_path / "no" / "where"), "/no/where: No such file"),
        (("dump", f"sqlite://{tmp_path}/none.db", file), "there is no metadata file"),
    ]
    for arguments, why in cases:
        done = slicefs(*arguments)
        assert done.code == 1, done
        assert why in done.err
        assert len(done.err.splitlines()) == 1
    assert file.read_bytes() == whole
    file.write_bytes(whole[:-20])
    done = slicefs("load", fresh, file)
    assert done.code == 1
    assert "ends early" in done.err
    assert str(file) in done.err
    assert not list(tmp_path.glob("fresh.db*")), "what was not loaded is not there"
    file.write_bytes(whole)
    succeed("load", fresh, file)


@needs_mounts
def test_the_metadata_comes_back_from_the_bucket(served: Volume, tmp_path: Path) -> None:
    """M5: Redis is lost with all that it had; the volume's own object store has a backup."""
    served.format()
    mount = served.mount("--backup-meta", "1s")
    (mount.path / "kept").write_bytes(b"kept" * 1000)
    before = _tree(mount.path)
    meta_dir = served.bucket / "testvol/meta"
    wait_until(lambda: len(list(meta_dir.glob("*/end"))) >= 3, 100)
    mount.umount()
    place = ("--bucket", served.bucket)
    moved = f"sqlite://{tmp_path}/restored.db"
    told = json.loads(succeed("restore-meta", moved, "testvol", *place, "--list", "--json"))
    listed = told["backups"]
    assert len(listed) >= 3
    assert not Path(f"{tmp_path}/restored.db").exists()
    assert listed[-1]["name"] in succeed("restore-meta", moved, "testvol", *place)
    succeed("fsck", moved, "--data")
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    succeed("mount", moved, mountpoint, "-d")
    try:
        assert _tree(mountpoint) == before
    finally:
        succeed("umount", mountpoint)
    for words, why in (
        ((moved, "testvol", *place), "already"),
        ((f"sqlite://{tmp_path}/x.db", "othervol", *place), "is not there"),
        ((f"sqlite://{tmp_path}/x.db", "testvol", *place, "--at", "2020"), "write it like"),
    ):
        done = slicefs("restore-meta", *words)
        assert done.code == 1, done
        assert why in done.err
    assert not Path(f"{tmp_path}/x.db").exists()

"""K1: what the controller lists and clones, and what becomes of volumes that are deleted."""

from __future__ import annotations

import os
import subprocess

from csi.errors import Code
from tests.csi.driver import Driver, code_of
from tests.faults.program import needs_mounts

pytestmark = needs_mounts
MIB = 1 << 20
PVC = {"csi.storage.k8s.io/pvc/name": "data"}


def test_listed_cloned_and_deleted(driver: Driver) -> None:
    """Each `onDelete` keeps what it says, and a clone has nothing to do with its source."""
    driver.secrets["format-options"] = "trash-days=1"
    capacity = {"limit_bytes": MIB}
    for kind in ("delete", "archive", "retain"):
        driver.create(kind, parameters={"onDelete": kind}, capacity_range=capacity)
    bare = driver.create("bare", capacity_range={})
    assert bare.capacity_bytes == 0
    assert driver.expand("bare", MIB) == MIB  # of no limit: it stays so
    root = next((driver.state / "stores").iterdir()) / "mnt"
    for kind in ("delete", "archive", "retain"):
        (root / kind / "kept").write_text(kind)
    source = {"volume": {"volume_id": "retain"}}
    clone = driver.create("clone", volume_content_source=source, capacity_range=capacity)
    assert driver.create("clone", volume_content_source=source, capacity_range=capacity) == clone
    assert clone.content_source.volume.volume_id == "retain"
    (root / "retain/kept").write_text("changed")
    assert (root / "clone/kept").read_text() == "retain"
    missing = {"volume": {"volume_id": "none"}}
    assert code_of(driver.create, "other", volume_content_source=missing) is Code.NOT_FOUND
    first = driver.list_volumes(max_entries=3)
    rest = driver.list_volumes(token=first.next_token)
    listed = [entry.volume.volume_id for entry in [*first.entries, *rest.entries]]
    assert (listed, rest.next_token) == (["archive", "bare", "clone", "delete", "retain"], "")
    assert first.entries[2].volume.volume_context == clone.volume_context
    assert code_of(driver.list_volumes, token="no number") is Code.ABORTED
    assert driver.free_bytes() > 0
    for kind in ("delete", "archive", "retain", "bare", "clone"):
        for _ in range(2):
            driver.delete(kind)
    assert list(driver.list_volumes().entries) == []
    assert [each.name for each in root.iterdir() if each.name != ".csi"] == ["retain"]
    (root / "retain/kept").write_bytes(bytes(2 * MIB))  # it has no limit any more
    [archived] = (root / ".csi/archive").iterdir()
    assert archived.name.startswith("archive-")
    assert (archived / "kept").read_text() == "archive"
    hours = [line.split()[0] for line in driver.slicefs("restore").splitlines()]
    assert "/.csi/retired/" in driver.slicefs("restore", *hours)  # what `delete` removes
    assert code_of(driver.create, "retain") is Code.ALREADY_EXISTS  # that directory is not empty
    driver.finish()


def test_snapshots_of_an_archived_volume(driver: Driver) -> None:
    """They outlive it, are no part of a later volume in its place, and can be deleted."""
    driver.create(
        "first", parameters={"onDelete": "archive", "pathPattern": "a-${pvc.name}", **PVC}
    )
    root = next((driver.state / "stores").iterdir()) / "mnt"
    (root / "a-data/file").write_text("kept")
    snapshot = driver.snapshot("snap-1", "first")
    driver.delete("first")
    [archived] = (root / ".csi/archive").iterdir()
    source = {"snapshot": {"snapshot_id": snapshot.snapshot_id}}
    driver.create("again", volume_content_source=source)
    assert (root / "again/file").read_text() == "kept"
    driver.delete_snapshot(snapshot.snapshot_id)
    assert not (archived / ".snapshots/snap-1").exists()
    other = {"pathPattern": "b-${pvc.name}", "onDelete": "retain", **PVC}
    driver.create("second", parameters=other)
    assert code_of(driver.create, "second", parameters={**other, "pathPattern": "c"}) is (
        Code.ALREADY_EXISTS
    )
    driver.snapshot("snap-2", "second")
    driver.delete("second")
    assert os.listdir(root / "b-data") == []
    assert code_of(driver.create, "third", parameters=other) is Code.ALREADY_EXISTS
    driver.delete_snapshot("snap-2")
    driver.create("third", parameters=other)
    driver.delete("third")
    driver.delete("again")
    driver.finish()


def test_links_lead_to_no_other_directory(driver: Driver) -> None:
    """Where pods can write above a volume, what they put there is neither taken nor deleted."""
    driver.create("first")
    root = next((driver.state / "stores").iterdir()) / "mnt"
    for name in ("team", "team/below", "victim"):
        (root / name).mkdir(mode=0o700)
    (root / "team/data").symlink_to("../victim")
    for pattern in ("team/${pvc.name}", "team/data/${pvc.name}"):
        parameters = {"pathPattern": pattern, **PVC}
        assert code_of(driver.create, "second", parameters=parameters) is Code.FAILED_PRECONDITION
    assert (root / "victim").stat().st_mode & 0o777 == 0o700
    assert os.listdir(root / "victim") == []
    driver.create("third", parameters={"pathPattern": "team/below/${pvc.name}", **PVC})
    (root / "team/below").rename(root / "team/moved")
    (root / "victim/data").mkdir()
    (root / "victim/data/kept").touch()
    (root / "team/below").symlink_to("../victim")
    assert code_of(driver.delete, "third") is Code.FAILED_PRECONDITION
    assert (root / "victim/data/kept").exists()
    (root / "team/below").unlink()
    (root / "team/moved").rename(root / "team/below")
    driver.delete("third")
    driver.delete("first")
    driver.finish()


def test_flags_keep_no_volume(driver: Driver) -> None:
    """A volume with files that can't be removed (chattr(1)) is deleted all the same."""
    driver.create("first")
    root = next((driver.state / "stores").iterdir()) / "mnt"
    (root / "first/below").mkdir()
    (root / "first/below/file").write_text("kept")
    (root / "first/below/link").symlink_to("file")
    for name, flag in (("below/file", "+i"), ("below", "+a"), ("", "+i")):
        subprocess.run(["chattr", flag, root / "first" / name], check=True)
    driver.delete("first")
    assert os.listdir(root / ".csi/retired") == []
    assert list(driver.list_volumes().entries) == []
    driver.finish()

"""F3, T1: what scripts are told (`--json`), and days of trash that change under a running mount."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.faults.program import Volume, is_mounted, needs_mounts, slicefs, succeed


def _told(*words: str | Path) -> Any:
    return json.loads(succeed(*words, "--json"))


@needs_mounts
def test_f3_frames_of_a_live_volume(embedded: Volume) -> None:
    """O4: blocks that are written from then on have them, and all of them are read."""
    embedded.format("--frame-size", "64KiB")
    mount = embedded.mount("--pack-below", "0")
    data = os.urandom(1 << 20)

    def written(name: str) -> tuple[int, int]:
        """Version and log2 of the frames of a new file's block."""
        before = set(embedded.objects())
        (mount.path / name).write_bytes(data)
        (block,) = set(embedded.objects()) - before
        head = block.read_bytes()[:8]
        return head[4], head[7]

    assert written("first") == (1, 16)
    assert _told("config", embedded.meta, "--frame-size", "4KiB")["frame_bytes"] == 4096
    (mount.path / "heard").write_bytes(b"")
    assert written("second") == (3, 12)
    assert _told("config", embedded.meta, "--frame-size", "32KiB")["version"] == 3
    (mount.path / "heard").unlink()
    assert written("third") == (3, 15)
    mount.umount()
    mount = embedded.mount("--pack-below", "0")
    for name in ("first", "second", "third"):
        with (mount.path / name).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            assert os.pread(file.fileno(), 5000, 700_000) == data[700_000:705_000]
            assert os.pread(file.fileno(), len(data), 0) == data
    embedded.end()


@needs_mounts
def test_f3_trash_days_of_a_live_volume(embedded: Volume) -> None:
    """T1: the mount follows at once, both ways; fewer than 0 is refused, and changes nothing."""
    embedded.format()
    mount = embedded.mount()
    trash = mount.path / ".trash"

    def deleted(name: str) -> bool:
        """Whether a file that is deleted now can be found in the trash."""
        (mount.path / name).write_bytes(b"x")
        (mount.path / name).unlink()
        return any(name in each.name for hour in trash.iterdir() for each in hour.iterdir())

    assert not deleted("first")
    assert _told("config", embedded.meta, "--trash-days", "3")["trash_days"] == 3
    assert deleted("second")
    refused = slicefs("config", embedded.meta, "--trash-days", "-1")
    assert refused.code != 0
    assert len(refused.err.splitlines()) == 1
    assert "-1" in refused.err
    assert _told("config", embedded.meta)["trash_days"] == 3
    assert _told("config", embedded.meta, "--trash-days", "0")["trash_days"] == 0
    assert not deleted("third")
    embedded.end()


@needs_mounts
def test_what_commands_tell_scripts(embedded: Volume, tmp_path: Path) -> None:
    embedded.format()
    mount = embedded.mount()
    (mount.path / "file").write_bytes(b"x" * 5000)
    path = str(mount.path / "file")
    assert _told("flush", path) == {"paths": [path], "files": [{"path": path, "stored": True}]}
    file = tmp_path / "volume.dump"
    dumped = _told("dump", embedded.meta, file)
    assert (dumped["file"], dumped["inodes"]) == (str(file), 2)
    copy = f"sqlite://{tmp_path}/copy.db"
    loaded = _told("load", copy, file, "--verify")
    assert loaded == {
        "meta": copy,
        "file": str(file),
        "volume": "testvol",
        "verified": True,
        "problems": [],
    }
    refused = slicefs("dump", embedded.meta, "-", "--json")
    assert refused.code != 0
    assert refused.err == (
        "slicefs: --json and the dump would both go to standard output: name a file\n"
    )
    ended = _told("umount", mount.path)
    assert ended == {
        "mountpoint": str(mount.path),
        "volume": "testvol",
        "unstored": None,
        "lost": None,
    }
    assert not is_mounted(mount.path)
    embedded.end()

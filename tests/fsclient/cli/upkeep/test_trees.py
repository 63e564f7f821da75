"""R1: `slicefs rmr`, `summary` and `info -r` on a real mount, and what they never touch."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from fsclient.trees.remove import _TreeRemover, remove
from fsclient.trees.walk import Dir, Failures, Walk
from fsmeta.runtime import SystemRuntime
from tests.faults.program import Volume, needs_mounts, slicefs, succeed


def _fill(top: Path) -> None:
    """Three directories, 451 files and a link out of the tree."""
    (top / "a" / "b").mkdir(parents=True)
    for number in range(450):
        (top / "a" / "b" / f"f{number}").touch()
    (top / "large").write_bytes(b"x" * 100_000)
    os.link(top / "large", top / "again")
    (top / "out").symlink_to("/etc")


@needs_mounts
def test_trees_are_counted_and_removed(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount()
    top = mount.path / "top"
    _fill(top)
    told = json.loads(succeed("summary", "--depth", "1", "--entries", "2", top, "--json"))
    assert (told["files"], told["directories"], told["bytes"]) == (453, 3, 100_000)
    assert told["parts"][0]["path"] in (f"{top}/large", f"{top}/again")
    assert len(told["parts"]) == 2
    assert succeed("summary", top).splitlines()[0].split() == [
        "space",
        "size",
        "files",
        "dirs",
        "path",
    ]
    info = json.loads(succeed("info", "-r", top, "--json"))
    assert (info["path"], info["below"]["files"]) == (str(top), 453)
    beside = embedded.base / "beside"
    beside.mkdir()
    (beside / "kept").touch()
    (top / "mounted").mkdir()
    subprocess.run(["mount", "--bind", beside, top / "mounted"], check=True)
    try:
        done = slicefs("rmr", top)
        assert done.code == 1
        assert "another file system is mounted here; it is left alone" in done.err
        assert (beside / "kept").exists()
    finally:
        subprocess.run(["umount", "-l", top / "mounted"], check=True)
    assert sorted(os.listdir(top)) == ["mounted"]
    assert succeed("rmr", top) == "0 files, 2 directories removed\n"
    assert not top.exists()
    assert "does not exist" in slicefs("rmr", top).err
    assert "is a mount: name what is to be removed" in slicefs("rmr", mount.path).err
    assert "is not on a SliceFS mount: use `rm -r`" in slicefs("rmr", beside).err
    assert (beside / "kept").exists()
    embedded.end()


class _Swapping(_TreeRemover):
    """Exchanges a directory below for a symlink before it is entered, as an attacker would."""

    def __init__(self, trap: Path, target: Path) -> None:
        super().__init__(SystemRuntime())
        self._trap = trap
        self._target = target

    def entries(self, where: Dir, names: Sequence[str]) -> None:
        super().entries(where, names)
        if "bait" in names:
            self._trap.rename(self._trap.with_name("moved"))
            self._trap.symlink_to(self._target)


def test_a_link_that_is_swapped_under_rmr_is_not_followed(tmp_path: Path) -> None:
    """With one thread the directory's files come before the directories below it are entered."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").touch()
    top = tmp_path / "top"
    (top / "trap").mkdir(parents=True)
    (top / "trap" / "file").touch()
    (top / "bait").touch()
    runtime = SystemRuntime()
    failures = Failures(runtime)
    Walk(_Swapping(top / "trap", target), runtime, failures, 1).run(str(top))
    assert (target / "kept").exists()
    assert failures.count >= 1
    assert remove([str(top)], runtime).failed == 0
    assert not top.exists()
    assert (target / "kept").exists()


@needs_mounts
def test_a_file_is_compacted_when_asked(embedded: Volume) -> None:
    """Twelve times the same 64 KiB: most bytes are hidden, in fewer commits than mounts look at."""
    embedded.format()
    mount = embedded.mount()
    (mount.path / "d").mkdir()
    path = mount.path / "d" / "file"
    for number in range(12):
        with path.open("r+b" if number else "wb") as file:
            file.write(b"%c" % (65 + number) * (64 << 10))
            file.flush()
            os.fsync(file.fileno())
    told = json.loads(succeed("compact", mount.path / "d", "--json"))
    assert (told["files"], told["chunks"], told["failed"]) == (1, 1, 0)
    assert told["compacted"] == 1
    (chunk,) = json.loads(succeed("info", path, "--json"))["chunks"]
    assert len(chunk["slices"]) == 1
    assert path.read_bytes() == b"L" * (64 << 10)
    assert succeed("compact", path) == "1 files, 0 of 1 chunks rewritten\n"
    assert "is not on a SliceFS mount" in slicefs("compact", embedded.base).err
    embedded.end()

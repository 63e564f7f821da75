"""O6, R1: `slicefs gc --pack` on real volumes: small files that nobody has packed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from fsclient.cli.upkeep.gc import PackReport
from tests.faults.load import content
from tests.faults.program import SLICEFS, Mount, Volume, needs_mounts, slicefs, succeed, wait_until
from tests.fsclient.cli.upkeep.test_gc import end_sessions
from tests.support import waiting

pytestmark = needs_mounts
FILES = 60


def pack(volume: Volume, *options: str) -> Any:
    found = json.loads(succeed("gc", volume.meta, "--pack", "--json", *options))
    return PackReport(*(found[name] for name in PackReport._fields))


def write(folder: Path, count: int = FILES) -> dict[str, bytes]:
    """Small files, as a mount leaves them that does not pack."""
    folder.mkdir(exist_ok=True)
    files = {f"f{number}": content(number, 3000 + number) for number in range(count)}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return files


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def segments(mount: Mount, folder: str) -> set[int]:
    """In which slices the files are."""
    found = set()
    for path in (mount.path / folder).iterdir():
        info = json.loads(os.getxattr(path, "user.slicefs.info"))
        found |= {piece["id"] for chunk in info["chunks"] for piece in chunk["slices"]}
    return found


def test_o6_files_that_nobody_has_packed(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount("--pack-below", "0")
    files = write(mount.path / "small")
    (mount.path / "large").write_bytes(content(1, 600_000))
    mount.umount()
    assert len(embedded.objects()) == FILES + 1
    assert pack(embedded)[:4] == (FILES, 1, 0, 0)
    assert len(embedded.objects()) == 2, "nobody else was there: what they were is deleted"
    assert pack(embedded)[:4] == (0, 0, 0, 0)
    assert "packed      0 files into 0 blocks" in succeed("gc", embedded.meta, "--pack")
    mount = embedded.mount()
    assert read(mount.path / "small") == files
    assert len(segments(mount, "small")) == 1
    mount.umount()
    assert embedded.fsck("--data")["leaked_objects"] == 0
    embedded.end()


def test_o6_a_dead_client_keeps_its_files_until_its_end(embedded: Volume) -> None:
    """Whoever holds ids back may be in doubt: what it wrote is left, and its name is said."""
    embedded.format()
    mount = embedded.mount("--pack-below", "0", "--no-supervisor")
    files = write(mount.path / "small")
    mount.kill()
    found = pack(embedded)
    assert found[:4] == (0, 0, FILES, 0)
    assert f"pid {mount.pid}" in found.packing_held_by
    assert "because of session" in succeed("gc", embedded.meta, "--pack")
    end_sessions(embedded)
    assert pack(embedded)[:4] == (FILES, 1, 0, 0)
    mount = embedded.mount()
    assert read(mount.path / "small") == files
    mount.umount()
    assert embedded.fsck("--data")["leaked_objects"] == 0
    embedded.end()


def test_o6_what_clones_share_is_left(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount("--pack-below", "0")
    files = write(mount.path / "small")
    for name in ("f1", "f2", "f3"):
        path, size = mount.path / "small" / name, len(files[name])
        with path.open("rb") as source, Path(f"{path}.copy").open("wb") as copy:
            assert os.copy_file_range(source.fileno(), copy.fileno(), size, 0, 0) == size
        files[f"{name}.copy"] = files[name]
    mount.umount()
    assert pack(embedded)[:4] == (FILES - 3, 1, 0, 6)
    mount = embedded.mount()
    assert read(mount.path / "small") == files
    mount.umount()
    assert embedded.fsck("--data")["leaked_objects"] == 0
    embedded.end()


def test_o6_packed_beside_a_mount_that_reads_and_writes(served: Volume) -> None:
    served.format()
    mount = served.mount("--pack-below", "0", "--heartbeat", "0.3")
    files = write(mount.path / "small")
    with (mount.path / "small/f0").open("rb") as reader:
        assert reader.read(100) == files["f0"][:100]
        deadline = time.monotonic() + 100
        left, recent = len(files), 1
        while recent:  # the floor may rise in the middle of the files, and one alone is not packed
            report = pack(served)
            left += report.segments_made - report.packed_files
            recent = report.recent_files
            assert time.monotonic() < deadline, "the mount's floor does not rise"
        assert left <= len(files) / 2
        wait_until("deletion", 100, lambda: len(served.objects()) == left)
        assert reader.read() == files["f0"][100:]
        for name in ("f1", "f2"):
            with (mount.path / "small" / name).open("ab") as file:
                file.write(b"more")
            files[name] += b"more"
        assert read(mount.path / "small") == files
    mount.umount()
    assert served.fsck("--data")["leaked_objects"] == 0
    served.end()


def test_o6_packing_with_a_cursor_goes_on_where_it_was_killed(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount("--pack-below", "0")
    files = write(mount.path / "small", 2000)
    mount.umount()
    cursor = embedded.base / "cursor"
    words = ["gc", embedded.meta, "--pack", "--delete", "--age", "0", "--cursor", str(cursor)]
    dice, killed = random.Random(5), 0
    for _ in range(3):
        process = subprocess.Popen([SLICEFS, *words], stdout=subprocess.DEVNULL)
        waiting.wait_until(lambda: cursor.exists() or process.poll() is not None, 100)  # noqa: B023
        time.sleep(dice.random() * 0.2)
        process.kill()
        killed += process.wait() == -signal.SIGKILL
        end_sessions(embedded)  # what others do after a minute
    assert killed, "it was never in the midst of its work"
    pack(embedded, "--delete", "--age", "0", "--cursor", str(cursor))
    found = pack(embedded)
    assert (found.packed_files, found.recent_files) == (0, 0), "all were packed by then"
    mount = embedded.mount()
    assert read(mount.path / "small") == files
    mount.umount()
    json.loads(succeed("gc", embedded.meta, "--delete", "--age", "0", "--json"))
    assert embedded.fsck("--data")["leaked_objects"] == 0
    embedded.end()


def test_o6_a_damaged_file_is_named_and_left(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount("--pack-below", "0")
    files = write(mount.path / "small")
    ino = (mount.path / "small/f7").stat().st_ino
    mount.umount()
    (lost,) = [path for path in embedded.objects() if path.name.endswith(f"_{len(files['f7'])}")]
    lost.unlink()
    done = slicefs("gc", embedded.meta, "--pack", "--json")
    assert done.code == 1
    assert f"slicefs: inode {ino} is not packed: " in done.err
    assert json.loads(done.out)["packed_files"] == FILES - 1
    assert json.loads(done.out)["unreadable_files"] == 1
    mount = embedded.mount()
    (mount.path / "small/f7").unlink()
    del files["f7"]
    assert read(mount.path / "small") == files
    mount.umount()
    embedded.end()


def test_bad_input(embedded: Volume) -> None:
    embedded.format()
    for options in (["--pack-below", "1KiB"], ["--pack", "--pack-below", "0"]):
        done = slicefs("gc", embedded.meta, *options)
        assert done.code == 1
        assert "--pack-below is for a run with --pack, and more than 0" in done.err
        assert done.err.count("\n") == 1

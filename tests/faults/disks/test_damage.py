"""O4: corrupt metadata makes a mount read-only, wrong objects are EIO, never data."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fsmeta.schema import keys
from tests.faults.load import content
from tests.faults.program import Mount, Volume, needs_mounts, slicefs

pytestmark = needs_mounts

SIZE = 1_000_000
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "head": lambda data: bytes((data[0] ^ 1,)) + data[1:],
    "middle": lambda data: (
        data[: SIZE // 2] + bytes((data[SIZE // 2] ^ 0x80,)) + data[SIZE // 2 + 1 :]
    ),
    "end": lambda data: data[:-1] + bytes((data[-1] ^ 1,)),
    "shorter": lambda data: data[:-4096],
    "longer": lambda data: data + bytes(4096),
    "empty": lambda data: data[:0],
    "other": lambda data: data[:200] + data[4296:] + data[200:4296],
}


def with_files(volume: Volume) -> dict[str, bytes]:
    """A volume with three files, not mounted."""
    volume.format()
    mount = volume.mount()
    files = {name: content(ord(name), SIZE) for name in "abc"}
    for name, data in files.items():
        (mount.path / name).write_bytes(data)
    mount.umount()
    return files


def object_of(mount: Mount, name: str, volume: Volume) -> Path:
    """The file that holds the only block of a file."""
    found = json.loads(os.getxattr(mount.path / name, "user.slicefs.info"))
    sid = found["chunks"][0]["slices"][0]["id"]
    [path] = [path for path in volume.objects() if path.name.startswith(f"{sid}_")]
    return path


def is_eio(act: Callable[[], object]) -> None:
    with pytest.raises(OSError, match="Input/output error") as caught:
        act()
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("field", [b"a", b"v", keys.chunk_field(0)])
def test_corrupt_inode(embedded: Volume, field: bytes) -> None:
    files = with_files(embedded)
    mount = embedded.mount()
    ino = (mount.path / "b").stat().st_ino
    mount.umount()
    row = keys.inode_row(ino)
    right = embedded.value(row, field)
    embedded.set_value(row, field, b"\xff" + right[:-1])
    mount = embedded.mount()
    (mount.path / "before").write_text("all is well")
    is_eio((mount.path / "b").read_bytes)
    for act in (
        lambda: (mount.path / "new").touch(),
        lambda: (mount.path / "a").write_bytes(b""),
        lambda: (mount.path / "a").unlink(),
        lambda: (mount.path / "a").rename(mount.path / "z"),
        lambda: (mount.path / "a").chmod(0o600),
        lambda: (mount.path / "d").mkdir(),
    ):
        with pytest.raises(OSError, match="Read-only") as caught:
            act()
        assert caught.value.errno == errno.EROFS
    assert (mount.path / "a").read_bytes() == files["a"]
    assert (mount.path / "before").read_text() == "all is well"
    assert mount.numbers()["read_only"] == 1
    mount.umount()
    assert any(f"row {row!r}" in line and "read-only" in line for line in embedded.complaints())
    done = slicefs("fsck", embedded.meta)
    assert done.code == 4
    assert f"problem: inode {ino}: corrupt metadata" in done.err
    embedded.set_value(row, field, right)
    assert (embedded.mount().path / "b").read_bytes() == files["b"]
    embedded.end(r"Corrupt: corrupt metadata|read-only from now on")


@pytest.mark.parametrize("damage", sorted(DAMAGE))
def test_damaged_object(embedded: Volume, damage: str) -> None:
    files = with_files(embedded)
    mount = embedded.mount()
    block = object_of(mount, "b", embedded)
    right = block.read_bytes()
    block.write_bytes(DAMAGE[damage](right))
    is_eio((mount.path / "b").read_bytes)
    assert mount.numbers()["blocks_damaged_total"] >= 1
    others_are_fine(mount, files)
    done = slicefs("fsck", "--data", embedded.meta)
    assert done.code == 4, done
    assert f"problem: object {block.relative_to(embedded.bucket / 'testvol')}" in done.err
    block.write_bytes(right)
    assert (mount.path / "b").read_bytes() == files["b"]
    embedded.end("ObjectDamaged: ")


def test_missing_object(embedded: Volume) -> None:
    files = with_files(embedded)
    mount = embedded.mount()
    block = object_of(mount, "b", embedded)
    right = block.read_bytes()
    block.unlink()
    is_eio((mount.path / "b").read_bytes)
    assert mount.numbers()["blocks_missing_total"] >= 1
    others_are_fine(mount, files)
    done = slicefs("fsck", embedded.meta)
    assert done.code == 4, done
    name = block.relative_to(embedded.bucket / "testvol")
    assert f"problem: object {name} is missing: /b\n" in done.err
    block.write_bytes(right)
    assert (mount.path / "b").read_bytes() == files["b"]
    embedded.end("ObjectMissing: ")


@pytest.mark.parametrize("command", ["fsck", "scrub"])
@pytest.mark.parametrize("spread", [("--hash-prefix",), ("--shards", "3", "--hash-prefix")])
def test_r1_a_missing_object_is_named_as_the_store_has_it(
    base: Path, command: str, spread: tuple[str, ...]
) -> None:
    """fsck named a key without its prefix, and no file."""
    bucket = base / "bucket"
    place = f"{bucket}-%d" if "--shards" in spread else f"{bucket}"
    volume = Volume(base, place=("--bucket", place))
    volume.format(*spread)
    mount = volume.mount()
    (mount.path / "dir").mkdir()
    (mount.path / "dir/file").write_bytes(b"data")
    mount.umount()
    [block] = [path for path in base.glob("bucket*/testvol/?/chunks/**/*") if path.is_file()]
    right = block.read_bytes()
    block.unlink()
    done = slicefs(command, volume.meta)
    assert done.code == (4 if command == "fsck" else 3), done
    name = block if "--shards" in spread else block.relative_to(bucket / "testvol")
    assert f"problem: object {name} is missing: /dir/file\n" in done.err
    block.write_bytes(right)
    volume.end()


def others_are_fine(mount: Mount, files: dict[str, bytes]) -> None:
    """The rest can be read, and written."""
    for name in "ac":
        assert (mount.path / name).read_bytes() == files[name]
    (mount.path / "new").write_bytes(files["b"])
    assert (mount.path / "new").read_bytes() == files["b"]
    assert mount.numbers()["read_only"] == 0

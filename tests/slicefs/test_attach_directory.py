"""X2: the files of a directory of the host as files of a volume, without a copy."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from fsdata.attached.directory import ALLOWED_ENV, file_etag
from fsmeta.errors import ConfigError
from slicefs.client.client import Client
from slicefs.lifecycle.attach import AttachReport, attach
from tests.faults.program import slicefs
from tests.posix.volumes import Volume, can_mount
from tests.slicefs.attached_objects import BIG, code_of, found

needs_mount = pytest.mark.skipif(not can_mount(), reason="mounting takes root and /dev/fuse")
FILES = {
    "a/b/two": b"22",
    "a/one": b"1" * 1000,
    "a-b": b"x",
    "big": BIG,
    "empty": b"",
    "50%": b"percent",
    "\udcff": b"no UTF-8",
}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with files, which clients may read."""
    root = tmp_path / "host"
    for name, data in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (root / "no files").mkdir()
    monkeypatch.setenv(ALLOWED_ENV, f"/nothing:{root}")
    return root


@needs_mount
def test_files_are_read_through_a_mount(host: Path, volume: Volume) -> None:
    root = volume.mount()
    report = attach(f"file://{host}", str(root / "data"))
    assert report == AttachReport(len(FILES), 0, 0, 0, 0, ())
    assert found(root / "data") == FILES
    assert (root / "data/no files").is_dir()
    assert (root / "data/big").stat().st_blocks == 0
    with (root / "data/big").open("rb") as file:
        assert os.pread(file.fileno(), 100, 8_000_000) == BIG[8_000_000:8_000_100]
    with (root / "data/big").open("r+b") as file:
        file.write(b"own")
    assert (root / "data/big").read_bytes() == b"own" + BIG[3:]
    assert (host / "big").read_bytes() == BIG


@needs_mount
def test_a_changed_file_is_stale_until_the_next_scan(host: Path, volume: Volume) -> None:
    root = volume.mount()
    attach(f"file://{host}", str(root / "data"))
    before = (host / "big").stat()
    with (host / "big").open("r+b") as file:
        file.write(b"other")
    os.utime(host / "big", ns=(before.st_atime_ns, before.st_mtime_ns))  # as an archiver does
    (host / "a-b").unlink()
    (host / "a/one").rename(host / "a/three")
    (host / "new").write_bytes(b"new")
    for name in ("big", "a-b", "a/one"):
        assert code_of((root / "data" / name).read_bytes) == errno.ESTALE
    again = attach(f"file://{host}", str(root / "data"))
    assert again == AttachReport(2, 1, 2, 4, 0, ())
    assert found(root / "data") == found(host)


def test_symlinks_are_not_followed(host: Path, volume: Volume, fs: Client) -> None:
    (host / "link").symlink_to("/etc/hostname")
    (host / "folder").symlink_to("/etc")
    os.mkfifo(host / "pipe")
    report = attach(f"file://{host}", f"{volume.meta}#set")
    assert (report.made, report.skipped) == (len(FILES), 3)
    assert sorted(report.examples) == ["folder", "link", "pipe"]
    (host / "big").rename(host / "kept")
    (host / "big").symlink_to("kept")
    with fs.open("set/big") as file:
        assert code_of(file.read) == errno.ESTALE


def test_a_client_reads_below_allowed_directories_only(
    host: Path, volume: Volume, fs: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(f"file://{host}", f"{volume.meta}#set")
    for allowed in ("", f"{host}/a:{host}2"):
        monkeypatch.setenv(ALLOWED_ENV, allowed)
        with Client(volume.meta, uid=0, gid=0) as client, client.open("set/a/one") as file:
            assert code_of(file.read) == errno.EIO
    monkeypatch.setenv(ALLOWED_ENV, str(host.parent))
    with fs.open("set/a/one") as file:
        assert file.read() == FILES["a/one"]
    # a record that leads out of its directory, as root of a container could write it
    outside = host.parent / "secret"
    outside.write_bytes(b"secret")
    etag = file_etag(outside.stat())
    wish = {"endpoint": "file://", "region": "", "bucket": f"{host}"}
    names = ["../secret", "a/../../secret", str(outside)]
    files = [[f"n{at}", name, etag, 6, 0] for at, name in enumerate(names)]
    fs.setxattr("/set", "user.slicefs.attach", json.dumps({**wish, "files": files}).encode())
    for at in range(len(names)):
        with fs.open(f"set/n{at}") as file:
            assert code_of(file.read) == errno.ESTALE


@needs_mount
def test_what_can_not_be_attached(host: Path, volume: Volume) -> None:
    root = volume.mount()
    (root / "inside").mkdir()
    for url, why in (
        (f"file://{host}/nothing", "is no directory"),
        (f"file://{host}/big", "is no directory"),
        (f"file://{root}/inside", "on a SliceFS mount"),
    ):
        with pytest.raises(ConfigError, match=why):
            attach(url, str(root / "data"))
    assert os.listdir(root) == ["inside"]


def test_another_attachment_of_the_same_directory_stays(host: Path, volume: Volume) -> None:
    """Files of one further down were taken for files of objects that are gone."""
    for place in ("below/twice", ""):
        attach(f"file://{host}", f"{volume.meta}#{place}")
    with Client(volume.meta) as client:
        for place in ("below/twice", "/"):
            assert {"big"} <= set(client.listdir(place))
    assert attach(f"file://{host}", f"{volume.meta}#").removed == 0


def test_a_path_that_is_on_no_mount_is_refused(host: Path, tmp_path: Path) -> None:
    """ext4 takes any `user.` xattr, so files seemed to be made there."""
    for path in (tmp_path, tmp_path / "new/deep"):
        with pytest.raises(ConfigError, match="is not on a SliceFS mount"):
            attach(f"file://{host}", str(path))
    assert os.listdir(tmp_path) == ["host"]
    assert os.listxattr(tmp_path) == []


def test_the_command_says_what_it_skips(host: Path, volume: Volume) -> None:
    (host / "link").symlink_to("big")
    done = slicefs("attach", f"file://{host}", f"{volume.meta}#set")
    assert done.code == 1
    assert done.err.splitlines()[0] == "skipped: link"
    assert "1 skipped: symlinks and devices" in done.err

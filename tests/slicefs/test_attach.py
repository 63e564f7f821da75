"""X2: the objects of a bucket as files, without a copy."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import slicefs
from fsmeta.admin.snapshots import Taker
from fsmeta.errors import ConfigError, Corrupt
from fsmeta.schema import inode
from fsmeta.types import ROOT_CALLER, AttachedObject, Ino
from slicefs.client.client import Client
from slicefs.lifecycle.attach import TEMPORARY, AttachReport, attach
from slicefs.stores.tree import Tree
from tests.posix.volumes import Volume, can_mount, run
from tests.slicefs.attached_objects import BIG, OBJECTS, code_of, found
from tests.support.ceph_cluster import CephCluster
from tests.support.http_proxy import Fault, HttpProxy, Kind

needs_mount = pytest.mark.skipif(not can_mount(), reason="mounting takes root and /dev/fuse")


def test_golden_bytes() -> None:
    """A difference here is a new format: see docs/FORMAT.md."""
    shown = AttachedObject("http://h", "", "b", "k", "e")
    record = bytes.fromhex(
        "85 a8 656e64706f696e74 a8 687474703a2f2f68 a6 726567696f6e a0"
        "a6 6275636b6574 a1 62 a3 6b6579 a1 6b a4 65746167 a1 65"
    )
    assert inode.pack_object(shown) == record
    assert inode.unpack_object(Ino(1), record) == shown
    with pytest.raises(Corrupt):
        inode.unpack_object(Ino(1), inode.pack_object(shown._replace(etag="")))


@needs_mount
def test_objects_are_read_through_every_mount(source: Tree, volume: Volume) -> None:
    one, two = volume.mount("one"), volume.mount("two")
    assert attach(source.url, str(one / "data")) == AttachReport(len(OBJECTS), 0, 0, 0, 0, ())
    assert found(one / "data") == found(two / "data") == OBJECTS
    big = one / "data/big"
    assert (big.stat().st_size, big.stat().st_blocks) == (len(BIG), 0)
    with big.open("rb") as file:
        assert os.lseek(file.fileno(), 5, os.SEEK_DATA) == 5
        assert os.lseek(file.fileno(), 5, os.SEEK_HOLE) == len(BIG)
        assert os.pread(file.fileno(), 100, 8_000_000) == BIG[8_000_000:8_000_100]
    shutil.copyfile(big, two / "copy")  # by copy_file_range(2), where that shares slices
    assert (one / "copy").read_bytes() == BIG
    assert (one / "copy").stat().st_blocks > 0


@needs_mount
def test_attached_files_are_renamed_linked_and_removed(source: Tree, volume: Volume) -> None:
    root = volume.mount()
    attach(source.url, str(root / "data"))
    path = root / "data/a/one"
    path.chmod(0o600)
    path.rename(root / "moved")
    os.link(root / "moved", root / "linked")
    assert (root / "linked").read_bytes() == OBJECTS["a/one"]
    (root / "moved").unlink()
    shutil.rmtree(root / "data")
    assert source.read("a/one") == OBJECTS["a/one"]  # nothing of ours deletes it
    assert source.read("big") == BIG


@needs_mount
def test_a_changed_object_is_stale_until_the_next_scan(source: Tree, volume: Volume) -> None:
    root = volume.mount()
    attach(source.url, str(root / "data"))
    (root / "data/own").write_bytes(b"mine")
    with (root / "data/big").open("rb", buffering=0) as held:
        assert os.pread(held.fileno(), 10, 0) == BIG[:10]
        source.write_atomic("big", (BIG[::-1],))  # as long as it was
        source.remove("a-b")
        source.remove("a/b/two")
        source.write_atomic("new/file", (b"new",))
        assert code_of(lambda: os.pread(held.fileno(), 10, 8_500_000)) == errno.ESTALE
        assert code_of((root / "data/a-b").read_bytes) == errno.ESTALE
        assert attach(source.url, str(root / "data")) == AttachReport(1, 1, 2, 3, 0, ())
        # this handle is of the old object
        assert code_of(lambda: os.pread(held.fileno(), 10, 8_700_000)) == errno.ESTALE
    kept = {path: data for path, data in OBJECTS.items() if path not in ("a-b", "a/b/two")}
    assert found(root / "data") == {**kept, "big": BIG[::-1], "new/file": b"new", "own": b"mine"}
    assert not (root / "data/a/b").exists()
    again = attach(source.url, str(root / "data"))
    assert again == AttachReport(0, 0, 0, 5, 0, ())


def test_a_client_attaches_and_reads_without_a_mount(
    source: Tree, volume: Volume, fs: Client
) -> None:
    report = slicefs.attach(source.url, f"{volume.meta}#set")
    assert report.made == len(OBJECTS)
    paths = [f"set/{name}" for name in OBJECTS]
    assert [bytes(each) for each in fs.read_many(paths)] == list(OBJECTS.values())
    assert [bytes(part) for part in fs.read_many([("set/big", 4_000_000, 4_500_000)])] == [
        BIG[4_000_000:4_500_000]
    ]
    with fs.open("set/big") as file:
        assert file.read() == BIG
    shown = json.loads(run("config", volume.meta, "--json"))
    assert shown["version"] == 4  # what knows only 3 would show zeros


def test_snapshots_clones_and_dumps_have_the_same_objects(
    source: Tree, volume: Volume, fs: Client, tmp_path: Path
) -> None:
    attach(source.url, f"{volume.meta}#set")
    meta = fs.connection().meta
    taker = Taker(meta, ROOT_CALLER, meta.now_ns, lambda: False)
    assert taker.take(fs.view().find("set").ino, b"one").changed == 0
    fs.rmtree("set/a")
    with fs.open("set/.snapshots/one/a/one") as file:
        assert file.read() == OBJECTS["a/one"]
    run("dump", volume.meta, tmp_path / "dump")
    other = f"sqlite://{tmp_path}/other.db"
    run("load", other, tmp_path / "dump")
    assert not json.loads(run("fsck", other, "--json"))["problems"]
    with Client(other, uid=0, gid=0) as loaded, loaded.open("set/big") as file:
        assert file.read() == BIG


def test_only_root_attaches(fs: Client, as_user: Callable[[int], Client]) -> None:
    wish = {"endpoint": "", "region": "", "bucket": "b", "files": [["n", "k", "e", 1, 0]]}
    fs.mkdir("open", 0o777)
    fs.chmod("open", 0o777)
    with pytest.raises(PermissionError):
        as_user(1000).setxattr("open", "user.slicefs.attach", json.dumps(wish).encode())
    assert fs.listdir("open") == []


@pytest.mark.parametrize(
    "value",
    [b"", b"[]", b'{"endpoint":"","region":"","bucket":"b","files":[]}',
     b'{"endpoint":"","region":"","bucket":"b","files":[["a/b","k","e",1,0]]}',
     b'{"endpoint":"","region":"","bucket":"b","files":[["n","k","",1,0]]}'],
)  # fmt: skip
def test_what_is_no_list_of_objects_makes_nothing(fs: Client, value: bytes) -> None:
    assert code_of(lambda: fs.setxattr("/", "user.slicefs.attach", value)) == errno.EINVAL
    assert fs.listdir("/") == []


def test_names_that_are_taken_or_unusable_are_reported(
    source: Tree, volume: Volume, fs: Client
) -> None:
    source.write_atomic("big/below", (b"x",))  # a name and a directory at once
    source.write_atomic("n" * 256, (b"x",))
    fs.makedirs("set")
    with fs.open("set/a-b", "wb") as file:
        file.write(b"own")
    with fs.open(f"set/{TEMPORARY}1", "wb") as file:
        file.write(b"own, too")
    report = attach(source.url, f"{volume.meta}#set")
    assert (report.made, report.skipped) == (len(OBJECTS) - 1, 2)
    assert [each.rpartition("/")[2] for each in report.kept_examples] == ["a-b"]
    assert [each.rpartition("/")[2][:3] for each in report.examples] == ["nnn", "big"]
    with fs.open("set/a-b") as file:
        assert file.read() == b"own"
    with fs.open("set/big/below") as file:
        assert file.read() == b"x"


def test_a_store_that_is_busy_is_asked_again(
    source: Tree, volume: Volume, fs: Client, monkeypatch: pytest.MonkeyPatch, ceph: CephCluster
) -> None:
    with HttpProxy(ceph.s3_port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        attach(source.url, f"{volume.meta}#set")
        proxy.add(Fault(Kind.STATUS, 3, method="GET"))
        with fs.open("set/a/one") as file:
            assert file.read() == OBJECTS["a/one"]


def test_what_is_no_bucket_is_not_attached(volume: Volume, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only s3://"):
        attach(str(tmp_path), f"{volume.meta}#set")


def test_a_bucket_that_is_not_there_leaves_nothing(
    source: Tree, volume: Volume, fs: Client
) -> None:
    assert source.url.startswith("s3://")  # the fixture names the server
    with pytest.raises(ConfigError, match=r"slicefs-not-there.*no such bucket.*check its name"):
        attach("s3://slicefs-not-there/x", f"{volume.meta}#set")
    assert fs.listdir("/") == []

"""A1, A6: directories, volumes and buckets are the same kind of tree."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fsmeta.errors import ConfigError
from slicefs.checkpoint.manager import StepManager
from slicefs.lifecycle.move import OpenTrees
from slicefs.stores import s3
from slicefs.stores.opening import open_tree
from slicefs.stores.s3 import BucketTree, Links
from slicefs.stores.tree import Buffer, Entry, Tree
from tests.support.ceph_cluster import ACCESS_KEY, SECRET_KEY, CephCluster

NAMES = ("a", "a-b", "a.d/x", "a/b", "a0", "dir/one", "dir/sub/two", "é/ü", "odd \udcff name")


def write(tree: Tree, path: str, data: bytes = b"x") -> None:
    tree.write_atomic(path, (data,))


def test_a_file_is_read_as_it_was_written(tree: Tree) -> None:
    data = bytes(range(256)) * 1000
    tree.write_atomic("d/file", (data[:1000], data[1000:]))
    assert tree.read("d/file") == data
    assert tree.read("d/file", 10, 20) == data[10:20]
    assert tree.read("d/file", len(data) - 5, len(data) + 5) == data[-5:]
    assert tree.stat("d/file").size == len(data)
    assert tree.exists("d/file")
    assert tree.exists("d")
    assert not tree.exists("d/other")
    with tree.open_read("d/file") as file:
        file.seek(-300, 2)
        buffer = bytearray(400)
        assert file.readinto(buffer) == 300
        assert buffer[:300] == data[-300:]


def test_ranges_come_in_the_order_they_were_asked_for(tree: Tree) -> None:
    data = bytes(range(256)) * 100
    write(tree, "one", data)
    write(tree, "two", data[::-1])
    write(tree, "empty", b"")
    found = tree.read_ranges(
        ["two", ("one", 500, 600), ("one", 0, 3), "empty", ("one", 590, 10**6), ("one", 7, 7)]
    )
    wanted = [data[::-1], data[500:600], data[:3], b"", data[590:], b""]
    assert [bytes(each) for each in found] == wanted
    with pytest.raises(FileNotFoundError):
        tree.read_ranges(["one", "missing", "two"])


def test_a_listing_is_in_byte_order_and_goes_on_behind_a_path(tree: Tree) -> None:
    names = NAMES[:2] + NAMES[4:8] if tree.url.startswith("s3") else NAMES[1:]
    for name in names:
        write(tree, name, name.encode(errors="surrogateescape"))
    ordered = sorted(names, key=lambda name: name.encode(errors="surrogateescape"))
    listed = list(tree.list())
    assert [info.path for info in listed] == ordered
    assert all(info.size == len(info.path.encode(errors="surrogateescape")) for info in listed)
    assert [info.path for info in tree.list("dir/")] == ["dir/one", "dir/sub/two"]
    assert [info.path for info in tree.list("dir/s")] == ["dir/sub/two"]
    assert list(tree.list("nothing")) == []
    for name in ordered:
        behind = [info.path for info in tree.list("", after=name)]
        assert behind == ordered[ordered.index(name) + 1 :], name
    assert list(tree.list_dir("dir")) == [Entry("one", False, 7), Entry("sub", True)]


def test_a_listing_has_more_than_a_page_of_names(tree: Tree) -> None:
    for number in range(1003 if tree.url.startswith("s3") else 100):
        write(tree, f"many/{number:04}", b"")
    found = [info.path for info in tree.list("many/")]
    assert len(found) == len(set(found)) >= 100
    assert tree.remove_tree("many") == len(found)
    assert list(tree.list("many/")) == []


def test_what_is_not_closed_is_not_there(tree: Tree) -> None:
    write(tree, "file", b"old")
    writer = tree.writer("file")
    writer.write(b"new")
    assert tree.read("file") == b"old"
    writer.abort()
    assert tree.read("file") == b"old"

    def broken() -> Iterator[Buffer]:
        yield b"new"
        raise KeyError("the caller fails")

    with pytest.raises(KeyError):
        tree.write_atomic("file", broken())
    with pytest.raises(KeyError):
        tree.write_atomic("other", broken())
    assert [info.path for info in tree.list()] == ["file"]
    assert [entry.name for entry in tree.list_dir()] == ["file"]
    write(tree, "file", b"newer")
    assert tree.read("file") == b"newer"


def test_a_large_file_is_whole(tree: Tree) -> None:
    piece = bytes(range(256)) * 4096  # 1 MiB
    with tree.writer("large") as writer:
        for number in range(40):
            writer.write(piece[number:] + piece[:number])
    assert tree.stat("large").size == 40 << 20
    found = tree.read_ranges([("large", number << 20, (number + 1) << 20) for number in range(40)])
    for number, each in enumerate(found):
        assert each == piece[number:] + piece[:number]
    with tree.open_read("large") as file:
        buffer = bytearray(40 << 20)
        view, done = memoryview(buffer), 0
        while count := file.readinto(view[done:]):
            done += count
        assert done == len(buffer)
        assert buffer[3 << 20 : 4 << 20] == piece[3:] + piece[:3]
    part = tree.writer("aborted")
    for _ in range(20):
        part.write(piece)
    part.abort()
    assert not tree.exists("aborted")


def test_copies_renames_and_removals(tree: Tree) -> None:
    write(tree, "a/file", b"data")
    write(tree, "b/file", b"other")
    tree.copy("a/file", "c/copy")
    tree.rename("a/file", "b/file")
    assert [info.path for info in tree.list()] == ["b/file", "c/copy"]
    assert tree.read("b/file") == tree.read("c/copy") == b"data"
    tree.remove("c/copy")
    for verb in (tree.remove, tree.read, tree.stat):
        with pytest.raises(FileNotFoundError):
            verb("c/copy")
    with pytest.raises(FileNotFoundError):
        tree.copy("missing", "b/file")
    with pytest.raises(ValueError, match="leads out"):
        tree.read("../secret")


def test_a_tree_pickles(tree: Tree) -> None:
    write(tree, "file", b"data")
    again = pickle.loads(pickle.dumps(tree))
    assert again.read("file") == b"data"
    assert again.url == tree.url
    client = getattr(again, "client", None)
    if client is not None:
        client.close()
    again.close()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://host/x", "scheme 'ftp' is unknown"),
        ("s3://B/x", "no bucket can have this name"),
        ("r2://bucket/x", "set R2_ENDPOINT_URL or R2_ACCOUNT_ID"),
        ("file://relative", "three slashes"),
        ("slicefs://nowhere/x", "set SLICEFS_META_NOWHERE"),
        ("slicefs:///x", "no volume has this name"),
        ("", "names nothing"),
    ],
)
def test_a_wrong_url_is_one_line(url: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("R2_ENDPOINT_URL", "R2_ACCOUNT_ID", "SLICEFS_META_NOWHERE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLICEFS_VOLUMES", "/nonexistent")
    with pytest.raises(ConfigError) as caught:
        open_tree(url)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bucket_that_is_not_there_is_not_waited_for(s3_keys: None) -> None:
    """Nor is it a tree without files: a program would begin its training anew."""
    del s3_keys
    tree = open_tree("s3://slicefs-not-there/x")
    assert isinstance(tree, s3.S3Tree)
    calls: list[Callable[[], object]] = [
        lambda: list(tree.list("")),
        lambda: tree.stat("a"),
        lambda: tree.read("a"),
        lambda: tree.read_ranges([("a", 0, 20 << 20)]),
        lambda: write(tree, "a"),
        StepManager(tree).latest,
    ]
    for call in calls:
        with pytest.raises(OSError, match="there is no such bucket") as caught:
            call()
        assert not isinstance(caught.value, FileNotFoundError)
    assert tree.links().stack.retrying.repeats() == 0
    tree.close()


def test_a_volume_is_named_in_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = tmp_path / "volumes"
    profile.write_text("vol redis://:secret@host/1\nbad ftp://x\n")
    monkeypatch.setenv("SLICEFS_VOLUMES", str(profile))
    assert open_tree("slicefs://vol/data/x").url == "redis://host/1#data/x"
    with pytest.raises(ConfigError, match="is no metadata URL"):
        open_tree("slicefs://bad/data")


@pytest.mark.parametrize(
    ("scheme", "variable"), [("r2", "R2_ENDPOINT_URL"), ("gs", "GS_ENDPOINT_URL")]
)
def test_other_clouds_by_their_endpoints(
    scheme: str,
    variable: str,
    bucket: str,
    ceph: CephCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, ceph.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    tree = open_tree(f"{scheme}://{bucket}/{tmp_path.name}-{scheme}")
    data = bytes(range(256)) * (40 << 10)  # more than one part
    write(tree, "d/large", data)
    write(tree, "d/small")
    assert tree.url.startswith(f"{scheme}://")
    assert [(info.path, info.size) for info in tree.list("d/")] == [
        ("d/large", len(data)),
        ("d/small", 1),
    ]
    assert tree.read("d/large", 1000, 2000) == data[1000:2000]
    tree.copy("d/large", "copied")
    assert tree.read("copied") == data
    assert tree.remove_tree("") == 3
    tree.close()


def test_threads_that_come_at_once_share_what_is_open(
    bucket: str, s3_keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each made a session of boto3, 0.1 s of processor time, and `ckpt clean` took a minute."""
    del s3_keys
    made: list[Links] = []

    class Counted(Links):
        """Counts."""

        def __init__(self, place: BucketTree) -> None:
            made.append(self)
            super().__init__(place)

    monkeypatch.setattr(s3, "Links", Counted)
    at_once = threading.Barrier(16)
    with OpenTrees() as trees:

        def look(number: int) -> list[Entry]:
            at_once.wait()
            end = trees.endpoint(f"s3://{bucket}/none-{number}")
            return list(end.tree.list_dir(end.path))

        with ThreadPoolExecutor(16) as threads:
            assert list(threads.map(look, range(16))) == [[]] * 16
    assert len(made) == 1

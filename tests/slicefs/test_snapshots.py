"""A6: a snapshot by its URL, and a manifest of it that is read without asking the metadata."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsmeta.admin.snapshots import Taker
from fsmeta.errors import ConfigError
from fsmeta.types import ROOT_CALLER, Slice, SliceId, SliceKind
from slicefs.client.client import Client
from slicefs.client.volumes import snapshot_path
from slicefs.data.source import SampleSource
from slicefs.manifests.manifest import File, Manifest, pack, write_manifest
from slicefs.stores.opening import open_tree
from slicefs.stores.volume import VolumeTree
from tests.posix.volumes import PATIENCE_S, Volume
from tests.slicefs.test_bulk import counted, fill

COUNT = 60
GOLDEN = "db6ac942abc755de8da08da350a0fd9a112eff31fb3fa6f23e606f7a8c0e3989"  # of FORMAT.md


@pytest.fixture
def named(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> str:
    """The volume's name in URLs."""
    monkeypatch.setenv("SLICEFS_META_VOL", volume.meta)
    return "slicefs://vol"


def take(fs: Client, path: str, name: bytes) -> None:
    """Take a snapshot."""
    meta = fs.connection().meta
    taker = Taker(meta, ROOT_CALLER, meta.now_ns, lambda: False)
    taker.take(fs.view().find(path).ino, name)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("data@one", "data/.snapshots/one"),
        ("a/data@one/sub/f", "a/data/.snapshots/one/sub/f"),
        ("@one", ".snapshots/one"),
        ("data/f", "data/f"),
        ("", ""),
        ("data@", "data@"),
    ],
)
def test_paths_of_snapshots(path: str, found: str) -> None:
    assert snapshot_path(path) == found


def test_a_snapshot_is_a_tree_by_its_url(fs: Client, named: str) -> None:
    made = fill(fs, COUNT)
    take(fs, "set", b"one")
    for path in made:
        fs.remove(path)
    tree = open_tree(f"{named}/set@one")
    assert [info.path for info in tree.list()] == sorted(path[4:] for path in made)
    assert tree.read_ranges([path[4:] for path in made]) == list(made.values())
    with pytest.raises(OSError, match="in a snapshot"):
        tree.write_atomic("new", [b"x"])
    assert isinstance(tree, VolumeTree)
    tree.client.close()


def test_a_manifest_of_a_snapshot_needs_no_metadata(
    volume: Volume, fs: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fill(fs, COUNT)
    for part in (b"one", b"two"):
        with fs.open("set/0/appended", "ab") as file:  # of two slices: it has to be looked for
            file.write(part)
    made["set/0/appended"] = b"onetwo"
    with pytest.raises(ConfigError, match="is no snapshot"):
        write_manifest(open_tree("set", client=fs), open_tree(tmp_path), "no", slices=True)
    take(fs, "set", b"one")
    tree = open_tree("set/.snapshots/one", client=fs)
    write_manifest(tree, open_tree(tmp_path), "set.slicefs-manifest", slices=True)
    fs.rmtree("set/1")
    with Client(volume.meta, uid=0, gid=0, meta_timeout=PATIENCE_S) as reader:
        source = SampleSource.from_manifest(f"{tmp_path}/set.slicefs-manifest")
        source.tree = open_tree("set/.snapshots/one", client=reader)
        assert len(source) == COUNT + 1
        numbers = {path: number for number, (path, _) in enumerate(source.objects)}
        calls = counted(reader, monkeypatch)
        found = source.read([numbers[path[4:]] for path in made if path != "set/0/appended"])
        assert calls == []
        assert [bytes(each.data) for each in found] == list(made.values())[:-1]
        assert bytes(source.read([numbers["0/appended"]])[0].data) == b"onetwo"
        with pytest.raises(ConfigError, match="has no slices"):
            write_manifest(open_tree(tmp_path), open_tree(tmp_path), "no", slices=True)


def test_golden_bytes_with_slices() -> None:
    piece = Slice(0, SliceId(7), 4096, 10, 3, SliceKind.SEGMENT)
    data = pack("x", [File("b", 3, 1, b"", piece), File("a", 0, 2, b"")], slices=True)
    assert data[:8].hex() == "536c634d02000000"
    assert data[-32:].hex() == GOLDEN
    listed = Manifest(data)
    assert [(file.path, file.slice) for file in listed] == [("a", None), ("b", piece)]
    with pytest.raises(ConfigError, match="damaged"):
        Manifest(data[:-33] + data[-32:])

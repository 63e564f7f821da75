"""A3, A6: sources, streams with their states, and manifests."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest

from fsmeta.errors import ConfigError
from slicefs.data.order import Reader
from slicefs.data.source import Sample, SampleSource, matcher
from slicefs.data.stream import SampleStream
from slicefs.manifests.manifest import File, Manifest, open_manifest, pack, write_manifest
from slicefs.stores.opening import open_tree

COUNT = 150
GOLDEN = "5ee46284a126c9ea0dfca1f822fdca0b243fafc531803145ae29ec055d55af52"  # of FORMAT.md


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files whose content is their number."""
    for number in range(COUNT):
        path = tmp_path / "set" / f"{number % 3}" / f"{number:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}" * (number + 1))
    (tmp_path / "set" / "notes.md").write_text("not a sample")
    return tmp_path / "set"


def samples(stream: SampleStream, reader: Reader) -> list[str]:
    return [sample.path for sample in stream.read(reader)]


def test_patterns() -> None:
    assert matcher("*.txt")("a.txt")
    assert not matcher("*.txt")("d/a.txt")
    assert matcher("**/*.txt")("a.txt")
    assert matcher("**/*.txt")("d/e/a.txt")
    assert matcher("d/[!ab]?.txt")("d/cx.txt")
    assert not matcher("d/[!ab]?.txt")("d/ax.txt")
    assert matcher("a+(b)")("a+(b)")


def test_sources_by_prefix_objects_and_manifest(folder: Path, tmp_path: Path) -> None:
    source = SampleSource.from_prefix(str(folder), glob="**/*.txt")
    assert len(source) == COUNT
    assert source.objects[0] == ("0/000.txt", 1)
    found = source.read([5, 0, 5])
    assert [sample.path for sample in found] == ["0/015.txt", "0/000.txt", "0/015.txt"]
    assert bytes(found[0].data) == b"15" * 16
    assert pickle.loads(pickle.dumps(source)).read([0])[0].data == b"0"
    ranges = SampleSource.from_objects(
        [f"{folder}/0/003.txt", (f"file://{folder}/1/010.txt"[7:], 2, 6)]
    )
    assert [bytes(sample.data) for sample in ranges.read([0, 1])] == [b"3333", b"1010"]
    tree = open_tree(folder)
    write_manifest(tree, open_tree(tmp_path), "set.slicefs-manifest", digests=True)
    listed = SampleSource.from_manifest(f"{tmp_path}/set.slicefs-manifest")
    assert len(listed) == COUNT + 1
    assert pickle.loads(pickle.dumps(listed)).read([2])[0] == source.read([2])[0]
    with pytest.raises(ConfigError, match="no file matches"):
        SampleSource.from_prefix(str(folder), glob="*.jpg")
    with pytest.raises(ConfigError, match="several places"):
        SampleSource.from_objects(["s3://bucket-a/x", "s3://bucket-b/x"])


def test_a_file_that_changes_under_the_reader_is_an_error(folder: Path) -> None:
    source = SampleSource.from_prefix(str(folder))
    (folder / "0/000.txt").write_text("longer than it was")
    with pytest.raises(OSError, match="list the data set again") as caught:
        source.read([0])
    assert caught.value.filename == "0/000.txt"


def test_a_stream_gives_each_sample_once_and_goes_on(folder: Path) -> None:
    source = SampleSource.from_prefix(str(folder), glob="**/*.txt")

    def stream() -> SampleStream:
        return SampleStream(source, shuffle=True, seed=5, window_bytes=4096, fetch_bytes=2000)

    whole = samples(stream(), Reader())
    assert sorted(whole) == [path for path, _ in source.objects]
    first = stream()
    reading = first.read(Reader())
    begun = [next(reading).path for _ in range(40)]
    second = stream()
    second.load_state_dict(first.state_dict())
    assert begun + samples(second, Reader()) == whole
    assert second.epoch == 1
    assert samples(second, Reader()) != whole
    third = stream()  # 40 samples by one rank; the rest by three
    third.load_state_dict(pickle.loads(pickle.dumps(stream().state_dict(consumed=40))))
    state = third.state_dict()
    rest = []
    for rank in range(3):
        each = stream()
        each.load_state_dict(state)
        rest += samples(each, Reader(rank, 3))
    assert sorted(begun + rest) == sorted(whole)


def test_batches_are_bounded_where_no_size_is_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 10_000
    for path in folder.rglob("*.txt"):
        path.write_bytes(b"x" * size)
    source = SampleSource.from_objects(sorted(map(str, folder.rglob("*.txt"))))
    asked: list[int] = []
    read = source.read

    def counted(indexes: Sequence[int]) -> list[Sample]:
        asked.append(len(indexes))
        return read(indexes)

    monkeypatch.setattr(source, "read", counted)
    stream = SampleStream(source, fetch_bytes=4 * size)
    assert len(samples(stream, Reader())) == COUNT
    assert asked[0] == 8
    assert max(asked[1:]) == 4  # as many as `fetch_bytes` holds
    asked.clear()
    assert len(samples(SampleStream(source), Reader())) == COUNT
    assert asked == [8, 64, 64, COUNT - 136]  # small ones are read many at a time


def test_a_state_is_of_one_list_and_one_reader(folder: Path) -> None:
    source = SampleSource.from_prefix(str(folder), glob="**/*.txt")
    stream = SampleStream(source, seed=1)
    reading = stream.read(Reader(0, 2, 0, 2, 4))
    taken = [next(reading).path for _ in range(10)]
    state = stream.state_dict()
    other = SampleStream(source, seed=1)
    other.load_state_dict(state)
    whole = samples(SampleStream(source, seed=1), Reader(0, 2, 0, 2, 4))
    assert taken + samples(other, Reader(0, 2, 0, 2, 4)) == whole
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="another number of readers"):
        samples(other, Reader(0, 3))
    with pytest.raises(ValueError, match="has seed 1"):
        SampleStream(source, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="another list"):
        SampleStream(SampleSource.from_prefix(str(folder)), seed=1).load_state_dict(state)


def test_a_manifest_is_mapped_and_found_in(folder: Path, tmp_path: Path) -> None:
    os.rename(folder / "notes.md", os.fsencode(folder) + b"/\xff\xfe")  # not UTF-8
    made = write_manifest(open_tree(folder), open_tree(tmp_path), "m", digests=True)
    manifest = open_manifest(tmp_path / "m")
    manifest.verify()
    assert list(manifest) == list(made)
    assert manifest.root == f"file://{folder}"
    assert [file.path for file in manifest] == [info.path for info in open_tree(folder).list()]
    assert manifest.find("1/001.txt").size == 2
    assert len(manifest.find("1/001.txt").digest) == 32
    assert len(list(manifest.below("2/"))) == 50
    assert list(manifest.below("3/")) == []
    assert manifest[-1].path == os.fsdecode(b"\xff\xfe")
    for wrong in ("1/002.txt", "", "zzz"):
        with pytest.raises(KeyError):
            manifest.find(wrong)


def test_golden_bytes() -> None:
    data = pack("file:///x", [File("b", 7, 9, b""), File("a", 1, -1, b"\1" * 32)])
    assert data[:8].hex() == "536c634d01000000"
    assert data[-32:].hex() == GOLDEN
    assert [file.path for file in Manifest(data)] == ["a", "b"]
    with pytest.raises(ValueError, match="listed twice"):
        pack("x", [File("a", 1, 1, b""), File("a", 2, 2, b"")])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data[:50], "too short"),
        (lambda data: b"Nope" + data[4:], "is no manifest"),
        (lambda data: data[:4] + b"\3" + data[5:], "version 3"),
        (lambda data: data[:16] + b"\xff" + data[17:], "damaged"),
        (lambda data: data[:-40] + b"\xff" + data[-39:], "damaged"),
    ],
)
def test_damage_is_found(change: object, text: str) -> None:
    assert callable(change)
    data = change(pack("file:///x", [File(f"name-{n}", n, n, b"") for n in range(20)]))
    with pytest.raises(ConfigError, match=text):
        Manifest(data).verify()

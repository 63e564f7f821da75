"""A2: fsspec's own suite for file systems, transactions, batched ranges."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import pytest
from fsspec.tests import abstract

from fsmeta.errors import ConfigError
from slicefs.fsspec import SliceFSFileSystem
from tests.posix.volumes import PATIENCE_S
from tests.slicefs.memory_disk import quick_volume


@pytest.fixture(scope="module")
def made() -> Iterator[SliceFSFileSystem]:
    """A file system for all tests of this file; the volume is clean in the end."""
    with quick_volume() as volume:
        fs = SliceFSFileSystem(url=volume.meta, meta_timeout=PATIENCE_S, skip_instance_cache=True)
        yield fs
        fs.client.close()


class Fixtures(abstract.AbstractFixtures):  # type: ignore[misc]
    """What fsspec's tests ask for."""

    @pytest.fixture
    def fs(self, made: SliceFSFileSystem) -> SliceFSFileSystem:
        """The file system under test."""
        return made

    @pytest.fixture
    def fs_path(self, made: SliceFSFileSystem) -> Iterator[str]:
        """A directory of the test's own."""
        path = "/suite"
        made.mkdir(path)
        yield path
        made.rm(path, recursive=True)


class TestCopy(abstract.AbstractCopyTests, Fixtures):  # type: ignore[misc]
    """fsspec's tests of `copy`; the patterns are those of `get`, so they run with --soak."""

    test_copy_glob_edge_cases = pytest.mark.soak(
        abstract.AbstractCopyTests.test_copy_glob_edge_cases
    )


class TestGet(abstract.AbstractGetTests, Fixtures):  # type: ignore[misc]
    """fsspec's tests of `get`."""


class TestPut(abstract.AbstractPutTests, Fixtures):  # type: ignore[misc]
    """fsspec's tests of `put`; the patterns are those of `get`, so they run with --soak."""

    test_put_glob_edge_cases = pytest.mark.soak(abstract.AbstractPutTests.test_put_glob_edge_cases)


class TestPipe(abstract.AbstractPipeTests, Fixtures):  # type: ignore[misc]
    """fsspec's tests of `pipe`."""


class TestOpen(abstract.AbstractOpenTests, Fixtures):  # type: ignore[misc]
    """fsspec's tests of `open`."""


def test_ranges_are_merged_and_errors_returned(made: SliceFSFileSystem) -> None:
    made.pipe({"/r/a": b"0123456789" * 1000, "/r/b": b"b" * 10})
    paths = ["/r/a", "/r/b", "/r/a"]
    assert made.cat_ranges(paths, [0, 2, -4], [3, None, None]) == [b"012", b"b" * 8, b"6789"]
    assert made.cat_ranges(paths, 1, 4) == [b"123", b"bbb", b"123"]
    found = made.cat_ranges(["/r/a", "/r/none"], 0, 2)
    assert found[0] == b"01"
    assert isinstance(found[1], FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        made.cat_ranges(["/r/none"], 0, 2, on_error="raise")
    assert made.cat(["/r/a", "/r/b"]) == {"/r/a": b"0123456789" * 1000, "/r/b": b"b" * 10}
    assert made.cat_file("/r/a", -3) == b"789"
    made.rm("/r", recursive=True)


def test_a_transaction_is_all_or_nothing(made: SliceFSFileSystem) -> None:
    made.pipe("/t/old", b"old")
    with made.transaction:
        made.pipe("/t/new", b"new")
        made.pipe("/t/old", b"newer")
        assert made.ls("/t", detail=False) == ["/t/old"]
        assert made.cat("/t/old") == b"old"
    assert sorted(made.ls("/t", detail=False)) == ["/t/new", "/t/old"]
    assert made.cat("/t/old") == b"newer"

    def fail() -> None:
        with made.transaction:
            made.pipe("/t/old", b"lost")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert made.cat("/t/old") == b"newer"
    made.rm("/t", recursive=True)


def test_a_failed_write_leaves_what_was_there(made: SliceFSFileSystem) -> None:
    made.pipe("/f", b"old")

    def fail() -> None:
        with made.open("/f", "wb") as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert made.cat("/f") == b"old"
    with pytest.raises(FileExistsError):
        made.pipe_file("/f", b"x", mode="create")
    made.rm("/f")


def test_a_url_names_the_volume(made: SliceFSFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = made.client.url
    monkeypatch.setenv("SLICEFS_META_MY_VOL", meta)
    with fsspec.open("slicefs://my-vol/u/file.txt", "wt") as file:
        file.write("text")
    fs, path = fsspec.core.url_to_fs("slicefs://my-vol/u/file.txt")
    assert path == "my-vol:/u/file.txt"
    assert fs.unstrip_protocol(path) == "slicefs://my-vol/u/file.txt"
    assert made.cat("/u/file.txt") == b"text"
    assert list(made.glob("/u/*.txt", detail=True)) == ["/u/file.txt"]
    for pattern in ("slicefs://my-vol/u/*.txt", "slicefs://my-vol/*/*", "my-vol:/u/f*", path):
        assert fs.glob(pattern) == fs.find("slicefs://my-vol/u") == [path]
    assert fs.glob("u/*.txt") == ["/u/file.txt"]
    assert fs.ls("slicefs://my-vol", detail=False) == [fs._parent(path)] == ["my-vol:/u"]
    assert fs._parent("my-vol:/u") == fs._strip_protocol("slicefs://my-vol") == "my-vol:/"
    with fsspec.open(f"slicefs://{path}", volume="my-vol") as file:  # as Hugging Face does
        assert file.read() == b"text"
    assert fs.modified(path) >= fs.created(path).replace(year=2000)
    fs.mv(path, "/v/moved")
    assert fs.info("/v/moved")["size"] == 4
    with pytest.raises(ConfigError, match="of volume my-vol"):
        fs.cat("slicefs://other/v/moved")
    with pytest.raises(ConfigError, match="not in volume other"):
        fsspec.open("slicefs://my-vol/v/moved", volume="other")
    for each in list(SliceFSFileSystem._cache.values()):
        each.client.close()
    for each in ("/u", "/v"):
        made.rm(each, recursive=True)
    with pytest.raises(ConfigError, match="name the volume"):
        SliceFSFileSystem()

"""Names of other libraries, as far as they need no torch: files, options, what is refused."""

from __future__ import annotations

import logging
import os
import pickle
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest

from fsmeta.errors import ConfigError
from slicefs.compat import dataflux, s3torch
from slicefs.compat.dataflux.dataflux_checkpoint import DatafluxCheckpoint
from slicefs.compat.dataflux.places import url_of
from slicefs.compat.s3torch.checkpoint import S3Checkpoint
from slicefs.compat.s3torch.client import S3ClientConfig
from slicefs.compat.s3torch.prefixes import (
    BinaryPrefixStrategy,
    HexPrefixStrategy,
    RoundRobinPrefixStrategy,
)
from slicefs.compat.s3torch.s3reader import S3Reader, S3ReaderConstructor, kind_of
from slicefs.stores.opening import open_tree
from tests.support.ceph_cluster import CephCluster

REGION = "us-east-1"
without_torch = pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed")


@pytest.mark.usefixtures("s3_keys")
def test_files_by_url(bucket: str, tmp_path: Path) -> None:
    url = f"s3://{bucket}/{tmp_path.name}/"
    checkpoint = S3Checkpoint(region=REGION)
    tree = open_tree(url)
    data = os.urandom(3_000_000)
    with checkpoint.writer(f"{url}epoch0.ckpt") as writer:
        assert writer.write(data) == len(data)
    with pytest.raises(TypeError), checkpoint.writer(f"{url}epoch1.ckpt") as writer:
        writer.write(cast("bytes", "no bytes"))
    assert [info.path for info in tree.list()] == ["epoch0.ckpt"]
    with checkpoint.reader(f"{url}epoch0.ckpt") as reader:
        assert (reader.bucket, reader.key) == (bucket, f"{tmp_path.name}/epoch0.ckpt")
        assert reader.tell() == 0
        assert reader.seek(-10, os.SEEK_END) == len(data) - 10
        assert reader.read() == data[-10:]
        reader.seek(5)
        part = bytearray(100)
        assert reader.readinto(part) == 100
        assert part == data[5:105]
        again: S3Reader = pickle.loads(pickle.dumps(reader))
        with again:
            assert again.read() == data
    with pytest.raises(ValueError, match="closed"):
        reader.read()
    with pytest.raises(s3torch.S3Exception):
        checkpoint.reader(f"{url}epoch1.ckpt").read()
    for each in (checkpoint, tree, again._tree):
        each.close()


def test_the_address_is_a_parameter(
    ceph: CephCluster, bucket: str, s3_keys: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del s3_keys
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    config = S3ClientConfig(force_path_style=True)
    checkpoint = S3Checkpoint(REGION, endpoint=ceph.endpoint, s3client_config=config)
    with checkpoint.writer(f"s3://{bucket}/{tmp_path.name}/a") as writer:
        writer.write(b"a")
    assert checkpoint.reader(f"s3://{bucket}/{tmp_path.name}/a").read() == b"a"
    checkpoint.close()


def test_google_is_a_bucket_too(
    ceph: CephCluster, bucket: str, s3_keys: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del s3_keys
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("GS_ENDPOINT_URL", ceph.endpoint)
    checkpoint = DatafluxCheckpoint(project_name="project", bucket_name=bucket)
    with checkpoint.writer(f"{tmp_path.name}/a") as writer:
        writer.write(b"a" * 20_000_000)  # two parts
    with checkpoint.reader(f"{tmp_path.name}/a") as reader:
        assert reader.read() == b"a" * 20_000_000
    assert checkpoint.tree.url == f"gs://{bucket}"
    checkpoint.close()


def test_a_whole_object_is_read_by_few_requests(
    bucket: str, s3_keys: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`io` reads 8 KiB at a time where a file has no `readall`."""
    del s3_keys
    tree = open_tree(f"s3://{bucket}/{tmp_path.name}")
    data = os.urandom(1_000_000)
    tree.write_atomic("a", (data,))
    asked: list[int] = []
    read_ranges = tree.read_ranges

    def counted(items: Any, max_gap: int = 0) -> list[memoryview]:
        asked.append(len(items))
        return read_ranges(items, max_gap)

    monkeypatch.setattr(tree, "read_ranges", counted)
    with tree.open_read("a") as stream:
        assert stream.read(10) == data[:10]
        assert stream.read() == data[10:]
    assert sum(asked) <= 2
    tree.close()


def test_paths_of_google() -> None:
    assert url_of("gcs://b/k") == url_of("gs://b/k") == url_of(Path("gcs://b/k")) == "gs://b/k"
    assert url_of(Path("/data/gs:/x")) == "/data/gs:/x"
    assert url_of("slicefs://vol/k") == "slicefs://vol/k"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: S3Checkpoint(REGION, s3client_config=S3ClientConfig(unsigned=True)), "unsigned"),
        (lambda: S3Checkpoint(REGION, endpoint="localhost:9000"), "no address"),
        (lambda: S3Checkpoint(REGION).writer("s3://a--use1-az4--x-s3/k"), "directory buckets"),
        (lambda: S3Checkpoint(REGION).writer(str(Path("s3://bucket/k"))), "pass the URL as a str"),
        (lambda: kind_of("S3MapDataset", dict), "one of S3ReaderConstructor"),
        (lambda: DatafluxCheckpoint("p", "bucket", storage_client=object()), "storage_client"),
    ],
)
def test_what_can_not_be_ignored_is_refused(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_what_has_no_meaning_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "slicefs.compat")
    S3Checkpoint(REGION, s3client_config=S3ClientConfig(part_size=16 << 20, max_attempts=3))
    DatafluxCheckpoint("project", "bucket")
    kind_of("S3MapDataset", S3ReaderConstructor.range_based(buffer_size=0))
    said = [record.getMessage() for record in caplog.records if "compat" in record.name]
    assert said == [
        "S3Checkpoint: accepted without effect: part_size, max_attempts",
        "DatafluxCheckpoint: accepted without effect: project_name",
        "S3MapDataset: accepted without effect: buffer_size",
    ]


def test_prefixes_of_ranks() -> None:
    named = RoundRobinPrefixStrategy(["a", "b"], epoch_num=5)
    assert [named(rank) for rank in range(3)] == [
        "a/epoch_5/__0_",
        "b/epoch_5/__1_",
        "a/epoch_5/__2_",
    ]
    binary = BinaryPrefixStrategy(epoch_num=1, min_prefix_length=4, prefix_count=3)
    assert [binary(rank) for rank in range(4)] == [
        "0000/epoch_1/__0_",
        "1000/epoch_1/__1_",
        "0100/epoch_1/__2_",
        "0000/epoch_1/__3_",
    ]
    assert HexPrefixStrategy(min_prefix_len=1, prefix_count=17)(16) == "01/__16_"
    for wrong in ({"prefix_count": 0}, {"min_prefix_length": 0}):
        with pytest.raises(ValueError, match="at least one"):
            BinaryPrefixStrategy(**wrong)


@without_torch
@pytest.mark.parametrize("package", [dataflux, s3torch])
def test_what_is_missing_is_named(package: Any) -> None:
    for name in package.__all__:
        if not re.search("dataset|storage|lightning|distributed|config$", name.lower()) or (
            name == "S3ClientConfig"
        ):
            assert getattr(package, name) is not None
            continue
        with pytest.raises(ImportError, match=r"needs torch: pip install torch") as caught:
            getattr(package, name)
        assert "\n" not in str(caught.value)

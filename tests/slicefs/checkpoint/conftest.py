"""Trees of each kind: a directory, a volume on SQLite, a bucket of radosgw."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slicefs.client.client import Client
from slicefs.stores.opening import open_tree
from slicefs.stores.tree import Tree
from tests.posix.volumes import PATIENCE_S, new_volume
from tests.support.ceph_cluster import ACCESS_KEY, SECRET_KEY, CephCluster

BUCKET = "checkpoints"


@pytest.fixture(scope="session")
def checkpoint_bucket(ceph: CephCluster) -> str:
    """A bucket of radosgw."""
    ceph.make_bucket(BUCKET)
    return BUCKET


@pytest.fixture
def bucket_url(
    checkpoint_bucket: str, ceph: CephCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A prefix in it for this test, and the environment that leads there."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", ceph.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    return f"s3://{checkpoint_bucket}/{tmp_path.name}"


@pytest.fixture
def volume_tree(tmp_path: Path) -> Iterator[Tree]:
    """A directory of a volume, which is clean in the end."""
    meta = f"sqlite://{tmp_path}/meta.db"
    with (
        new_volume(tmp_path / "vol", meta) as volume,
        Client(volume.meta, uid=0, gid=0, umask=0o022, meta_timeout=PATIENCE_S) as client,
    ):
        yield open_tree("runs", client=client)


@pytest.fixture(params=["directory", "volume", "bucket"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tree]:
    """A tree of each kind."""
    if request.param == "volume":
        yield request.getfixturevalue("volume_tree")
        return
    url = request.getfixturevalue("bucket_url") if request.param == "bucket" else tmp_path / "t"
    made = open_tree(url)
    yield made
    made.remove_tree("")
    made.close()

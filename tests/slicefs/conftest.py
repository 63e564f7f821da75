"""Volumes, clients and trees for the tests of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slicefs.client.client import Client
from slicefs.stores.opening import open_tree
from slicefs.stores.tree import Tree
from tests.posix.volumes import PATIENCE_S, Volume
from tests.slicefs.attached_objects import OBJECTS
from tests.slicefs.memory_disk import quick_volume
from tests.support.ceph_cluster import ACCESS_KEY, SECRET_KEY, CephCluster

BUCKET = "trees"


@pytest.fixture
def volume() -> Iterator[Volume]:
    """A volume on SQLite, clean in the end."""
    with quick_volume() as made:
        yield made


@pytest.fixture
def fs(volume: Volume) -> Iterator[Client]:
    """A client of it, as root."""
    with Client(volume.meta, uid=0, gid=0, umask=0o022, meta_timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def as_user(volume: Volume) -> Iterator[Callable[[int], Client]]:
    """Clients of the volume for other users."""
    made: list[Client] = []

    def client(uid: int) -> Client:
        made.append(Client(volume.meta, uid=uid, gid=uid, umask=0o022, meta_timeout=PATIENCE_S))
        return made[-1]

    yield client
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def bucket(ceph: CephCluster) -> str:
    """A bucket of radosgw."""
    ceph.make_bucket(BUCKET)
    return BUCKET


@pytest.fixture
def s3_keys(ceph: CephCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that leads to it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", ceph.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@pytest.fixture(params=["local", "volume", "s3"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tree]:
    """An empty tree of each kind."""
    if request.param == "local":
        (tmp_path / "tree").mkdir()
        made = open_tree(tmp_path / "tree")
    elif request.param == "volume":
        made = open_tree("", client=request.getfixturevalue("fs"))
    else:
        request.getfixturevalue("s3_keys")
        made = open_tree(f"s3://{request.getfixturevalue('bucket')}/{tmp_path.name}")
    yield made
    made.remove_tree("")
    made.close()


@pytest.fixture
def source(request: pytest.FixtureRequest, bucket: str, tmp_path: Path) -> Iterator[Tree]:
    """A prefix of a bucket with objects."""
    request.getfixturevalue("s3_keys")
    tree = open_tree(f"s3://{bucket}/{tmp_path.name}")
    for path, data in OBJECTS.items():
        tree.write_atomic(path, (data,))
    yield tree
    tree.remove_tree("")
    tree.close()

"""A driver with a Redis volume; the Redis wants a password, so that there is one to hide."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.csi.driver import SECRET, Driver
from tests.fsdata.stores import fresh_name
from tests.support.ceph_cluster import ACCESS_KEY, SECRET_KEY, CephCluster
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="session")
def closed_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis with a password for those who come by TCP."""
    if not RedisServer.is_installed():
        pytest.skip("needs redis-server")
    with RedisServer(tmp_path_factory.mktemp("csi-redis")) as server:
        server.ask("ACL", "SETUSER", "csi", "on", f">{SECRET}", "~*", "&*", "+@all")
        yield server


@pytest.fixture
def secrets(closed_redis: RedisServer) -> Iterator[dict[str, str]]:
    """Of a volume that is not formatted yet, with its data in a directory."""
    base = Path(tempfile.mkdtemp(prefix="slicefs-csi-"))
    url = closed_redis.empty_url().replace("redis://", f"redis://csi:{SECRET}@")
    place = {"storage": "file", "bucket": str(base / "bucket")}
    yield {"name": "csivol", "metaurl": url, **place, "format-options": "trash-days=0"}
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def s3_secrets(secrets: dict[str, str], ceph: CephCluster) -> dict[str, str]:
    """Of a volume that is not formatted yet, with its data in a bucket of radosgw."""
    place = {"storage": "s3", "bucket": f"{ceph.endpoint}/{fresh_name()}"}
    return {**secrets, **place, "access-key": ACCESS_KEY, "secret-key": SECRET_KEY}


@pytest.fixture
def s3_driver(secrets: dict[str, str], s3_secrets: dict[str, str]) -> Iterator[Driver]:
    """As `driver`, on S3."""
    found = Driver(Path(secrets["bucket"]).parent, s3_secrets)
    found.start()
    yield found
    found.clean_up()


@pytest.fixture
def driver(secrets: dict[str, str]) -> Iterator[Driver]:
    """A driver that serves; its directory is short, for the socket."""
    found = Driver(Path(secrets["bucket"]).parent, secrets)
    found.start()
    yield found
    found.clean_up()

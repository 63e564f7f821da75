"""What `slicefs format` is told of the real object stores that tests use."""

from __future__ import annotations

from pathlib import Path

from tests.fsdata.stores import POOL, credentials_file, fresh_name
from tests.support.ceph_cluster import CephCluster


def s3_place(base: Path, endpoint: str, bucket: str = "") -> list[str]:
    """What `format` is told of a bucket."""
    keys = credentials_file(base)
    url = f"{endpoint}/{bucket or fresh_name()}"
    return ["--storage", "s3", "--bucket", url, "--store-option", f"credentials={keys}"]


def rados_place(ceph: CephCluster, namespace: str = "") -> list[str]:
    """What `format` is told of a namespace."""
    place = f"{POOL}/{namespace or fresh_name()}"
    return ["--storage", "rados", "--bucket", place, "--store-option", f"conf={ceph.conf}"]

"""O1: uploads in parts that more than one process goes on with. radosgw is the judge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdata.objects.s3.multipart import Multipart
from fsmeta.errors import StoreError
from tests.fsdata.stores import s3_bucket
from tests.support.ceph_cluster import CephCluster


@pytest.fixture
def uploads(ceph: CephCluster, tmp_path: Path) -> Iterator[Multipart]:
    objects = s3_bucket(ceph, tmp_path)
    yield Multipart(objects, lambda request: request())
    objects.close()


def test_an_upload_that_another_process_has_completed(uploads: Multipart) -> None:
    """The end is repeated where the object is made of the same parts, and fails where it is not."""
    ours, theirs = b"a" * 1000, b"b" * 1000
    upload = uploads.begin("key")
    etag = uploads.put_part("key", upload, 1, (ours,))
    uploads.end("key", upload, [etag], len(ours))
    uploads.end("key", upload, [etag], len(ours))  # its answer was lost
    other = uploads.begin("key")
    different = uploads.put_part("key", other, 1, (theirs,))
    with pytest.raises(StoreError):
        uploads.end("key", upload, [different], len(theirs))
    uploads.drop("key", other)

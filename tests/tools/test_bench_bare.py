"""The program that shows what a store gives by itself."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from tests.support.ceph_cluster import ACCESS_KEY, SECRET_KEY, CephCluster
from tools import bench
from tools.benchlib import bare
from tools.benchlib.s3 import S3
from tools.benchlib.workloads import Options

_OPTIONS = Options(threads=(1,), count=5, size_mib=12, redis=None)


def test_its_rows_are_those_of_bigfile_and_it_leaves_nothing(ceph: CephCluster) -> None:
    port = urlsplit(ceph.endpoint).port
    assert port is not None
    server = S3(port, ACCESS_KEY, SECRET_KEY)
    found = list(bare.bigfile(server, _OPTIONS))
    assert [metric.operation for metric in found] == [
        "write+fsync 1 MiB",
        "write+fsync 128 KiB",
        "read 1 MiB, cold",
        "random read 4 KiB, cold",
        "random read 128 KiB, cold",
    ]
    assert all(metric.value > 0 for metric in found)
    buckets = [each["Name"] for each in server.client().list_buckets()["Buckets"]]
    assert bare.BUCKET not in buckets


@pytest.mark.parametrize("words", [["meta", "--store", "s3"], ["bigfile"]])
def test_it_needs_a_store_of_requests(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main([*words, "--bare"])
    assert "--bare needs bigfile with --store s3 or radosgw" in capsys.readouterr().err

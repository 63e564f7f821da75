"""The Ceph of the tests, in memory, for one benchmark: RADOS, and S3 by its radosgw."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tools.benchlib.s3 import S3

POOL = "bench"
STOP_S = 60.0
# tests/support/ceph_cluster.py has them, too; tools don't import tests
_ACCESS_KEY = "slicefs-test"
_SECRET_KEY = "secret-of-the-tests"


@contextmanager
def running(workspace: Path, buckets: Sequence[str], direct: bool) -> Iterator[S3]:
    """Start a cluster below `workspace` and end it; `direct`: systems may use RADOS itself."""
    directory = workspace / "ceph"
    directory.mkdir()
    command = [sys.executable, "-m", "tests.support.ceph_cluster", str(directory), POOL, *buckets]
    with (
        (workspace / "ceph.log").open("wb") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as cluster,
    ):
        assert cluster.stdin is not None
        assert cluster.stdout is not None
        try:
            endpoint = cluster.stdout.readline()
            if not endpoint:
                raise RuntimeError(f"no Ceph: see {log.name}")
            port = urlsplit(endpoint.strip()).port
            assert port is not None
            conf = directory / "ceph.conf"
            yield S3(port, _ACCESS_KEY, _SECRET_KEY, conf if direct else None)
        finally:
            cluster.stdin.close()
            cluster.wait(STOP_S)

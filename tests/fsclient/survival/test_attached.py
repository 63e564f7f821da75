"""Attached files of a supervised mount: the next client reads them, and copies what is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slicefs.lifecycle.attach import attach
from slicefs.stores.opening import open_tree
from tests.faults.fixtures import base, embedded
from tests.faults.program import Volume, needs_mounts, succeed
from tests.fsclient.survival.supervised import Supervised
from tests.slicefs.test_copy_up import OPENER, is_second
from tests.support.ceph_cluster import ACCESS_KEY, SECRET_KEY, CephCluster
from tests.support.http_proxy import Fault, HttpProxy, Kind
from tests.support.waiting import wait_until

__all__ = ["base", "embedded"]

pytestmark = needs_mounts
BIG = os.urandom(9_000_000)


def test_a_client_that_is_killed_while_it_copies(
    embedded: Volume, ceph: CephCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ceph.make_bucket("survival")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    with HttpProxy(ceph.s3_port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        source = open_tree(f"s3://survival/{tmp_path.name}")
        source.write_atomic("big", (BIG,))
        source.write_atomic("small", (b"1" * 1000,))
        embedded.format()
        mounted = Supervised(embedded)
        attach(source.url, str(mounted.path / "data"))
        big, small = mounted.path / "data/big", mounted.path / "data/small"
        with small.open("rb", buffering=0) as reader:
            assert reader.read(3) == b"111"
            held = proxy.add(Fault(Kind.HOLD, 1, method="GET", when=is_second))
            opener = subprocess.Popen([sys.executable, "-c", OPENER, big], stdout=subprocess.PIPE)
            wait_until(lambda: held.hits == 1)
            mounted.kill()
            proxy.heal()
            assert opener.communicate(timeout=120)[0] == b"begun\nopened\n"
            assert reader.read() == b"1" * 997
            with small.open("r+b") as file:
                file.write(b"own")
            assert os.pread(reader.fileno(), 5, 0) == b"own11"
        assert big.read_bytes() == BIG
        assert source.read("big") == BIG
        source.close()
        mounted.await_next()
        mounted.mount.umount()
    assert json.loads(succeed("fsck", embedded.meta, "--json"))["problems"] == []

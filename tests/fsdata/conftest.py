"""Fixtures of the data tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsdata.disk_cache.directory import member
from tests.fsdata.world import World
from tests.support.ceph_cluster import CephCluster
from tests.support.http_proxy import HttpProxy


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has other work to do is no cache disk that is slow or hangs."""
    monkeypatch.setattr(member, "SLOW_S", 120.0)
    monkeypatch.setattr(member, "HUNG_S", 120.0)


@pytest.fixture
def world() -> Iterator[World]:
    """A data stack that must be idle and clean when the test ends."""
    made = World()
    yield made
    if made.objects.gate is not None:  # left closed by a test that failed: threads wait there
        made.objects.gate.set()
    made.close()


@pytest.fixture
def proxy(ceph: CephCluster) -> Iterator[HttpProxy]:
    """Between clients and radosgw."""
    with HttpProxy(ceph.s3_port) as made:
        yield made

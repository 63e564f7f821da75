"""The client of a supervised mount is killed under load: programs see a pause, and no error."""

from __future__ import annotations

import time

import pytest

from tests.faults.fixtures import base, durable_redis, embedded, served
from tests.faults.program import Volume, needs_mounts
from tests.fsclient.survival.killing import killing

__all__ = ["base", "durable_redis", "embedded", "served"]

pytestmark = needs_mounts


def test_killed_with_redis(served: Volume) -> None:
    killing(served, 3, 1)


def test_killed_with_writeback(embedded: Volume) -> None:
    killing(embedded, 3, 2, "--writeback", "--staging-dir", str(embedded.base / "staging"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("writeback", [False, True])
def test_killed_often(served: Volume, writeback: bool) -> None:
    staging = ("--writeback", "--staging-dir", str(served.base / "staging"))
    killing(served, 100, time.time_ns() % 1_000_000, *(staging if writeback else ()))

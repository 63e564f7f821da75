"""A redis-server and volumes, for the tests of faults and of the commands."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.program import Volume
from tests.faults.redis_server import DurableRedis
from tests.support.redis_server import RedisServer


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory that every user can reach, which pytest's own is not."""
    path = Path(tempfile.mkdtemp(prefix="slicefs-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def durable_redis(base: Path) -> Iterator[DurableRedis]:
    if not RedisServer.is_installed():
        pytest.skip("needs redis-server")
    (base / "redis").mkdir()
    server = DurableRedis(base / "redis")
    yield server
    server.close()


@pytest.fixture
def embedded(base: Path) -> Iterator[Volume]:
    """A volume on SQLite, not formatted yet."""
    volume = Volume(base)
    yield volume
    volume.clean_up()


@pytest.fixture
def served(base: Path, durable_redis: DurableRedis) -> Iterator[Volume]:
    """A volume on Redis, not formatted yet."""
    volume = Volume(base, durable_redis.url())
    yield volume
    volume.clean_up()

"""M1: a mount whose Redis goes on from an older state turns read-only and says what to do."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.program import Volume, needs_mounts, slicefs, wait_until
from tests.support.redis_server import RedisServer

pytestmark = needs_mounts

NOTICED_S = 60.0  # a beat, and what it takes to connect; only a failure takes longer
GONE_BACK = "gone back to an older state"
AFTERWARDS = f"{GONE_BACK}|redis: |could not end the session|keeps nothing on disk"


@pytest.fixture
def server(base: Path) -> Iterator[RedisServer]:
    if not RedisServer.is_installed():
        pytest.skip("needs redis-server")
    (base / "redis").mkdir()
    with RedisServer(base / "redis") as made:
        yield made


@pytest.fixture
def volume(base: Path, server: RedisServer) -> Iterator[Volume]:
    made = Volume(base, server.url())
    yield made
    made.clean_up()


def _back_to(server: RedisServer, backup: Path) -> None:
    server.stop()
    shutil.copy(backup, server.directory / "dump.rdb")
    server.start()


def test_a_restored_backup(volume: Volume, server: RedisServer) -> None:
    volume.format()
    mount = volume.mount("--heartbeat", "1")
    (mount.path / "kept").write_text("kept")
    server.ask("SAVE")
    shutil.copy(server.directory / "dump.rdb", volume.base / "backup")
    (mount.path / "lost").write_text("lost")
    _back_to(server, volume.base / "backup")
    wait_until(
        "it is noticed by itself",
        NOTICED_S,
        lambda: any(GONE_BACK in line for line in volume.complaints()),
    )
    for refused in (
        lambda: (mount.path / "new").write_text("x"),
        lambda: (mount.path / "kept").unlink(),
        lambda: (mount.path / "kept").chmod(0o600),
    ):
        with pytest.raises(OSError, match="Read-only") as caught:
            refused()
        assert caught.value.errno == errno.EROFS
    assert (mount.path / "kept").read_text() == "kept"
    assert mount.numbers()["read_only"] == 1
    (line,) = [line for line in volume.complaints() if "read-only from now on" in line]
    assert line.endswith("read-only from now on: unmount and run `slicefs fsck`, then mount again")
    mount.umount()
    second = volume.mount()
    (second.path / "new").write_text("new")
    assert sorted(path.name for path in second.path.iterdir()) == ["kept", "new"]
    volume.end(AFTERWARDS)


def test_everything_deleted(volume: Volume, server: RedisServer) -> None:
    """FLUSHALL under a mount: nothing is written into the void."""
    volume.format()
    mount = volume.mount("--heartbeat", "1")
    (mount.path / "lost").write_text("lost")
    server.ask("SAVE")
    shutil.copy(server.directory / "dump.rdb", volume.base / "backup")
    server.ask("FLUSHALL")
    wait_until(
        "it is noticed by itself",
        NOTICED_S,
        lambda: any(GONE_BACK in line for line in volume.complaints()),
    )
    with pytest.raises(OSError, match=r"Read-only|Stale"):  # the root is gone, too
        (mount.path / "new").write_text("x")
    assert server.ask("DBSIZE") == 0
    mount.umount()
    assert "there is no volume" in slicefs("mount", volume.meta, mount.path).err
    _back_to(server, volume.base / "backup")
    assert (volume.mount().path / "lost").read_text() == "lost"
    volume.end(AFTERWARDS + "|has ended session|no longer|deletion of unused data")

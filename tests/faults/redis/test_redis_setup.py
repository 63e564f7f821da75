"""M1: how Redis is set up: rights of a user, eviction, persistence, Sentinel below a mount."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.judge import Worker, await_operations, failing, start
from tests.faults.program import Volume, needs_mounts, slicefs, succeed, wait_until
from tests.support.redis_server import RedisServer
from tests.support.redis_sets import Sentinels

pytestmark = needs_mounts

SECRET = "hunter2"
# what docs/OPERATING.md says that a user needs, and nothing else
RIGHTS = (
    "resetchannels &__redis__:invalidate +info +ping +select +eval +evalsha +subscribe"
    " +client|id +client|tracking +wait +hget +hmget +hgetall +hset +hdel +hincrby +hscan"
    " +hsetnx +hlen +exists +unlink +scan +pexpire +pttl"
)
AWAY = "redis: |no answer to a commit|keeps nothing on disk"


@pytest.fixture
def server(base: Path) -> Iterator[RedisServer]:
    if not RedisServer.is_installed():
        pytest.skip("needs redis-server")
    (base / "redis").mkdir()
    with RedisServer(base / "redis", "--appendonly", "yes", "--appendfsync", "always") as made:
        yield made


@pytest.fixture
def volume(base: Path, server: RedisServer) -> Iterator[Volume]:
    made = Volume(base, server.url())
    yield made
    made.clean_up()


def test_a_user_with_the_least_rights(volume: Volume, server: RedisServer) -> None:
    """All of a mount works with them, news of others included; settings it may not ask for."""
    server.ask("ACL", "SETUSER", "files", "on", f">{SECRET}", "~*", "nocommands", *RIGHTS.split())
    volume.meta = volume.meta.replace("//", f"//files:{SECRET}@")
    volume.format()
    one, two = volume.mount(), volume.mount(name="second")
    for n in range(20):
        (one.path / f"{n}").write_text("x" * n)
    (one.path / "dir").mkdir()
    os.rename(one.path / "1", one.path / "dir" / "2")
    (one.path / "3").unlink()
    assert sorted(os.listdir(two.path)) == sorted(os.listdir(one.path))
    wait_until("news of others are heard", 60, lambda: two.numbers()["meta_vouched"] == 1)
    volume.status()
    succeed("dump", volume.meta, volume.base / "dump")
    volume.end()
    denied = {entry[b"object"] for entry in server.ask("ACL", "LOG")}
    # from 7.2 on the library also says its name, and does without where it may not
    assert denied - {b"client|setinfo"} == {b"config|get", b"time"}


def test_a_policy_that_evicts_is_refused(volume: Volume, server: RedisServer) -> None:
    server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    words = ("format", volume.meta, "testvol", "--bucket", volume.bucket)
    for done in (slicefs(*words), slicefs(*words, "--dry-run")):
        assert done.code == 1
        assert "config set maxmemory-policy noeviction" in done.err
        assert done.err.count("\n") == 1
    assert server.ask("DBSIZE") == 0
    server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    volume.format()
    server.ask("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
    (volume.base / "mnt").mkdir()
    done = slicefs("mount", "-d", volume.meta, volume.base / "mnt")
    assert done.code == 1
    assert "maxmemory-policy volatile-ttl" in done.err
    assert "noeviction" in volume.status()["warnings"][0]
    server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    volume.end()


def test_what_may_be_lost_is_said(volume: Volume, server: RedisServer) -> None:
    volume.format()
    assert (volume.status()["warnings"], volume.status()["notes"]) == ([], [])
    for settings, words in (
        ({"appendonly": "no", "save": "3600 1"}, "snapshots only, if any"),
        ({"save": ""}, "keeps nothing on disk"),
    ):
        for name, value in settings.items():
            server.ask("CONFIG", "SET", name, value)
        (warning,) = volume.status()["warnings"]
        assert words in warning
        assert f"warning     {warning}" in succeed("status", volume.meta)
        volume.mount().umount()
        assert words in volume.complaints()[-1]
    volume.end("Redis keeps")


def test_what_many_choose_is_no_warning_of_each_mount(volume: Volume, server: RedisServer) -> None:
    """Whoever makes the volume is told, and whoever asks."""
    server.ask("CONFIG", "SET", "appendfsync", "everysec")
    made = succeed("format", volume.meta, "testvol", "--bucket", volume.bucket)
    assert "note: Redis writes its log once a second" in made
    assert volume.status()["warnings"] == []
    (note,) = volume.status()["notes"]
    assert f"note        {note}" in succeed("status", volume.meta)
    volume.mount().umount()
    assert any(note in line and " INFO " in line for line in volume.log_lines())
    volume.end()


def test_full(volume: Volume, server: RedisServer) -> None:
    """Nothing can be made, and what is there can be deleted, until there is room."""
    volume.format()
    mount = volume.mount()
    for n in range(10):
        (mount.path / f"{n}").write_text("x" * 10_000)
    (mount.path / "dir").mkdir()
    server.ask("CONFIG", "SET", "maxmemory", "1")
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            (mount.path / "new").touch()
        with pytest.raises(OSError, match="No space left"):
            (mount.path / "new").mkdir()
    for n in range(5):
        (mount.path / f"{n}").unlink()
    os.truncate(mount.path / "5", 0)
    os.truncate(mount.path / "6", 100)
    (mount.path / "dir").rmdir()
    assert sorted(os.listdir(mount.path)) == ["5", "6", "7", "8", "9"]
    server.ask("CONFIG", "SET", "maxmemory", "0")
    (mount.path / "new").write_text("new")
    assert mount.numbers()["read_only"] == 0
    volume.end("StoreFull|No space|ENOSPC|metadata store is full")


def test_bad_redis_wait(volume: Volume) -> None:
    volume.format()
    (volume.base / "mnt").mkdir()
    for value, why in {"2": "Redis has 0 replicas", "0": "1 to 99", "1:0": "1 to 99"}.items():
        done = slicefs("mount", volume.meta, volume.base / "mnt", "--redis-wait", value)
        assert done.code in (1, 2), done
        assert why in done.err
    done = slicefs("mount", f"sqlite://{volume.base}/x.db", volume.base / "mnt", "--redis-wait=1")
    assert "is for metadata in Redis" in done.err
    volume.end()


def test_fail_over_below_a_mount(base: Path) -> None:
    """Sentinel: under load, without a new mount, and nothing acknowledged is lost."""
    (base / "set").mkdir()
    with Sentinels(base / "set") as sentinels:
        volume = Volume(base, sentinels.url())
        workers: list[Worker] = []
        try:
            volume.format()
            mount = volume.mount("--redis-wait", "1:500")
            workers += [Worker(mount.path / f"w{n}", base / f"journal{n}", n) for n in range(2)]
            start(workers)
            await_operations(workers, 4)
            sentinels.first.kill()
            sentinels.watch_closely()
            wait_until("a new master", 100, sentinels.has_failed_over)
            await_operations(workers, 4)
            for worker in workers:
                worker.stop()
            assert failing(workers) == []
            for worker in workers:
                worker.judge()
            assert mount.numbers()["read_only"] == 0
            volume.end(AWAY)
        finally:
            for worker in workers:
                worker.abandon()
            volume.clean_up()

"""W1, W2, W4: write-back on real mounts: SIGKILL, lost disks, an object store that is away.

One mount writes checkpoints to a store that takes them slowly; another watches and must never see
a marker before all that it vouches for, nor an error.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsclient.volume.metadata_url import open_store
from fsmeta.meta.meta import Meta
from fsmeta.runtime import SystemRuntime
from tests.faults.checkpoint import Watcher, Writer
from tests.faults.places import rados_place, s3_place
from tests.faults.program import (
    SLICEFS,
    Mount,
    Volume,
    is_mounted,
    needs_mounts,
    slicefs,
    succeed,
    wait_until,
)
from tests.faults.redis_server import DurableRedis
from tests.support.ceph_cluster import CephCluster

pytestmark = needs_mounts

SHARDS = 10
SHARD_BYTES = 200_000
SLOW = ("--upload-limit", "1MiB")  # two seconds for a checkpoint
HARDLY = ("--upload-limit", "64KiB")  # half a minute: for tests that don't wait for it


def staged(volume: Volume, *options: str, name: str = "mnt") -> Mount:
    """A mount that writes back."""
    return volume.mount(
        "--writeback", "--staging-dir", str(volume.base / "staging"), *options, name=name
    )


def journal_files(volume: Volume) -> list[str]:
    """What is left in journals."""
    staging = volume.base / "staging"
    return [path.name for path in staging.rglob("*") if path.is_file() and path.name != "lock"]


def test_w2_other_mounts_see_checkpoints_in_order(served: Volume) -> None:
    served.format()
    mine = staged(served, *SLOW)
    other = served.mount(name="other")
    states = 0
    for turn in range(4):
        writer = Writer(mine.path / f"step{turn}", SHARDS, SHARD_BYTES, random.Random(turn))
        watcher = Watcher(writer, other.path / f"step{turn}")
        begun = time.monotonic()
        writer.write()
        stall = time.monotonic() - begun
        assert writer.judge(writer.folder) == (SHARDS, True)  # this mount sees all at once
        succeed("flush", "--wait", writer.folder)
        assert time.monotonic() - begun > stall
        assert writer.judge(other.path / f"step{turn}") == (SHARDS, True)
        watcher.stop()
        states = max(states, len(watcher.seen))  # who watches may be kept from looking for a while
    assert states > 3, "nothing was held back"
    assert mine.numbers()["staging_conflicts_total"] == 0
    mine.umount()
    assert journal_files(served) == []
    served.end()


@pytest.fixture(params=["s3", "rados"])
def stored(
    request: pytest.FixtureRequest, base: Path, durable_redis: DurableRedis, ceph: CephCluster
) -> Iterator[Volume]:
    """A volume on Redis whose data go to a real object store, not formatted yet."""
    place = s3_place(base, ceph.endpoint) if request.param == "s3" else rados_place(ceph)
    volume = Volume(base, durable_redis.url(), place)
    yield volume
    volume.clean_up()


def killing(volume: Volume, kills: int, seed: int, keep_disk: bool | None) -> None:
    """Kill the writing mount `kills` times; the disk with its journal is lost, or None: maybe."""
    chance = random.Random(seed)
    volume.format()
    other = volume.mount(name="other")
    for kill in range(kills):
        mine = staged(volume, *SLOW, "--no-supervisor")
        writer = Writer(mine.path / f"step{kill}", SHARDS, SHARD_BYTES, chance)
        theirs = other.path / f"step{kill}"
        watcher = Watcher(writer, theirs)
        writer.start()
        time.sleep(chance.uniform(0.0, 2.5))
        mine.kill()
        writer.join()
        watcher.stop()
        if keep_disk is False or (keep_disk is None and chance.random() < 0.5):
            wait_until("nobody uses that disk", 60, mine.has_ended)
            shutil.rmtree(volume.base / "staging")
            if theirs.exists():
                writer.judge(theirs)
            continue
        mine = staged(volume)
        promised = (writer.acknowledged, writer.complete)
        found = writer.judge(mine.path / f"step{kill}")  # before anything is published
        assert found >= promised, (found, promised)
        succeed("flush", "--wait", mine.path)
        assert writer.judge(theirs) >= promised
        mine.umount()
    volume.end("session .* sent no heartbeat|staging journal")


def test_w1_killed_and_mounted_again(served: Volume) -> None:
    killing(served, 6, seed=1, keep_disk=True)


def test_w2_killed_and_its_disk_lost(served: Volume) -> None:
    killing(served, 6, seed=2, keep_disk=False)


def test_w1_killed_with_sqlite(embedded: Volume) -> None:
    killing(embedded, 4, seed=3, keep_disk=None)


def test_w2_killed_before_real_stores(stored: Volume) -> None:
    killing(stored, 2, seed=7, keep_disk=None)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("keep_disk", [True, False], ids=["kept", "lost"])
def test_w2_killed_often(served: Volume, keep_disk: bool, part: int) -> None:
    """100 kills, with and without the disk; in parts, which end one by one."""
    killing(served, 20, seed=time.time_ns() % 1_000_000 + part, keep_disk=keep_disk)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("keep_disk", [True, False], ids=["kept", "lost"])
def test_w2_killed_often_before_real_stores(stored: Volume, keep_disk: bool, part: int) -> None:
    """As many before each of S3 and RADOS."""
    killing(stored, 20, seed=time.time_ns() % 1_000_000 + part, keep_disk=keep_disk)


def test_w4_the_journal_is_beside_the_cache(embedded: Volume) -> None:
    """And what was left where it was before is taken up."""
    embedded.format()
    cache = ("--cache-dir", str(embedded.base / "ssd"))
    mine = staged(embedded, *HARDLY, "--drain-timeout", "0.5", *cache)
    writer = Writer(mine.path / "step", SHARDS, SHARD_BYTES, random.Random(8))
    writer.write()
    os.kill(mine.pid, signal.SIGTERM)
    wait_until("the client has left it", 60, mine.has_ended)
    assert journal_files(embedded)
    shutil.move(embedded.base / "staging", embedded.base / "disk/staging")
    # the second cache directory of this mount was the first of the one before
    both = f"{embedded.base}/ssd:{embedded.base}/disk"
    mine = embedded.mount("--writeback", "--cache-dir", both)
    assert writer.judge(writer.folder) == (SHARDS, True)
    succeed("flush", "--wait", mine.path)
    mine.umount()
    mine = embedded.mount("--writeback", *cache)
    place = json.loads((mine.path / ".config").read_text())["mount"]["staging"]
    assert place.startswith(f"{embedded.base}/ssd/staging/")
    embedded.end("not in the store yet")


def test_w4_what_umount_leaves_is_said_and_taken_up(embedded: Volume) -> None:
    embedded.format()
    mine = staged(embedded, *HARDLY, "--drain-timeout", "0.5")
    Writer(mine.path / "step", SHARDS, SHARD_BYTES, random.Random(4)).write()
    done = slicefs("umount", mine.path)
    assert done.code == 3, "a script that ends the host after this would lose them"
    assert "not in the store yet" in done.err, done
    assert journal_files(embedded)
    writer = Writer(mine.path / "step", SHARDS, SHARD_BYTES, random.Random(4))
    mine = staged(embedded)
    assert writer.judge(writer.folder) == (SHARDS, True)
    succeed("flush", "--wait", "--timeout", "60", mine.path)
    mine.umount()
    assert journal_files(embedded) == []
    embedded.end("not in the store yet")


def test_w4_umount_waits_for_a_slow_client_to_say_what_it_leaves(embedded: Volume) -> None:
    """It asked for three seconds, and then ended with 0 as if nothing were left."""
    embedded.format()
    mine = staged(embedded, *HARDLY, "--drain-timeout", "0.5")
    (mine.path / "file").write_bytes(os.urandom(12 << 20))
    os.kill(mine.pid, signal.SIGSTOP)
    with subprocess.Popen([SLICEFS, "umount", mine.path], stderr=subprocess.PIPE) as umount:
        time.sleep(5)
        os.kill(mine.pid, signal.SIGCONT)
        _, err = umount.communicate(timeout=100)
    assert (umount.returncode, err.count(b"not in the store yet")) == (3, 1), err
    mine = staged(embedded)
    succeed("flush", "--wait", mine.path)
    mine.umount()
    embedded.end("not in the store yet")


def test_w4_a_mount_in_the_foreground_says_what_it_leaves(embedded: Volume) -> None:
    """By its exit code, to whoever started it, as `umount` does."""
    embedded.format()
    root = embedded.base / "mnt"
    root.mkdir()
    words = ["mount", embedded.meta, str(root), "--cache-dir", "none", "--log", str(embedded.log)]
    staging = ["--writeback", "--staging-dir", str(embedded.base / "staging")]
    limits = [*HARDLY, "--drain-timeout", "0.5"]
    for options, code in ((limits, 3), ([], 0)):
        with subprocess.Popen([SLICEFS, *words, *staging, *options]) as process:
            try:
                wait_until("it is mounted", 60, lambda: is_mounted(root))
                wait_until("it serves", 60, (root / ".stats").exists)
                if code:
                    (root / "file").write_bytes(os.urandom(12 << 20))
                else:
                    succeed("flush", "--wait", root)
                process.terminate()
                assert process.wait(60) == code
            finally:
                process.kill()
    assert journal_files(embedded) == []
    embedded.end("not in the store yet")


def test_w4_what_waits_for_the_limit_does_not_outlast_the_drain(embedded: Volume) -> None:
    """The client ended when the block that waited for `--upload-limit` was through, a minute on."""
    embedded.format()
    mine = staged(embedded, *HARDLY, "--drain-timeout", "0.5")
    (mine.path / "file").write_bytes(os.urandom(12 << 20))
    done = slicefs("umount", mine.path)
    assert (done.code, done.err.count("not in the store yet")) == (3, 1), done
    assert done.seconds < 60, "of the three minutes that it takes"
    assert mine.has_ended()
    mine = staged(embedded)
    succeed("flush", "--wait", mine.path)
    mine.umount()
    assert journal_files(embedded) == []
    embedded.end("not in the store yet")


def test_w1_a_mount_without_writeback_says_what_it_does_not_show(embedded: Volume) -> None:
    embedded.format()
    cache = ("--cache-dir", str(embedded.base / "cache"))
    mine = embedded.mount("--writeback", *cache, *HARDLY, "--no-supervisor")
    other = embedded.mount(*cache, name="other")
    assert embedded.complaints() == [], "the journal of a mount that lives is nobody's business"
    other.umount()
    for number in range(3):
        (mine.path / f"file{number}").write_bytes(os.urandom(1 << 19))
    mine.kill()
    other = embedded.mount(*cache, name="other")
    assert len(os.listdir(other.path)) < 3
    assert "mount with --writeback --staging-dir" in embedded.complaints()[0]
    other.umount()
    mine = embedded.mount("--writeback", *cache)
    succeed("flush", "--wait", mine.path)
    assert len(os.listdir(mine.path)) == 3
    embedded.end("has the journal of a mount")


def end_sessions(volume: Volume) -> None:
    """What the leader does with sessions that have stood still for a minute, at once."""
    store = open_store(volume.meta, SystemRuntime())
    try:
        meta = Meta(store, SystemRuntime())
        for each in meta.sessions.all():
            meta.sessions.end(each.id)
    finally:
        store.close()


def test_w1_gc_deletes_nothing_while_a_journal_is_left(embedded: Volume) -> None:
    """Blocks that a killed mount had uploaded and not published were taken for leaked.

    Wherever its journal is: the metadata know of it.
    """
    embedded.format()
    gc = ("gc", embedded.meta, "--delete", "--age", "0")
    for data in (os.urandom(6 << 20), os.urandom(6 << 20)):
        mine = staged(embedded, *HARDLY, "--no-supervisor")
        (mine.path / "file").write_bytes(data)
        mine.kill()
        wait_until("the client ends", 60, mine.has_ended)
        succeed(*gc)  # its session holds back what it has uploaded
        end_sessions(embedded)
        done = slicefs(*gc)
        assert done.code == 1, done
        [journal] = (embedded.base / "staging").glob("*/0")
        assert (
            f"slicefs: {journal} on {socket.gethostname()} has the journal of a mount" in done.err
        )
        succeed("gc", embedded.meta)  # counting is harmless
        mine = staged(embedded)
        succeed("flush", "--wait", mine.path)
        succeed(*gc)
        assert (mine.path / "file").read_bytes() == data
        mine.umount()
        succeed(*gc)
    embedded.end("journal|repeated|has ended session")


def test_w1_a_journal_whose_disk_is_lost_is_given_up(embedded: Volume) -> None:
    embedded.format()
    gc = ("gc", embedded.meta, "--delete", "--age", "0")
    mine = staged(embedded, *HARDLY, "--no-supervisor")
    (mine.path / "file").write_bytes(os.urandom(6 << 20))
    mine.kill()
    wait_until("the client ends", 60, mine.has_ended)
    shutil.rmtree(embedded.base / "staging")
    end_sessions(embedded)
    done = slicefs(*gc)
    assert done.code == 1
    assert "if that disk is lost, add --give-up-journals" in done.err
    assert slicefs("gc", embedded.meta, "--give-up-journals").code == 1, "it is for --delete"
    succeed(*gc, "--give-up-journals")
    succeed(*gc)
    embedded.end()


def test_w4_sigterm_drains(embedded: Volume) -> None:
    embedded.format()
    mine = staged(embedded, *SLOW)
    (mine.path / "file").write_bytes(b"x" * 1_500_000)
    os.kill(mine.pid, signal.SIGTERM)
    wait_until("the client drains", 60, mine.has_ended)
    assert journal_files(embedded) == []
    again = embedded.mount()
    assert (again.path / "file").read_bytes() == b"x" * 1_500_000
    embedded.end()


def test_w3_fsync_store_waits_until_others_see_it(served: Volume) -> None:
    served.format()
    mine = staged(served, "--fsync", "store", *SLOW)
    other = served.mount(name="other")
    with open(mine.path / "file", "wb") as file:
        file.write(b"x" * 500_000)
        os.fsync(file.fileno())
        assert (other.path / "file").read_bytes() == b"x" * 500_000
    served.end()


def test_w2_copies_clones_and_files_without_names(served: Volume) -> None:
    """As the kernel asks for them: copies fall back, link(2) and `clone` wait for the store."""
    served.format()
    mine = staged(served, "--upload-limit", "1MiB")
    other = served.mount(name="other")
    run, data = mine.path / "run", os.urandom(400_000)
    run.mkdir()
    (run / "shard").write_bytes(data)
    _copy(run / "shard", run / "copy")
    assert (run / "copy").read_bytes() == data
    directory = os.open(run, os.O_RDONLY)
    nameless = os.open(run, os.O_TMPFILE | os.O_RDWR, 0o644)
    os.write(nameless, data)
    os.posix_fallocate(nameless, 400_000, 100_000)
    os.link(f"/proc/self/fd/{nameless}", "named", dst_dir_fd=directory, follow_symlinks=True)
    assert (other.path / "run/named").read_bytes() == data + bytes(100_000)
    os.close(nameless)
    os.close(directory)
    (run / "late").write_bytes(data)
    succeed("clone", run, mine.path / "clone")
    for name in ("shard", "copy", "late"):
        assert (other.path / "clone" / name).read_bytes() == data
    objects = set(served.objects())
    _copy(run / "shard", run / "shared")
    succeed("flush", "--wait", mine.path)
    assert (other.path / "run/shared").read_bytes() == data
    assert set(served.objects()) <= objects, "a copy of what is published took space"
    mine.umount()
    assert journal_files(served) == []
    served.end()


def _copy(source: Path, target: Path) -> None:
    """copy_file_range(2), which the kernel does by itself where we refuse."""
    with open(source, "rb") as old, open(target, "wb") as new:
        size = os.fstat(old.fileno()).st_size
        while size:
            size -= os.copy_file_range(old.fileno(), new.fileno(), size)


def test_w4_a_full_staging_disk_is_written_through(embedded: Volume) -> None:
    disk = embedded.base / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", disk], check=True)
    try:
        embedded.format()
        mine = embedded.mount("--writeback", "--staging-dir", str(disk), *SLOW)
        writer = Writer(mine.path / "step", SHARDS, 600_000, random.Random(5))
        writer.write()
        assert mine.numbers()["staging_written_through_total"] > 0
        assert writer.judge(writer.folder) == (SHARDS, True)
        mine.umount()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    embedded.end("staging disk: .*No space left|staging journal: .*No space left")


def test_w4_writers_wait_for_room(embedded: Volume) -> None:
    embedded.format()
    mine = staged(embedded, "--staging-size", "64MiB", "--upload-limit", "40MiB")
    data = os.urandom(1 << 20)
    with open(mine.path / "file", "wb") as file:
        for _ in range(120):
            file.write(data)
            assert mine.numbers()["staging_disk_bytes"] <= 64 << 20
    assert (mine.path / "file").stat().st_size == 120 << 20
    succeed("flush", "--wait", mine.path)
    mine.umount()
    embedded.end()

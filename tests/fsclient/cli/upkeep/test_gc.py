"""R1: `slicefs gc` on real volumes: what it counts, deletes and leaves, also while others write."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any, Self

import pytest

from fsclient.background.tidy_queue import COMMITS_BEFORE_LOOK
from fsdata.format.object_keys import object_key
from fsmeta.meta.meta import Meta
from fsmeta.runtime import SystemRuntime
from fsmeta.store.sqlite import SqliteStore
from fsmeta.types import SliceId
from tests.faults.load import content
from tests.faults.places import rados_place, s3_place
from tests.faults.program import SLICEFS, Mount, Volume, needs_mounts, slicefs, succeed, wait_until
from tests.support.ceph_cluster import CephCluster

pytestmark = needs_mounts


def gc(volume: Volume, *options: str) -> Any:
    return json.loads(succeed("gc", volume.meta, "--json", *options))


def plant(volume: Volume, sid: int, size: int = 1000) -> Path:
    """An object that nothing refers to."""
    path = volume.bucket / "testvol" / object_key(SliceId(sid), 0, size)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    return path


def test_what_is_leaked_is_counted_and_deleted(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount()
    files = {f"f{n}": content(n, 100_000) for n in range(5)}
    for name, data in files.items():
        (mount.path / name).write_bytes(data)
    mount.umount()
    used = set(embedded.objects())
    leaked = [plant(embedded, 500), plant(embedded, 501)]
    future = plant(embedded, 5000)
    strange = embedded.bucket / "testvol/chunks/0/0/notes"
    strange.write_text("not ours")
    found = gc(embedded)
    assert found["leaked"] == {"objects": 0, "bytes": 0}, "too young"
    assert found["young"] == {"objects": 2, "bytes": 2000}
    found = gc(embedded, "--age", "0")
    assert found["in_use"]["objects"] == 5
    assert found["leaked"] == {"objects": 2, "bytes": 2000}
    assert found["recent"]["objects"] == 1, "of an id that nobody has been given"
    assert found["strange"]["objects"] == 1
    assert found["deleted"]["objects"] == 0
    assert all(path.exists() for path in leaked)
    text = succeed("gc", embedded.meta, "--age", "0s")
    assert "2 objects, 2.0 KiB: --delete removes them" in text
    assert "deleted     2 objects" in succeed("gc", embedded.meta, "--age", "0", "--delete")
    assert not any(path.exists() for path in leaked)
    assert used | {future, strange} == {*embedded.objects()}
    future.unlink()
    strange.unlink()
    mount = embedded.mount()
    assert {name: (mount.path / name).read_bytes() for name in files} == files
    embedded.end()


def test_bad_input(embedded: Volume) -> None:
    embedded.format()
    for words, why in (
        (("--age", "soon"), "'soon' is not a time like 90, 30m, 2h or 7d"),
        (("--threads", "0"), "--threads"),
    ):
        done = slicefs("gc", embedded.meta, *words)
        assert done.code == 2
        assert why in done.err
        assert done.err.count("\n") == 1
    other = embedded.base / "other"
    other.write_text('{"volume": "x"}')
    for options, why in (
        (["--cursor", str(other)], "--cursor is for a run with --delete"),
        (["--delete", "--cursor", str(other)], "can't be read: remove it to start again"),
        (["--delete", "--cursor", f"{embedded.base}/no/file"], "No such file or directory"),
    ):
        done = slicefs("gc", embedded.meta, *options)
        assert done.code == 1
        assert why in done.err
        assert done.err.count("\n") == 1
    done = slicefs("gc", f"sqlite://{embedded.base}/none.db")
    assert (done.code, done.out) == (1, "")


class Writers:
    """A process that writes files at full speed, and what it has closed."""

    CODE = """
import hashlib, os, signal, sys
root, number, stop = sys.argv[1], 0, []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
while not stop:
    data = os.urandom(2000 + number * 7919 % 300_000)
    name = f"{root}/{number % 40}"
    with open(name + ".new", "wb") as file:
        file.write(data)
    os.rename(name + ".new", name)
    print(number % 40, hashlib.sha256(data).hexdigest(), flush=True)
    number += 1
"""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        command = [sys.executable, "-c", self.CODE, str(folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            process.kill()

    def is_at_work(self) -> bool:
        return len(os.listdir(self._folder)) > 11

    def stop(self) -> int:
        """End it; everything it has closed must be there. How many files it wrote."""
        self._process.terminate()
        out, _ = self._process.communicate(timeout=60)
        lines = [line.split() for line in out.splitlines()]
        for name, digest in dict(lines).items():
            found = hashlib.sha256((self._folder / name).read_bytes()).hexdigest()
            assert found == digest, name
        return len(lines)


RUNS_MAX = 40  # of 20 ids each: all are of the first mount, which was given 1024


@pytest.mark.parametrize("kind", ["embedded", "served"])
def test_gc_beside_clients_that_write(kind: str, request: pytest.FixtureRequest) -> None:
    volume: Volume = request.getfixturevalue(kind)
    volume.format("--block-size", "64KiB")
    mount = volume.mount()
    (mount.path / "first").write_text("takes ids, of which most are never used")
    mount.umount()
    mounts = [volume.mount("--heartbeat", "0.3", name=name) for name in ("one", "two")]
    deleted = runs = 0
    end = time.monotonic() + 8
    with Writers(mounts[0].path / "0") as first, Writers(mounts[1].path / "1") as second:
        while (
            time.monotonic() < end or runs < 3 or not (first.is_at_work() and second.is_at_work())
        ):
            if runs == RUNS_MAX:
                break
            for number in range(20):
                plant(volume, 100 + 20 * runs + number)
            found = gc(volume, "--delete", "--age", "0")
            assert found["failed"] == 0
            deleted += found["deleted"]["objects"]
            runs += 1
        assert deleted >= 20 * runs, "all that was planted"
        wait_until("both write", 60, lambda: first.is_at_work() and second.is_at_work())
        assert min(first.stop(), second.stop()) > 10
    for mount in mounts:
        mount.umount()
    assert gc(volume, "--delete", "--age", "0")["recent"]["objects"] == 0
    assert volume.fsck("--data")["leaked_objects"] == 0
    volume.end()


def test_gc_killed_at_random_points(embedded: Volume) -> None:
    embedded.format("--block-size", "64KiB")
    mount = embedded.mount()
    data = content(3, 1_000_000)
    (mount.path / "file").write_bytes(data)
    mount.umount()
    dice = random.Random(7)
    for number in range(600):
        plant(embedded, 100 + number, 100)
    left = []
    for _ in range(6):
        command = [SLICEFS, "gc", embedded.meta, "--delete", "--age", "0", "--threads", "2"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(0.2 + dice.random() * 0.5)
        process.kill()
        process.wait()
        left.append(len(embedded.objects()))
        embedded.fsck("--data")
    found = gc(embedded, "--delete", "--age", "0")
    assert found["leaked"]["objects"] == found["deleted"]["objects"]
    assert embedded.fsck("--data")["leaked_objects"] == 0
    mount = embedded.mount()
    assert (mount.path / "file").read_bytes() == data
    embedded.end()


# `slicefs`, killed in the midst of its work: after so many objects that it has deleted
DYING = """
import os, signal, sys
from fsclient.cli.main import main
left, unlink = int(sys.argv.pop(1)), os.unlink

def dying(path, *more, **named):
    global left
    if "/chunks/" in str(path):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    unlink(path, *more, **named)

os.unlink = dying
main()
"""


def test_r1_gc_with_a_cursor_goes_on_where_it_was_killed(embedded: Volume) -> None:
    embedded.format("--block-size", "64KiB")
    mount = embedded.mount()
    (mount.path / "file").write_bytes(content(3, 300_000))
    for number in range(2500):
        (mount.path / f"{number}").touch()
    mount.umount()
    for number in range(800):  # ids that were given out
        plant(embedded, 100 + number, 100)
    cursor = embedded.base / "cursor"
    words = ["gc", embedded.meta, "--delete", "--age", "0", "--cursor", str(cursor)]
    dice = random.Random(3)
    left = [800]
    for _ in range(3):
        dying = [sys.executable, "-c", DYING, str(dice.randrange(1, 200))]
        assert subprocess.run([*dying, *words], stdout=subprocess.DEVNULL).returncode == -SIGKILL
        assert cursor.exists()
        left.append(embedded.fsck("--data")["leaked_objects"])
    assert left == sorted(left, reverse=True)
    assert left[-1] > 0, "it was killed with work left to do"
    gc(embedded, "--delete", "--age", "0", "--cursor", str(cursor))
    assert embedded.fsck("--data")["leaked_objects"] == 0
    assert not [path for path in embedded.base.iterdir() if path.name.startswith("cursor")]
    embedded.end()


def end_sessions(volume: Volume) -> None:
    """What another client does a minute after a client has died."""
    runtime = SystemRuntime()
    store = SqliteStore(volume.meta.removeprefix("sqlite://"), runtime, False)
    meta = Meta(store, runtime)
    for each in meta.sessions.all():
        meta.sessions.end(each.id)
    store.close()


def test_what_a_dead_client_may_have_committed_waits_for_its_end(embedded: Volume) -> None:
    embedded.format("--block-size", "64KiB")
    mount = embedded.mount("--heartbeat", "0.2", "--no-supervisor")
    (mount.path / "kept").write_bytes(content(1, 200_000))
    with leaking(mount):
        time.sleep(1)
    found = gc(embedded, "--delete", "--age", "0")
    assert found["deleted"]["objects"] == 0
    assert found["recent"]["objects"] >= 4
    assert f"pid {mount.pid}" in found["held_by"]
    assert "because of session" in succeed("gc", embedded.meta)
    end_sessions(embedded)
    found = gc(embedded, "--delete", "--age", "0")
    assert found["deleted"]["objects"] >= 4
    assert embedded.fsck("--data")["leaked_objects"] == 0
    mount = embedded.mount()
    assert (mount.path / "kept").read_bytes() == content(1, 200_000)
    embedded.end()


def test_compact(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount()
    pieces = [content(n, 50_000) for n in range(10)]
    assert len(pieces) < COMMITS_BEFORE_LOOK, "else the mount does it itself"
    with (mount.path / "file").open("wb", buffering=0) as file:
        for piece in pieces:
            os.pwrite(file.fileno(), piece, 0)
            os.fsync(file.fileno())
    mount.umount()
    assert gc(embedded, "--compact", "--age", "0")["compacted_chunks"] == 1
    assert "compacted   0 chunks" in succeed("gc", embedded.meta, "--compact")
    mount = embedded.mount()
    assert (mount.path / "file").read_bytes() == pieces[-1]
    found = json.loads(os.getxattr(mount.path / "file", "user.slicefs.info"))
    assert len(found["chunks"][0]["slices"]) == 1
    mount.umount()
    assert embedded.fsck("--data")["leaked_objects"] == 0
    embedded.end()


def test_r1_a_damaged_file_is_left_out_of_compaction(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount()
    for name in ("damaged", "whole"):
        with (mount.path / name).open("wb", buffering=0) as file:
            for number in range(10):
                os.pwrite(file.fileno(), content(number, 50_000), 0)
                os.fsync(file.fileno())
    found = json.loads(os.getxattr(mount.path / "damaged", "user.slicefs.info"))
    ino = found["ino"]
    mount.umount()
    slices = sorted(embedded.objects(), key=lambda path: int(path.name.split("_")[0]))
    slices[9].unlink()  # the one that hides the nine before it
    done = slicefs("gc", embedded.meta, "--compact", "--age", "0", "--json")
    assert done.code == 1
    assert f"inode {ino}, chunk 0: " in done.err
    counts = json.loads(done.out)
    assert (counts["compacted_chunks"], counts["uncompacted_chunks"]) == (1, 1)
    mount = embedded.mount()
    assert (mount.path / "whole").read_bytes() == content(9, 50_000)
    (mount.path / "damaged").unlink()
    mount.umount()
    embedded.end()


@pytest.mark.parametrize("store", ["s3", "rados"])
def test_on_real_stores(base: Path, ceph: CephCluster, store: str) -> None:
    place = s3_place(base, ceph.endpoint) if store == "s3" else rados_place(ceph)
    volume = Volume(base, place=place)
    try:
        volume.format("--block-size", "64KiB", "--hash-prefix")
        mount = volume.mount("--no-supervisor")
        (mount.path / "kept").write_bytes(content(1, 500_000))
        with leaking(mount):
            pass
        assert gc(volume, "--age", "0", "--delete")["deleted"]["objects"] == 0
        end_sessions(volume)
        found = gc(volume, "--age", "0", "--delete")
        assert found["leaked"]["objects"] >= 4, found
        assert found["deleted"] == found["leaked"]
        assert volume.fsck("--data")["leaked_objects"] == 0
        mount = volume.mount()
        assert (mount.path / "kept").read_bytes() == content(1, 500_000)
        volume.end()
    finally:
        volume.clean_up()


@contextmanager
def leaking(mount: Mount) -> Iterator[None]:
    """Full blocks go up, are not committed, and then the client is killed."""
    before = mount.numbers()["object_put_count_total"]
    fd = os.open(mount.path / "lost", os.O_CREAT | os.O_WRONLY)
    os.write(fd, content(2, 300_000))
    wait_until("uploads", 100, lambda: mount.numbers()["object_put_count_total"] >= before + 4)
    yield
    mount.kill()
    with suppress(OSError):  # there is nobody any more
        os.close(fd)

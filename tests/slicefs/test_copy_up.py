"""X2: attached files that are written: their objects are copied, and stay as they are."""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from fsdata.attached import bucket as attached_bucket
from slicefs.client.client import Client
from slicefs.lifecycle.attach import attach
from slicefs.stores.tree import Tree
from tests.conftest import LogWatch
from tests.posix.volumes import PATIENCE_S, Volume, can_mount, run
from tests.slicefs.attached_objects import BIG, OBJECTS, code_of, found
from tests.slicefs.memory_disk import quick_volume
from tests.support.ceph_cluster import CephCluster
from tests.support.http_proxy import Fault, HttpProxy, Kind, Request
from tests.support.waiting import wait_until

needs_mount = pytest.mark.skipif(not can_mount(), reason="mounting takes root and /dev/fuse")
SECOND = 4 << 20  # where the second block of `BIG` begins
OPENER = """
import os, sys
print("begun", flush=True)
os.close(os.open(sys.argv[1], os.O_RDWR))
print("opened", flush=True)
"""
MANY = 100  # more than a mount has serving threads
MANY_OPENERS = """
import os, sys, threading

def open_one():
    fd = os.open(sys.argv[1], os.O_RDWR)
    os.pwrite(fd, b"x", len(threads))
    os.close(fd)
    done.append(fd)

done, threads = [], []
for _ in range(int(sys.argv[2])):
    threads.append(threading.Thread(target=open_one))
for each in threads:
    each.start()
for each in threads:
    each.join()
print(len(done), flush=True)
"""
COPIER = """
import sys
from slicefs.client.client import Client
with Client(sys.argv[1], uid=0, gid=0) as fs:
    print("begun", flush=True)
    fs.open("set/big", "r+b").close()
    print("copied", flush=True)
"""


@pytest.fixture
def proxy(ceph: CephCluster, source: Tree, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpProxy]:
    """Stands before the bucket, for what is attached from now on; `source` goes past it."""
    del source  # made before
    with HttpProxy(ceph.s3_port) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        yield made


@pytest.fixture
def told(redis_url: str) -> Iterator[Volume]:
    """A volume whose mounts are told of each other's changes."""
    with quick_volume(redis_url) as made:
        yield made


def is_second(request: Request) -> bool:
    """Whether a request is for the second block of `BIG`."""
    ranges = [value for name, value in request.headers if name.lower() == "range"]
    return f"bytes={SECOND}-" in "".join(ranges)


def gets(proxy: HttpProxy) -> int:
    """How often bytes were asked for."""
    return sum(request.method == "GET" for request in proxy.requests())


def shows_object(path: Path) -> bool:
    """Whether a file is attached."""
    return code_of(lambda: os.getxattr(path, "user.slicefs.attached")) is None


def opens(root: Path) -> int:
    """How many OPENs a mount has begun to serve; asking is one more."""
    lines = (root / ".stats").read_text().splitlines()
    return sum(
        int(float(line.split()[1])) for line in lines if 'operations_total{op="open"}' in line
    )


def leaked(volume: Volume) -> int:
    """How many objects no file lists."""
    count: int = json.loads(run("fsck", volume.meta, "--data", "--json"))["leaked_objects"]
    return count


def collect(volume: Volume) -> None:
    """Have gc delete what no file lists; a client that is there may still be about to commit."""

    def is_clean() -> bool:
        run("gc", volume.meta, "--delete", "--age", "0")
        return leaked(volume) == 0

    wait_until(is_clean, 180)


def _is_long(fd: int, size: int) -> bool:
    return os.fstat(fd).st_size == size


# --- on mounts -----------------------------------------------------------------------------------


@needs_mount
def test_written_files_have_bytes_of_their_own(source: Tree, volume: Volume) -> None:
    root = volume.mount()
    attach(source.url, str(root / "data"))
    before = (root / "data/big").stat()
    with (root / "data/big").open("r+b") as file:
        assert file.read(10) == BIG[:10]
        after = os.fstat(file.fileno())
        assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)
        assert after.st_blocks * 512 >= len(BIG)
        file.seek(5_000_000)
        file.write(b"own")
    with (root / "data/a/one").open("ab") as file:
        file.write(b"more")
    with (root / "data/empty").open("r+b") as file:
        file.write(b"not")
    (root / "data/a-b").write_bytes(b"anew")
    big = BIG[:5_000_000] + b"own" + BIG[5_000_003:]
    wanted = {**OBJECTS, "big": big, "a/one": OBJECTS["a/one"] + b"more", "empty": b"not"}
    wanted["a-b"] = b"anew"
    assert found(root / "data") == wanted
    assert not any(shows_object(root / "data" / name) for name in ("big", "a/one", "empty", "a-b"))
    assert shows_object(root / "data/a/b/two")
    assert {name: source.read(name) for name in OBJECTS} == OBJECTS
    report = attach(source.url, str(root / "data"))  # what is the volume's own stays
    assert (report.made, report.replaced, report.removed) == (0, 0, 0)
    assert found(root / "data") == wanted


@needs_mount
def test_truncated_files_copy_what_they_keep(
    source: Tree, proxy: HttpProxy, volume: Volume
) -> None:
    one, two = volume.mount("one"), volume.mount("two")
    attach(f"{source.url}", str(one / "data"))
    proxy.heal()
    with (two / "data/big").open("rb") as held:
        assert os.pread(held.fileno(), 5, 6_000_000) == BIG[6_000_000:6_000_005]
        asked = gets(proxy)
        os.truncate(one / "data/big", 4_500_000)
        os.truncate(one / "data/big", 4_500_010)
        assert gets(proxy) == asked + 2
        wait_until(lambda: (two / "data/big").stat().st_size == 4_500_010)
        assert os.pread(held.fileno(), 20, 4_499_990) == BIG[4_499_990:4_500_000] + bytes(10)
    with (one / "data/a/one").open("r+b") as file:
        file.truncate(2000)
    assert (two / "data/a/one").read_bytes() == OBJECTS["a/one"] + bytes(1000)
    asked = gets(proxy)
    os.close(os.open(one / "data/a/b/two", os.O_WRONLY | os.O_TRUNC))
    os.truncate(one / "data/a-b", 0)
    assert gets(proxy) == asked
    assert (one / "data/a/b/two").read_bytes() == (two / "data/a-b").read_bytes() == b""


@needs_mount
def test_handles_that_were_open_follow(source: Tree, told: Volume) -> None:
    one, two = told.mount("one"), told.mount("two")
    attach(source.url, str(one / "data"))
    paths = one / "data/big", two / "data/big"
    held = [os.open(path, os.O_RDONLY) for path in paths]
    try:
        for each in held:
            assert os.pread(each, 10, 8_000_000) == BIG[8_000_000:8_000_010]
        writer = os.open(paths[0], os.O_RDWR)
        os.pwrite(writer, b"0123456789", 8_000_000)
        assert os.pread(held[0], 10, 8_000_000) == b"0123456789"
        os.close(writer)
        wait_until(lambda: os.pread(held[1], 10, 8_000_000) == b"0123456789")
        writer = os.open(paths[1], os.O_RDWR | os.O_APPEND)
        os.write(writer, b"end")
        os.close(writer)
        for each in held:
            wait_until(partial(_is_long, each, len(BIG) + 3))
            assert os.pread(each, 10, len(BIG)) == b"end"
            assert os.lseek(each, 0, os.SEEK_HOLE) == len(BIG) + 3
    finally:
        for each in held:
            os.close(each)
    assert source.read("big") == BIG


@needs_mount
def test_maps_are_written_and_read_on_both_mounts(source: Tree, told: Volume) -> None:
    one, two = told.mount("one"), told.mount("two")
    attach(source.url, str(one / "data"))
    with (two / "data/big").open("rb") as reader, (one / "data/big").open("r+b") as writer:
        shown = mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ)
        assert shown[7_000_000:7_000_004] == BIG[7_000_000:7_000_004]
        with mmap.mmap(writer.fileno(), 0) as written:
            written[7_000_000:7_000_004] = b"mmap"
            written.flush()
        os.fsync(writer.fileno())
        wait_until(lambda: shown[7_000_000:7_000_004] == b"mmap")
        assert shown[:7_000_000] == BIG[:7_000_000]
        shown.close()


@needs_mount
def test_two_mounts_copy_at_the_same_time(source: Tree, proxy: HttpProxy, volume: Volume) -> None:
    one, two = volume.mount("one"), volume.mount("two")
    attach(source.url, str(one / "data"))
    held = proxy.add(Fault(Kind.HOLD, 2, method="GET", when=is_second))
    openers = [
        subprocess.Popen([sys.executable, "-c", OPENER, root / "data/big"], stdout=subprocess.PIPE)
        for root in (one, two)
    ]
    wait_until(lambda: held.hits == 2)
    assert (one / "data/a/one").read_bytes() == OBJECTS["a/one"]  # others are served meanwhile
    proxy.heal()
    assert [each.communicate(timeout=60)[0] for each in openers] == [b"begun\nopened\n"] * 2
    assert (one / "data/big").read_bytes() == (two / "data/big").read_bytes() == BIG
    collect(volume)  # the copy that came second


@needs_mount
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_program_that_waits_for_a_copy_can_be_ended(
    source: Tree, proxy: HttpProxy, volume: Volume, end: signal.Signals
) -> None:
    root = volume.mount()
    attach(source.url, str(root / "data"))
    held = proxy.add(Fault(Kind.HOLD, 1, method="GET", when=is_second))
    opener = subprocess.Popen(
        [sys.executable, "-c", OPENER, root / "data/big"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until(lambda: held.hits == 1)
    opener.send_signal(end)
    assert opener.communicate(timeout=60)[0] == b"begun\n"  # while the store still does not answer
    assert held.hits == 1
    proxy.heal()
    assert (root / "data/big").read_bytes() == BIG
    assert shows_object(root / "data/big")
    (root / "data/big").open("r+b").close()
    assert not shows_object(root / "data/big")
    collect(volume)


@needs_mount
@pytest.mark.parametrize("killed", [False, True])
def test_many_that_wait_for_a_copy_hold_no_threads(
    source: Tree, proxy: HttpProxy, volume: Volume, killed: bool
) -> None:
    root = volume.mount()
    attach(source.url, str(root / "data"))
    held = proxy.add(Fault(Kind.HOLD, 1, method="GET", when=is_second))
    words = [sys.executable, "-c", MANY_OPENERS, str(root / "data/big"), str(MANY)]
    before, asked = opens(root), count(1)
    openers = subprocess.Popen(words, stdout=subprocess.PIPE)
    wait_until(lambda: opens(root) - before - next(asked) == MANY)
    wait_until(lambda: held.hits == 1)
    assert (root / "data/a/one").read_bytes() == OBJECTS["a/one"]
    (root / "data/new").write_bytes(b"new")
    assert (root / "data/a/b/two").stat().st_size == 2
    assert sorted(os.listdir(root / "data/a")) == ["b", "one"]
    if killed:
        openers.kill()
        openers.communicate()
        assert held.hits == 1  # the store still does not answer
    proxy.heal()
    if killed:
        assert shows_object(root / "data/big")
        os.close(os.open(root / "data/big", os.O_RDWR))
    else:
        assert openers.communicate(timeout=120)[0].split() == [b"%d" % MANY]
    assert not shows_object(root / "data/big")
    mine = BIG if killed else BIG[:MANY] + b"x" + BIG[MANY + 1 :]
    assert (root / "data/big").read_bytes() == mine
    collect(volume)


@needs_mount
def test_a_quota_refuses_before_anything_is_copied(
    source: Tree, proxy: HttpProxy, volume: Volume
) -> None:
    root = volume.mount()
    attach(source.url, str(root / "data"))
    run("quota", "set", volume.meta, "--path", "/data", "--capacity", "4MiB")
    asked = gets(proxy)
    assert code_of(lambda: (root / "data/big").open("r+b")) == errno.EDQUOT
    assert code_of(lambda: os.truncate(root / "data/big", 8 << 20)) == errno.EDQUOT
    assert gets(proxy) == asked
    os.truncate(root / "data/big", 2 << 20)
    with (root / "data/big").open("r+b") as file:
        assert file.read() == BIG[: 2 << 20]
    run("quota", "check", volume.meta)


@needs_mount
def test_a_mount_that_writes_back_stores_the_copy_first(
    source: Tree, volume: Volume, tmp_path: Path
) -> None:
    back = volume.mount("back", "--writeback", "--staging-dir", str(tmp_path / "staging"))
    other = volume.mount("other")
    attach(source.url, str(other / "data"))
    wait_until((back / "data/big").exists)
    with (back / "data/big").open("r+b") as file:
        assert (other / "data/big").read_bytes() == BIG  # by slices, which are in the store
        assert not shows_object(other / "data/big")
        file.seek(1000)
        file.write(b"held back")
    os.chmod(back / "data/a/one", 0o600)
    with (back / "data/a/one").open("ab") as file:  # behind a change that waits
        file.write(b"more")
    assert (back / "data/big").read_bytes()[1000:1009] == b"held back"
    run("flush", back, "--wait")
    assert (other / "data/big").read_bytes() == BIG[:1000] + b"held back" + BIG[1009:]
    assert (other / "data/a/one").read_bytes() == OBJECTS["a/one"] + b"more"
    assert (other / "data/a/one").stat().st_mode & 0o777 == 0o600


@needs_mount
@pytest.mark.parametrize("asks", ["auto", "always"])
def test_mounts_that_open_without_asking_follow(source: Tree, told: Volume, asks: str) -> None:
    root = told.mount("writer")
    attach(source.url, str(root / "data"))
    reader = told.mount("reader", "--read-only", "--open-requests", asks)
    assert found(reader / "data") == OBJECTS
    with (reader / "data/big").open("rb") as held:
        assert os.pread(held.fileno(), 4, 100) == BIG[100:104]
        with (root / "data/big").open("r+b") as file:
            os.pwrite(file.fileno(), b"both", 100)
        wait_until(lambda: os.pread(held.fileno(), 4, 100) == b"both")
    wait_until(lambda: (reader / "data/big").read_bytes()[100:104] == b"both")
    assert code_of(lambda: (reader / "data/big").open("r+b")) == errno.EROFS


# --- clients that are killed, objects that change, stores that are away --------------------------


def test_killed_in_the_middle_it_leaves_the_object(
    source: Tree, proxy: HttpProxy, volume: Volume, fs: Client
) -> None:
    attach(source.url, f"{volume.meta}#set")
    held = proxy.add(Fault(Kind.HOLD, 1, method="GET", when=is_second))
    copier = subprocess.Popen([sys.executable, "-c", COPIER, volume.meta], stdout=subprocess.PIPE)
    wait_until(lambda: held.hits == 1)
    chunks = volume.folder / "data/testvol/chunks"
    wait_until(lambda: any(chunks.rglob("*_0_4194304")))
    copier.kill()
    assert copier.communicate()[0] == b"begun\n"
    proxy.heal()
    with fs.open("set/big") as file:
        assert file.read() == BIG
    assert fs.getxattr("set/big", "user.slicefs.attached")
    with fs.open("set/big", "r+b") as file:
        file.write(b"again")
    with fs.open("set/big") as file:
        assert file.read() == b"again" + BIG[5:]
    assert leaked(volume) > 0
    for stored in chunks.rglob("1_*"):  # by the first session that wrote; gc waits for its lease
        stored.unlink()
    assert leaked(volume) == 0


def test_an_object_that_changes_while_it_is_copied_is_stale(
    source: Tree, proxy: HttpProxy, volume: Volume, fs: Client
) -> None:
    attach(source.url, f"{volume.meta}#set")
    held = proxy.add(Fault(Kind.HOLD, 1, method="GET", when=is_second))
    codes: list[int | None] = []
    writer = threading.Thread(
        target=lambda: codes.append(code_of(lambda: fs.open("set/big", "r+b")))
    )
    writer.start()
    wait_until(lambda: held.hits == 1)
    source.write_atomic("big", (BIG[::-1],))
    proxy.heal()
    writer.join()
    assert codes == [errno.ESTALE]
    assert fs.getxattr("set/big", "user.slicefs.attached")  # nothing of it was kept
    assert code_of(lambda: fs.truncate("set/big", 10)) == errno.ESTALE
    fs.truncate("set/big", 0)  # no byte of it is needed
    with fs.open("set/big") as file:
        assert file.read() == b""


def test_a_store_that_is_away_is_an_error_and_leaves_the_file(
    source: Tree,
    proxy: HttpProxy,
    volume: Volume,
    fs: Client,
    monkeypatch: pytest.MonkeyPatch,
    log_watch: LogWatch,
) -> None:
    monkeypatch.setattr(attached_bucket, "TIMEOUT_S", 1.0)
    log_watch.expect("")
    attach(source.url, f"{volume.meta}#set")
    proxy.go_away()
    assert code_of(lambda: fs.open("set/big", "r+b")) == errno.EIO
    proxy.come_back()
    assert fs.getxattr("set/big", "user.slicefs.attached")
    with fs.open("set/big", "r+b") as file:
        assert file.read() == BIG


def test_only_permitted_users_have_a_file_copied(
    source: Tree,
    proxy: HttpProxy,
    volume: Volume,
    fs: Client,
    as_user: Callable[[int], Client],
) -> None:
    attach(source.url, f"{volume.meta}#set")
    user = as_user(1000)
    asked = gets(proxy)
    assert code_of(lambda: user.open("set/big", "r+b")) == errno.EACCES
    assert code_of(lambda: user.truncate("set/big", 5)) == errno.EACCES
    assert gets(proxy) == asked
    fs.chown("set/big", 1000, 1000)
    fs.chmod("set/big", 0o644)
    with user.open("set/big", "r+b") as file:
        file.write(b"user")
    with fs.open("set/big") as file:
        assert file.read(6) == b"user" + BIG[4:6]


@needs_mount
def test_snapshots_and_clones_keep_showing_the_object(source: Tree, volume: Volume) -> None:
    root = volume.mount()
    attach(source.url, str(root / "data"))
    run("clone", root / "data", root / "copy")
    run("snapshot", "create", root / "data", "one")
    with (root / "data/big").open("r+b") as file:
        file.write(b"own")
    assert (root / "copy/big").read_bytes() == BIG
    assert (root / "data/.snapshots/one/big").read_bytes() == BIG
    assert code_of(lambda: (root / "data/.snapshots/one/big").open("r+b")) == errno.EROFS
    with Client(volume.meta, uid=0, gid=0, meta_timeout=PATIENCE_S) as fs:
        assert bytes(fs.read_many(["data/big"])[0]) == b"own" + BIG[3:]
        assert bytes(fs.read_many(["copy/big"])[0]) == BIG

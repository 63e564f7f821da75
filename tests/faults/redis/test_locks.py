"""P3 with the real program: counters and databases on two mounts, storms, lost sessions, kills."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fsclient.volume.metadata_url import open_store
from fsmeta.meta.meta import Meta
from fsmeta.runtime import SystemRuntime
from fsmeta.types import SessionId
from tests.faults.program import Mount, Volume, needs_mounts, wait_until
from tests.faults.redis_server import DurableRedis

pytestmark = needs_mounts
WAITERS = 500
TOLD = "owners have lost their locks"
LOST = f"{TOLD}|has ended session|locks? (were|was|that was) lost"


@pytest.fixture(params=["sqlite", "redis"])
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Volume]:
    """A volume that is mounted twice."""
    meta = ""
    if request.param == "redis":
        server: DurableRedis = request.getfixturevalue("durable_redis")
        meta = server.url()
    made = Volume(tmp_path, meta)
    try:
        made.format()
        yield made
    finally:
        made.clean_up()


def _twice(volume: Volume) -> tuple[Mount, Mount]:
    one = volume.mount("--no-supervisor", name="one")  # a test kills it
    return one, volume.mount(name="two")


def _run(kind: str, times: int, *files: Path) -> None:
    """A counting process for each file; they begin together."""
    words = [sys.executable, "-m", "tests.faults.counter"]
    ran = [
        subprocess.Popen([*words, str(file), kind, str(times)], stdin=subprocess.PIPE)
        for file in files
    ]
    for process in ran:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
    assert [process.wait(150) for process in ran] == [0] * len(files)


@pytest.mark.parametrize("kind", ["flock", "fcntl"])
def test_counters_on_two_mounts(volume: Volume, kind: str) -> None:
    one, two = _twice(volume)
    file, same = one.path / "counter", two.path / "counter"
    file.touch()
    _run(kind, 40, file, file, same, same)
    assert file.read_text() == "160"
    volume.end()


def test_sqlite_on_two_mounts(volume: Volume) -> None:
    """Its journal, its locks of byte ranges, and pages that another mount has written."""
    one, two = _twice(volume)
    file, same = one.path / "db", two.path / "db"
    with closing(sqlite3.connect(file)) as db:
        db.execute("CREATE TABLE t (number INTEGER PRIMARY KEY, pid INTEGER)")
    _run("sqlite", 15, file, file, same, same)
    with closing(sqlite3.connect(same)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        rows = db.execute("SELECT number, count(*) FROM t GROUP BY number").fetchall()
    assert rows == [(number, 1) for number in range(60)]
    volume.end()


def test_500_waiters(volume: Volume) -> None:
    """In two mounts: each is woken once, none is served by a thread of its own."""
    one, two = _twice(volume)
    (one.path / "file").touch()
    places = [mount.path / "file" for mount in (one, two)]
    order: list[int] = []

    def wait(number: int) -> None:
        fd = os.open(places[number % 2], os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        order.append(number)
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    first = os.open(places[0], os.O_RDWR)
    fcntl.flock(first, fcntl.LOCK_EX)
    threads = [threading.Thread(target=wait, args=(number,)) for number in range(WAITERS)]
    for thread in threads:
        thread.start()

    def waiting() -> float:
        return sum(mount.numbers()["lock_waits"] for mount in (one, two))

    wait_until("all wait", 100, lambda: waiting() == WAITERS)
    assert order == []
    # 64 serve at most, where all are at the store at once; 250 wait
    serving = max(len(os.listdir(f"/proc/{mount.pid}/task")) for mount in (one, two))
    assert serving < 100, "a wait takes a thread"
    for mount in (one, two):
        (mount.path / f"while they wait, on {mount.path.name}").touch()
    before = sum(mount.numbers()["meta_round_trips_total"] for mount in (one, two))
    began = time.monotonic()
    fcntl.flock(first, fcntl.LOCK_UN)
    for thread in threads:
        thread.join(200)
    took = time.monotonic() - began
    spent = sum(mount.numbers()["meta_round_trips_total"] for mount in (one, two)) - before
    os.close(first)
    assert sorted(order) == list(range(WAITERS))
    print(f"{WAITERS} waiters: {took:.1f} s, {spent / WAITERS:.1f} requests each")
    if volume.meta.startswith("redis"):
        assert spent < 8 * WAITERS
    volume.end()


def _sessions_of(volume: Volume, mount: Mount) -> list[int]:
    found = [each for each in volume.status()["sessions"] if each["pid"] == mount.pid]
    return [each["id"] for each in found]


def _fails(code: int, call: Callable[..., object], *arguments: object) -> None:
    with pytest.raises(OSError, match=r".") as caught:
        call(*arguments)
    assert caught.value.errno == code, caught.value


def test_a_lost_lock_fails_closed(volume: Volume) -> None:
    """Others have ended the session: what was written under its locks is void, and EIO says so."""
    one, two = _twice(volume)
    (one.path / "file").write_bytes(b"as it was")
    fd, other = os.open(one.path / "file", os.O_RDWR), os.open(two.path / "file", os.O_RDWR)
    bystander = os.open(one.path / "file", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    shown = [each["locks"] for each in volume.status()["sessions"] if each["pid"] == one.pid]
    assert shown == [[{"ino": os.fstat(fd).st_ino, "kind": "flock"}]]
    (ended,) = _sessions_of(volume, one)
    store = open_store(volume.meta, SystemRuntime())
    others = Meta(store, SystemRuntime()).sessions
    # no process begins from here on: it would flush this, as the mount does itself after 5 s
    assert os.pwrite(fd, b"LOST", 0) == 4
    others.end(SessionId(ended))
    store.close()
    fcntl.flock(other, fcntl.LOCK_EX)
    wait_until("it is told", 60, lambda: bool(re.search(TOLD, "\n".join(volume.complaints()))))
    wait_until("it joins anew", 60, lambda: _sessions_of(volume, one) not in ([], [ended]))
    assert os.pread(other, 100, 0) == b"as it was"
    for call, *arguments in (
        (os.pread, fd, 10, 0),
        (os.pwrite, fd, b"x", 0),
        (os.fsync, fd),
        (os.ftruncate, fd, 0),
        (fcntl.flock, fd, fcntl.LOCK_SH | fcntl.LOCK_NB),
        (fcntl.flock, fd, fcntl.LOCK_UN),
    ):
        _fails(errno.EIO, call, *arguments)
    assert os.pread(bystander, 100, 0) == b"as it was"
    _fails(errno.EAGAIN, fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_UN)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.pwrite(fd, b"AS", 0)
    fcntl.flock(fd, fcntl.LOCK_UN)
    fcntl.flock(other, fcntl.LOCK_SH)
    assert os.pread(other, 100, 0) == b"AS it was"
    for each in (fd, other, bystander):
        os.close(each)
    volume.end(LOST)


def test_a_killed_mount_lets_others_go_on(volume: Volume) -> None:
    """Its locks go when its session is ended; then whoever waits has them."""
    one, two = _twice(volume)
    (one.path / "file").touch()
    holder = subprocess.Popen(
        [sys.executable, "-c", f"import fcntl; f = open('{one.path}/file', 'r+');"
         "fcntl.lockf(f, fcntl.LOCK_EX); print('has it', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"has it\n"
    fd = os.open(two.path / "file", os.O_RDWR)
    got = threading.Event()

    def wait() -> None:
        fcntl.lockf(fd, fcntl.LOCK_EX)
        got.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    (dead,) = _sessions_of(volume, one)
    one.kill()
    assert not got.wait(0.5)
    store = open_store(volume.meta, SystemRuntime())
    Meta(store, SystemRuntime()).sessions.end(SessionId(dead))
    store.close()
    assert got.wait(60)
    waiting.join()
    os.close(fd)
    holder.kill()
    holder.communicate()
    volume.end()

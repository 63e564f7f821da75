"""W2, W3, W4: two clients in one process, one of which holds back: who wins, and when."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsclient.client.client import MountClient
from fsclient.client.client_options import STAGED_UPLOADS, ClientOptions
from fsclient.client.given_parts import GivenParts
from fsclient.control.clone_jobs import CLONE_XATTR
from fsclient.writeback.writeback import WriteBackOptions
from fsdata.files.upload_pool import UPLOAD_THREADS
from fsdata.objects.contract import Buffer
from fsdata.objects.mem import MemObjects
from fsmeta.ops.names.rename import WHITEOUT
from fsmeta.rules.settings import FormatChoices, create_volume, new_format
from fsmeta.txn.retry import Transactor
from fsmeta.txn.row_cache import RowCache
from fsmeta.types import BLOCK_BYTES_MAX, ROOT_CALLER, Caller, SetAttr
from tests.conftest import LogWatch, assert_clean
from tests.posix.inproc import RUNTIME, Connect, memory, sqlite
from tests.posix.volumes import PATIENCE_S
from tests.sim.world.posix import File, Posix

SETTLE_S = 120.0


class Gate(MemObjects):
    """Objects that are not taken while it is shut."""

    def __init__(self) -> None:
        super().__init__(RUNTIME)
        self.open = RUNTIME.event()
        self.asked: list[str] = []

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        gate = self.open  # whoever sees that it was asked may exchange it
        self.asked.append(key)
        assert gate.wait(SETTLE_S), "nobody opened the gate"
        super().put(key, pieces)


class Pair:
    """`mine` writes back, `theirs` does not; nothing of mine is seen while the gate is shut."""

    def __init__(self, connect: Connect, staging: Path, capacity: int = 0) -> None:
        self.gate = Gate()
        self.gate.open.set()
        self.store = store = connect()
        settings = new_format("testvol", "mem", "unused", FormatChoices(capacity=capacity))
        Transactor(store, RUNTIME, RowCache(RUNTIME)).run(
            lambda txn: create_volume(txn, settings, (0, 0), RUNTIME.now_ns())
        )
        options = ClientOptions(heartbeat_s=0.5, meta_timeout_s=PATIENCE_S)
        back = options._replace(staging_dir=str(staging), writeback=WriteBackOptions())
        self.mine = MountClient(connect(), RUNTIME, back, GivenParts(self.gate))
        self.theirs = MountClient(connect(), RUNTIME, options, GivenParts(self.gate))
        self.mine.start()
        self.theirs.start()
        self.me, self.them = Posix(self.mine.vfs), Posix(self.theirs.vfs)

    def hold(self) -> None:
        """Shut the gate, and give the directory /d something to wait for."""
        self.gate.open.clear()
        write(self.me, b"/d/first", b"first")

    def release(self) -> None:
        """Open the gate; returns when all is published."""
        self.gate.open.set()
        assert self.mine.writeback is not None
        assert self.mine.writeback.settle(None, SETTLE_S)

    def end(self) -> None:
        self.gate.open.set()
        self.mine.stop()
        self.theirs.stop()
        assert_clean(self.store)
        self.store.close()


def write(posix: Posix, path: bytes, data: bytes) -> None:
    file = posix.open(path, os.O_CREAT | os.O_RDWR)
    try:
        file.write(0, data)
    finally:
        file.close()


class Clone:
    """`slicefs clone` or `snapshot`, as the program asks the mount for it."""

    def __init__(
        self, pair: Pair, source: bytes, parent: bytes, name: bytes, snapshot: bool = False
    ) -> None:
        self._xattrs = pair.me.fs.xattrs
        self._parent = pair.me.stat(parent).ino
        wish = {
            "source": pair.me.stat(source).ino,
            "name": name.decode(),
            "preserve": False,
            "snapshot": snapshot,
        }
        value = json.dumps(wish).encode()
        self._xattrs.setxattr(ROOT_CALLER, self._parent, CLONE_XATTR + name, value, 0)
        self._name = CLONE_XATTR + name

    def report(self) -> dict[str, int]:
        """How far it is."""
        return dict(json.loads(self._xattrs.getxattr(ROOT_CALLER, self._parent, self._name)))

    def wait(self, code: int = 0) -> dict[str, int]:
        """The last report."""
        give_up = RUNTIME.monotonic() + SETTLE_S
        while not (report := self.report())["done"]:
            assert RUNTIME.monotonic() < give_up, "it does not come to an end"
            RUNTIME.sleep(0.02)
        assert report["errno"] == code, report
        return report


def read(posix: Posix, path: bytes) -> bytes:
    file = posix.open(path)
    try:
        return file.read(0, 1 << 20)
    finally:
        file.close()


@contextmanager
def new_pair(connect: Connect, staging: Path, capacity: int = 0) -> Iterator[Pair]:
    made = Pair(connect, staging, capacity)
    try:
        made.me.mkdir(b"/d")
        yield made
    finally:
        made.end()


@pytest.fixture(params=["mem", "sqlite"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    connect = memory() if request.param == "mem" else sqlite(tmp_path / "meta.db")
    with new_pair(connect, tmp_path / "staging") as made:
        yield made


def test_w2_nothing_is_seen_before_what_it_waits_for(pair: Pair) -> None:
    pair.hold()
    pair.me.symlink(b"first", b"/d/link")
    write(pair.me, b"/d/tmp", b"all")
    pair.me.rename(b"/d/tmp", b"/d/complete")
    pair.me.mkdir(b"/d/sub")
    assert sorted(pair.me.listdir(b"/d")) == [b"complete", b"first", b"link", b"sub"]
    assert read(pair.me, b"/d/complete") == b"all"
    # its name was made while nothing waited; a directory goes first
    assert sorted(pair.them.listdir(b"/d")) == [b"first", b"sub"]
    assert read(pair.them, b"/d/first") == b""
    pair.release()
    assert sorted(pair.them.listdir(b"/d")) == [b"complete", b"first", b"link", b"sub"]
    assert read(pair.them, b"/d/complete") == b"all"


def test_w3_so_many_uploads_that_the_link_never_waits(pair: Pair) -> None:
    """While the store thinks about some, others send; and what that takes of memory is bounded."""
    most = STAGED_UPLOADS * UPLOAD_THREADS
    pair.gate.asked.clear()
    pair.gate.open.clear()
    write(pair.me, b"/d/shard", bytes((most + 2) * BLOCK_BYTES_MAX))
    wait_until(lambda: len(pair.gate.asked) >= most)
    RUNTIME.sleep(0.2)
    assert len(pair.gate.asked) == most
    pair.release()
    assert pair.them.stat(b"/d/shard").size == (most + 2) * BLOCK_BYTES_MAX


def test_w2_gc_leaves_what_is_held_back(pair: Pair) -> None:
    _, before = pair.mine.meta.sessions.round_and_floor()
    pair.hold()
    pair.me.unlink(b"/d/first")
    write(pair.me, b"/d/second", b"second")
    for _ in range(3):
        _, floor = pair.mine.meta.sessions.round_and_floor()
    assert floor == before, "a slice that is not published may be deleted"
    pair.release()
    for _ in range(3):
        _, floor = pair.mine.meta.sessions.round_and_floor()
    assert floor > before


def test_w2_others_were_faster(pair: Pair, log_watch: LogWatch) -> None:
    log_watch.expect(
        "^WARNING fsclient.writeback.publisher: create name: .*; it is in /lost.found/name"
    )
    log_watch.expect("^WARNING fsclient.writeback.publisher: rename old new is left out")
    write(pair.me, b"/d/old", b"old")
    pair.release()
    pair.hold()
    write(pair.me, b"/d/name", b"mine")
    ino = pair.me.stat(b"/d/name").ino
    pair.me.rename(b"/d/old", b"/d/new")
    pair.them.symlink(b"theirs", b"/d/name")
    pair.them.rename(b"/d/old", b"/d/elsewhere")
    pair.release()
    assert read(pair.them, b"/lost+found/name.%d" % ino) == b"mine"
    for posix in (pair.me, pair.them):
        assert sorted(posix.listdir(b"/d")) == [b"elsewhere", b"first", b"name"]
        assert read(posix, b"/d/elsewhere") == b"old"
    assert pair.mine.writeback is not None
    assert pair.mine.writeback.numbers()["staging_conflicts_total"] == 2


def test_w2_what_is_lost_is_followed_by_nothing(pair: Pair, log_watch: LogWatch) -> None:
    """A staging disk that fails under a running mount takes a file with it."""
    log_watch.expect("^ERROR fsdata.staging.uploads: object .* is lost: .* other bytes")
    log_watch.expect(
        "^ERROR fsclient.writeback.publisher: write .* staged data are lost; .*mounted again"
    )
    assert pair.mine.writeback is not None
    objects = pair.mine.writeback.objects
    disk = objects._data._disk
    whole = disk.read
    pair.hold()

    def fail(name: str, offset: int, size: int) -> bytes:
        if offset == 0:  # the first file
            return whole(name, offset, size)
        return bytes(size)

    disk.read = fail  # type: ignore[method-assign]
    write(pair.me, b"/d/shard", b"shard")
    shard = pair.me.open(b"/d/shard")
    wait_until(lambda: bool(objects._lost))
    disk.read = whole  # type: ignore[method-assign]
    write(pair.me, b"/d/complete", b"complete")  # nobody knows of it yet
    pair.release()
    assert pair.them.listdir(b"/d") == pair.me.listdir(b"/d") == [b"first", b"shard"]
    assert pair.them.stat(b"/d/shard").size == 0
    ino = pair.me.stat(b"/d").ino
    for change in (
        lambda: write(pair.me, b"/d/complete", b""),
        lambda: pair.me.rename(b"/d/first", b"/d/complete"),
        lambda: pair.me.mkdir(b"/d/complete"),
        lambda: pair.me.fs.xattrs.getxattr(ROOT_CALLER, ino, b"user.slicefs.durable"),
        shard.fsync,
        lambda: pair.me.fs.directories.fsyncdir(ROOT_CALLER, ino, 0),
    ):
        with pytest.raises(OSError, match="written there before is lost") as caught:
            change()
        assert caught.value.errno == errno.EIO
    shard.close()
    for snapshot in (True, False):
        Clone(pair, b"/d", b"/d", b"kept", snapshot).wait(errno.EIO)
    pair.me.mkdir(b"/e")
    write(pair.me, b"/e/complete", b"of another program")
    complete = pair.me.open(b"/e/complete")
    complete.fsync()
    complete.close()
    Clone(pair, b"/e", b"/e", b"kept", snapshot=True).wait()
    pair.release()
    assert read(pair.them, b"/e/complete") == b"of another program"
    assert pair.them.listdir(b"/d") == [b"first", b"shard"]


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = RUNTIME.monotonic() + SETTLE_S
    while not condition():
        assert RUNTIME.monotonic() < give_up
        RUNTIME.sleep(0.01)


def test_w2_a_directory_that_others_removed(pair: Pair, log_watch: LogWatch) -> None:
    log_watch.expect("^WARNING fsclient.writeback.publisher: create lost: ")
    pair.me.mkdir(b"/d/sub")
    pair.hold()
    write(pair.me, b"/d/sub/lost", b"data")
    ino = pair.me.stat(b"/d/sub/lost").ino
    pair.them.rmdir(b"/d/sub")
    pair.release()
    assert read(pair.them, b"/lost+found/lost.%d" % ino) == b"data"
    assert pair.me.listdir(b"/d") == [b"first"]


def test_w2_what_others_deleted_is_deleted(pair: Pair) -> None:
    write(pair.me, b"/d/file", b"before")
    pair.release()
    pair.hold()
    write(pair.me, b"/d/file", b"after")
    pair.them.unlink(b"/d/file")
    pair.release()
    assert pair.me.listdir(b"/d") == pair.them.listdir(b"/d") == [b"first"]


def test_w2_new_directories_have_one_winner(pair: Pair) -> None:
    pair.hold()
    pair.me.mkdir(b"/d/lock")
    with pytest.raises(FileExistsError):
        pair.them.mkdir(b"/d/lock")
    pair.them.mkdir(b"/d/theirs")
    with pytest.raises(FileExistsError):
        pair.me.mkdir(b"/d/theirs")
    pair.release()


def test_w2_fallocate_comes_in_order(pair: Pair) -> None:
    write(pair.me, b"/d/file", b"x" * 10_000)
    pair.release()
    pair.hold()
    begin = RUNTIME.monotonic()
    file = pair.me.open(b"/d/file", os.O_RDWR)
    file.punch(0, 4096)
    assert file.read(0, 4097) == bytes(4096) + b"x"
    file.write(20_000, b"end")  # into what is held back
    file.punch(4096, 4096)
    file.close()
    assert RUNTIME.monotonic() - begin < SETTLE_S / 2, "it waited for the store"
    assert read(pair.them, b"/d/file") == b"x" * 10_000
    pair.release()
    expected = bytes(8192) + b"x" * 1808 + bytes(10_000) + b"end"
    assert read(pair.them, b"/d/file") == read(pair.me, b"/d/file") == expected


@pytest.mark.parametrize(
    ("has_kernel", "want"),
    [
        (True, SetAttr(size=0, opened=True, kill_suid=True)),
        (False, SetAttr(gid=60001)),
        (False, SetAttr(mode=0o2767)),
    ],
)
def test_w2_setgid_that_a_stranger_dropped_does_not_come_back(
    pair: Pair, has_kernel: bool, want: SetAttr
) -> None:
    """Without group execute: the mount knows who is not in the group, the publisher does not."""
    write(pair.me, b"/d/f", b"1")
    ino = pair.me.stat(b"/d/f").ino
    pair.hold()
    pair.me.fs.setattr(ROOT_CALLER, ino, SetAttr(mode=0o6767, uid=60001, gid=60002), None)
    assert 60002 not in os.getgroups()
    stranger = Caller(60001, 60001, pid=os.getpid(), checked=has_kernel)
    pair.me.fs.setattr(stranger, ino, want, None)
    assert pair.me.stat(b"/d/f").mode == 0o100767
    pair.release()
    assert pair.me.stat(b"/d/f").mode == pair.them.stat(b"/d/f").mode == 0o100767


def test_w2_fallocate_of_what_others_deleted(pair: Pair) -> None:
    write(pair.me, b"/d/file", b"x" * 10_000)
    pair.release()
    pair.hold()
    file = pair.me.open(b"/d/file", os.O_RDWR)
    file.punch(0, 4096)
    file.close()
    pair.them.unlink(b"/d/file")
    pair.release()
    assert pair.me.listdir(b"/d") == pair.them.listdir(b"/d") == [b"first"]


def test_w2_a_whiteout_comes_with_its_rename(pair: Pair) -> None:
    write(pair.me, b"/d/file", b"data")
    pair.release()
    pair.hold()
    pair.me.rename(b"/d/file", b"/d/moved", WHITEOUT)
    assert stat.S_ISCHR(pair.me.stat(b"/d/file").mode)
    assert read(pair.them, b"/d/file") == b"data"
    pair.release()
    assert stat.S_ISCHR(pair.them.stat(b"/d/file").mode)
    assert read(pair.them, b"/d/moved") == b"data"


def test_w2_a_file_without_a_name_gets_one_when_all_of_it_is_seen(pair: Pair) -> None:
    """O_TMPFILE: no crash loses what link(2) has returned for, as others see it by then."""
    parent = pair.me.stat(b"/d").ino
    pair.hold()
    entry, opened = pair.me.fs.tmpfile(ROOT_CALLER, parent, 0o644, os.O_RDWR)
    assert entry.attr is not None
    file = File(pair.me.fs, entry.attr.ino, opened.fh)
    file.write(0, b"whole")
    file.fsync()  # a journal has it
    named = RUNTIME.event()

    def link() -> None:
        pair.me.fs.link(ROOT_CALLER, file.ino, parent, b"named")
        named.set()

    thread = RUNTIME.spawn("link", link)
    assert not named.wait(0.3)
    assert b"named" not in pair.them.listdir(b"/d")
    pair.me.symlink(b"x", b"/elsewhere")  # a file without a name holds nobody up
    assert b"elsewhere" in pair.them.listdir(b"/")
    pair.release()
    assert named.wait(SETTLE_S)
    thread.join()
    assert read(pair.them, b"/d/named") == b"whole"
    file.close()


def test_w2_copies_share_what_others_can_read(pair: Pair) -> None:
    for name in (b"/d/source", b"/d/target"):
        write(pair.me, name, b"s" * 5000)
    pair.release()
    source, target = (pair.me.open(b"/d/" + name, os.O_RDWR) for name in (b"source", b"target"))
    objects = sum(1 for _ in pair.gate.list(""))
    assert source.copy(target, 0, 5000, 5000) == 5000
    assert read(pair.them, b"/d/target") == b"s" * 10_000
    assert sum(1 for _ in pair.gate.list("")) == objects
    pair.hold()  # now something waits before it: the kernel is told to copy the bytes
    for _ in range(3):
        with pytest.raises(OSError, match="copy the bytes") as caught:
            source.copy(target, 0, 0, 5000)
        assert caught.value.errno == errno.EOPNOTSUPP
    pair.release()
    source.close()
    target.close()


def test_w2_who_can_t_share_is_not_used_up(pair: Pair) -> None:
    """Each refusal took one of the 65,536 numbers under which a session commits."""
    write(pair.me, b"/d/source", b"s")
    pair.hold()
    source = pair.me.open(b"/d/source", os.O_RDWR)
    target = pair.me.open(b"/d/first", os.O_RDWR)
    transactor = pair.mine.meta.transactor
    before = transactor._workers
    for _ in range(50):
        with pytest.raises(OSError, match="copy the bytes"):
            source.copy(target, 0, 0, 1)
    assert transactor._workers < before + 10, "one, and some for who commits meanwhile"
    source.close()
    target.close()
    pair.release()


def test_w2_a_clone_shows_what_was_done_before(pair: Pair) -> None:
    pair.me.mkdir(b"/d/run")
    pair.hold()
    write(pair.me, b"/d/run/shard", b"s" * 5000)
    pair.me.symlink(b"shard", b"/d/run/link")
    job = Clone(pair, b"/d/run", b"/d", b"copy")
    RUNTIME.sleep(0.3)
    assert not job.report()["done"]
    assert b"copy" not in pair.me.listdir(b"/d")
    pair.gate.open.set()
    job.wait()
    pair.gate.open.clear()
    write(pair.me, b"/d/run/shard", b"later")  # is held back, and none of the clone's
    for posix in (pair.me, pair.them):
        assert sorted(posix.listdir(b"/d/copy")) == [b"link", b"shard"]
        assert read(posix, b"/d/copy/shard") == b"s" * 5000
    pair.release()


def test_w2_a_clone_while_its_source_is_written(pair: Pair) -> None:
    """It lists nothing that others can't read, and comes to an end."""
    pair.me.mkdir(b"/d/run")
    for number in range(20):
        write(pair.me, b"/d/run/%d" % number, b"%d" % number * 2000)
    pair.release()
    pair.hold()
    for number in range(20):
        write(pair.me, b"/d/run/%d" % number, b"new")
    stop = RUNTIME.event()

    def go_on() -> None:
        number = 0
        while not stop.is_set():
            write(pair.me, b"/d/run/%d" % (number % 20), b"%d" % number)
            number += 1

    thread = RUNTIME.spawn("writer", go_on)
    job = Clone(pair, b"/d/run", b"/d", b"copy")
    pair.gate.open.set()
    job.wait()
    stop.set()
    thread.join()
    pair.gate.open.clear()
    for number in range(20):
        assert len(read(pair.them, b"/d/copy/%d" % number)) >= 3
    pair.release()


def test_w4_limits_are_judged_at_once(tmp_path: Path, log_watch: LogWatch) -> None:
    log_watch.expect("data written and not stored is lost: .* is full")
    with new_pair(memory(), tmp_path / "staging", capacity=1 << 20) as pair:
        pair.gate.open.clear()
        for number in range(4):
            write(pair.me, b"/d/%d" % number, bytes(200_000))
        with pytest.raises(OSError, match="full") as caught:
            write(pair.me, b"/d/too-much", bytes(400_000))
        assert caught.value.errno == errno.ENOSPC
        assert pair.me.stat(b"/d/too-much").size == 245_760  # what fitted is kept
        pair.me.unlink(b"/d/too-much")
        pair.release()
        assert pair.mine.meta.statfs().space_used == 4 * 200_704

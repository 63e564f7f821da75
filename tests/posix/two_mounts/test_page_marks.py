"""P2, P3: what one process has found to be old is not believed by another before it is dropped."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from fsclient.client.client import MountClient
from fsclient.kernel.contract import FileLock
from fsmeta.meta.meta import Meta
from fsmeta.ops.data.ranges import KEEP_SIZE, PUNCH_HOLE
from fsmeta.schema.locks import LOCK_END
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino, SetAttr
from tests.conftest import LogWatch
from tests.posix.inproc import RUNTIME, client
from tests.posix.two_mounts.test_notices import Told
from tests.posix.writeback.test_held_locks import Replies
from tests.support.waiting import wait_until

READ = FileLock(False, 0, LOCK_END, 1)


class Late(Told):
    """A kernel that takes its time to forget a file."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.free.set()
        self.broken = False

    def reload(self, ino: Ino) -> None:
        assert self.free.wait(100)
        if self.broken:
            raise OSError(errno.ENOMEM, "no memory")
        super().reload(ino)


class Two(NamedTuple):
    """A mount, and another client of its volume."""

    mount: MountClient
    other: Meta
    kernel: Late
    replies: Replies

    def changed(self, ino: Ino, size: int) -> None:
        self.other.setattr(ROOT_CALLER, ino, SetAttr(size=size))

    def lock(self, fh: int, owner: int) -> bool:
        """Whether a lock is had at once; its request has the owner's number."""
        return self.mount.vfs.locks.setlk(fh, owner, READ, False, owner, True)

    def opened(self, ino: Ino) -> tuple[int, bool]:
        """A handle, and whether the kernel keeps its pages."""
        opened = self.mount.vfs.open(ROOT_CALLER, ino, os.O_RDONLY)
        return opened.fh, opened.keep_cache


@pytest.fixture
def two() -> Iterator[Two]:
    backend = MemBackend(RUNTIME)  # without leases, as SQLite is
    with client(lambda: MemStore(backend, tracked=False)) as mount:
        other = Meta(MemStore(backend, tracked=False), RUNTIME)
        other.sessions.open({"host": "other"})
        made = Two(mount, other, Late(), Replies())
        mount.vfs.coherence.start(made.kernel)
        mount.vfs.locks.start(made.replies)
        yield made
        made.kernel.free.set()
        other.sessions.close()
        other.store.close()


def _made(two: Two) -> tuple[Ino, int]:
    entry, opened = two.mount.vfs.create(ROOT_CALLER, ROOT_INO, b"file", 0o644, os.O_RDWR)
    assert entry.attr is not None
    return entry.attr.ino, opened.fh


def test_p3_two_locks_wait_for_the_same_pages_to_go(two: Two) -> None:
    """The second was granted while the kernel still had the old pages, and a database of two
    programs on a mount lost what a third one had added on another.
    """
    ino, fh = _made(two)
    assert not two.lock(fh, 1)
    wait_until(lambda: two.replies.codes == {1: 0})
    assert two.lock(fh, 2), "nothing has changed"
    two.changed(ino, 100)
    two.kernel.free.clear()
    assert not two.lock(fh, 3)
    assert not two.lock(fh, 4)
    assert not two.replies.codes.keys() & {3, 4}
    two.kernel.free.set()
    wait_until(lambda: two.replies.codes.keys() >= {3, 4})
    assert two.lock(fh, 5)
    two.mount.vfs.release(ino, fh)


def test_p3_what_was_written_while_pages_were_dropped_stays(two: Two) -> None:
    """By another owner of a lock of the file."""
    ino, fh = _made(two)
    assert not two.lock(fh, 1)
    wait_until(lambda: two.replies.codes == {1: 0})
    two.changed(ino, 100)
    two.kernel.free.clear()
    assert not two.lock(fh, 2)
    two.mount.vfs.write(ROOT_CALLER, ino, fh, 0, memoryview(b"one"))
    two.mount.vfs.flush(ROOT_CALLER, ino, fh, 9)
    two.kernel.free.set()
    wait_until(lambda: 2 in two.replies.codes)
    assert two.lock(fh, 3)
    two.mount.vfs.release(ino, fh)


def test_p3_pages_that_could_not_be_dropped_are_dropped_by_the_next(
    two: Two, log_watch: LogWatch
) -> None:
    log_watch.expect("the kernel was not told of a change")
    ino, fh = _made(two)
    two.kernel.broken = True
    assert not two.lock(fh, 1)
    wait_until(lambda: two.replies.codes == {1: 0})
    two.kernel.broken = False
    assert not two.lock(fh, 2)
    wait_until(lambda: 2 in two.replies.codes)
    assert two.lock(fh, 3)
    two.mount.vfs.release(ino, fh)


def test_p2_two_opens_drop_the_same_pages(two: Two) -> None:
    """The kernel drops them when it has the answer to the first, which may be after the second."""
    ino, fh = _made(two)
    two.mount.vfs.release(ino, fh)
    two.changed(ino, 100)
    first, second = two.opened(ino), two.opened(ino)
    assert (first[1], second[1]) == (False, False)
    assert two.mount.vfs.read(ROOT_CALLER, ino, second[0], 0, 10)
    third = two.opened(ino)
    assert third[1], "a request through the second shows that the kernel had its answer"
    two.changed(ino, 200)
    fourth = two.opened(ino)
    two.mount.vfs.release(ino, fourth[0])  # it comes after opens that have failed, too
    fifth = two.opened(ino)
    assert (fourth[1], fifth[1]) == (False, False)
    for fh in (first[0], second[0], third[0], fifth[0]):
        two.mount.vfs.release(ino, fh)


@pytest.mark.parametrize("case", ["in turn", "a reader", "times", "punched", "an idle one"])
def test_p2_what_this_mount_writes_stays_in_the_kernel(two: Two, case: str) -> None:
    """Its commits make no pages old, whichever handles were open then and when they are used."""
    ino, fh = _made(two)
    vfs = two.mount.vfs
    vfs.release(ino, fh)
    two.changed(ino, 100)
    one, other = (vfs.open(ROOT_CALLER, ino, os.O_RDWR).fh for _ in range(2))

    def write(fh: int, data: bytes) -> None:
        vfs.write(ROOT_CALLER, ino, fh, 0, memoryview(data))
        vfs.flush(ROOT_CALLER, ino, fh, 0)

    if case == "times":
        vfs.setattr(ROOT_CALLER, ino, SetAttr(mtime_ns=5), one)
    elif case == "punched":
        vfs.ranges.fallocate(ROOT_CALLER, ino, one, KEEP_SIZE | PUNCH_HOLE, 0, 10)
    write(one, b"one")
    if case == "in turn":
        write(other, b"two")
        write(one, b"three")
    elif case == "a reader":
        assert vfs.read(ROOT_CALLER, ino, other, 0, 10)
    vfs.release(ino, one)
    vfs.release(ino, other)
    again = two.opened(ino)
    assert again[1]
    vfs.release(ino, again[0])


def test_p2_an_open_relies_on_no_notice_that_is_still_to_be_given(two: Two) -> None:
    """The size that the kernel believes for a second is taken back by each open that finds it old,
    until it is."""
    ino, fh = _made(two)
    two.mount.vfs.release(ino, fh)
    leases = two.mount.vfs.coherence
    leases.stat(two.mount.meta.getattr(ROOT_CALLER, ino))
    two.changed(ino, 100)
    now = two.mount.meta.getattr(ROOT_CALLER, ino)
    told = two.kernel.seen
    meanwhile: list[int] = []

    def again(ino: Ino) -> None:
        """Another open comes while the kernel is told."""
        two.kernel.inval_attr = Late.inval_attr.__get__(two.kernel)  # type: ignore[method-assign]
        leases.opened(now)
        meanwhile.append(len(told))
        told.append(("attr", ino))

    two.kernel.inval_attr = again  # type: ignore[method-assign]
    told.clear()
    leases.opened(now)
    assert meanwhile == [1]
    leases.opened(now)
    assert told == [("attr", ino), ("attr", ino)], "the kernel has asked for nothing since"

"""What the kernel is told of changes, and how often, played by a list."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from fsclient.kernel import kernel_notices
from fsclient.kernel.cache_leases import LONG_S, SHORT_S, CacheLeases
from fsclient.kernel.contract import Notifier
from fsclient.kernel.kernel_notices import AGAIN_AFTER_S
from fsmeta.schema import keys
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino
from tests.conftest import LogWatch
from tests.posix.inproc import RUNTIME, memory, meta_only
from tests.support.waiting import wait_until


class Told:
    """A kernel that remembers what it was told."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def inval_inode(self, ino: Ino) -> None:
        self.seen.append(("inode", ino))

    def inval_pages(self, ino: Ino, begin: int, end: int) -> None:
        self.seen.append(("pages", ino, begin, end))

    def inval_attr(self, ino: Ino) -> None:
        self.seen.append(("attr", ino))

    def inval_entry(self, parent: Ino, name: bytes) -> None:
        self.seen.append(("entry", parent, name))

    def reload(self, ino: Ino) -> None:
        self.seen.append(("reload", ino))

    def inval_all(self) -> bool:
        return False


def _is_told(kernel: Told) -> Notifier:
    return kernel


@pytest.fixture
def kernel() -> Iterator[tuple[Told, CacheLeases]]:
    with meta_only(memory()) as fs:
        coherence, told = CacheLeases(fs.meta, RUNTIME), Told()
        coherence.start(told)
        yield told, coherence
        coherence.notices.stop()


def test_what_we_changed_is_told_once_and_before_the_answer(
    kernel: tuple[Told, CacheLeases],
) -> None:
    """A second time would have the kernel drop the right answer, if that is on its way, and go by
    the old mode: who had just appended to a setuid program ran it as its owner, seldom.
    """
    told, coherence = kernel
    coherence.notices.stale(ROOT_INO)
    assert told.seen == [("attr", ROOT_INO)]
    time.sleep(3 * AGAIN_AFTER_S)
    assert told.seen == [("attr", ROOT_INO)]


def test_names_and_listings_are_told_twice_and_attributes_once(
    kernel: tuple[Told, CacheLeases],
) -> None:
    told, coherence = kernel
    coherence.grant_absent(ROOT_INO, b"name")
    meta = coherence._meta
    coherence.stat(meta.getattr(ROOT_CALLER, ROOT_INO))
    coherence.notices.changed([keys.inode_row(ROOT_INO)])
    wait_until(lambda: told.seen)
    coherence.notices.changed([keys.dir_row(ROOT_INO)])
    listing = [("inode", ROOT_INO), ("entry", ROOT_INO, b"name")]
    wait_until(lambda: len(told.seen) >= 5)
    time.sleep(3 * AGAIN_AFTER_S)
    assert told.seen == [("inode", ROOT_INO), *listing, *listing]


def test_an_answer_that_was_stuck_is_taken_back() -> None:
    """It came after both notifications, and the kernel believed it for an hour."""
    serving: set[int] = {7, 8}
    with meta_only(memory()) as fs:
        coherence, told = CacheLeases(fs.meta, RUNTIME), Told()
        coherence.start(told, lambda: serving)
        name = ("entry", ROOT_INO, b"name")
        coherence.grant_absent(ROOT_INO, b"name")  # the answer to 7
        coherence.notices.changed([keys.dir_row(ROOT_INO)])
        wait_until(lambda: told.seen.count(name) == 2)
        serving.remove(8)
        serving.add(9)
        serving.remove(7)
        wait_until(lambda: told.seen.count(name) == 3)
        coherence.notices.stop()


def test_news_do_not_wait_for_the_repetition_of_others(
    kernel: tuple[Told, CacheLeases], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_notices, "AGAIN_AFTER_S", 3600.0)
    told, coherence = kernel
    for number in range(1, 4):
        coherence.notices.changed([keys.dir_row(Ino(number))])
        wait_until(lambda: ("inode", Ino(number)) in told.seen)  # noqa: B023
    assert told.seen == [("inode", Ino(number)) for number in range(1, 4)]


class Stuck(Told):
    """A kernel in which programs hold the locks of directories."""

    def __init__(self, *held: Ino) -> None:
        super().__init__()
        self.held = set(held)
        self.free = threading.Event()

    def inval_entry(self, parent: Ino, name: bytes) -> None:
        if parent in self.held:
            assert self.free.wait(200)
        super().inval_entry(parent, name)


def test_p6_a_directory_whose_lock_is_held_stops_no_other_news() -> None:
    """getdents(2) into a buffer that does not take it: the kernel heard of nothing any more."""
    held, others = [Ino(number) for number in range(10, 13)], [Ino(20), Ino(21)]
    told = Stuck(*held)
    with meta_only(memory()) as fs:
        coherence = CacheLeases(fs.meta, RUNTIME)
        coherence.start(told)
        try:
            for ino in (*held, *others):
                coherence.entry(ino, b"name", fs.meta.getattr(ROOT_CALLER, ROOT_INO))
            coherence.notices.changed([keys.dir_row(ino) for ino in held])
            coherence.notices.changed([keys.dir_row(ino) for ino in others])
            for ino in others:
                wait_until(lambda: told.seen.count(("entry", ino, b"name")) == 2)  # noqa: B023
            for ino in held:
                wait_until(lambda: coherence.notices.is_slow(ino))  # noqa: B023
                assert ("entry", ino, b"name") not in told.seen
            wait_until(lambda: not coherence.notices.is_slow(others[0]))
            told.free.set()
            for ino in held:
                wait_until(lambda: told.seen.count(("entry", ino, b"name")) == 2)  # noqa: B023
                wait_until(lambda: not coherence.notices.is_slow(ino))  # noqa: B023
        finally:
            told.free.set()
            coherence.notices.stop()


def test_p6_no_name_is_believed_for_long_where_the_kernel_hears_late() -> None:
    backend = MemBackend(RUNTIME)
    with meta_only(lambda: MemStore(backend, tracked=True)) as fs:
        coherence, told = CacheLeases(fs.meta, RUNTIME), Stuck(ROOT_INO)
        coherence.start(told)
        try:
            attr = fs.meta.getattr(ROOT_CALLER, ROOT_INO)
            with pytest.raises(FileNotFoundError):
                fs.meta.lookup(ROOT_CALLER, ROOT_INO, b"name")
            assert coherence.entry(ROOT_INO, b"name", attr).entry_ttl == LONG_S
            coherence.notices.changed([keys.dir_row(ROOT_INO)])
            wait_until(lambda: coherence.notices.is_slow(ROOT_INO))
            assert coherence.entry(ROOT_INO, b"name", attr).entry_ttl == SHORT_S
            assert not coherence.grant_absent(ROOT_INO, b"none")
            told.free.set()
            wait_until(lambda: not coherence.notices.is_slow(ROOT_INO))
            assert coherence.entry(ROOT_INO, b"name", attr).entry_ttl == LONG_S
        finally:
            told.free.set()
            coherence.notices.stop()


class Failing(Told):
    """A kernel that refuses the first notification of each inode and of each name."""

    def inval_inode(self, ino: Ino) -> None:
        first = ("inode", ino) not in self.seen
        super().inval_inode(ino)
        if first:
            raise OSError(errno.ENOMEM, "no memory")

    def inval_entry(self, parent: Ino, name: bytes) -> None:
        del name
        self.inval_inode(parent)

    def reload(self, ino: Ino) -> None:
        self.inval_inode(ino)


def test_p6_a_notification_that_fails_stops_none_behind_it(log_watch: LogWatch) -> None:
    """Answers behind it were never given: who waited for a lock waited on."""
    log_watch.expect("WARNING fsclient.kernel.ended_leases: the kernel was not told of a change")
    with meta_only(memory()) as fs:
        coherence, told = CacheLeases(fs.meta, RUNTIME), Failing()
        coherence.start(told)
        try:
            answered: list[int] = []
            done: list[int] = []
            for number in range(10, 20):  # the notifier takes several at once
                then = partial(answered.append, number)
                assert coherence.notices.drop_pages(Ino(number), partial(done.append, number), then)
            wait_until(lambda: answered == list(range(10, 20)))
            assert done == [], "each of them failed"
            for number in range(20, 23):
                coherence.entry(Ino(number), b"name", fs.meta.getattr(ROOT_CALLER, ROOT_INO))
            coherence.notices.changed([keys.dir_row(Ino(number)) for number in range(20, 23)])
            for number in range(20, 23):  # the listing and the name, both again
                wait_until(lambda: told.seen.count(("inode", Ino(number))) == 4)  # noqa: B023
        finally:
            coherence.notices.stop()

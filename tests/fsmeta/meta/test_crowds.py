"""Where many files of a directory are opened soon nothing is asked for; a few cost little more."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from fsmeta.meta.meta import Meta
from fsmeta.meta.prefetch_policy import (
    AHEAD_EARNED,
    AHEAD_FREE,
    AHEAD_MAX,
    AHEAD_SAVED,
    MISSES_A_PAGE,
    PAGES_MAX,
    PrefetchPolicy,
)
from fsmeta.types import ROOT_CALLER, ROOT_INO, Caller, Ino, SetAttr, Slice
from tests.fsmeta.engines import Engine
from tests.support.waiting import wait_until

KERNEL = Caller(1000, 1000, checked=True)
FILES = 300  # one page
D = Ino(2)
EPOCHS = 5


@pytest.fixture
def directory(engine: Engine) -> Ino:
    meta = engine.meta()
    made = meta.create(Caller(0, 0), ROOT_INO, b"d", 0o40777).ino
    for number in range(FILES):
        meta.create(KERNEL, made, b"%d" % number, 0o100666)
    return made


def _epoch(meta: Meta, directory: Ino, numbers: range | list[int]) -> int:
    """Round trips of opening each of these files by name, and reading what it consists of."""
    before = meta.store.round_trips
    for number in numbers:
        ino = meta.lookup(KERNEL, directory, b"%d" % number).ino
        meta.read_chunk(meta.open(KERNEL, ino).ino, 0)
    return meta.store.round_trips - before


def _shuffled() -> list[int]:
    return random.Random(1).sample(range(FILES), FILES)


def _write(meta: Meta, ino: Ino, size: int) -> Slice:
    piece = Slice(0, meta.new_slice_id(), size, 0, size)
    meta.write_slices(ino, [(0, piece)], size, 1)
    return piece


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_an_epoch_soon_asks_for_nothing(engine: Engine, directory: Ino) -> None:
    reader = engine.meta()
    reader.lookup(KERNEL, ROOT_INO, b"d")  # loads the script
    order = _shuffled()
    first = _epoch(reader, directory, order[:MISSES_A_PAGE])
    assert first == 2 * MISSES_A_PAGE + 1  # and one for the page
    assert _epoch(reader, directory, order[MISSES_A_PAGE:]) < FILES // 5
    assert _epoch(reader, directory, order) == 0
    before = reader.store.round_trips
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            reader.lookup(KERNEL, directory, b"none")
    assert reader.store.round_trips == before + 1


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_reading_what_was_listed_soon_asks_for_nothing(engine: Engine, directory: Ino) -> None:
    """After `ls -l` the attributes are known, and what files consist of is not."""
    reader = engine.meta()
    names, _ = reader.names(directory)
    reader.attrs([ino for _, ino, _ in names])
    assert _epoch(reader, directory, _shuffled()) < FILES // 5


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_what_was_asked_for_ahead_is_what_the_store_has(engine: Engine, directory: Ino) -> None:
    writer, reader = engine.meta(), engine.meta()
    inos = {n: writer.lookup(KERNEL, directory, b"%d" % n).ino for n in range(FILES)}
    sizes = {n: n % 3 * 1000 for n in inos}
    pieces = {n: [_write(writer, inos[n], size)] for n, size in sizes.items() if size}
    for number in _shuffled():
        attr = reader.open(KERNEL, reader.lookup(KERNEL, directory, b"%d" % number).ino)
        assert (attr.ino, attr.size) == (inos[number], sizes[number])
        assert reader.read_chunk(attr.ino, 0) == pieces.get(number, [])


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_changes_of_what_was_asked_for_ahead_are_seen(engine: Engine, directory: Ino) -> None:
    """Close-to-open holds for files that nobody here has looked at."""
    reader, writer = engine.meta(), engine.meta()
    order = _shuffled()
    _epoch(reader, directory, order[: FILES // 2])
    for number in order[FILES // 2 :]:
        ino = writer.lookup(KERNEL, directory, b"%d" % number).ino
        name, size = b"%d" % number, 5 + number
        if number % 3 == 0:
            writer.setattr(ROOT_CALLER, ino, SetAttr(size=size))
            wait_until(partial(_has_size, reader, ino, size))
        elif number % 3 == 1:
            piece = _write(writer, ino, size)
            wait_until(partial(_has_size, reader, ino, size))
            assert reader.read_chunk(ino, 0) == [piece]
        else:
            writer.unlink(KERNEL, directory, name)
            wait_until(partial(_is_missing, reader, directory, name))


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_nothing_stale_stays_where_all_change_at_once(engine: Engine, directory: Ino) -> None:
    """What is asked for ahead crosses the changes of another client and of our own."""
    reader, writer = engine.meta(), engine.meta()
    inos = [writer.lookup(KERNEL, directory, b"%d" % n).ino for n in range(FILES)]
    for _ in range(EPOCHS):
        reader.cache.forget()
        with _changing(writer, inos[::2]), _changing(reader, inos[1::2]):
            _epoch(reader, directory, _shuffled())
        judge = engine.meta()
        for ino in inos:
            size, slices = judge.open(KERNEL, ino).size, judge.read_chunk(ino, 0)
            wait_until(partial(_shows, reader, ino, size, slices))


@contextmanager
def _changing(meta: Meta, inos: list[Ino]) -> Iterator[None]:
    """A thread writes to these files, one after the other in no order."""
    over = threading.Event()

    def change() -> None:
        chance, size = random.Random(inos[0]), 0
        while not over.is_set():
            size += 1
            _write(meta, chance.choice(inos), size)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _shows(meta: Meta, ino: Ino, size: int, slices: list[Slice]) -> bool:
    return _has_size(meta, ino, size) and meta.read_chunk(ino, 0) == slices


def _has_size(meta: Meta, ino: Ino, size: int) -> bool:
    return meta.open(KERNEL, ino).size == size


def _is_missing(meta: Meta, directory: Ino, name: bytes) -> bool:
    try:
        meta.lookup(KERNEL, directory, name)
    except FileNotFoundError:
        return True
    return False


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_what_others_change_is_seen(engine: Engine, directory: Ino) -> None:
    reader, writer = engine.meta(), engine.meta()
    _epoch(reader, directory, range(20))
    writer.unlink(KERNEL, directory, b"7")
    writer.create(KERNEL, directory, b"new", 0o100666)
    other = writer.lookup(KERNEL, directory, b"8").ino
    writer.unlink(KERNEL, directory, b"9")
    writer.link(KERNEL, other, directory, b"9")

    def heard() -> bool:
        try:
            return reader.lookup(KERNEL, directory, b"9").ino == other
        except FileNotFoundError:
            return False

    wait_until(heard)
    for gone in (b"7", b"none"):
        with pytest.raises(FileNotFoundError):
            reader.lookup(KERNEL, directory, gone)
    reader.lookup(KERNEL, directory, b"new")
    assert reader.lookup(KERNEL, directory, b"9").nlink == 2


class _Pages:
    """A store that counts the pages it is asked for."""

    def __init__(self, last: int) -> None:
        self.asked: list[bytes] = []
        self._last = last

    def read(self, directory: Ino, cursor: bytes) -> bytes | None:
        assert directory == D
        self.asked.append(cursor)
        page = int(cursor or b"0") + 1
        return b"%d" % page if page < self._last else None


def test_pages_follow_as_long_as_names_are_missed() -> None:
    pages = _Pages(3)
    crowds = PrefetchPolicy(pages.read)
    for _ in range(10 * MISSES_A_PAGE):
        crowds.missed(D, True)
    assert pages.asked == [b"", b"1", b"2"]


def test_an_endless_directory_is_read_so_far() -> None:
    pages = _Pages(10**9)
    crowds = PrefetchPolicy(pages.read)
    for _ in range(2 * PAGES_MAX * MISSES_A_PAGE):
        crowds.missed(D, True)
    assert len(pages.asked) == PAGES_MAX


def test_a_directory_that_others_change_is_read_ever_less_readily() -> None:
    pages = _Pages(1)
    crowds = PrefetchPolicy(pages.read)
    for number in range(1, 1001):
        crowds.missed(D, remembered=number % 100 > 1)  # every hundredth look-up others were here
    assert 3 <= len(pages.asked) <= 6
    assert set(pages.asked) == {b""}


def _asked(crowds: PrefetchPolicy, misses: int) -> int:
    return sum(crowds.ahead(D)[1] for _ in range(misses))


def test_what_nobody_uses_is_bounded() -> None:
    crowds = PrefetchPolicy(_Pages(1).read)
    assert _asked(crowds, MISSES_A_PAGE - 1) == 0
    assert crowds.ahead(D) == (0, AHEAD_MAX)
    assert crowds.ahead(D) == (AHEAD_MAX, AHEAD_MAX)
    assert _asked(crowds, 10_000) == AHEAD_FREE - 2 * AHEAD_MAX == 0


def test_what_is_used_earns_more_and_does_not_pile_up() -> None:
    crowds = PrefetchPolicy(_Pages(1).read)
    crowds.opened(D)  # of a directory that nobody has asked about
    assert _asked(crowds, 100) == AHEAD_FREE
    crowds.opened(D)
    assert _asked(crowds, 100) == AHEAD_EARNED
    for _ in range(10_000):
        crowds.opened(D)
    assert _asked(crowds, 100) == AHEAD_SAVED


def test_names_that_came_late_are_passed_once_more() -> None:
    crowds = PrefetchPolicy(_Pages(1).read)
    assert _asked(crowds, MISSES_A_PAGE) == AHEAD_MAX
    crowds.passed(D)
    assert crowds.ahead(D) == (0, AHEAD_MAX)

"""Issue 3, item 9: listings of large directories in bounded memory, while others come and go."""

from __future__ import annotations

import random
import stat
import threading
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from fsclient.listings import dir_stream, pages as listing_pages
from fsclient.listings.dir_stream import PAGES_KEPT, RECENT_MAX, DirStream
from fsclient.listings.pages import CursorRange, Pages
from fsmeta.dentries import Dentries
from fsmeta.errors import Unavailable
from fsmeta.runtime import SystemRuntime
from fsmeta.schema import keys
from fsmeta.store.contract import SCAN_PAGE
from fsmeta.store.writes import Delete, Put
from fsmeta.types import ROOT_CALLER, ROOT_INO, Dentry, FileType, Ino
from tests.fsmeta.engines import Engine, change
from tools.benchlib.fill import fill, name_of

RUNTIME = SystemRuntime()
INO = Ino(7)
DOTS = Dentry(b".", INO, FileType.DIR), Dentry(b"..", INO, FileType.DIR)
DIR = stat.S_IFDIR | 0o755
AT_MOST = 170  # names a request, about as many as fit 4 KiB
COUNTS = {"tikv": 2500, "mem": 6000, "cluster": 6000}  # each costs 0.2 ms to write to TiKV


class Directory:
    """A directory of thousands of files, and clients that see it."""

    def __init__(self, engine: Engine, count: int | None = None) -> None:
        self.count = COUNTS.get(engine.name, 12_000) if count is None else count
        self.writer, self.reader = engine.meta(), engine.meta()
        self.ino = self.writer.create(ROOT_CALLER, ROOT_INO, b"d", DIR).ino
        fill(self.writer, self.ino, 0, self.count)
        self.pages = Pages(RUNTIME)
        self.names = {name_of(number) for number in range(self.count)}

    def open(self) -> DirStream:
        made = DirStream(self.ino, partial(self.reader.listed, self.ino), self.pages, RUNTIME)
        made.begin(DOTS)
        return made


@pytest.fixture
def directory(engine: Engine) -> Directory:
    return Directory(engine)


def _steps(
    made: DirStream, cookie: int = 0, at_most: int = AT_MOST
) -> Iterator[tuple[Sequence[bytes], Sequence[int]]]:
    """A listing from `cookie` on, request by request."""
    while True:
        names, cookies = made.behind(cookie, at_most)
        if not names:
            return
        assert len(names) == len(cookies) <= at_most
        cookie = cookies[-1]
        assert all(0 < each < 1 << 63 for each in cookies)
        yield [name for name, _, _ in names], cookies


def _rest(made: DirStream, cookie: int = 0) -> list[bytes]:
    return [name for names, _ in _steps(made, cookie) for name in names]


def _is_each_once(found: list[bytes], names: set[bytes]) -> bool:
    return len(found) == len(set(found)) and set(found) == names | {b".", b".."}


def test_each_name_once(directory: Directory) -> None:
    found = _rest(directory.open())
    assert found[:2] == [b".", b".."]
    assert _is_each_once(found, directory.names)


def test_any_cookie_can_be_sought(directory: Directory) -> None:
    """seekdir(3) to what telldir(3) said, near and far, and by a handle that is opened later."""
    made = directory.open()
    found: list[bytes] = []
    cookies: list[int] = []
    for names, more in _steps(made):
        found += names
        cookies += more
    assert len(set(cookies)) == len(cookies)
    chance = random.Random(1)
    for reader in (made, directory.open()):
        for _ in range(20):
            at = chance.randrange(len(found))
            page = [name for name, _, _ in reader.behind(cookies[at], AT_MOST)[0]]
            assert page == found[at + 1 : at + 1 + len(page)]
            assert page or at == len(found) - 1
    at = len(found) // 3
    assert _rest(made, cookies[at]) == found[at + 1 :]


def test_two_readers_of_one_handle(directory: Directory) -> None:
    """They seek by turns: each goes on where it was."""
    made = directory.open()
    turns = [_steps(made), _steps(made)]
    lists: list[list[bytes]] = [[], []]
    for names, _ in turns[0]:
        lists[0] += names
        if len(lists[0]) > 3000:
            break
    for names, _ in turns[1]:
        lists[1] += names
        lists[0] += next(turns[0], ([], []))[0]
    lists[0] += [name for names, _ in turns[0] for name in names]
    assert _is_each_once(lists[0], directory.names)
    assert _is_each_once(lists[1], directory.names)


def _come_and_go(directory: Directory, turn: int) -> None:
    """Names come for five turns, then go by and by, but every twentieth."""
    meta, ino, batch = directory.writer, directory.ino, directory.count // 10
    if turn < 5:
        fill(meta, ino, directory.count + turn * batch, batch)
    elif turn < 15:
        for number in range(directory.count + batch * 5):
            if number % 20 and number % 10 == turn - 5:
                meta.unlink(ROOT_CALLER, ino, name_of(number))


@pytest.mark.parametrize("engine", ["mem", "sqlite", "redis"], indirect=True)
def test_others_come_and_go(engine: Engine) -> None:
    directory = Directory(engine, 5000)
    stay = {name_of(number) for number in range(0, directory.count, 20)}
    found: list[bytes] = []
    for turn, (names, _) in enumerate(_steps(directory.open(), at_most=300)):
        found += names
        _come_and_go(directory, turn)
    assert len(found) == len(set(found))
    assert stay <= set(found)


@pytest.mark.parametrize("engine", ["mem", "sqlite", "redis"], indirect=True)
@pytest.mark.parametrize("seed", range(8))
def test_a_listing_that_a_later_handle_goes_on_with(engine: Engine, seed: int) -> None:
    """As the kernel does it, when names have come or gone, so that pages end elsewhere."""
    chance = random.Random(seed)
    directory = Directory(engine, 3000)
    steps = _steps(directory.open())
    found: list[bytes] = []
    cookies: Sequence[int] = ()
    for _ in range(chance.randrange(1, 3000 // AT_MOST)):
        names, cookies = next(steps)
        found += names
    others = [b"other %d" % number for number in range(100)]
    if seed % 2:
        for number in chance.sample(range(3000), 100):
            directory.writer.unlink(ROOT_CALLER, directory.ino, name_of(number))
            directory.names.discard(name_of(number))
    else:
        for name in others:
            directory.writer.create(ROOT_CALLER, directory.ino, name, stat.S_IFREG | 0o644)
    directory.reader.cache.forget()
    found += _rest(directory.open(), cookies[-1])
    assert len(found) == len(set(found))
    assert directory.names <= set(found)


@pytest.mark.parametrize("engine", ["redis", "cluster"], indirect=True)
@pytest.mark.parametrize("seed", range(12))
def test_a_table_that_shrinks_under_the_scan(engine: Engine, seed: int) -> None:
    """Redis brings names again then; those that stay are listed once, in any case."""
    store, row, chance = engine.open(), b"trow", random.Random(seed)
    names = [b"%d" % chance.getrandbits(40) for _ in range(3000)]
    store.commit(change(*(Put(row, name, b"1") for name in names)))

    def read(cursor: bytes | None) -> tuple[Dentries, bytes | None]:
        page = store.scan(row, cursor or b"", 50)
        names = dict(page.items)
        return Dentries.of(Dentry(name, INO, FileType.REG) for name in names), page.cursor

    made = DirStream(INO, read, Pages(RUNTIME), RUNTIME)
    made.begin(())
    found: list[bytes] = []
    for step, _ in _steps(made, at_most=100):
        found += step
        stay = names[: max(30, len(names) * 4 // 5)]
        gone, names = names[len(stay) :], stay
        if gone:
            store.commit(change(*(Delete(row, name) for name in gone)))
    assert len(found) == len(set(found))
    assert set(names) <= set(found)


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_a_small_directory_keeps_its_cookies_when_it_grows(engine: Engine) -> None:
    """What was listed from memory is gone on with from the store, where it has several pages."""
    directory = Directory(engine, 900)
    cookies = [each for _, more in _steps(directory.open()) for each in more]
    assert max(cookies) < 1 << 31, "32-bit programs could not list it"
    names = _rest(directory.open())
    fill(directory.writer, directory.ino, 900, 600)
    directory.reader.cache.forget()
    later = directory.open()
    found = names[:300] + _rest(later, cookies[299])
    assert len(found) == len(set(found))
    assert directory.names <= set(found)


@pytest.mark.parametrize("engine", ["mem"], indirect=True)
def test_memory_is_bounded(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dir_stream, "RECENT_MAX", 2000)
    made = directory.open()
    for _ in _steps(made):
        assert len(made._pages) <= PAGES_KEPT
        assert len(made._seen) <= 2000 + SCAN_PAGE
    assert RECENT_MAX > PAGES_KEPT * SCAN_PAGE


@pytest.mark.parametrize("engine", ["mem"], indirect=True)
def test_what_is_noted_of_reads_is_bounded(directory: Directory) -> None:
    """Regression: the log of the row cache kept the names of its last 4096 pages."""
    for _ in range(3):
        assert _rest(directory.open())
    cache = directory.reader.cache
    noted = sum(
        len(fields or ())
        for _, _, filled in cache._own._recent
        for row, fields in filled.items()
        if row == keys.dir_row(directory.ino)
    )
    assert noted <= 2 * SCAN_PAGE


def test_what_was_staged_is_published_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of the first page come again on the last one, long after."""
    monkeypatch.setattr(dir_stream, "RECENT_MAX", 200)
    pages = [[_file(100 * page + n) for n in range(100)] for page in range(20)]
    pages[-1] += pages[0]

    def read(cursor: bytes | None) -> tuple[Dentries, bytes | None]:
        number = int(cursor or b"0")
        return Dentries.of(pages[number]), b"%d" % (number + 1) if number + 1 < len(pages) else None

    made = DirStream(INO, read, Pages(RUNTIME), RUNTIME)
    made.begin(DOTS)
    assert _is_each_once(_rest(made), {name_of(number) for number in range(2000)})


def test_forgotten_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose cookie nobody knows any more is shown all names again, rather than none."""
    monkeypatch.setattr(listing_pages, "RECENT_PAGES", 0)
    files = Dentries.of(_file(number) for number in range(20))

    def read(cursor: bytes | None) -> tuple[Dentries, bytes | None]:
        return (files[10:], None) if cursor else (files[:10], b"10")

    pages = Pages(RUNTIME, at_most=1)
    made = DirStream(INO, read, pages, RUNTIME)
    made.begin(DOTS)
    found = [(names, cookies) for names, cookies in _steps(made, at_most=5)]
    last = found[-1][1][-1]
    assert pages.number(CursorRange(Ino(8), b"other", None)) > last >> dir_stream.SLOT_BITS
    other = DirStream(INO, read, pages, RUNTIME)
    other.begin(DOTS)
    assert _is_each_once(_rest(other, last), {name for name, _, _ in files})


def _file(number: int) -> Dentry:
    return Dentry(name_of(number), Ino(100 + number), FileType.REG)


def test_names_in_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names whose checksums are equal have cookies of their own."""
    monkeypatch.setattr(dir_stream, "crc32", lambda name: len(name) << 4)
    names = Dentries.of(_file(number) for number in range(100))
    made = DirStream(INO, lambda _cursor: (names, None), Pages(RUNTIME), RUNTIME)
    made.begin(DOTS)
    found = [each for each, _ in _steps(made, at_most=7)]
    assert _is_each_once([name for each in found for name in each], {name for name, _, _ in names})


@pytest.mark.parametrize("engine", ["mem"], indirect=True)
def test_names_that_many_handles_hold_are_bounded(directory: Directory) -> None:
    """Each of many open directories kept its last pages; now the oldest read theirs again."""
    directory.pages = Pages(RUNTIME, listed_max=6 * SCAN_PAGE)
    turns = [_steps(directory.open()) for _ in range(20)]
    lists: list[list[bytes]] = [[] for _ in turns]
    for _ in range(-(-directory.count // AT_MOST) + directory.count // SCAN_PAGE + 1):
        for found, steps in zip(lists, turns, strict=True):
            found += next(steps, ([], []))[0]
            assert directory.pages.listed <= 8 * SCAN_PAGE
    assert all(_is_each_once(found, directory.names) for found in lists)


@pytest.mark.parametrize("engine", ["mem", "sqlite", "redis"], indirect=True)
def test_the_next_page_is_read_ahead(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a page is given out; what fails there is tried again by who wants it."""
    monkeypatch.setattr(dir_stream, "AHEAD_FROM_S", 0.0)
    mine = threading.get_ident()
    ahead: list[bytes | None] = []
    brought: list[Dentry] = []

    def read(cursor: bytes | None) -> tuple[Dentries, bytes | None]:
        if threading.get_ident() != mine:
            ahead.append(cursor)
            if len(ahead) == 2:
                raise Unavailable("once")
        return directory.reader.listed(directory.ino, cursor)

    made = DirStream(directory.ino, read, directory.pages, RUNTIME)
    made.begin(DOTS)
    found: list[bytes] = []
    for names, _ in _steps(made):
        found += names
        made.read_ahead(brought.extend)
    made.close()
    assert _is_each_once(found, directory.names)
    pages = directory.count // SCAN_PAGE
    assert len(ahead) == len(set(ahead)) >= pages - 2
    assert len({name for name, _, _ in brought}) == len(brought) > 0
    assert directory.pages.listed == 0

"""`Store.everything`: all that is stored at one moment, while others change it (M4, M5)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from fsmeta.errors import ConfigError, Unavailable
from fsmeta.store.contract import Store
from fsmeta.store.redis import snapshot
from fsmeta.store.redis.engine import RedisStore
from fsmeta.store.writes import Append, Delete, DeleteRow, Merge, Put, Write
from tests.fsmeta.engines import RUNTIME, Engine, add, change
from tests.fsmeta.proxy import Cut, Proxy
from tests.support.waiting import wait_until

ROWS = [b"t%08d" % number for number in range(300)]
BIG = b"tlarge---"
BIG_FIELDS = 2500  # several pages


def _generation(number: int) -> list[Write]:
    """One commit, by which the whole store moves from one state to the next."""
    text = b"%08d" % number
    writes: list[Write] = [Put(row, b"now", text) for row in ROWS]
    come, go = ROWS[number % 300], ROWS[(number - 1) % 300]
    writes += [Put(come + b"x", b"%d" % field, text) for field in range(3)]
    writes += [DeleteRow(go + b"x")]
    writes += [Put(BIG, b"%d" % (number % BIG_FIELDS), text)]
    writes += [Delete(BIG, b"%d" % ((number - 1) % BIG_FIELDS))]
    writes += [Append(b"tappended", b"f", b"%08d" % number)]
    writes += [Merge(b"tmerged--", b"f", (0, text)), add(b"U", b"space", 1)]
    return writes


def _begin(store: Store) -> None:
    big = [Put(BIG, b"%d" % field, b"-") for field in range(1, BIG_FIELDS)]
    store.commit(change(*big))
    store.commit(change(Put(b"tmerged--", b"f", b"-" * 8), *_generation(0)[:-2]))


def _require_one_moment(found: dict[tuple[bytes, bytes], bytes]) -> int:
    """Which generation all of `found` is of."""
    text = found[ROWS[0], b"now"]
    number = int(text)
    assert {found.pop((row, b"now")) for row in ROWS} == {text}
    come = ROWS[number % 300] + b"x"
    assert {found.pop((come, b"%d" % field)) for field in range(3)} == {text}
    changed = found.pop((BIG, b"%d" % (number % BIG_FIELDS)))
    assert changed == text
    untouched = {key for key in found if key[0] == BIG}
    assert len(untouched) == BIG_FIELDS - 2 - number
    for key in untouched:
        del found[key]
    history = found.pop((b"tappended", b"f"))
    assert history == b"".join(b"%08d" % before for before in range(number + 1))
    if number:
        assert found.pop((b"tmerged--", b"f")) == text
        assert found.pop((b"U", b"space")) == b"%d" % number
    else:
        found.pop((b"tmerged--", b"f"))
    assert not found
    return number


def _read(store: Store, pause: Callable[[], object] = bool) -> dict[tuple[bytes, bytes], bytes]:
    """What the tests have put there; what comes twice must be the same."""
    found: dict[tuple[bytes, bytes], bytes] = {}
    with store.everything() as everything:
        for count, (row, field, value) in enumerate(everything):
            if row[:1] == b"t" or (row == b"U" and field == b"space"):
                assert found.setdefault((row, field), value) == value
            if count % 500 == 0:
                pause()
    return found


def test_a_store_at_rest_is_read_whole(engine: Engine) -> None:
    store = engine.open()
    _begin(store)
    assert _require_one_moment(_read(store)) == 0
    _tidy(store)


def test_changes_meanwhile_are_not_seen(engine: Engine) -> None:
    reader, writer = engine.open(), engine.open()
    _begin(writer)
    stop, go = threading.Event(), threading.Semaphore(20)
    reached = [0]

    def work() -> None:
        while go.acquire() and not stop.is_set():
            writer.commit(change(*_generation(reached[0] + 1)))
            reached[0] += 1

    def let_write() -> None:
        """Some more commits, of which one at least comes while the reader waits."""
        seen = reached[0]
        go.release(3)
        wait_until(lambda: reached[0] > seen or not thread.is_alive())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(3):
            wait_until(lambda: reached[0] >= 20 or not thread.is_alive())
            before = reached[0]
            number = _require_one_moment(_read(reader, let_write))
            assert before <= number <= reached[0]
            assert reached[0] > before, "nobody wrote meanwhile"
    finally:
        stop.set()
        go.release()
        thread.join()
    _tidy(writer)


def _tidy(store: Store) -> None:
    """The volume that is in the store, too, has counts of its own."""
    page = store.scan_rows(b"t")
    rows = list(page.rows)
    while page.cursor is not None:
        page = store.scan_rows(b"t", page.cursor)
        rows += page.rows
    store.commit(change(*(DeleteRow(row) for row in rows), Delete(b"U", b"space")))


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_one_reader_at_a_time(engine: Engine) -> None:
    first, second = engine.open(), engine.open()
    with first.everything() as everything:
        next(everything)
        with pytest.raises(ConfigError, match="another dump"), second.everything():
            pass
    with second.everything() as everything:
        assert list(everything)


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_nothing_is_noted_unless_somebody_reads(engine: Engine) -> None:
    store = engine.open()
    store.commit(change(Put(ROWS[0], b"f", b"1")))
    assert engine.first.read_rows([snapshot.NOTES]) == [{}]
    with suppress(ZeroDivisionError), store.everything():
        store.commit(change(Put(ROWS[0], b"f", b"2")))
        assert len(engine.first.read_rows([snapshot.NOTES])[0]) == 2
        raise ZeroDivisionError
    assert engine.first.read_rows([snapshot.NOTES]) == [{}]
    store.commit(change(DeleteRow(ROWS[0])))


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_a_reader_that_was_given_up_notices(engine: Engine) -> None:
    store, other = engine.open(), engine.open()
    _begin(store)
    with store.everything() as everything:
        next(everything)
        other.commit(change(DeleteRow(snapshot.NOTES)))  # as if it had expired
        with other.everything() as theirs:
            next(theirs)
            with pytest.raises(Unavailable, match="too long"):
                list(everything)
            assert list(theirs)
    _tidy(store)


@pytest.mark.parametrize("cut", [Cut.BEFORE_REPLY, Cut.IN_REPLY, Cut.AFTER_REQUEST])
@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_notes_expire_though_the_answer_is_lost(engine: Engine, cut: Cut) -> None:
    """And the reader that asked again is not taken for another one."""
    host, port = engine.url.removeprefix("redis://").split("/")[0].split(":")
    with Proxy(int(port)) as proxy:
        store = RedisStore(engine.url.replace(f"{host}:{port}", f"{host}:{proxy.port}"), RUNTIME)
        proxy.arm(cut, b"HSETNX")
        with suppress(Unavailable), store.everything():
            assert proxy.cuts == 1
        assert proxy.cuts == 1
        left = RedisStore(engine.url, RUNTIME)
        assert left._ask_plainly(b"PTTL", snapshot.NOTES) != -1
        left.close()
        store.close()

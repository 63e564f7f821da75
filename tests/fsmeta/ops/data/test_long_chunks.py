"""Chunks of many slices: what a write, a punch and a look cost, and that they count right."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from random import Random
from types import FrameType
from typing import Any

import pytest

from fsdata.format.geometry import COMPACT_BYTES, COMPACT_SLICES, should_compact
from fsmeta.meta import file_turns
from fsmeta.meta.meta import Meta
from fsmeta.ops.data import long_chunks
from fsmeta.ops.data.extent import Exchange
from fsmeta.ops.data.long_chunks import LONG_BYTES, covered_with, slices_of
from fsmeta.ops.data.ranges import KEEP_SIZE, PUNCH_HOLE
from fsmeta.schema.slices import SLICE_BYTES, hole, pack_slices
from fsmeta.slices import covered, resolve
from fsmeta.store.contract import Applied, Commit
from fsmeta.store.redis.script import as_msgpack
from fsmeta.types import CHUNK_BYTES, ROOT_CALLER, ROOT_INO, Ino, SetAttr, Slice, SliceId
from tests.fsmeta.engines import Engine

PAGE = 4096
PAGES = CHUNK_BYTES // PAGE


def _calls(action: Callable[[], object]) -> int:
    """How many Python functions this thread has called for it: work, whatever the machine does."""
    count = 0

    def note(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def _full_chunk(meta: Meta) -> Ino:
    ino = meta.create(ROOT_CALLER, ROOT_INO, b"f", 0o100644).ino
    whole = Slice(0, meta.new_slice_id(), CHUNK_BYTES, 0, CHUNK_BYTES)
    meta.write_slices(ino, [(0, whole)], CHUNK_BYTES, 1)
    return ino


def _punch(meta: Meta, ino: Ino, page: int) -> None:
    begin = page * PAGE
    meta.ranges.fallocate(ino, PUNCH_HOLE | KEEP_SIZE, begin, begin + PAGE)


def _write(meta: Meta, ino: Ino, page: int) -> None:
    piece = Slice(page * PAGE, meta.new_slice_id(), PAGE, 0, PAGE)
    meta.write_slices(ino, [(0, piece)], CHUNK_BYTES, 1)


@pytest.mark.parametrize("engine", ["mem"], indirect=True)
@pytest.mark.parametrize("change", [_punch, _write])
def test_a_small_change_costs_the_same_however_many_slices_there_are(
    engine: Engine, change: Callable[[Meta, Ino, int], None]
) -> None:
    """generic/610: each of 256 punches took 2 ms, of 1,024 5 ms, and of 4,096 20 ms."""
    meta = engine.meta()
    ino = _full_chunk(meta)
    pages = Random(1).sample(range(1, PAGES, 2), 2020)
    costs = []
    for count in (200, 2000):
        while len(meta.read_chunk(ino, 0)) <= count:
            change(meta, ino, pages.pop())
        change(meta, ino, pages.pop())
        costs.append(min(_calls(lambda: change(meta, ino, pages.pop())) for _ in range(3)))
    assert costs[1] < 1.5 * costs[0]
    shown = resolve(meta.read_chunk(ino, 0))
    used = sum(part.length for part in shown if part.slice is not None)
    assert meta.getattr(ROOT_CALLER, ino).used == used


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
@pytest.mark.parametrize("change", [_punch, _write])
def test_a_small_change_tells_redis_the_end_of_the_list(
    engine: Engine, change: Callable[[Meta, Ino, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = engine.meta()
    ino = _full_chunk(meta)
    pages = Random(1).sample(range(1, PAGES, 2), 500)
    told: list[int] = []

    def counted(body: object) -> bytes:
        told.append(len(packed := as_msgpack(body)))
        return packed

    monkeypatch.setattr("fsmeta.store.redis.commit.as_msgpack", counted)
    for page in pages:
        change(meta, ino, page)
    assert len(meta.read_chunk(ino, 0)) * SLICE_BYTES > 10_000
    assert max(told[-20:]) < 600


def test_two_clients_change_one_chunk(engine: Engine) -> None:
    """Each has the list of the other's past, and compactions come in between."""
    metas = engine.meta(), engine.meta()
    ino = _full_chunk(metas[0])
    random = Random(5)
    for _ in range(150 if engine.name in ("mem", "sqlite") else 60):
        meta = random.choice(metas)
        page = random.randrange(40)
        choice = random.random()
        if choice < 0.45:
            _punch(meta, ino, page)
        elif choice < 0.9:
            _write(meta, ino, page)
        else:
            old = meta.read_chunk(ino, 0)
            some = old[: random.randrange(1, len(old) + 1)]
            new = [
                Slice(part.pos, meta.new_slice_id(), part.length, 0, part.length)
                for part in resolve(some)
                if part.slice is not None
            ]
            meta.compact_chunk(ino, 0, some, new)
    shown = resolve(metas[0].read_chunk(ino, 0))
    used = sum(part.length for part in shown if part.slice is not None)
    assert [meta.getattr(ROOT_CALLER, ino).used for meta in metas] == [used, used]


def test_what_is_remembered_is_what_the_bytes_say() -> None:
    """Lists that grow, that others replace, that come back in older states."""
    for seed in range(60):
        random = Random(seed)
        ino, value, older = Ino(1 << 40), b"", [b""]
        for number in range(80):
            new = [_some(random, number) for _ in range(random.randrange(1, 3))]
            old = slices_of(ino, 0, value)
            before, after = covered_with(ino, 0, value, new)
            assert (before, after) == (covered(old), covered([*old, *new]))
            choice = random.randrange(10)
            if choice < 7:
                value += pack_slices(new)
            elif choice == 7 and len(value) > LONG_BYTES:
                value = value[SLICE_BYTES * random.randrange(1, 3) :]
            elif choice == 8:
                value = random.choice(older)
            older.append(value)
            assert pack_slices(slices_of(ino, 0, value)) == value


def _some(random: Random, number: int) -> Slice:
    pos, length = random.randrange(900), random.randrange(1, 100)
    return (
        hole(pos, length) if number % 3 == 0 else Slice(pos, SliceId(number + 1), length, 0, length)
    )


def test_only_a_few_are_remembered() -> None:
    value = pack_slices([Slice(2 * n, SliceId(n + 1), 1, 0, 1) for n in range(40)])
    for index in range(3 * long_chunks.KEPT):
        slices_of(Ino(1 << 40), index, value)
        covered_with(Ino(1 << 40), index, value, [])
    assert len(long_chunks._listed) <= long_chunks.KEPT
    assert len(long_chunks._laid) <= long_chunks.KEPT


def test_an_exchange_counts_what_it_fills() -> None:
    for seed in range(300):
        random = Random(seed)
        old, new, later = (
            [_some(random, random.randrange(9)) for _ in range(random.randrange(8))]
            for _ in range(3)
        )
        grown = covered([*new, *later]) - covered([*old, *later])
        assert Exchange(old, new).grown(later) == grown


def test_a_rewrite_of_much_waits_for_many_records() -> None:
    """Small writes into a large chunk are not followed by 64 MiB that move, each 48 of them."""
    whole = Slice(0, SliceId(1), CHUNK_BYTES, 0, CHUNK_BYTES)
    small = [Slice(2 * n * PAGE, SliceId(n + 2), PAGE, 0, PAGE) for n in range(PAGES // 2)]
    enough = CHUNK_BYTES // COMPACT_BYTES
    assert not should_compact([whole, *small[: enough - 2]])
    assert should_compact([whole, *small[: enough - 1]])
    short = whole._replace(size=1 << 20, length=1 << 20)
    assert should_compact([short, *small[: COMPACT_SLICES - 1]])


def test_a_compaction_has_its_turn_among_changes_that_never_pause(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change made its commit fail: a list of 10,000 punches was never exchanged."""
    monkeypatch.setattr(file_turns, "HOLD_MAX_S", 60.0)
    meta = engine.meta()
    ino = _full_chunk(meta)
    for page in range(20):
        _punch(meta, ino, page)
    me, real = threading.get_ident(), meta.transactor.store.commit
    changes: list[Future[None]] = []
    with ThreadPoolExecutor(1) as program:

        def commit(wanted: Commit) -> Applied | None:
            if threading.get_ident() == me:
                changes.append(program.submit(_punch, meta, ino, 100 + len(changes)))
                wait(changes, timeout=0.1)
            return real(wanted)

        monkeypatch.setattr(meta.transactor.store, "commit", commit)
        whole = Slice(0, meta.new_slice_id(), CHUNK_BYTES, 0, CHUNK_BYTES)
        assert meta.compact_chunk(ino, 0, meta.read_chunk(ino, 0), [whole])
    assert [each.result() for each in changes] == [None], "more than one attempt"
    assert len(meta.read_chunk(ino, 0)) == 2
    assert meta.getattr(ROOT_CALLER, ino).used == CHUNK_BYTES - PAGE


def test_changes_wait_for_a_compaction_no_longer_than_a_moment(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store may be away for its commit."""
    monkeypatch.setattr(file_turns, "HOLD_MAX_S", 0.01)
    meta = engine.meta()
    ino = _full_chunk(meta)
    with meta._turns.take(ino):
        _punch(meta, ino, 1)
        _write(meta, ino, 2)
        meta.setattr(ROOT_CALLER, ino, SetAttr(size=PAGE))

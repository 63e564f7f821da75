"""dump and load (M4): between all engines, of one moment, and nothing less than whole."""

from __future__ import annotations

import io
import random
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zstandard

from fsmeta.admin import dump as dumps
from fsmeta.errors import ConfigError
from fsmeta.meta.locks import Range
from fsmeta.meta.meta import Meta
from fsmeta.rules.settings import FRAMES_VERSION
from fsmeta.schema import keys
from fsmeta.schema.locks import Kind
from fsmeta.store.contract import Store
from fsmeta.store.writes import Delete, Put
from fsmeta.types import ROOT_INO
from tests.conftest import assert_clean
from tests.fsmeta.engines import ENGINES, RUNTIME, Engine, change, dump, open_engine
from tests.fsmeta.work import random_work

LEFT_OUT = {b"S", b"G", b"Z"}


@pytest.fixture(params=ENGINES)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An empty database."""
    directory = tmp_path / "target"
    directory.mkdir()
    made = open_engine(request.param, directory, request.getfixturevalue)
    try:
        yield made
    finally:
        made.close()


def _dumped(store: Store) -> bytes:
    sink = io.BytesIO()
    dumps.dump(store, sink)
    return sink.getvalue()


def _rows(store: Store) -> dict[bytes, dict[bytes, bytes]]:
    rows = dump(store)
    return {row: f for row, f in rows.items() if row not in LEFT_OUT and row[:1] not in b"sgl"}


def test_what_is_loaded_is_what_was_dumped(engine: Engine, target: Engine) -> None:
    """But for sessions, and the locks that they have."""
    locker = engine.meta()
    random_work(locker, random.Random(1), 150)
    locker.locks.setlk(ROOT_INO, Kind.POSIX, 1, Range(True))
    data = _dumped(engine.first)
    store = target.open()
    assert dumps.load(store, io.BytesIO(data)).name == "test"
    assert dumps.verify(store, io.BytesIO(data)) == []
    before, after = _rows(engine.first), _rows(store)
    assert dump(engine.first, b"l")
    assert not dump(store, b"l")
    assert not dump(store, b"g")
    counters = before.pop(b"C"), after.pop(b"C")
    counters[0].pop(b"lineage", None)  # of a Redis, which is another than this one
    assert before == after
    assert all(int(counters[1][name]) > int(value) + 10**6 for name, value in counters[0].items())
    meta = Meta(store, RUNTIME, deadline_s=10)
    meta.sessions.open({"host": "after"})
    random_work(meta, random.Random(2), 50)
    assert_clean(store)


def test_a_dump_is_of_one_moment(engine: Engine) -> None:
    """Two clients work on; what is loaded is in itself without fault."""
    stop = threading.Event()
    clients = [engine.meta(), engine.meta()]

    def work(meta: Meta, seed: int) -> None:
        chance = random.Random(seed)
        while not stop.is_set():
            random_work(meta, chance, 20)

    threads = [
        threading.Thread(target=work, args=(meta, seed)) for seed, meta in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    try:
        data = [_dumped(engine.first) for _ in range(5)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for each in data:
        loaded = open_engine("mem", Path(), str)
        dumps.load(loaded.first, io.BytesIO(each))
        assert_clean(loaded.first)
        loaded.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[bytes]:
    made = open_engine("mem", tmp_path, str)
    made.format()
    random_work(made.meta(), random.Random(3), 60)
    yield _dumped(made.first)
    made.close()


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Store]:
    made = open_engine("mem", tmp_path, str)
    yield made.first
    made.close()


def test_a_dump_has_the_version_of_its_volume(small: bytes) -> None:
    """So that an older client, which knows that version, can load it."""
    frame = zstandard.ZstdDecompressor().decompressobj().decompress(small[len(dumps.MAGIC) :])
    (length,) = struct.unpack_from(">I", frame)
    assert msgpack.unpackb(frame[4 : 4 + length]) == {"version": FRAMES_VERSION, "name": "test"}
    assert FRAMES_VERSION < keys.METADATA_VERSION


def test_a_dump_that_ends_early_makes_no_volume(small: bytes, empty: Store) -> None:
    for end in range(0, len(small), 7):
        with pytest.raises(ConfigError, match=r"ends early|not a dump"):
            dumps.load(empty, io.BytesIO(small[:end]))
        assert empty.read([(keys.FORMAT, keys.FORMAT_FIELD)]) == [None]
    dumps.load(empty, io.BytesIO(small))  # what the attempts have left is no hindrance
    assert_clean(empty)


def test_no_damaged_byte_is_loaded(small: bytes, empty: Store) -> None:
    """A few bits of a frame's header mean nothing to zstd; any other is noticed."""
    dumps.load(empty, io.BytesIO(small))
    right = dump(empty)
    harmless = 0
    for at in range(0, len(small), 3):
        damaged = bytearray(small)
        damaged[at] ^= 0x10
        empty.commit(change(Delete(b"F", b"format"), Put(b"F", b"loading", b"1")))
        try:
            dumps.load(empty, io.BytesIO(bytes(damaged)))
        except ConfigError:
            assert empty.read([(keys.FORMAT, keys.FORMAT_FIELD)]) == [None]
        else:
            assert dump(empty) == right
            harmless += 1
    assert harmless <= 2
    empty.commit(change(Delete(b"F", b"format"), Put(b"F", b"loading", b"1")))


def _frame(*blocks: object) -> bytes:
    packed = [bytes(msgpack.packb(block)) for block in blocks]
    body = b"".join(len(each).to_bytes(4, "big") + each for each in packed)
    return dumps.MAGIC + zstandard.ZstdCompressor().compress(body)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not a dump"),
        (b"{}" * 100, "not a dump"),
        (dumps.MAGIC + b"no frame at all, no frame at all", "damaged"),
        (_frame({"version": 99}), "upgrade slicefs"),
        (_frame({"version": "1"}), "has no version"),
        (_frame([1, 2]), "has no version"),
        (_frame({"version": 1}, {"records": 0, "sha256": b""}), "not what was written"),
    ],
)
def test_what_is_no_dump_is_refused(data: bytes, why: str, empty: Store) -> None:
    with pytest.raises(ConfigError, match=why):
        dumps.load(empty, io.BytesIO(data))
    assert empty.read([(keys.FORMAT, keys.FORMAT_FIELD)]) == [None]


def test_a_volume_is_not_loaded_over(engine: Engine) -> None:
    random_work(engine.meta(), random.Random(4), 30)
    before = dump(engine.first)
    with pytest.raises(ConfigError, match="there is a volume 'test' already"):
        dumps.load(engine.open(), io.BytesIO(_dumped(engine.first)))
    assert dump(engine.first) == before


@pytest.mark.parametrize("target", ["redis"], indirect=True)
def test_what_others_keep_in_a_database_stays(target: Engine, small: bytes) -> None:
    store = target.open()
    store.commit(change(Put(b"somebody's", b"field", b"value")))
    with pytest.raises(ConfigError, match="not empty"):
        dumps.load(store, io.BytesIO(small))
    assert dump(store) == {b"somebody's": {b"field": b"value"}}


def test_verify_finds_what_is_different(small: bytes, empty: Store) -> None:
    dumps.load(empty, io.BytesIO(small))
    empty.commit(change(Put(b"i" + bytes(7) + b"\1", b"a", b"else")))
    assert len(dumps.verify(empty, io.BytesIO(small))) == 1

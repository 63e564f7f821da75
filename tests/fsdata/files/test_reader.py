"""Reading: assembly, holes, read-ahead, stale slices, and the grace period."""

from __future__ import annotations

import itertools
import random

import pytest

from fsdata.files.readahead import (
    FROM_START_BYTES,
    LEAPS_MIN,
    STREAM_BYTES_MAX,
    STREAM_BYTES_MIN,
    WINDOW_BYTES_MAX,
    WINDOW_BYTES_MIN,
    Readahead,
)
from fsdata.files.reader import ZEROS_BYTES, FileReader
from fsdata.resources.read_epoch import ReadEpoch
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import ObjectMissing
from fsmeta.runtime import SystemRuntime
from fsmeta.slices import ChunkView
from fsmeta.types import BLOCK_BYTES_MAX, CHUNK_BYTES, Ino, Slice, SliceId, SliceKind
from tests.fsdata.reads import fetch_ahead, read_block
from tests.fsdata.world import BLOCK, World, pattern

RUNTIME = SystemRuntime()
INO = Ino(7)


def store(world: World, slice_id: int, data: bytes) -> SliceId:
    """A slice with `data`, in the store."""
    for index in range(-(-len(data) // BLOCK)):
        part = bytearray(data[index * BLOCK : (index + 1) * BLOCK])
        world.blocks.put_block(SliceId(slice_id), index, part)
    return SliceId(slice_id)


def test_pieces_are_views_and_holes_are_shared_zeros(world: World) -> None:
    data = pattern(3 * BLOCK)
    one = store(world, 1, data)
    world.sink.chunks[INO, 0] = [Slice(BLOCK, one, len(data), 0, len(data))]
    length = CHUNK_BYTES + 10
    got = world.reader().read(0, length + 99, length)
    assert b"".join(got) == bytes(BLOCK) + data + bytes(length - 4 * BLOCK)
    zeros = [piece for piece in got if not any(memoryview(piece)[:1])]
    assert len({id(piece.obj) for piece in zeros if isinstance(piece, memoryview)}) == 1
    assert max(map(len, got)) <= ZEROS_BYTES
    assert sum(map(len, got)) == length, "never more than the file holds"


def test_never_more_than_asked(world: World) -> None:
    data = pattern(2 * BLOCK)
    world.sink.chunks[INO, 0] = [Slice(0, store(world, 1, data), len(data), 0, len(data))]
    reader = world.reader()
    for offset, size in ((0, 1), (BLOCK - 1, 2), (5, 0), (len(data), 9), (len(data) - 3, 99)):
        got = reader.read(offset, size, len(data))
        assert b"".join(got) == data[offset : offset + size]
    assert reader.read(0, 10, 0) == []
    assert reader.read(50, 10, 20) == []


def test_later_slices_and_truncation_holes_hide(world: World) -> None:
    a, b = pattern(1000, 1), pattern(100, 2)
    hole = Slice(900, SliceId(0), 50, 0, 50, SliceKind.HOLE)
    world.sink.chunks[INO, 0] = [
        Slice(0, store(world, 1, a), 1000, 0, 1000),
        Slice(500, store(world, 2, b), 100, 0, 100),
        hole,
    ]
    want = a[:500] + b + a[600:900] + bytes(50) + a[950:]
    reader = world.reader()
    assert b"".join(reader.read(0, 1000, 1000)) == want
    assert b"".join(reader.read(550, 400, 1000)) == want[550:950]
    world.sink.chunks[INO, 0].append(Slice(0, store(world, 3, b), 100, 0, 100))
    assert b"".join(reader.read(0, 1000, 1000)) == b + want[100:], "the list's growth is seen"


def test_slices_replaced_by_compaction_are_looked_up_again(world: World) -> None:
    data = pattern(1000)
    old = Slice(0, SliceId(1), 1000, 0, 1000)
    new = Slice(0, store(world, 2, data), 1000, 0, 1000)
    answers = [[old], [new]]
    reader = FileReader(RUNTIME, world.blocks, lambda _: answers.pop(0))
    assert b"".join(reader.read(0, 1000, 1000)) == data
    broken = FileReader(RUNTIME, world.blocks, lambda _: [old])
    with pytest.raises(ObjectMissing):
        broken.read(0, 1000, 1000)


def test_window_doubles_and_random_reads_close_it() -> None:
    window, length = Readahead(), 1 << 30
    assert window.note(0, 100)
    assert window.advance(length) == [], "one read proves nothing"
    assert window.note(100, 100)
    assert window.advance(length) == [(WINDOW_BYTES_MIN, 2 * WINDOW_BYTES_MIN)]
    assert window.advance(length) == []
    asked = at = 2 * WINDOW_BYTES_MIN
    widest = 0
    for offset in range(200, 100 << 20, 1 << 20):
        assert window.note(offset, 1 << 20)
        for begin, end in window.advance(length):
            assert begin == asked, "each byte once"
            asked = end
            widest = max(widest, asked - offset)
        at = offset + (1 << 20)
    assert asked > at
    assert WINDOW_BYTES_MAX <= widest <= WINDOW_BYTES_MAX + 2 * WINDOW_BYTES_MIN
    ticket = window.ticket
    assert not window.note(900 << 20, 4096)
    assert not ticket.live
    assert window.advance(length) == []
    assert not window.note((900 << 20) + 4096, 4096), "two neighbouring pages are no stream"
    assert window.advance(length) == []
    assert window.note((900 << 20) + 8192, STREAM_BYTES_MIN)
    assert window.advance(length)
    assert window.ticket.live
    assert window.ticket is not ticket


def test_window_ends_with_the_file() -> None:
    window, length = Readahead(), (9 << 20) + 5
    asked: list[tuple[int, int]] = []
    for offset in range(0, length, 1 << 20):
        assert window.note(offset, 1 << 20)
        asked += window.advance(length)
    ranges = asked
    assert ranges[0][0] == 4 << 20
    assert ranges[-1][1] == length
    small = Readahead()
    for offset in range(0, 1 << 20, 1 << 17):
        small.note(offset, 1 << 17)
        assert small.advance(1 << 20) == [], "one block needs no read-ahead"


def test_window_finds_readers_that_go_backwards() -> None:
    """C3: what they ask for is below them, each byte once, down to the file's begin."""
    window, length, step = Readahead(), 100 << 20, 128 << 10
    asked: list[tuple[int, int]] = []
    for turn, offset in enumerate(range(length - step, -1, -step)):
        known = window.note(offset, step)
        assert known or turn < 12, "a few reads prove it"
        ahead = window.advance(length)
        for begin, end in ahead:
            assert end <= offset + step
            assert offset - begin <= WINDOW_BYTES_MAX + BLOCK_BYTES_MAX
        asked += ahead
    assert len(asked) > 5
    assert all(low[1] == high[0] for high, low in itertools.pairwise(asked)), "each byte once"
    assert asked[0][1] > 90 << 20
    assert asked[-1][0] == 0
    window.note(50 << 20, 4096)
    assert not window.ticket.live


def test_window_finds_strides() -> None:
    """C3: parts of equal size at equal distances, up or down."""
    for stride in (10 << 20, -(3 << 20)):
        window, length = Readahead(), 1 << 30
        start = 0 if stride > 0 else length - 4096
        asked: list[tuple[int, int]] = []
        for turn in range(12):
            offset = start + turn * stride
            assert not window.note(offset, 4096) or turn == 0
            asked += window.advance(length)
        begins = [begin for begin, _ in asked]
        assert all(end - begin == 4096 for begin, end in asked)
        assert len(set(begins)) == len(begins), "each once"
        assert begins == [start + turn * stride for turn in range(4, 16)]
        assert not window.note(555_555_555, 4096)
        assert not window.ticket.live
        assert window.advance(length) == []


def test_random_readers_fetch_nothing_ahead() -> None:
    """C3."""
    window, dice = Readahead(), random.Random(1)
    for _ in range(1000):
        window.note(dice.randrange(1 << 40), 4096)
        assert window.advance(1 << 41) == []


def read_run(window: Readahead, begin: int, size: int, length: int, step: int = 4096) -> int:
    """Read neighbours; how many of the reads counted as a stream, read-ahead included."""
    counted = 0
    for offset in range(begin, begin + size, step):
        counted += window.note(offset, step, length)
        counted += len(window.advance(length))
    return counted


def test_records_in_a_mapped_file_are_no_streams() -> None:
    """C3: as LMDB reads: a page of the tree, near it another one, then the pages of a value."""
    window, length, dice = Readahead(), 1 << 40, random.Random(2)
    for size in (0, 4096, 16 << 10, 100 << 10):
        for _ in range(300):
            at = dice.randrange(length) & -4096
            pages = (at, at + dice.randrange(-200, 200) * 4096, at + dice.randrange(500) * 4096)
            for page in (*pages, at - 4096):
                assert read_run(window, page, 4096, length) == 0
            assert read_run(window, at + (dice.randrange(1, 200) << 12), size, length) == 0


def test_a_handle_learns_how_long_its_runs_are() -> None:
    """C3: once a run was too short for the block that was fetched, the next has to prove more."""
    window, length = Readahead(), 1 << 40
    long, far = 400 << 10, 1 << 30
    counts = [read_run(window, far * turn, long, length) for turn in range(1, 8)]
    assert counts[0] > 0
    assert not any(counts[1:])
    assert read_run(window, far * 8, 32 << 20, length) > 0, "a stream is one for all that"
    assert read_run(window, far * 9, STREAM_BYTES_MIN + 4096, length) > 0
    short = Readahead()
    for turn in range(1, 20):
        read_run(short, far * turn, STREAM_BYTES_MAX + (turn << 10), length)
    assert read_run(short, far * 20, STREAM_BYTES_MAX, length) > 0, "there is an end to it"


def test_who_leaps_through_a_file_is_a_stream_soon() -> None:
    """C3: as tar(1) lists an archive: a header, and a seek over what belongs to it."""
    window, length, dice = Readahead(), 1 << 40, random.Random(4)
    at, proved = 1 << 30, []
    for _ in range(40):
        proved.append(window.note(at, 10 << 10, length))
        at += (10 << 10) + dice.randrange(1, 300 << 10)
    assert proved == [False] * LEAPS_MIN + [True] * (40 - LEAPS_MIN)
    assert window.advance(length)
    assert not window.note(at - (700 << 10), 4096, length), "not for who goes back and forth"


def test_the_begin_of_a_short_file_is_that_of_a_stream() -> None:
    """C3: of a long one only where much is asked for at once."""
    assert Readahead().note(0, 16 << 10, FROM_START_BYTES)
    assert not Readahead().note(0, 16 << 10, FROM_START_BYTES + 1)
    assert Readahead().note(0, STREAM_BYTES_MIN, 1 << 40)
    assert not Readahead().note(100 << 10, STREAM_BYTES_MIN, FROM_START_BYTES)


def test_reading_backwards_fetches_each_block_once(world: World) -> None:
    """C3."""
    data = pattern(1 << 20) * 12
    world.sink.chunks[INO, 0] = [Slice(0, store(world, 1, data), len(data), 0, len(data))]
    reader = world.reader()
    for end in range(len(data), 0, -(64 << 10)):
        begin = end - (64 << 10)
        assert b"".join(reader.read(begin, end - begin, len(data))) == data[begin:end]
    reader.close()
    world.readers.close()
    assert len(world.objects.gets) == len(data) // BLOCK
    assert world.budget.gauges().ahead == 0


def test_sequential_reading_fetches_each_block_once(world: World) -> None:
    data = pattern(1 << 20) * 12
    world.sink.chunks[INO, 0] = [Slice(0, store(world, 1, data), len(data), 0, len(data))]
    reader = world.reader()
    step = 1 << 16
    for offset in range(0, len(data), step):
        got = b"".join(reader.read(offset, step, len(data)))
        assert got == data[offset : offset + step]
    keys = [key for key, _, _ in world.objects.gets]
    assert len(set(keys)) == len(data) // BLOCK
    assert len(keys) == len(set(keys))
    reader.close()


def test_a_sequential_reader_leaves_blocks_behind(world: World) -> None:
    data = pattern(1 << 20) * 12
    world.sink.chunks[INO, 0] = [Slice(0, store(world, 1, data), len(data), 0, len(data))]
    reader, step = world.reader(), 1 << 16
    for offset in range(0, len(data), step):
        reader.read(offset, step, len(data))
    world.readers.close()
    assert not world.cache._blocks
    assert world.budget.gauges().ahead == 0
    assert len(world.cache._behind.blocks) == world.cache.stats().blocks > 0


def test_read_ahead_that_nobody_wants_is_dropped(world: World) -> None:
    data = pattern(1 << 20) * 12
    world.sink.chunks[INO, 0] = [Slice(0, store(world, 1, data), len(data), 0, len(data))]
    reader = world.reader()
    reader.read(0, BLOCK - 1, len(data))
    world.objects.gate = RUNTIME.event()
    busy = [RUNTIME.event(), RUNTIME.event()]
    try:
        for event in busy:  # both threads are busy, so what is asked for now stays in the queue
            world.readers.submit(lambda event=event: event.wait() and None)  # type: ignore[misc]
        reader.read(0, 10, len(data))  # cached, or it would wait at the gate
        assert world.budget.gauges().ahead > 0
        reader.close()
    finally:
        for event in busy:
            event.set()
    world.readers.close()
    assert len(world.objects.gets) == 1
    assert world.budget.gauges().ahead == 0


def test_read_ahead_that_was_overtaken_fetches_nothing_again(world: World) -> None:
    """The store is slower than the reader, who takes each block as a whole: none is cached."""
    data = pattern(1 << 20) * 12
    world.sink.chunks[INO, 0] = [Slice(0, store(world, 1, data), len(data), 0, len(data))]
    reader, slow = world.reader(), RUNTIME.event()

    def be_slow() -> None:
        slow.wait()

    for _ in range(2):  # both threads are busy until the reader has come to the end
        world.readers.submit(be_slow)
    for offset in range(0, len(data), BLOCK):
        assert b"".join(reader.read(offset, BLOCK, len(data))) == data[offset : offset + BLOCK]
    assert world.budget.gauges().ahead > 0
    slow.set()
    world.readers.close()
    assert len(world.objects.gets) == len(data) // BLOCK
    assert world.budget.gauges().ahead == 0


def test_what_landed_meanwhile_is_not_fetched_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's fetch ends between a thread's look into the cache and its own fetch."""
    data = pattern(BLOCK)
    sid = store(world, 1, data)
    has = world.cache.has

    def overtaken(_: tuple[SliceId, int]) -> bool:
        monkeypatch.setattr(world.cache, "has", has)
        assert bytes(read_block(world.blocks, sid, BLOCK, 0, 0, 10, whole=True)) == data[:10]
        return False

    monkeypatch.setattr(world.cache, "has", overtaken)
    fetch_ahead(world.blocks, sid, BLOCK, 0)
    assert len(world.objects.gets) == 1


def test_epoch_waits_for_reads_that_began_before() -> None:
    epoch = ReadEpoch(RUNTIME)
    assert epoch.advance(0)
    inside, leave = RUNTIME.event(), RUNTIME.event()

    def read() -> None:
        with epoch.reading():
            inside.set()
            leave.wait()

    thread = RUNTIME.spawn("reader", read)
    inside.wait()
    assert not epoch.advance(0)
    with epoch.reading():
        assert not epoch.advance(0), "the older read counts still"
        leave.set()
        thread.join()
        assert not epoch.advance(0), "this one began before, too"
    assert epoch.advance(0)
    waited: list[bool] = []
    with epoch.reading():
        waiter = RUNTIME.spawn("waiter", lambda: waited.append(epoch.advance(30)))
        with epoch.reading():
            pass
    waiter.join()
    assert waited == [True]


def test_pool_runs_everything_and_closes() -> None:
    pool = WorkerPool(RUNTIME, "test", 3)
    lock, seen = RUNTIME.lock(), []

    def job(number: int) -> None:
        with lock:
            seen.append(number)
        if number < 100:
            pool.submit(lambda: job(number + 100))

    for number in range(100):
        pool.submit(lambda number=number: job(number))  # type: ignore[misc]
    pool.close()
    pool.submit(lambda: job(200))
    assert sorted(seen) == list(range(201))


def test_a_read_after_a_small_write_lays_that_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader beside a writer of small pieces, and one that sees another list each time."""
    chance, data = random.Random(1), bytearray(pattern(BLOCK))
    slices = [Slice(0, store(world, 1, bytes(data)), BLOCK, 0, BLOCK)]
    world.sink.chunks[INO, 0] = slices
    reader, laid = world.reader(), 0
    lay = ChunkView.lay

    def count(view: ChunkView, piece: Slice) -> None:
        nonlocal laid
        laid += 1
        lay(view, piece)

    monkeypatch.setattr(ChunkView, "lay", count)
    for number in range(2, 200):
        pos, piece = chance.randrange(BLOCK - 100), pattern(100, number)
        slices.append(Slice(pos, store(world, number, piece), 100, 0, 100))
        data[pos : pos + 100] = piece
        assert b"".join(reader.read(0, BLOCK, BLOCK)) == data
    assert laid == len(slices)
    world.sink.chunks[INO, 0] = slices[1:50]
    hidden = world.reader().read(0, BLOCK, BLOCK)
    assert b"".join(reader.read(0, BLOCK, BLOCK)) == b"".join(hidden)

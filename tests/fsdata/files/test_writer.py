"""Writing: slices, overlay, order of commits, failures, memory, idle flush."""

from __future__ import annotations

from errno import ENOSPC

import pytest

from fsdata.files.ordered_commits import COMMIT_BYTES, COMMIT_RECORDS, PENDING_MAX
from fsdata.files.pending_slices import OPEN_MAX
from fsdata.files.upload_pool import UploadPool
from fsdata.files.write_buffer import BlockState
from fsdata.files.writer import SLICE_BYTES, FileWriter
from fsdata.resources.memory_budget import BUFFER_BYTES_MIN
from fsmeta.errors import StoreError, Unavailable
from fsmeta.runtime import SystemRuntime
from fsmeta.types import CHUNK_BYTES, Ino, Slice
from tests.fsdata.faults import no_space
from tests.fsdata.world import BLOCK, World, pattern
from tests.support.traced import traced, tracing

RUNTIME = SystemRuntime()
INO = Ino(7)


def put(writer: FileWriter, offset: int, data: bytes) -> None:
    """Write from a buffer that is overwritten afterwards, as the transport's is."""
    buffer = bytearray(data)
    writer.write(offset, memoryview(buffer))
    buffer[:] = b"!" * len(buffer)


def test_a_small_file_is_one_object_and_one_commit(world: World) -> None:
    data = pattern(100_000)
    writer = world.writer()
    put(writer, 0, data)
    assert world.length(writer) == 100_000
    assert writer.dirty
    writer.flush()
    writer.flush()
    assert world.sink.commits == 1
    assert world.sink.chunks[INO, 0] == [Slice(0, world.sink.order[0], 100_000, 0, 100_000)]
    assert len(world.objects.puts) == 1
    assert world.content() == data
    assert not writer.dirty


def test_an_append_in_many_writes_is_one_slice(world: World) -> None:
    data = pattern(5 * BLOCK + 777)
    writer = world.writer()
    for at in range(0, len(data), 10_000):
        put(writer, at, data[at : at + 10_000])
    writer.flush()
    assert len(world.sink.order) == 1
    assert len(world.objects.puts) == 6
    assert world.content() == data


def test_full_blocks_are_uploaded_before_flush(world: World) -> None:
    writer = world.writer()
    world.objects.gate = RUNTIME.event()
    put(writer, 0, pattern(BLOCK))
    world.objects.arrived.wait()
    world.objects.gate.set()
    writer.flush()
    assert world.content() == pattern(BLOCK)


def test_small_overwrites_change_the_open_block_in_place(world: World) -> None:
    writer = world.writer()
    put(writer, 0, b"a" * 100)
    put(writer, 10, b"b" * 20)
    put(writer, 90, b"c" * 20)
    assert world.budget.gauges().writing == 110 + SLICE_BYTES
    writer.flush()
    assert world.budget.gauges().writing == 0
    assert len(world.sink.order) == 1
    assert world.content() == b"a" * 10 + b"b" * 20 + b"a" * 60 + b"c" * 20


def test_overwrites_of_uploaded_blocks_are_new_slices(world: World) -> None:
    writer = world.writer()
    put(writer, 0, b"a" * (BLOCK + 5))
    put(writer, BLOCK - 5, b"b" * 10)
    put(writer, BLOCK + 3, b"c" * 4)
    writer.flush()
    assert world.content() == b"a" * (BLOCK - 5) + b"b" * 8 + b"c" * 4


def test_later_writes_win_across_slices(world: World) -> None:
    writer = world.writer()
    put(writer, 0, b"a" * 100)
    put(writer, 200, b"b" * 100)
    put(writer, 100, b"c" * 150)  # appends to the first, but hides half of the second
    put(writer, 240, b"d" * 20)
    writer.flush()
    assert world.content() == b"a" * 100 + b"c" * 140 + b"d" * 20 + b"b" * 40


def test_chunks_are_slices_of_their_own(world: World) -> None:
    writer = world.writer()
    put(writer, CHUNK_BYTES - 10, b"x" * 30)
    assert world.length(writer) == CHUNK_BYTES + 20
    writer.flush()
    assert [piece.pos for piece in world.sink.chunks[INO, 0]] == [CHUNK_BYTES - 10]
    assert [piece.length for piece in world.sink.chunks[INO, 1]] == [20]
    assert world.sink.lengths[INO] == CHUNK_BYTES + 20
    assert world.sink.commits == 1


def test_unflushed_bytes_are_read_from_the_buffers(world: World) -> None:
    writer = world.writer()
    reader = world.reader(writer=writer)
    data = pattern(2 * BLOCK + 50)
    world.objects.gate = RUNTIME.event()  # nothing can be uploaded
    for at in range(0, len(data), 30_000):
        put(writer, at, data[at : at + 30_000])
        got = b"".join(reader.read(0, world.length(writer), world.length(writer)))
        assert got == data[: world.length(writer)]
    assert world.objects.gets == []
    old = reader.read(2 * BLOCK, 50, world.length(writer))
    put(writer, 2 * BLOCK, b"new")
    assert b"".join(old) == data[2 * BLOCK :], "an answer does not change any more"
    world.objects.gate.set()
    writer.flush()
    want = data[: 2 * BLOCK] + b"new" + data[2 * BLOCK + 3 :]
    assert b"".join(reader.read(0, len(data), len(data))) == want
    assert world.content() == want


def test_a_streamed_file_is_committed_in_the_background() -> None:
    world = World(limit=BUFFER_BYTES_MIN)
    writer = world.writer()
    piece = pattern(1 << 20)
    total = CHUNK_BYTES + COMMIT_BYTES
    highest = 0
    for at in range(0, total, len(piece)):
        writer.write(at, memoryview(piece))
        highest = max(highest, world.budget.gauges().writing)
    writer.flush()
    assert world.sink.commits >= 2
    assert highest <= BUFFER_BYTES_MIN
    assert world.sink.lengths[INO] == total
    assert world.content() == piece * (total // len(piece))
    world.close()


def test_one_write_larger_than_all_memory(world: World) -> None:
    data = pattern(1 << 20) * 40
    writer = world.writer()
    put(writer, CHUNK_BYTES - (20 << 20) - 3, data)
    writer.flush()
    assert world.content()[CHUNK_BYTES - (20 << 20) - 3 :] == data


def test_random_writes_stay_bounded(world: World) -> None:
    writer = world.writer()
    size = 1 << 22
    model = bytearray(size)
    for number in range(2 * PENDING_MAX):
        at = number * 7919 * 64 % (size - 32)
        model[at : at + 32] = pattern(32, number)
        put(writer, at, pattern(32, number))
        assert len(writer.slices.all) <= PENDING_MAX
        assert sum(not piece.sealed for piece in writer.slices.all) <= OPEN_MAX
    writer.flush()
    assert world.content() == bytes(model).rstrip(b"\0")[: world.length(writer)].ljust(
        world.length(writer), b"\0"
    )
    assert world.sink.commits < 2 * PENDING_MAX // (COMMIT_RECORDS // 2)


@pytest.mark.parametrize("make", [lambda: Unavailable("injected"), no_space])
@pytest.mark.parametrize("torn", [False, True])
def test_a_failed_flush_raises_once_and_the_next_one_saves_the_data(
    world: World, make: type[Exception], torn: bool
) -> None:
    data = pattern(3 * BLOCK + 10)
    writer = world.writer()
    world.objects.torn = torn
    world.objects.fail("put", 10**6, make)
    put(writer, 0, data)
    with pytest.raises((Unavailable, OSError)):
        writer.flush()
    assert world.sink.commits == 0
    assert writer.dirty
    with pytest.raises((Unavailable, OSError)):
        writer.flush()
    world.objects.fail("put", 0)
    writer.flush()
    assert world.content() == data
    writer.flush()


def test_a_background_failure_is_raised_by_the_next_write(world: World) -> None:
    writer = world.writer()
    world.objects.fail("put", 1, no_space)
    put(writer, 0, b"a" * BLOCK)
    world.pool.close()  # the upload has ended
    with pytest.raises(OSError, match="injected") as caught:
        put(writer, BLOCK, b"b")
    assert caught.value.errno == ENOSPC
    put(writer, BLOCK, b"c")
    writer.flush()
    assert world.content() == b"a" * BLOCK + b"c"


def test_a_background_failure_is_raised_by_flush_even_if_it_heals(world: World) -> None:
    writer = world.writer()
    world.objects.fail("put", 1)
    put(writer, 0, b"a" * BLOCK)
    world.pool.close()
    with pytest.raises(Unavailable):
        writer.flush()
    assert world.content() == b"a" * BLOCK
    writer.flush()


def test_a_failed_commit_is_offered_again_in_order(world: World) -> None:
    writer = world.writer()
    world.sink.errors = [Unavailable("commit"), StoreError("again")]
    put(writer, 0, b"a" * 10)
    put(writer, 5000, b"b" * 10)
    with pytest.raises(Unavailable, match="commit"):
        writer.flush()
    put(writer, 3, b"c")
    with pytest.raises(StoreError, match="again"):
        writer.flush()
    writer.flush()
    assert world.sink.order == sorted(world.sink.order)
    assert world.sink.commits == 1
    assert world.content()[:10] == b"aaacaaaaaa"


def test_only_a_stored_prefix_is_committed(world: World) -> None:
    writer = world.writer()
    world.objects.fail("put", 2)
    put(writer, 0, b"first")
    put(writer, 100, b"second")
    put(writer, 200, b"third")
    with pytest.raises(Unavailable):
        writer.flush()
    assert world.sink.order in ([], [1], [1, 2])
    writer.flush()
    assert world.sink.order == [1, 2, 3]


def test_discard_releases_everything(world: World) -> None:
    writer = world.writer()
    world.objects.fail("put", 10**6)
    put(writer, 0, b"a" * (3 * BLOCK + 5))
    with pytest.raises(Unavailable):
        writer.flush()
    put(writer, 10**6, b"more")
    writer.discard()
    writer.flush()
    assert world.budget.gauges().writing == 0
    assert world.pool.dirty() == 0
    assert world.sink.commits == 0


@pytest.mark.parametrize("fails", [False, True])
def test_discard_during_an_upload(world: World, fails: bool) -> None:
    writer = world.writer()
    world.objects.gate = RUNTIME.event()
    world.objects.fail("put", int(fails))
    put(writer, 0, b"a" * BLOCK)
    world.objects.arrived.wait()
    writer.discard()
    world.objects.gate.set()
    world.pool.close()
    assert world.budget.gauges().writing == 0
    writer.flush()


def test_flush_gives_up_at_its_deadline(world: World) -> None:
    writer = world.writer()
    world.objects.gate = RUNTIME.event()
    put(writer, 0, b"a" * BLOCK)
    world.objects.arrived.wait()
    with pytest.raises(Unavailable, match="too long"):
        writer.flush(deadline=RUNTIME.monotonic())
    world.objects.gate.set()
    writer.flush(deadline=RUNTIME.monotonic() + 60)
    assert world.content() == b"a" * BLOCK


def test_durable_flush_syncs_what_was_committed_before(world: World) -> None:
    writer = world.writer()
    put(writer, 0, b"one")
    writer.flush()
    assert world.objects.synced == []
    put(writer, 10, b"two")
    writer.flush(durable=True)
    assert world.objects.synced == world.objects.puts
    writer.flush(durable=True)
    assert len(world.objects.synced) == 2
    put(writer, 20, b"three")
    writer.flush()
    writer.flush(durable=True)
    assert world.objects.synced == world.objects.puts


def test_memory_pressure_pushes_other_files(world: World) -> None:
    """Half-filled buffers of many idle files don't starve a writer."""
    share = BUFFER_BYTES_MIN // 64
    files = [world.writer(ino) for ino in range(100, 163)]
    for file in files:
        for at in range(0, share, BLOCK - 1):  # never a full block
            file.write(10**6 + at * 2, memoryview(bytes(min(BLOCK - 1, share - at))))
    last = world.writer(8)
    for at in range(0, 4 * share, share):
        last.write(at, memoryview(pattern(share)))
    for file in (*files, last):
        file.flush()
    assert world.content(8) == pattern(share) * 4


def test_full_memory_and_a_failing_store_is_an_error_not_a_hang(world: World) -> None:
    writer = world.writer()
    world.objects.fail("put", 10**9, no_space)

    def fill() -> None:
        for at in range(0, 2 * BUFFER_BYTES_MIN, 1 << 20):
            writer.write(at, memoryview(bytes(1 << 20)))

    with pytest.raises(OSError, match="injected"):
        fill()
    writer.discard()


def test_idle_files_are_flushed() -> None:
    world = World(idle_s=0.01)
    committed = RUNTIME.event()
    world.sink.on_commit = committed.set
    world.objects.fail("put", 2)
    writer = world.writer()
    put(writer, 0, b"lying about")
    assert committed.wait(60)
    with pytest.raises(Unavailable):
        writer.flush()
    writer.flush()
    world.close()
    assert world.content() == b"lying about"


def test_flusher_sees_age_and_idleness(world: World) -> None:
    class Clock(SystemRuntime):
        def __init__(self) -> None:
            super().__init__()
            self.at = 100.0
            self.monotonic = lambda: self.at

    clock = Clock()
    pool = UploadPool(clock, world.budget, 1, idle_s=5.0)
    writer = FileWriter(world.side._replace(runtime=clock, pool=pool), INO)
    assert writer.due() == float("inf")
    put(writer, 0, b"x")
    assert writer.due() == 105.0
    clock.at = 128.0
    put(writer, 1, b"x")
    assert writer.due() == 130.0, "30 s after the first byte, however busy"
    writer.flush()
    assert writer.due() == float("inf")
    pool.close()


def test_the_end_is_that_of_what_is_not_committed(world: World) -> None:
    """How long the rest is, others know: a file may be cut while something is written."""
    writer = world.writer()
    put(writer, 480, b"x" * 20)
    put(writer, 0, b"x" * 20)
    assert writer.end == 500
    writer.flush()
    assert writer.end == 0
    put(writer, 30, b"y")
    assert writer.end == 31
    writer.flush()


def test_each_who_waits_for_a_flush_hears_that_it_failed(world: World) -> None:
    """A failure is kept for one call: another one, made meanwhile, took it, and this one was 0."""
    writer = world.writer()
    put(writer, 0, b"x")
    world.objects.fail("put", 1)
    poke = world.budget.poke

    def write_meanwhile() -> None:
        world.budget.poke = poke  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            put(writer, 10, b"y")

    world.budget.poke = write_meanwhile  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        writer.flush()
    assert writer.dirty
    writer.flush()
    assert world.content() == b"x"
    put(writer, 0, b"z")
    writer.flush()
    assert world.content() == b"z"


def test_a_bug_in_the_store_does_not_hang_a_flush(world: World) -> None:
    writer = world.writer()

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    put_block = world.blocks.put_block
    world.blocks.put_block = broken  # type: ignore[method-assign]
    put(writer, 0, b"x")
    with pytest.raises(ZeroDivisionError):
        writer.flush()
    assert writer.slices.all[0].blocks[0].state is BlockState.READY
    world.blocks.put_block = put_block  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="without a word"):
        writer.flush()
    assert world.content() == b"x"


def uncounted_bytes(count: int) -> int:
    """How much more so many pending slices of a byte each allocate than what is counted."""
    world = World()
    writer = world.writer()
    world.objects.gate = gate = RUNTIME.event()
    put(writer, 0, b"x")
    with tracing() as peak:
        for at in range(1, count):
            put(writer, 10 * at, b"x")
        grown = peak()
    counted = world.budget.gauges().writing
    assert counted == count * (1 + SLICE_BYTES)
    gate.set()
    writer.flush()
    world.close()
    return grown - counted


def test_c4_a_pending_slice_takes_no_more_than_what_is_counted() -> None:
    """A byte each, at random places: what holds it counts, not only the byte."""
    assert traced(uncounted_bytes, PENDING_MAX - 1) <= 0


def test_c4_where_slices_take_all_memory_they_are_committed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdata.files.writer.SLICE_BYTES", BUFFER_BYTES_MIN // 40)
    writers = [world.writer(ino) for ino in range(1, 11)]
    for at in range(20):
        for writer in writers:
            put(writer, 10 * at, b"x")
            assert world.budget.gauges().writing <= BUFFER_BYTES_MIN
    assert 160 <= len(world.sink.order) < 200  # nobody has asked for it
    for writer in writers:
        writer.flush()
        writer.discard()

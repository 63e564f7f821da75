"""The whole data path against a bytearray: random writes, reads, truncation, flushes, faults."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from fsdata.format.block_v1 import Codec
from fsmeta.errors import Unavailable
from fsmeta.runtime import SystemRuntime
from fsmeta.types import CHUNK_BYTES, Ino, Slice, SliceId, SliceKind
from tests.fsdata.world import BLOCK, World, pattern

INO = Ino(7)
RUNTIME = SystemRuntime()
BASE = CHUNK_BYTES - 3 * BLOCK  # the model covers the end of one chunk and the start of the next
SPAN = 6 * BLOCK

SPOTS = st.one_of(
    st.integers(0, SPAN - 1),
    st.integers(-3, 3).map(lambda near: 3 * BLOCK + near),
    st.sampled_from([0, BLOCK - 1, BLOCK, 2 * BLOCK + 1]),
)
SIZES = st.one_of(st.integers(1, 300), st.integers(BLOCK - 5, 3 * BLOCK))
STEPS = st.one_of(
    st.tuples(st.just("write"), SPOTS, SIZES),
    st.tuples(st.just("append"), st.just(0), SIZES),
    st.tuples(st.just("read"), SPOTS, SIZES),
    st.tuples(st.just("truncate"), SPOTS, st.just(0)),
    st.tuples(st.just("flush"), st.just(0), st.just(0)),
    st.tuples(st.just("fail"), st.integers(1, 3), st.just(0)),
    st.tuples(st.just("forget"), st.just(0), st.just(0)),
)


class File:
    """A file, its model, and the steps on both."""

    def __init__(self, codec: Codec, locked: bool) -> None:
        self.world = World(codec, locked=locked)
        self.writer = self.world.writer()
        self.world.sink.lengths[INO] = BASE
        self.reader = self.world.reader(writer=self.writer)
        self.model = bytearray()  # of what is past BASE
        self.fill = 0

    def flush(self) -> None:
        """Faults count down, so this ends."""
        while True:
            try:
                return self.writer.flush()
            except Unavailable:
                continue

    def write(self, offset: int, size: int) -> None:
        size = min(size, SPAN - offset)
        self.fill += 1
        data = pattern(size, self.fill)
        if offset > len(self.model):
            self.model += bytes(offset - len(self.model))
        self.model[offset : offset + size] = data
        buffer = bytearray(data)
        while True:
            try:
                self.writer.write(BASE + offset, memoryview(buffer))
                break
            except Unavailable:
                continue
        buffer[:] = bytes(size)

    def append(self, _: int, size: int) -> None:
        if len(self.model) < SPAN:
            self.write(len(self.model), size)

    def read(self, offset: int, size: int) -> None:
        got = self.reader.read(BASE + offset, size, self.world.length(self.writer))
        assert b"".join(got) == self.model[offset : offset + size]

    def truncate(self, size: int, _: int) -> None:
        """As the metadata does it: flush, then a hole over what is cut off."""
        self.flush()
        if size < len(self.model):
            at, end = BASE + size, BASE + SPAN
            for chunk in (0, 1):
                first = max(at - chunk * CHUNK_BYTES, 0)
                last = min(end - chunk * CHUNK_BYTES, CHUNK_BYTES)
                if first < last:
                    hole = Slice(first, SliceId(0), last - first, 0, last - first, SliceKind.HOLE)
                    self.world.sink.chunks.setdefault((INO, chunk), []).append(hole)
        del self.model[size:]
        self.model += bytes(size - len(self.model))
        self.world.sink.lengths[INO] = BASE + size

    def forget(self, _: int, __: int) -> None:
        self.world.cache.shrink(1 << 40)

    def step(self, verb: str, at: int, size: int) -> None:
        match verb:
            case "write":
                self.write(at, size)
            case "append":
                self.append(at, size)
            case "read":
                self.read(at, size)
            case "truncate":
                self.truncate(at, size)
            case "flush":
                self.flush()
            case "fail":
                self.world.objects.fail("put", at)
            case "forget":
                self.forget(at, size)


@settings(max_examples=60)
@given(st.lists(STEPS, max_size=25), st.sampled_from(list(Codec)), st.booleans())
def test_a_file_is_what_was_written(
    steps: list[tuple[str, int, int]], codec: Codec, locked: bool
) -> None:
    file = File(codec, locked)
    for step in steps:
        file.step(*step)
    assert file.world.length(file.writer) == BASE + len(file.model)
    file.read(0, SPAN)
    file.flush()
    file.read(0, SPAN)
    file.forget(0, 0)
    file.read(0, SPAN)
    assert file.world.sink.order == sorted(file.world.sink.order), "in order of creation"
    file.world.close()


def test_threads_that_write_their_own_parts() -> None:
    """Four writers, a reader and a flusher at once; each part holds what its writer put last."""
    world = World(threads=3)
    writer, part = world.writer(), 5 * BLOCK // 2
    reader = world.reader(writer=writer)
    failures: list[str] = []
    stop = RUNTIME.event()

    def write(number: int) -> None:
        for turn in range(6):
            data = bytes([16 * number + turn + 1]) * part
            for at in range(0, part, 50_001):
                writer.write(number * part + at, memoryview(data)[at : at + 50_001])
            got = b"".join(reader.read(number * part, part, world.length(writer)))
            if got != data:
                failures.append(f"writer {number} turn {turn}")

    def disturb() -> None:
        while not stop.is_set():
            writer.flush()
            world.cache.shrink(1 << 40)

    writers = [RUNTIME.spawn("w", lambda n=n: write(n)) for n in range(4)]  # type: ignore[misc]
    other = RUNTIME.spawn("flusher", disturb)
    for thread in writers:
        thread.join()
    stop.set()
    other.join()
    writer.flush()
    assert failures == []
    assert world.content() == b"".join(bytes([16 * n + 6]) * part for n in range(4))
    world.close()

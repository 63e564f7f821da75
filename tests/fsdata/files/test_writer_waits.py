"""Writers that wait: for memory that others hold, and for what is on its way to the store."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from fsdata.files.writer import PIECE_BYTES, FileWriter
from fsdata.resources.memory_budget import BUFFER_BYTES_MIN
from fsmeta.errors import StoreError, Unavailable
from fsmeta.runtime import SystemRuntime
from fsmeta.types import SliceId
from tests.fsdata.world import BLOCK, World
from tests.support.waiting import wait_until

RUNTIME = SystemRuntime()


def test_c4_threads_that_fill_the_memory_at_once_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each asks for an id at the same moment: none may hold memory that another needs then."""
    world = World()
    count = BUFFER_BYTES_MIN // PIECE_BYTES
    together = threading.Barrier(count)
    new_slice_id = world.sink.new_slice_id

    def late() -> SliceId:
        together.wait(60.0)
        return new_slice_id()

    monkeypatch.setattr(world.sink, "new_slice_id", late)
    monkeypatch.setattr("fsdata.resources.memory_budget.WAIT_S_MAX", 5.0)
    writers = [world.writer(ino) for ino in range(1, count + 1)]
    errors: list[Exception] = []

    def write(writer: FileWriter) -> None:
        try:
            writer.write(0, memoryview(bytes(PIECE_BYTES)))
            writer.flush()
        except StoreError as error:
            errors.append(error)
        finally:
            writer.discard()

    threads = [RUNTIME.spawn("writer", partial(write, writer)) for writer in writers]
    for thread in threads:
        thread.join()
    assert not errors
    world.close()


def test_a_stream_waits_for_what_is_on_its_way() -> None:
    """Of one file; another one goes on."""
    world = World(file_bytes_max=4 * BLOCK)
    world.objects.gate = RUNTIME.event()
    stream, other = world.writer(1), world.writer(2)
    done = RUNTIME.event()

    def write() -> None:
        for at in range(8):
            stream.write(at * BLOCK, memoryview(bytes(BLOCK)))
        done.set()

    thread = RUNTIME.spawn("stream", write)
    world.objects.arrived.wait()
    wait_until(lambda: stream.end == 5 * BLOCK)
    other.write(0, memoryview(bytes(2 * BLOCK)))
    assert not done.is_set()
    assert stream.end == 5 * BLOCK
    world.objects.gate.set()
    thread.join()
    for writer in (stream, other):
        writer.flush()
        writer.discard()
    world.close()


@pytest.mark.parametrize("ends", ["fails", "discard"])
def test_a_stream_that_waits_hears_of_the_end(ends: str) -> None:
    world = World(file_bytes_max=BLOCK)
    world.objects.gate = RUNTIME.event()
    stream = world.writer()
    if ends == "fails":
        world.objects.fail("put", 2)
    thread = RUNTIME.spawn("stream", partial(stream.write, 0, memoryview(bytes(2 * BLOCK))))
    world.objects.arrived.wait()
    wait_until(lambda: stream.end == 2 * BLOCK)
    if ends == "discard":
        stream.discard()
        thread.join()
        world.objects.gate.set()
    else:
        world.objects.gate.set()
        thread.join()
        with pytest.raises(Unavailable):
            stream.flush()
        stream.flush()
        stream.discard()
    world.close()

"""Where a limit or a full store has room for a part of what is pending, that part is committed."""

from __future__ import annotations

from contextlib import suppress
from errno import EDQUOT, ENOSPC

import pytest

from fsdata.files.writer import FileWriter
from fsdata.format.block_v1 import Codec
from fsmeta.errors import Unavailable
from fsmeta.types import Ino
from tests.fsdata.world import BLOCK, World, pattern
from tests.support.waiting import wait_until

INO = Ino(7)


def refused(writer: FileWriter, code: int = EDQUOT) -> None:
    with pytest.raises(OSError, match=r"quota|injected") as caught:
        writer.flush()
    assert caught.value.errno == code


def seen(world: World, writer: FileWriter) -> bytes:
    """What this mount reads: what is committed and what is pending."""
    length = world.length(writer)
    return b"".join(world.reader(writer=writer).read(0, length, length))


@pytest.mark.parametrize("room", [1, 4096, BLOCK, 3 * BLOCK + 5, 5 * BLOCK + 700])
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4])
def test_a_limit_keeps_the_begin_of_a_slice(room: int, codec: Codec) -> None:
    world = World(codec, locked=codec is not Codec.NONE)
    writer, data = world.writer(), pattern(5 * BLOCK + 777)
    world.sink.room = room
    writer.write(0, memoryview(data))
    refused(writer)
    assert world.content() == data[:room]
    assert seen(world, writer) == data
    refused(writer)  # as long as something is not stored
    world.sink.room = 10
    refused(writer)
    assert world.content() == data[: room + 10]
    world.sink.room = None
    writer.flush()
    assert world.content() == seen(world, writer) == data
    assert not writer.dirty
    world.close()


def test_of_many_slices_the_first_ones_are_kept(world: World) -> None:
    writer = world.writer()
    parts = [pattern(1000, seed) for seed in range(5)]
    for number, part in enumerate(parts):
        writer.write(5000 * number, memoryview(part))
    world.sink.room = 2500
    refused(writer)
    assert world.sink.commits == 1
    expected = bytearray(10_500)
    for number, part in enumerate(parts[:3]):
        expected[5000 * number : 5000 * number + 1000] = part
    assert world.content() == bytes(expected[:10_500])
    world.sink.room = None
    writer.flush()
    assert world.content() == seen(world, writer)
    assert world.content()[20_000:] == parts[4]


def test_an_append_goes_on_where_its_begin_ends(world: World) -> None:
    writer, data = world.writer(), pattern(2 * BLOCK + 100)
    world.sink.room = BLOCK + 7
    writer.append(0, memoryview(data))
    refused(writer)
    assert world.content() == data[: BLOCK + 7]
    assert seen(world, writer) == data
    writer.append(len(data), memoryview(b"more"))
    world.sink.room = None
    writer.flush()
    assert world.content() == data + b"more"


def test_what_another_client_took_meanwhile_is_asked_again(world: World) -> None:
    writer, data = world.writer(), pattern(1000)
    world.sink.room = 500
    writer.write(0, memoryview(data))
    world.sink.errors = [OSError(EDQUOT, "quota"), OSError(EDQUOT, "quota")]
    refused(writer)
    assert world.content() == data[:500]
    writer.discard()


def test_there_is_room_by_now(world: World) -> None:
    writer = world.writer()
    world.sink.errors = [OSError(ENOSPC, "quota")]
    writer.write(0, memoryview(b"abc"))
    writer.flush()
    assert world.content() == b"abc"


def test_a_commit_in_doubt_is_not_cut(world: World) -> None:
    writer = world.writer()
    world.sink.room = 1
    writer.write(0, memoryview(b"abc"))
    world.sink.errors = [Unavailable("away")]
    with pytest.raises(Unavailable):
        writer.flush()
    writer.discard()
    assert world.content() == b""


@pytest.mark.parametrize("stored", [1, 3])
@pytest.mark.parametrize("stray", [False, True])
def test_a_full_store_keeps_the_first_blocks(world: World, stored: int, stray: bool) -> None:
    """Of blocks that are uploaded together a later one may fit where an earlier one did not."""
    writer, data = world.writer(), pattern(5 * BLOCK + 777)
    blocks = range(stored, 5 if stray else 6)
    world.objects.full_for = [data[at * BLOCK : at * BLOCK + 64] for at in blocks]
    writer.write(0, memoryview(data))
    for _ in range(3):
        with pytest.raises(OSError, match="injected"):
            writer.flush()
    wait_until(lambda: not world.pool.uploads())
    assert world.content() == data[: stored * BLOCK]
    assert seen(world, writer) == data
    names = {info.key.split("/")[-1] for info in world.objects.inner.list("")}
    assert len(names) == stored + stray  # none is left that no slice has
    world.objects.full_for = ()
    with suppress(OSError):  # of an upload that ended behind the last flush
        writer.flush()
    writer.flush()
    assert world.content() == data


def test_what_is_cut_is_given_back(world: World) -> None:
    writer = world.writer()
    data = pattern(4 * BLOCK)
    world.objects.full_for = [data[2 * BLOCK : 2 * BLOCK + 64]]
    writer.write(0, memoryview(data))
    with pytest.raises(OSError, match="injected"):
        writer.flush()
    writer.discard()
    assert world.budget.gauges().writing == 0
    assert world.pool.dirty() == 0

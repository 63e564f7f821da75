"""The arena outlives the process that writes it, whenever that is killed."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsclient.survival import channel, tables
from fsclient.survival.arena import _LOG_BYTES, ARENA_BYTES, SEGMENT_BYTES, Arena, ArenaFull
from fsclient.survival.kept import PIECES, SETTLED_CLIENTS, KeptRecords, Past, serving
from fsclient.survival.records import CommitId
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime
from fsmeta.types import Caller, Ino, SessionId, SliceId

SMALL_BYTES = 1 << 20
_WRITER = """
import os, sys
from fsclient.survival.arena import Arena
from fsmeta.runtime import SystemRuntime

written, number, small = Arena(int(sys.argv[1]), SystemRuntime()), 0, sys.argv[2] == "small"
while True:
    number += 1
    size = number % 5000 if small else number % 100 * 10_000
    data = bytes([number % 256]) * size
    written.put(b"number%d" % (number % 40), number.to_bytes(8, "big"), data)
    os.write(1, number.to_bytes(8, "big"))
"""


@pytest.fixture
def memory() -> Iterator[int]:
    """The descriptor of an arena."""
    fd = os.memfd_create("test-arena")
    os.ftruncate(fd, ARENA_BYTES)
    yield fd
    os.close(fd)


def arena(fd: int) -> Arena:
    return Arena(fd, SystemRuntime())


def test_a_change_that_was_applied_is_known_until_it_is_answered(memory: int) -> None:
    """A client finds that, and dies before it has answered the request."""
    first = KeptRecords(arena(memory), SystemRuntime())
    serving(3, 4000)
    first.commits_names(CommitId(b"s", b"w\0\1", 7), Ino(99))
    serving(5, 4002)
    first.commits_names(CommitId(b"s", b"w\0\2", 8), Ino(0))
    past = Past(arena(memory))
    applied, nothing = sorted(past.intents()[0], key=lambda each: each.unique)
    assert not applied.settled
    past.settle([applied], 2)
    past.forget([nothing])
    second = KeptRecords(past._arena, SystemRuntime())
    serving(3, 5000)
    second.commits_names(CommitId(b"s", b"w\0\1", 9), Ino(0))  # the same thread's place
    for generation in range(3, 3 + SETTLED_CLIENTS):
        again = Past(arena(memory))
        found = {each.unique: each for each in again.intents()[0]}
        assert set(found) == {4000, 5000}
        assert (found[4000].settled, found[4000].ino) == (True, 99)
        assert not found[5000].settled
        again.settle([found[4000]], generation)
    Past(arena(memory)).settle([found[4000]], generation + 1)
    assert [each.unique for each in Past(arena(memory)).intents()[0]] == [5000]


def test_the_next_worker_reads_what_the_last_one_set(memory: int) -> None:
    first = arena(memory)
    first.put(b"a", b"1")
    first.put(b"b", b"2", memoryview(b"data"))
    first.put(b"a", b"3")
    first.drop(b"b")
    first.put(b"c", b"")
    again = arena(memory)
    assert again.items(b"") == [(b"a", b"3"), (b"c", b"")]
    assert again.live_bytes == first.live_bytes


def test_dead_records_make_room(memory: int) -> None:
    """A log of many times the size of the arena, of which little lives."""
    os.ftruncate(memory, SMALL_BYTES)
    first = arena(memory)
    for number in range(200):
        first.put(b"kept%d" % number, b"x" * 100)
    for number in range(2000):
        first.put(b"w%d" % number, b"", bytes(10_000))
        first.drop(b"w%d" % number)
    for found in (first, arena(memory)):
        assert [key for key, _ in found.items(b"")] == [b"kept%d" % n for n in range(200)]


def test_large_data_are_found_by_the_next_worker(memory: int) -> None:
    first = arena(memory)
    data = {b"w%d" % n: os.urandom(100_000 + n) for n in range(300)}  # some segments
    for key, value in data.items():
        first.put(key, b"head", memoryview(value))
    first.put(b"w3", b"small", b"and short")
    first.put(b"w4", b"head", data[b"w5"])
    for number in range(100, 300, 3):
        first.drop(b"w%d" % number)
        del data[b"w%d" % number]
    found = dict(arena(memory).items(b""))
    assert (found.pop(b"w3"), found.pop(b"w4")) == (b"smalland short", b"head" + data[b"w5"])
    del data[b"w3"], data[b"w4"]
    assert found == {key: b"head" + value for key, value in data.items()}


def test_memory_is_used_again(memory: int) -> None:
    """A gigabyte passes through, of which 24 MiB are valid at a time, in order but for one.

    While that goes on no memory is given back; when it has ended, nearly all is.
    """
    first, mib = arena(memory), os.urandom(1 << 20)
    first.put(b"stays", b"", mib)
    for number in range(1000):
        first.put(b"w%d" % number, b"", mib)
        if number >= 24:
            first.drop(b"w%d" % (number - 24))
        if number > 100 and number % 100 == 0:
            taken = os.fstat(memory).st_blocks
            first.tidy()
            assert os.fstat(memory).st_blocks == taken
    assert os.fstat(memory).st_blocks * 512 < 100 << 20
    for number in range(1000 - 24, 1000):
        first.drop(b"w%d" % number)
    assert first.items(b"") == [(b"stays", mib)]
    first.tidy()  # as much as was in use since the last time may be wanted again
    assert os.fstat(memory).st_blocks * 512 > 36 << 20
    first.tidy()
    assert os.fstat(memory).st_blocks * 512 < 28 << 20
    assert arena(memory).items(b"") == [(b"stays", mib)]
    assert os.fstat(memory).st_blocks * 512 < 20 << 20, "the next worker gives back what is free"


def test_data_find_room_in_the_log_where_no_segment_is_free(memory: int) -> None:
    first, mib = arena(memory), bytes(1 << 20)
    count = 0

    def fill() -> None:
        nonlocal count
        while count < 2000:
            first.put(b"%d" % count, b"", mib)
            count += 1

    with pytest.raises(ArenaFull):
        fill()
    segments = (ARENA_BYTES - _LOG_BYTES - mmap.PAGESIZE) // SEGMENT_BYTES
    assert count > segments * 7
    assert first.room() < 2 << 20
    assert len(arena(memory).items(b"")) == count


def test_damaged_data_are_refused(memory: int) -> None:
    first = arena(memory)
    first.put(b"gone", b"", b"x" * 10_000)
    first.put(b"key", b"", b"y" * 10_000)
    at = mmap.PAGESIZE + _LOG_BYTES
    assert os.pread(memory, 10_001, at) == b"x" * 10_000 + b"y"
    first.drop(b"gone")
    os.pwrite(memory, b"X", at)
    assert arena(memory).items(b"") == [(b"key", b"y" * 10_000)], "nobody looks at what was dropped"
    os.pwrite(memory, b"X", at + 10_000)
    with pytest.raises(ConfigError, match="damaged"):
        arena(memory)


def test_a_full_arena_says_so_and_keeps_what_it_has(memory: int) -> None:
    os.ftruncate(memory, SMALL_BYTES)
    first = arena(memory)
    first.put(b"a", bytes(300_000))
    with pytest.raises(ArenaFull):
        first.put(b"b", bytes(300_000))
    first.put(b"a", bytes(100))
    first.put(b"b", bytes(300_000))
    assert [len(value) for _, value in arena(memory).items(b"")] == [100, 300_000]


def test_another_format_is_refused(memory: int) -> None:
    arena(memory)
    os.pwrite(memory, b"\xff", 8)
    with pytest.raises(ConfigError, match="unmount and mount again"):
        arena(memory)


def test_a_damaged_record_is_refused(memory: int) -> None:
    arena(memory).put(b"key", b"value")
    at = os.pread(memory, 8192, 0).index(b"value")
    os.pwrite(memory, b"X", at)
    with pytest.raises(ConfigError, match="damaged"):
        arena(memory)


@pytest.mark.parametrize("kind", ["small", "large"])
def test_killed_at_any_moment(memory: int, kind: str) -> None:
    """What was acknowledged is there: a process writes numbers in turn until it is killed."""
    if kind == "small":
        os.ftruncate(memory, SMALL_BYTES)
    for _ in range(10):
        words = [sys.executable, "-c", _WRITER, str(memory), kind]
        with subprocess.Popen(words, pass_fds=[memory], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            said = b""
            while len(said) < 8 * 3000:
                part = os.read(writer.stdout.fileno(), 1 << 16)
                assert part, "the writer has ended by itself"
                said += part
            writer.kill()
            said += writer.stdout.read()
        said = said[: len(said) // 8 * 8]
        acknowledged = int.from_bytes(said[-8:], "big")
        found = [value for _, value in arena(memory).items(b"number")]
        numbers = {int.from_bytes(value[:8], "big"): value[8:] for value in found}
        last = max(numbers)
        assert last in (acknowledged, acknowledged + 1)
        assert set(numbers) == set(range(last - 39, last + 1))
        for number, data in numbers.items():
            assert data == bytes([number % 256]) * len(data)
            assert len(data) == (number % 5000 if kind == "small" else number % 100 * 10_000)


def test_records_of_a_mount(memory: int) -> None:
    """Handles, locks, writes and commits, as the next worker sees them."""
    kept = KeptRecords(arena(memory), SystemRuntime())
    serving(2, 77)
    kept.opened(5, Ino(9), os.O_RDWR, False, direct=True)
    kept.opened(6, Ino(1), 0, True)
    kept.closed(6)
    kept.locked(Ino(9), ord("p"), 1 << 63, [5])
    kept.waits(4, Ino(9), ord("p"))
    kept.waits(5, Ino(9), ord("p"))
    kept.waited(4)
    kept.listed(3, Ino(1), b"from", None)
    kept.written(Ino(9), SliceId(100), 0, False, 1, memoryview(b"one"))
    kept.written(Ino(9), SliceId(101), 3, False, 2, memoryview(b"two"))
    kept.saved([SliceId(100)])
    kept.appending()
    kept.appended(3)
    kept.unprivileged(Ino(9), Caller(7, 8, (9,)))
    kept.commits_names(CommitId(b"session", b"w\0\1", 12), 11)
    kept.commits_slices(CommitId(b"session", b"w\0\2", 13), [101], journal=6)
    kept.joined(SessionId(8), "uuid")
    serving(-1, 0)
    left = arena(memory)
    found = Past(left)
    (handle,) = tables.handles(left)
    assert handle == (5, 9, os.O_RDWR, True, False, 77, None)
    assert tables.locks(left) == [(9, ord("p"), 1 << 63, (5,))]
    assert tables.tickets(left) == {(9, ord("p")): [5]}
    assert tables.pages(left) == [(3, 1, b"from", None)]
    (write,) = found.unsaved()
    assert write[2:7] == (9, 3, False, 2, b"two")
    assert found.appends() == {77: 3}
    assert found.callers() == {9: Caller(7, 8, (9,))}
    (names,), (slices,) = found.intents()
    assert names[1:] == (77, (b"session", b"w\0\1", 12), 0, 11, (), False)
    assert slices[1:] == (0, (b"session", b"w\0\2", 13), 6, 0, (101,), False)
    again = KeptRecords(left, SystemRuntime())
    assert again.session() == (8, "uuid")
    again.forget(write)
    found.forget([names, slices])
    assert (found.unsaved(), found.intents()) == ([], ([], []))


def test_an_append_that_was_not_answered(memory: int) -> None:
    """What it has written is left out, for the kernel sends the request again."""
    kept = KeptRecords(arena(memory), SystemRuntime())
    for unique in (71, 72):
        serving(2, unique)
        kept.appending()
        kept.written(Ino(9), SliceId(100), 0, True, 1, memoryview(b"%d" % unique))
        if unique == 71:
            kept.appended(2)
    serving(-1, 0)
    assert [write.data for write in Past(arena(memory)).unsaved()] == [b"71"]


def test_a_write_that_is_taken_again(memory: int) -> None:
    """A worker dies while it takes over: writes keep their order, and each is there once."""
    kept = KeptRecords(arena(memory), SystemRuntime())
    for number in range(3):
        data = memoryview(b"%d" % number)
        kept.written(Ino(9), SliceId(100 + number), number, False, 1, data)
    left = arena(memory)
    first = Past(left).unsaved()[0]
    again = KeptRecords(left, SystemRuntime(), tables.last_number(left) // PIECES + 1)
    again.rewriting(first.number)
    again.written(Ino(9), SliceId(200), first.offset, False, 1, memoryview(first.data))
    again.rewriting(0)
    found = Past(arena(memory)).unsaved()
    assert [(write.slice_id, write.data) for write in found] == [
        (200, b"0"),
        (101, b"1"),
        (102, b"2"),
    ]


def test_messages_carry_descriptors(tmp_path: Path) -> None:
    one, other = channel.pair()
    with one, other, (tmp_path / "file").open("w+") as file:
        assert channel.receive(other, wait=False) is None
        assert channel.send(one, channel.GO, file.fileno())
        message = channel.receive(other)
        assert message is not None
        assert message[0] == channel.GO
        assert os.path.sameopenfile(message[1], file.fileno())
        os.close(message[1])
        one.shutdown(socket.SHUT_RDWR)
        assert channel.receive(other) == (b"", -1)


def test_what_a_worker_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    given = channel.Inherited(3, 4, 5, -1, 2, 1, 1234, 99)
    monkeypatch.setenv(channel.WORKER_ENV, given.packed())
    assert channel.inherited() == given
    assert channel.WORKER_ENV not in os.environ
    assert channel.inherited() is None


def test_a_record_that_could_not_be_written_leaves_no_gap(memory: int) -> None:
    first = arena(memory)
    with pytest.raises(struct.error):
        first.put(bytes(1 << 17), b"a key that is too long")
    first.put(b"a", b"1")
    assert arena(memory).items(b"") == [(b"a", b"1")]

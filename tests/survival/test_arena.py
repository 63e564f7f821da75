"""The arena outlives the process that writes it, whenever that is killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsclient.survival import channel
from fsclient.survival.arena import ARENA_BYTES, Arena, ArenaFull
from fsclient.survival.kept import Kept, serving
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime
from fsmeta.types import Caller, Ino, SliceId

SMALL_BYTES = 1 << 20
_WRITER = """
import os, sys
from fsclient.survival.arena import Arena
from fsmeta.runtime import SystemRuntime

written, number = Arena(int(sys.argv[1]), SystemRuntime()), 0
while True:
    number += 1
    written.put(b"number", number.to_bytes(8, "big"), bytes(number % 5000))
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


def test_killed_at_any_moment(memory: int) -> None:
    """What was acknowledged is there: a process writes numbers in turn until it is killed."""
    os.ftruncate(memory, SMALL_BYTES)
    for _ in range(10):
        words = [sys.executable, "-c", _WRITER, str(memory)]
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
        (found,) = arena(memory).items(b"number")
        assert int.from_bytes(found[1][:8], "big") in (acknowledged, acknowledged + 1)


def test_records_of_a_mount(memory: int) -> None:
    """Handles, locks, writes and commits, as the next worker sees them."""
    kept = Kept(arena(memory))
    serving(2, 77)
    kept.opened(5, Ino(9), os.O_RDWR, False)
    kept.opened(6, Ino(1), 0, True)
    kept.closed(6)
    kept.locked(Ino(9), ord("p"), 1 << 63, [5])
    kept.written(Ino(9), SliceId(100), 0, True, memoryview(b"one"))
    kept.written(Ino(9), SliceId(101), 3, False, memoryview(b"two"))
    kept.appended(3)
    kept.saved([SliceId(100)])
    kept.unprivileged(Ino(9), Caller(7, 8, (9,)))
    kept.commits_names(b"session", b"w\0\1", 12)
    kept.commits_slices(b"session", b"w\0\2", 13, [101])
    kept.keep(b"S", b"a session")
    serving(-1, 0)
    found = Kept(arena(memory))
    (handle,) = found.handles()
    assert handle == (5, 9, os.O_RDWR, False, 77)
    assert found.locks() == [(9, ord("p"), 1 << 63, (5,))]
    (write,) = found.unsaved()
    assert write[:6] == (101, 9, 3, False, 77, b"two")
    assert found.appends() == {77: 3}
    assert found.callers() == {9: Caller(7, 8, (9,))}
    assert found.name_intents() == [(77, b"w\0\1", 12, b"session", ())]
    assert found.slice_intents() == [(0, b"w\0\2", 13, b"session", (101,))]
    assert found.kept(b"S") == b"a session"
    found.forget([write])
    found.commit_ended(b"w\0\2")
    assert (found.unsaved(), found.slice_intents()) == ([], [])


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
    given = channel.Inherited(3, 4, -1, 2, 1234)
    monkeypatch.setenv(channel.WORKER_ENV, given.packed())
    assert channel.inherited() == given
    assert channel.WORKER_ENV not in os.environ
    assert channel.inherited() is None

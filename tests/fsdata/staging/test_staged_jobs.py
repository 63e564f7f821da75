"""W3: who takes staged objects to the store: one thread is woken for what one thread can do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest

from fsdata.objects.mem import MemObjects
from fsdata.staging import coalesce
from fsdata.staging.data_segments import DataSegments
from fsdata.staging.disk import DirectoryDisk
from fsdata.staging.staged_objects import StagedObjects
from fsdata.staging.upload_scheduler import THREADS
from fsmeta.runtime import Condition, Lock, SystemRuntime
from tests.support.waiting import wait_until

ROOM = 20  # objects of a group
GROUPS = 10
SOON_S = 60.0


class Counting(SystemRuntime):
    """Counts how often threads of the journal's are woken."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def condition(self, lock: Lock | None = None) -> Condition:
        made = super().condition(lock)
        wait = made.wait

        def counted(timeout: float | None = None) -> bool:
            self.waits += 1
            return wait(timeout)

        made.wait = counted  # type: ignore[method-assign]
        return made


class Groups:
    """Stores small objects together, at once."""

    def __init__(self) -> None:
        self.packed: list[int] = []

    def size_of(self, key: str) -> int:
        """Those that are called so are small."""
        return int(key.startswith("small"))

    def pack(self, keys: Sequence[str]) -> Collection[str]:
        """All of them."""
        self.packed.append(len(keys))
        return keys

    def make_room(self) -> None:
        """There is room."""


@pytest.fixture
def runtime() -> Counting:
    return Counting()


@pytest.fixture
def groups() -> Groups:
    return Groups()


@pytest.fixture
def staged(tmp_path: Path, runtime: Counting, groups: Groups) -> Iterator[StagedObjects]:
    """With all its threads, which have nothing to do."""
    disk = DirectoryDisk(runtime, str(tmp_path))
    gate = runtime.event()

    class Gate(MemObjects):
        def put(self, key: str, pieces: object) -> None:
            assert gate.wait(SOON_S)
            super().put(key, pieces)  # type: ignore[arg-type]

    made = StagedObjects(runtime, Gate(runtime), DataSegments(runtime, disk))
    made.pack_with(groups, ROOM)
    made.begin_packing()
    for number in range(THREADS):
        made.put(f"alone/{number}", [b"x"])
    wait_until(lambda: len(made._jobs._threads) == THREADS)  # each is at one of them
    gate.set()
    assert made.await_empty(runtime.monotonic() + SOON_S)
    wait_until(lambda: made._jobs._idle == THREADS)
    yield made
    made.release(list(made._staged))
    made.close()
    disk.close()


def test_w3_small_objects_do_not_wake_everybody(
    staged: StagedObjects, runtime: Counting, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coalesce, "LINGER_S", 10 * SOON_S)  # else slow puts make more groups
    before = runtime.waits
    for number in range(GROUPS * ROOM):
        staged.put(f"small/{number}", [b"x" * 100])
    wait_until(lambda: sum(groups.packed) == GROUPS * ROOM)
    # one keeps the time, is told that a group is full, and calls the next one to keep it
    assert runtime.waits - before <= 8 * GROUPS


def test_w3_a_full_group_waits_for_nobody_else(
    staged: StagedObjects, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever keeps the time is told, not one of those who would rest again."""
    monkeypatch.setattr(coalesce, "LINGER_S", 10 * SOON_S)
    staged.put("small/first", [b"x"])
    wait_until(lambda: staged._jobs._timed)
    for number in range(ROOM):
        staged.put(f"small/{number}", [b"x"])
    wait_until(lambda: groups.packed == [ROOM])
    staged.flush_now()
    wait_until(lambda: groups.packed == [ROOM, 1])


def test_w3_time_is_kept_while_an_upload_takes_long(
    staged: StagedObjects, runtime: Counting, groups: Groups
) -> None:
    """The first small object finds one thread at work and nobody who keeps the time."""
    shut = runtime.event()
    put = staged._inner.put

    def slow(key: str, pieces: object) -> None:
        assert shut.wait(SOON_S)
        put(key, pieces)  # type: ignore[arg-type]

    staged._inner.put = slow  # type: ignore[method-assign]
    staged.put("alone/long", [b"x"])
    staged.put("small/lone", [b"x"])
    wait_until(lambda: groups.packed == [1])
    shut.set()
    wait_until(lambda: staged.is_stored("alone/long"))


def test_w3_an_object_alone_does_not_wait_for_who_keeps_the_time(
    staged: StagedObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coalesce, "LINGER_S", 10 * SOON_S)
    staged.put("small/first", [b"x"])
    wait_until(lambda: staged._jobs._timed)
    for number in range(2 * THREADS):
        staged.put(f"alone/later {number}", [b"x"])
    wait_until(lambda: all(staged.is_stored(f"alone/later {n}") for n in range(2 * THREADS)))
    staged.flush_now()

"""W2: objects that the store does not take: others don't wait for them, and it is not pestered.

In simulated time, so that pauses are counted and not lived through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fsdata.objects.contract import Buffer
from fsdata.objects.mem import MemObjects
from fsdata.staging import uploads
from fsdata.staging.data_segments import DataSegments
from fsdata.staging.disk import DirectoryDisk
from fsdata.staging.staged_objects import StagedObjects
from fsdata.staging.upload_scheduler import PAUSE_MAX_S, THREADS
from fsmeta.errors import Unavailable
from tests.conftest import LogWatch
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime

UPLOAD_S = 0.01
GOOD = 320


class Choosy(MemObjects):
    """A store that does not take what it is told not to, quickly or not."""

    def __init__(self, sim: SimRuntime) -> None:
        super().__init__(sim)
        self._sim = sim
        self.refuses = ""  # objects whose names begin so; "": none
        self.takes_s = UPLOAD_S  # to say so
        self.tries: list[float] = []  # that were refused, and when

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        if self.refuses and key.startswith(self.refuses):
            self.tries.append(self._sim.monotonic())
            self._sim.sleep(self.takes_s)
            raise Unavailable("refused")
        self._sim.sleep(UPLOAD_S)
        super().put(key, pieces)


class World:
    """A journal before such a store."""

    def __init__(self, sim: SimRuntime, root: Path) -> None:
        self.sim = sim
        self.store = Choosy(sim)
        self._disk = DirectoryDisk(sim, str(root))
        self.staged = StagedObjects(sim, self.store, DataSegments(sim, self._disk))

    def put(self, kind: str, count: int) -> list[str]:
        """Write so many objects of a kind; their names."""
        names = [f"{kind}/{number}" for number in range(count)]
        for name in names:
            self.staged.put(name, [b"x"])
        return names

    def stored_s(self, names: list[str]) -> float:
        """Seconds until the store has all of these."""
        begun = self.sim.monotonic()
        while not all(map(self.staged.is_stored, names)):
            self.sim.sleep(UPLOAD_S)
            assert self.sim.monotonic() - begun < 600, "never"
        return self.sim.monotonic() - begun

    def end(self) -> None:
        """The mount has ended."""
        self.staged.close()
        self._disk.close()


Run = Callable[[Callable[[World], None]], None]


@pytest.fixture
def run(tmp_path: Path, log_watch: LogWatch) -> Run:
    """Has something happen in a world of its own."""

    def runs(body: Callable[[World], None]) -> None:
        def whole(sim: SimRuntime) -> None:
            world = World(sim, tmp_path)
            body(world)
            world.end()

        log_watch.expect("uploads wait for the object store")
        simulate(0, whole)

    return runs


@pytest.mark.parametrize("refused", [1, THREADS, 20 * THREADS])
def test_w2_what_is_refused_holds_up_nobody(run: Run, refused: int) -> None:
    """One job's objects go in the time that they need, and the other's when they are taken."""

    def body(world: World) -> None:
        world.store.refuses = "bad"
        bad = world.put("bad", refused)
        alone_s = GOOD / THREADS * UPLOAD_S
        assert world.stored_s(world.put("good", GOOD)) < 2 * alone_s + refused * UPLOAD_S
        assert world.stored_s(world.put("more", GOOD)) < 2 * alone_s
        world.store.refuses = ""
        assert world.stored_s(bad) < PAUSE_MAX_S + refused * UPLOAD_S

    run(body)


def test_w2_objects_that_hang_leave_threads_to_others(run: Run) -> None:
    """Once it is known that they do: that they hung a first time took a thread each."""

    def body(world: World) -> None:
        world.store.refuses, world.store.takes_s = "bad", 30.0
        world.put("bad", THREADS)
        world.sim.sleep(31.0)
        assert world.stored_s(world.put("good", GOOD)) < 1.0

    run(body)


def test_w2_a_store_that_is_away_is_asked_now_and_then(run: Run) -> None:
    def body(world: World) -> None:
        world.store.refuses = "b"
        bad = world.put("bad", 2000)
        world.sim.sleep(600.0)
        tries = [time for time in world.store.tries if time > 300.0]
        assert 300 / PAUSE_MAX_S < len(tries) < 4 * THREADS * 300 / PAUSE_MAX_S
        world.store.refuses = ""
        assert world.stored_s(bad) < PAUSE_MAX_S + 2 * 2000 / THREADS * UPLOAD_S

    run(body)


def test_w2_one_object_is_offered_again_and_again(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """With longer and longer pauses; that it waits is said once, and that it does not any more."""

    def body(world: World) -> None:
        world.store.refuses = "bad"
        bad = world.put("bad", 1)
        for _ in range(100):
            world.put("good", 1)
            world.sim.sleep(1.0)
        pauses = [
            after - before
            for before, after in zip(world.store.tries, world.store.tries[1:], strict=False)
        ]
        assert pauses[:4] == pytest.approx([0.5, 1, 2, 4], abs=0.1)
        assert pauses[5:] == pytest.approx([PAUSE_MAX_S] * len(pauses[5:]), abs=0.1)
        world.store.refuses = ""
        world.stored_s(bad)

    with caplog.at_level("INFO"):
        run(body)
    ours = [record for record in caplog.records if record.name == uploads.__name__]
    assert [record.message for record in ours] == [
        "uploads wait for the object store: refused",
        "the object store takes uploads again",
    ]


def test_w2_who_deletes_what_is_refused_is_rid_of_it(run: Run) -> None:
    def body(world: World) -> None:
        world.store.refuses = "bad"
        bad = world.put("bad", 3)
        world.sim.sleep(5.0)
        world.staged.delete(*bad)
        tries = len(world.store.tries)
        assert world.staged.await_empty(world.sim.monotonic() + 5.0)
        world.sim.sleep(60.0)
        assert len(world.store.tries) <= tries + 1

    run(body)

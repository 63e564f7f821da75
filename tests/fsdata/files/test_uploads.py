"""O1: how many uploads there are at a time, by how long they take."""

from __future__ import annotations

import math
import threading
from functools import partial

import pytest

from fsdata.files.upload_pool import FAR_UPLOADS, UPLOAD_THREADS, WHOLE_BYTES, Flow, UploadPool
from fsdata.resources.memory_budget import BUFFER_BYTES, MemoryBudget
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.runtime import Runtime, SystemRuntime
from tests.sim.world.harness import simulate
from tests.sim.world.scheduler import SimRuntime
from tests.support.waiting import wait_until

RUNTIME = SystemRuntime()
UPLOADS = 150


class Way:
    """To a store: how many are on it now, and were at most."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = runtime.lock()
        self.now = self.most = self.done = 0

    def take(self, seconds: float) -> None:
        """An upload that takes so long, however many there are."""
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self._runtime.sleep(seconds)
        with self._lock:
            self.now -= 1
            self.done += 1

    def has_done(self, count: int) -> bool:
        """Whether so many uploads have ended."""
        return self.done == count


def run(seconds: float, most: int = FAR_UPLOADS, count: int = UPLOADS) -> int:
    """Upload blocks that take so long each; how many threads were thought good in the end.

    In simulated time: a real upload takes as long as the machine is busy.
    """

    def body(sim: SimRuntime) -> int:
        way, pool = Way(sim), UploadPool(sim, MemoryBudget(sim), most=most)
        for _ in range(count):
            pool.submit(lambda: way.take(seconds), WHOLE_BYTES)
        while pool.uploads():
            sim.sleep(0.001)
        threads = pool.threads()
        pool.close()
        assert (way.most, way.done) == (threads, count)
        return threads

    return simulate(0, body)


def test_a_store_that_is_far_gets_more_at_a_time() -> None:
    assert run(0.04) == FAR_UPLOADS


def test_a_store_that_is_near_gets_four() -> None:
    assert run(0.003) == UPLOAD_THREADS


def test_not_where_the_number_is_given() -> None:
    assert run(0.04, most=0, count=40) == UPLOAD_THREADS


def test_a_link_that_is_full_gets_no_more() -> None:
    """Each takes as long as there are uploads: more at a time gain nothing."""
    flow = Flow(UPLOAD_THREADS, FAR_UPLOADS)
    assert flow.took(0.03, True) == UPLOAD_THREADS, "the first one, alone"
    threads = UPLOAD_THREADS
    for _ in range(200):
        threads = flow.took(0.03 * threads, True)
    assert threads <= 2 * UPLOAD_THREADS


def test_a_slow_link_gets_no_more_and_loses_what_it_had() -> None:
    flow = Flow(UPLOAD_THREADS, FAR_UPLOADS)
    for _ in range(100):
        threads = flow.took(0.1, True)
    assert threads == FAR_UPLOADS
    for _ in range(100):
        threads = flow.took(5.0, True)
    assert threads == UPLOAD_THREADS


def test_no_more_where_none_waits() -> None:
    flow = Flow(UPLOAD_THREADS, FAR_UPLOADS)
    assert {flow.took(0.1, False) for _ in range(50)} == {UPLOAD_THREADS}


@pytest.mark.parametrize("sizes", [(8, 2, 6), (1, 8, 1), (3, 2, 1)])
def test_a_pool_that_changes_its_size_loses_no_job(sizes: tuple[int, ...]) -> None:
    way = Way(RUNTIME)
    pool = WorkerPool(RUNTIME, "some", 4)
    count = 0
    for round_ in range(30):
        pool.resize(sizes[round_ % len(sizes)])
        for _ in range(10):
            pool.submit(lambda: way.take(0.0005))
        count += 10
        if round_ % 3 == 0:
            wait_until(partial(way.has_done, count), 60)  # all asleep when the next ones come
    pool.resize(2)
    way.most = 0
    pool.close()
    assert way.done == count == 300


class Hoard:
    """A dirty file that gives its memory back when it is pushed."""

    pending_bytes = 0

    def __init__(self, budget: MemoryBudget, size: int) -> None:
        self._budget, self._size = budget, size
        budget.reserve(size)

    def due(self) -> float:
        """Never by itself."""
        return math.inf

    def flush_idle(self, wait: bool = False) -> None:
        """Everything was given back."""

    def push(self) -> None:
        """Give everything back, once."""
        size, self._size = self._size, 0
        self._budget.release(size)


def test_a_writer_that_waits_pushes_again_when_the_uploads_have_ended() -> None:
    """An upload under way was left to free memory, and freed none: the writer slept on."""
    budget = MemoryBudget(RUNTIME)
    pool = UploadPool(RUNTIME, budget)
    pool.watch(Hoard(budget, BUFFER_BYTES))
    uploading, waits, has_room = threading.Event(), threading.Event(), threading.Event()
    pool.submit(lambda: _require(uploading.wait(60)))

    def write() -> None:
        budget.reserve(1, waits.set)
        has_room.set()

    writer = RUNTIME.spawn("writer", write)
    assert waits.wait(60)  # it has pushed, in vain
    uploading.set()
    assert has_room.wait(60)
    writer.join()
    pool.close()


def _require(true: bool) -> None:
    assert true


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_job_that_raises_takes_no_thread_from_the_others() -> None:
    """After as many as there are threads nothing was uploaded any more, and closes waited."""
    pool = WorkerPool(RUNTIME, "test", 2)
    done = threading.Semaphore(0)

    def fail() -> None:
        raise ValueError("a mistake of ours")

    for _ in range(5):
        pool.submit(fail)
    for _ in range(3):
        pool.submit(done.release)
    for _ in range(3):
        assert done.acquire(timeout=60)
    pool.close()

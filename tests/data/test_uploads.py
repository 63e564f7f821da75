"""O1: how many uploads there are at a time, by how long they take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from fsdata.budget import Budget
from fsdata.pool import WorkerPool
from fsdata.uploads import FAR_UPLOADS, UPLOAD_THREADS, WHOLE_BYTES, Flow, UploadPool
from fsmeta.runtime import SystemRuntime

RUNTIME = SystemRuntime()
UPLOADS = 150


class Way:
    """To a store: how many are on it now, and were at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._link = threading.Lock()
        self.now = self.most = self.done = 0

    def take(self, alone_s: float, shared_s: float) -> None:
        """An upload: what it waits for by itself, and what it waits for in turn."""
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(alone_s)
        if shared_s:
            with self._link:
                time.sleep(shared_s)
        with self._lock:
            self.now -= 1
            self.done += 1


def run(upload: Callable[[], None], most: int = FAR_UPLOADS, count: int = UPLOADS) -> int:
    """Upload blocks; how many threads were thought good in the end."""
    pool = UploadPool(RUNTIME, Budget(RUNTIME), most=most)
    for _ in range(count):
        pool.submit(upload, WHOLE_BYTES)
    while pool.uploads():
        time.sleep(0.001)
    threads = pool.threads()
    pool.close()
    return threads


def test_a_store_that_is_far_gets_more_at_a_time() -> None:
    way = Way()
    assert run(lambda: way.take(0.04, 0)) == FAR_UPLOADS
    assert (way.most, way.done) == (FAR_UPLOADS, UPLOADS)


def test_a_store_that_is_near_gets_four() -> None:
    way = Way()
    assert run(lambda: way.take(0.003, 0)) == UPLOAD_THREADS
    assert way.most == UPLOAD_THREADS


def test_not_where_the_number_is_given() -> None:
    way = Way()
    assert run(lambda: way.take(0.04, 0), most=0, count=40) == UPLOAD_THREADS
    assert way.most == UPLOAD_THREADS


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
    way = Way()
    pool = WorkerPool(RUNTIME, "some", 4)
    for round_ in range(30):
        pool.resize(sizes[round_ % len(sizes)])
        for _ in range(10):
            pool.submit(lambda: way.take(0.0005, 0))
        if round_ % 3 == 0:
            deadline = time.monotonic() + 10
            while way.done < 10 * (round_ + 1):  # all asleep when the next ones come
                assert time.monotonic() < deadline, "a job was forgotten"
                time.sleep(0.001)
    pool.resize(2)
    way.most = 0
    pool.close()
    assert way.done == 300


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
        assert done.acquire(timeout=10)
    pool.close()

"""The scheduler itself: determinism, planted races, deadlocks, virtual time, crashes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from fsmeta.runtime import Condition
from tests.sim.world.core import Deadlock, StepLimit
from tests.sim.world.harness import simulate
from tests.sim.world.lock_order import Inversion
from tests.sim.world.scheduler import SimProcess, SimRuntime

SWITCHES_PER_SECOND = 15_000  # a floor far below the 80,000 of a quiet machine


def _crowd(sim: SimRuntime, body: Callable[[int], None], count: int = 4) -> None:
    threads = [sim.spawn(f"t{n}", partial(body, n)) for n in range(count)]
    for thread in threads:
        thread.join()


def _busy(seed: int) -> tuple[int, int, list[str]]:
    """A bit of everything; what came of it."""
    sim = SimRuntime(seed)
    log: list[str] = []
    lock, event = sim.lock(), sim.event()

    def work(n: int) -> None:
        for turn in range(5):
            with lock:
                log.append(f"{n} {turn} {sim.random_bits(8)} {sim.now_ns()}")
            sim.sleep(sim.random() / 100)
        if n == 0:
            event.set()
        log.append(f"{n} {event.wait(0.02)}")

    sim.run(lambda: _crowd(sim, work))
    return sim.scheduler.digest, sim.scheduler.steps, log


def test_same_seed_same_run() -> None:
    assert [_busy(seed) for seed in range(10)] == [_busy(seed) for seed in range(10)]


def test_other_seed_other_run() -> None:
    assert len({_busy(seed)[0] for seed in range(20)}) == 20


def _count(sim: SimRuntime, careful: bool) -> int:
    """Threads add to a counter, reading and writing in two steps."""
    total = 0
    lock = sim.lock()

    def add() -> None:
        nonlocal total
        seen = total
        sim.yield_point()
        total = seen + 1

    def work(_: int) -> None:
        if careful:
            with lock:
                add()
        else:
            add()

    _crowd(sim, work)
    return total


def test_lost_update_is_found() -> None:
    totals = {simulate(seed, lambda sim: _count(sim, careful=False)) for seed in range(30)}
    assert 4 in totals
    assert min(totals) < 4


@pytest.mark.sim_seeds(30)
def test_lock_excludes(sim_seed: int) -> None:
    assert simulate(sim_seed, lambda sim: _count(sim, careful=True)) == 4


def _hand_over(sim: SimRuntime, wait: Callable[[Condition, list[int]], None]) -> None:
    """One thread puts, another one takes as `wait` does."""
    queue: list[int] = []
    ready = sim.condition()

    def put(n: int) -> None:
        with ready:
            queue.append(n)
            ready.notify()

    taker = sim.spawn("taker", lambda: wait(ready, queue))
    sim.spawn("putter", lambda: put(1))
    taker.join()


def _wait_right(ready: Condition, queue: list[int]) -> None:
    with ready:
        while not queue:
            ready.wait()


def _wait_wrong(ready: Condition, queue: list[int]) -> None:
    with ready:
        empty = not queue
    if empty:  # the notify may come here, and nobody hears it
        with ready:
            ready.wait()


@pytest.mark.sim_seeds(30)
def test_condition_wakes(sim_seed: int) -> None:
    simulate(sim_seed, lambda sim: _hand_over(sim, _wait_right))


def test_lost_wakeup_is_found() -> None:
    def ends(seed: int) -> bool:
        try:
            simulate(seed, lambda sim: _hand_over(sim, _wait_wrong))
        except Deadlock:
            return False
        return True

    assert {ends(seed) for seed in range(40)} == {True, False}


def _needless(sim: SimRuntime) -> None:
    """Who has the lock waits for who wants it, where it comes first."""
    lock, told = sim.lock(), sim.event()

    def work(n: int) -> None:
        with lock:
            if n:
                told.set()
            else:
                told.wait()

    _crowd(sim, work, 2)


def test_deadlock_shows_stacks_and_seed() -> None:
    found: list[Deadlock] = []
    for seed in range(20):
        try:
            simulate(seed, _needless)
        except Deadlock as deadlock:
            found.append(deadlock)
    assert 0 < len(found) < 20
    text = str(found[0])
    assert "--- t0" in text
    assert "--- t1" in text
    assert "told.wait()" in text
    assert "--sim-seed" in found[0].__notes__[0]


def _both_ways(sim: SimRuntime) -> None:
    first, second = sim.lock(), sim.lock()
    with first, second:
        pass
    with second, first:
        pass


def _waits_in_another(sim: SimRuntime) -> None:
    first, second = sim.condition(), sim.lock()
    with first, second:
        first.wait(1)  # and takes it with the second held


def _circle_of_three(sim: SimRuntime) -> None:
    locks = [sim.lock() for _ in range(3)]
    for n in range(3):
        with locks[n], locks[n - 1]:
            pass


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (_both_ways, r"2\n(.|\n)*with first, second(.|\n)*with second, first"),
        (_waits_in_another, r"2\n(.|\n)*with first, second(.|\n)*first\.wait"),
        (_circle_of_three, "3\n"),
    ],
)
def test_a_deadlock_that_might_happen_fails(body: Callable[[SimRuntime], None], told: str) -> None:
    with pytest.raises(Inversion, match=f"in a circle of {told}"):
        simulate(0, body)


def test_locks_in_one_order() -> None:
    def body(sim: SimRuntime) -> None:
        locks = [sim.lock() for _ in range(3)]
        for _ in range(2):
            with locks[0], locks[2]:
                assert locks[1].acquire(blocking=False)  # who does not wait is in nobody's way
                assert not locks[2].acquire(timeout=1)
                locks[1].release()
            with locks[0], locks[1], locks[2]:
                pass

    simulate(0, body)


def test_own_lock_twice_is_a_deadlock() -> None:
    def body(sim: SimRuntime) -> None:
        lock = sim.lock()
        assert lock.acquire()
        assert not lock.acquire(blocking=False)
        assert not lock.acquire(timeout=1)
        lock.acquire()

    with pytest.raises(Deadlock, match="that it holds"):
        simulate(0, body)


def test_step_limit() -> None:
    def body(sim: SimRuntime) -> None:
        while True:
            sim.yield_point()

    with pytest.raises(StepLimit):
        simulate(0, body, steps_max=1000)


def _fail() -> None:
    raise ZeroDivisionError


def test_errors_come_out_of_any_thread() -> None:
    def body(sim: SimRuntime) -> None:
        sim.spawn("bad", _fail)
        sim.sleep(1)

    with pytest.raises(ZeroDivisionError):
        simulate(0, body)


def test_time_is_virtual() -> None:
    def body(sim: SimRuntime) -> None:
        began_ns, began = sim.now_ns(), sim.monotonic()
        sim.sleep(86_400)
        assert 86_400 <= sim.monotonic() - began < 86_401
        assert sim.now_ns() - began_ns >= 86_400 * 10**9
        assert not sim.event().wait(3600)
        condition = sim.condition()
        with condition:
            assert not condition.wait(3600)
        assert 93_600 <= sim.monotonic() - began < 93_601
        assert sim.process("ahead", skew_ns=5).now_ns() == sim.now_ns() + 5

    began = time.monotonic()
    simulate(0, body)
    assert time.monotonic() - began < 3600


def test_timers_fire_in_order() -> None:
    def body(sim: SimRuntime) -> list[int]:
        log: list[int] = []

        def work(n: int) -> None:
            sim.sleep(10 - n)
            log.append(n)

        _crowd(sim, work, 8)
        return log

    assert simulate(3, body) == [7, 6, 5, 4, 3, 2, 1, 0]


def test_join_times_out() -> None:
    def body(sim: SimRuntime) -> None:
        sleeper = sim.spawn("sleeper", lambda: sim.sleep(100))
        sleeper.join(1)
        assert sleeper.is_alive()
        sleeper.join()
        assert not sleeper.is_alive()

    simulate(0, body)


def test_threads_end_with_the_run() -> None:
    unwound: list[int] = []
    threads: list[threading.Thread] = []

    def work(sim: SimRuntime) -> None:
        threads.append(threading.current_thread())
        try:
            sim.event().wait()
        finally:
            unwound.append(1)

    def body(sim: SimRuntime) -> None:
        for n in range(5):
            sim.spawn(f"t{n}", lambda: work(sim))
        sim.sleep(1)

    simulate(0, body)
    assert len(unwound) == len(threads) == 5
    assert not any(thread.is_alive() for thread in threads)


def _crash(sim: SimRuntime) -> tuple[int, int]:
    """Two processes count under one lock of the world's; one dies. (The dead one's, the other's)"""
    counts = [0, 0]
    lock = sim.lock()
    processes = [sim.process("victim"), sim.process("other")]

    def work(n: int, process: SimProcess) -> None:
        while True:
            with lock:
                counts[n] += 1
                process.sleep(0.001)

    for n, process in enumerate(processes):
        for worker in range(2):
            process.spawn(str(worker), partial(work, n, process))
    sim.sleep(0.02 + sim.random() / 100)
    processes[0].crash()
    dead, alive = counts
    sim.sleep(1)
    assert counts[0] == dead, "a dead process went on"
    assert counts[1] > alive, "a lock died with the process"
    return dead, counts[1]


@pytest.mark.sim_seeds(20)
def test_crash(sim_seed: int) -> None:
    dead, _ = simulate(sim_seed, _crash)
    assert dead > 0


def test_crash_of_oneself() -> None:
    def body(sim: SimRuntime) -> None:
        process = sim.process("p")
        after: list[int] = []

        def work() -> None:
            process.crash()
            after.append(1)

        process.spawn("a", work).join()
        assert not after

    simulate(0, body)


@pytest.mark.sim_seeds(20)
def test_shield_puts_a_crash_off(sim_seed: int) -> None:
    def body(sim: SimRuntime) -> None:
        process, log, started = sim.process("p"), list[str](), sim.event()

        def work() -> None:
            with sim.shield():
                started.set()
                log.append("begin")
                sim.sleep(1)
                log.append("end")
            log.append("not reached")

        process.spawn("a", work)
        started.wait()
        process.crash()
        assert log == ["begin", "end"]

    simulate(sim_seed, body)


@pytest.mark.sim_seeds(20)
def test_frozen_processes_do_nothing(sim_seed: int) -> None:
    """Neither do those that hold a lock, but what the world does for them goes on."""

    def body(sim: SimRuntime) -> None:
        process, counts, served = sim.process("p"), [0, 0], list[int]()

        def work(n: int) -> None:
            while True:
                counts[n] += 1
                process.sleep(0.001 * n)

        def ask() -> None:
            with sim.shield():
                sim.sleep(1)
                served.append(1)
            served.append(2)

        for n in (0, 1):
            process.spawn(str(n), partial(work, n))
        process.spawn("ask", ask)
        sim.sleep(0.1)
        process.freeze()
        seen = list(counts)
        sim.sleep(10)
        assert counts == seen
        assert served == [1]
        process.thaw()
        sim.sleep(0.1)
        assert min(now - then for now, then in zip(counts, seen, strict=True)) > 0
        assert served == [1, 2]
        process.freeze()
        process.crash()
        assert process.alive() == []

    simulate(sim_seed, body)


def test_works_outside_of_a_run() -> None:
    sim = SimRuntime(0)
    lock, event = sim.lock(), sim.event()
    with lock:
        event.set()
    assert event.wait()
    with pytest.raises(RuntimeError):
        sim.event().wait() or sim.condition().wait()


def test_speed() -> None:
    sim = SimRuntime(1)

    def work(_: int) -> None:
        for _ in range(3000):
            sim.yield_point()

    began = time.process_time()
    sim.run(lambda: _crowd(sim, work, 8))
    assert sim.scheduler.switches / (time.process_time() - began) > SWITCHES_PER_SECOND

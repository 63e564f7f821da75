"""The engine of the simulation: tasks, gates, virtual time. `scheduler` is its public face.

Called by `scheduler` and `primitives` only. One thread runs at a time, so nothing here needs a
lock: to switch, the running thread opens the gate of the next one and waits at its own.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from pathlib import Path
from typing import Final, TypeVar

from tests.sim.world.lock_order import LockOrder

T = TypeVar("T")

STEP_NS: Final = 1000  # a seam costs a microsecond: timeouts can win against work
START_NS: Final = 1_767_225_600 * 10**9  # 2026-01-01
STEPS_MAX: Final = 2_000_000  # a minute of real time; a run that needs more does not end
TRACE_STEPS: Final = 64  # how much of the past a failure shows
KILL_SECONDS: Final = 100.0  # real time for a thread to unwind; a busy machine takes seconds
_DIGEST_MASK: Final = (1 << 61) - 1
_OWN_FILES: Final = ("core.py", "primitives.py", "threading.py")  # left out of stories


class Killed(BaseException):
    """The run is over: unwind."""


class Crashed(BaseException):
    """The simulated process of this thread has died."""


class Deadlock(AssertionError):
    """Every thread waits for another one."""


class StepLimit(AssertionError):
    """The run took more steps than it may."""


class Task:
    """One thread of the simulation. Touched by the running thread only."""

    __slots__ = (
        "done",
        "doom",
        "gate",
        "held",
        "ident",
        "index",
        "joiners",
        "name",
        "number",
        "process",
        "shields",
        "thread",
        "thrown",
        "wait",
        "woken",
    )

    def __init__(self, name: str, number: int, process: object) -> None:
        self.name = name
        self.number = number
        self.process = process
        self.gate = threading.Lock()
        self.gate.acquire()
        self.thread: threading.Thread | None = None
        self.ident = 0
        self.index = -1  # its place among the runnable; -1: waiting or done
        self.wait = 0  # counts waits, so that an old timer is not taken for a new one
        self.woken = False  # how the last wait ended: by another thread, not by a timer
        self.doom: type[BaseException] | None = None
        self.thrown = False  # `doom` is on its way up the stack
        self.shields = 0
        self.held: list[object] = []  # locks, as they were taken
        self.done = False
        self.joiners: list[Task] = []


# Processes that test side by side are numbered: each gets a processor of its own.
_OUR_NUMBER = int(os.environ.get("PYTEST_XDIST_WORKER", f"gw{os.getpid()}").removeprefix("gw"))


@contextmanager
def _on_one_cpu() -> Iterator[None]:
    """Keep this thread and those it starts on one processor: handing over is then 2–3× faster."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(allowed)[_OUR_NUMBER % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Let nothing be finalized when the collector's time has come: that follows from no seed.

    A generator that was left in the midst of a lock opens it when it is finalized, which is a seam.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Scheduler:
    """Decides who runs, and what time it is."""

    def __init__(self, seed: int, steps_max: int) -> None:
        self.seed = seed
        self.steps = 0
        self.switches = 0
        self.digest = 0  # of all choices: equal digests mean equal schedules
        self.trace: deque[Task] = deque(maxlen=TRACE_STEPS)
        self.current: Task | None = None
        self.tasks: list[Task] = []
        self.clock_ns = 0
        self.lock_order = LockOrder()
        self.choose: Callable[[], float] = random.Random(seed).random
        self._steps_max = steps_max
        self._main: Task | None = None
        self._runnable: list[Task] = []
        self._timers: list[tuple[int, int, int, Task]] = []  # (when, task, its wait, task)
        self._frozen: dict[object, dict[Task, None]] = {}  # process → its tasks that could run
        self._over = threading.Lock()  # opened when a run ends and when a killed task is gone
        self._over.acquire()
        self._ending = False
        self._failure: BaseException | None = None

    def run(self, body: Callable[[], T]) -> T:
        """See `SimRuntime.run`."""
        result: list[T] = []
        with _on_one_cpu(), _no_collector():
            self._main = self.start("main", lambda: result.append(body()), None)
            self.current = self._main
            self._main.gate.release()
            self._over.acquire()
            self._kill_all()
        if self._failure is not None:
            raise self._failure
        return result[0]

    def seam(self) -> None:
        """A point where another thread may run instead."""
        me = self.current
        if me is None:
            return
        if me.ident != threading.get_ident():
            raise RuntimeError("a thread that is not the simulation's is at a seam")
        if me.doom is not None:
            self.throw(me)
        self._tick(me)
        self._switch(me)

    def seam_after(self) -> None:
        """A seam behind an effect: quiet where a dying thread gives things back."""
        me = self.current
        if me is not None and not me.thrown:
            self.seam()

    def deadline(self, seconds: float) -> int:
        return self.clock_ns + int(seconds * 10**9)

    def block(self, until_ns: int | None) -> bool:
        """Wait until another thread wakes us (True) or the clock shows `until_ns` (False)."""
        me = self.current
        if me is None:
            raise RuntimeError("would wait for ever: no simulation is running")
        if me.doom is not None:
            self.throw(me)
        self._retire(me)
        me.wait += 1
        me.woken = False
        if until_ns is not None:
            heappush(self._timers, (until_ns, me.number, me.wait, me))
        self._tick(me)
        self._switch(me)
        return me.woken

    def wake(self, task: Task) -> None:
        """End the wait of `task`."""
        if task.index < 0 and not task.done:
            task.woken = True
            self._admit(task)

    def throw(self, me: Task) -> None:
        """Raise what `me` is doomed to, unless it is shielded."""
        if me.doom is not None and (not me.shields or me.doom is Killed):
            me.thrown = True
            raise me.doom(f"{me.name} (seed {self.seed})")

    def unshielded(self, me: Task) -> None:
        """What a shield has put off happens now."""
        self.throw(me)
        if self._frozen:
            self.seam()

    def doom(self, task: Task, fate: type[BaseException]) -> None:
        """Let `task` die of `fate` at its seam."""
        task.doom = task.doom or fate
        if not task.shields:
            self.wake(task)

    def freeze(self, process: object) -> None:
        """Stop `process` as SIGSTOP would; what the world does for it goes on."""
        assert self.current is None or self.current.process is not process, "can't freeze oneself"
        held = self._frozen.setdefault(process, {})
        for task in [each for each in self._runnable if each.process is process]:
            if not task.shields:
                self._retire(task)
                held[task] = None

    def thaw(self, process: object) -> None:
        """Let `process` go on."""
        for task in self._frozen.pop(process, {}):
            self._admit(task)

    def start(self, name: str, body: Callable[[], None], process: object) -> Task:
        """A new thread, able to run."""
        task = Task(name, len(self.tasks), process)
        self.tasks.append(task)
        self._admit(task)
        task.thread = threading.Thread(
            target=self._live, args=(task, body), name=f"sim-{name}", daemon=True
        )
        task.thread.start()
        return task

    def _live(self, task: Task, body: Callable[[], None]) -> None:
        """The life of a thread."""
        task.ident = threading.get_ident()
        task.gate.acquire()
        failure: BaseException | None = None
        try:
            self.throw(task)
            body()
        except (Killed, Crashed):
            pass
        except BaseException as error:  # noqa: BLE001 (run() raises it again)
            failure = error
        self._leave(task, failure)

    def _leave(self, task: Task, failure: BaseException | None) -> None:
        task.done = True
        self._retire(task)
        self._failure = self._failure or failure
        if self._ending or failure is not None or task is self._main:
            self._over.release()
            return
        for joiner in task.joiners:
            self.wake(joiner)
        following = self._next()
        if following is None:
            self._over.release()
            return
        self.current = following
        following.gate.release()

    def _admit(self, task: Task) -> None:
        if self._frozen and task.process in self._frozen and not task.shields:
            self._frozen[task.process][task] = None
            return
        task.index = len(self._runnable)
        self._runnable.append(task)

    def _retire(self, task: Task) -> None:
        if task.index < 0:
            return
        last = self._runnable.pop()
        if last is not task:
            self._runnable[task.index] = last
            last.index = task.index
        task.index = -1

    def _tick(self, me: Task) -> None:
        self.steps += 1
        if self.steps > self._steps_max:
            self._give_up(me, StepLimit(f"more than {self._steps_max} steps{self.story()}"))
        self.clock_ns += STEP_NS
        if self._timers and self._timers[0][0] <= self.clock_ns:
            self._fire()

    def _fire(self) -> None:
        """Let those run whose time has come."""
        timers = self._timers
        while timers and timers[0][0] <= self.clock_ns:
            _, _, wait, task = heappop(timers)
            if task.wait == wait and task.index < 0 and not task.done:
                self._admit(task)

    def _next(self) -> Task | None:
        """Who runs now; None: nobody ever will, and `_failure` says so."""
        runnable = self._runnable
        while not runnable:
            if not self._timers:
                self._failure = self._failure or Deadlock(f"nobody can run{self.story()}")
                return None
            when, _, wait, task = self._timers[0]
            if task.wait == wait and task.index < 0 and not task.done:
                self.clock_ns = max(self.clock_ns, when)
                self._fire()
            else:
                heappop(self._timers)
        pick = runnable[int(self.choose() * len(runnable))]
        self.digest = (self.digest * 1_000_003 + pick.number + 1) & _DIGEST_MASK
        self.trace.append(pick)
        return pick

    def _switch(self, me: Task) -> None:
        """Let the next one run, and return when it is our turn again."""
        if me.process in self._frozen and me.index >= 0 and not me.shields:
            self._retire(me)  # a shield has put it off
            self._admit(me)
        pick = self._next()
        if pick is None:
            self._wait_for_end(me)
        elif pick is not me:
            self.switches += 1
            self.current = pick
            pick.gate.release()
            me.gate.acquire()
        if me.doom is not None and not me.thrown:
            self.throw(me)

    def _give_up(self, me: Task, failure: BaseException) -> None:
        self._failure = self._failure or failure
        self._wait_for_end(me)

    def _wait_for_end(self, me: Task) -> None:
        self._over.release()
        me.gate.acquire()
        self.throw(me)

    def _kill_all(self) -> None:
        self._ending = True
        for task in self.tasks:
            assert task.thread is not None
            if not task.done:
                task.doom, task.thrown = Killed, False
                self.current = task
                task.gate.release()
                if not self._over.acquire(timeout=KILL_SECONDS):
                    raise RuntimeError(f"thread {task.name} does not end") from self._failure
            task.thread.join(KILL_SECONDS)
        self.current = None

    def story(self) -> str:
        """Who ran last, and where everyone is."""
        frames = sys._current_frames()
        parts = [f"\nseed {self.seed}, step {self.steps}, {self.clock_ns / 10**9:.6f} s"]
        parts.append("last to run: " + " ".join(task.name for task in self.trace))
        for task in self.tasks:
            frame = frames.get(task.ident)
            if not task.done and frame is not None:
                stack = traceback.extract_stack(frame)
                own = [line for line in stack if Path(line.filename).name not in _OWN_FILES]
                parts.append(f"--- {task.name}\n" + "".join(traceback.format_list(own[-8:])))
        return "\n".join(parts)

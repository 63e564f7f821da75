"""A scheduler for real threads of which one runs at a time; a seed picks the next at each seam.

`SimRuntime` is the `Runtime` of a simulated world, `SimProcess` that of one process in it: threads
that die together. Seams are the operations of the runtime itself: locks, conditions, events, sleep,
spawn, join and `yield_point`. Between two seams a thread runs undisturbed, so code that shares
data without a lock must call `yield_point` to show its races.

Time is virtual. Each seam takes STEP_NS; when every thread waits, the clock jumps to the next
timer. No timer and nobody to run is a `Deadlock`, which carries every thread's stack.

`run` waits for the end, then throws `Killed` into whatever thread is left.

A crash (`SimProcess.crash`) throws `Crashed` into each thread of the process at its seam. While it
unwinds, releasing and notifying still work, quietly; everything else throws again, so a dying
thread does nothing more. `shield` puts the crash off: what the world's servers do for a client must
not stop half-way because the client died.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from fsmeta.runtime import Condition, Event, Lock, Runtime, Thread, Waits
from tests.sim.world.core import START_NS, STEPS_MAX, Crashed, Scheduler, Task
from tests.sim.world.primitives import SimCondition, SimEvent, SimLock, SimThread

T = TypeVar("T")


class SimRuntime:
    """A simulated world. Use: `SimRuntime(seed).run(body)`, once."""

    def __init__(self, seed: int, steps_max: int = STEPS_MAX) -> None:
        self.seed = seed
        self.scheduler = Scheduler(seed, steps_max)
        self.yield_point: Callable[[], None] = self.scheduler.seam
        self._chance = random.Random(seed + 1)  # what the code under test draws
        self.random: Callable[[], float] = self._chance.random
        self.random_bits: Callable[[int], int] = self._chance.getrandbits

    def run(self, body: Callable[[], T]) -> T:
        """Run `body` as thread "main" until it returns; kill all others; return its value.

        Raises: what `body` or any other thread raised first, Deadlock, StepLimit.
        """
        return self.scheduler.run(body)

    def process(self, name: str, skew_ns: int = 0) -> SimProcess:
        """A new process whose wall clock is `skew_ns` ahead."""
        return SimProcess(self, name, skew_ns)

    def shield(self) -> Shield:
        """A context in which the calling thread is not struck by the crash of its process."""
        return Shield(self.scheduler)

    def now_ns(self) -> int:
        return START_NS + self.scheduler.clock_ns

    def monotonic(self) -> float:
        return self.scheduler.clock_ns / 10**9

    def sleep(self, seconds: float) -> None:
        scheduler = self.scheduler
        if scheduler.current is None:
            scheduler.clock_ns += int(seconds * 10**9)
        elif seconds <= 0:
            scheduler.seam()
        else:
            scheduler.block(scheduler.deadline(seconds))

    def tell(self, waits: Waits) -> None:
        """Nobody reads requests here."""

    def will_wait(self) -> None:
        """Nobody wants to know."""

    def await_input(self, descriptor: int) -> None:
        raise NotImplementedError("no descriptors in a simulation")

    def spawn(self, name: str, body: Callable[[], None]) -> Thread:
        """Start a thread in the process of the caller."""
        current = self.scheduler.current
        return self.spawn_in(current.process if current else None, name, body)

    def spawn_in(self, process: object, name: str, body: Callable[[], None]) -> Thread:
        """Start a thread in `process`; None: the world's own, which can't crash."""
        scheduler = self.scheduler
        if scheduler.current is not None:
            scheduler.throw(scheduler.current)
        task = scheduler.start(name, body, process)
        scheduler.seam()
        return SimThread(scheduler, task)

    def lock(self) -> Lock:
        return SimLock(self.scheduler)

    def condition(self, lock: Lock | None = None) -> Condition:
        assert lock is None or isinstance(lock, SimLock)
        return SimCondition(self.scheduler, lock)

    def event(self) -> Event:
        return SimEvent(self.scheduler)


class SimProcess:
    """The `Runtime` of one simulated process."""

    def __init__(self, sim: SimRuntime, name: str, skew_ns: int) -> None:
        self.name = name
        self.crashed = False
        self._sim = sim
        self._skew_ns = skew_ns
        self.monotonic = sim.monotonic
        self.sleep = sim.sleep
        self.tell = sim.tell
        self.will_wait = sim.will_wait
        self.await_input = sim.await_input
        self.random = sim.random
        self.random_bits = sim.random_bits
        self.lock = sim.lock
        self.condition = sim.condition
        self.event = sim.event

    def now_ns(self) -> int:
        return self._sim.now_ns() + self._skew_ns

    def set_clock(self, ahead_s: float) -> None:
        """Somebody sets this host's clock, right or wrong."""
        self._skew_ns = int(ahead_s * 10**9)

    def spawn(self, name: str, body: Callable[[], None]) -> Thread:
        """Start a thread of this process."""
        if self.crashed:
            raise Crashed(f"process {self.name} is dead")
        return self._sim.spawn_in(self, f"{self.name}/{name}", body)

    def freeze(self) -> None:
        """Stop all threads of the process, as SIGSTOP would, until `thaw`."""
        self._sim.scheduler.freeze(self)

    def thaw(self) -> None:
        """Let a frozen process go on; time has passed for it all at once."""
        self._sim.scheduler.thaw(self)
        self._sim.scheduler.seam()

    def alive(self) -> list[str]:
        """The names of its threads that have not ended."""
        tasks = self._sim.scheduler.tasks
        return [task.name for task in tasks if task.process is self and not task.done]

    def crash(self) -> None:
        """Kill the process as SIGKILL would; returns when its threads are gone.

        A thread of the process itself does not return from here.
        """
        self.crashed = True
        self.thaw()
        scheduler = self._sim.scheduler
        doomed = [task for task in scheduler.tasks if task.process is self and not task.done]
        for task in doomed:
            scheduler.doom(task, Crashed)
        scheduler.seam()
        for task in doomed:
            if task is not scheduler.current:
                SimThread(scheduler, task).join()


class Shield:
    """See `SimRuntime.shield`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._task: Task | None = scheduler.current

    def __enter__(self) -> None:
        if self._task is not None:
            self._scheduler.throw(self._task)
            self._task.shields += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.shields -= 1
            if not self._task.thrown:
                self._scheduler.unshielded(self._task)


_CONFORMS: tuple[Callable[..., Runtime], ...] = (SimRuntime, SimProcess)

"""Single flight: one thread fetches a block, and all threads that want it wait for that.

Threading: any method from any thread. The lock of `SingleFlight` is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from fsmeta.errors import StoreError
from fsmeta.runtime import Event, Runtime

K = TypeVar("K", bound=Hashable)


class _SharedFetch:
    """A fetch under way. `landed` exists only once a thread waits for it."""

    __slots__ = ("aside", "error", "landed", "result")

    def __init__(self, aside: bool = False) -> None:
        self.aside = aside  # a reader of no more than a range does not wait for it
        self.landed: Event | None = None
        self.result: memoryview | None = None
        self.error: OSError | StoreError | None = None

    def join(self) -> memoryview:
        """What another thread's fetch brings. Raises: what it does."""
        assert self.landed is not None, "made before the lock was released"
        self.landed.wait()
        if self.error is not None:
            raise self.error
        assert self.result is not None, "the fetching thread ended without a word"
        return self.result


class SingleFlight(Generic[K]):
    """The fetches under way, by what they bring."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = runtime.lock()
        self._flights: dict[K, _SharedFetch] = {}  # guarded by _lock

    def fetch(self, key: K, make: Callable[[], memoryview]) -> memoryview:
        """What `make` brings, or another thread's fetch of the same.

        A thread that comes when the other fetch has just ended makes its own: `make` looks first
        whether the result is there. Raises: what `make` does, OSError and StoreError.
        """
        with self._lock:
            flight = self._flights.get(key)
            mine = flight is None
            if flight is None:
                flight = self._flights[key] = _SharedFetch()
            elif flight.landed is None:
                flight.landed = self._runtime.event()
        return self._made(key, flight, make) if mine else flight.join()

    def fetch_alone(
        self,
        key: K,
        make: Callable[[], memoryview],
        wanted: Callable[[], bool],
        aside: bool = False,
    ) -> None:
        """Call `make`, unless another thread fetches the same, or else it is not `wanted`.

        `aside`: readers of ranges need not wait for it. Raises: as `fetch`.
        """
        with self._lock:
            if key in self._flights or not wanted():
                return
            flight = self._flights[key] = _SharedFetch(aside)
        self._made(key, flight, make)

    def is_awaited(self, key: K) -> bool:
        """Whether a reader of a range had better wait for a fetch under way."""
        with self._lock:
            flight = self._flights.get(key)
            return flight is not None and not flight.aside

    def count(self) -> int:
        """How many fetches are under way."""
        with self._lock:
            return len(self._flights)

    def _made(self, key: K, flight: _SharedFetch, make: Callable[[], memoryview]) -> memoryview:
        """Fetch, for this thread and those that join."""
        try:
            flight.result = make()
            return flight.result
        except (OSError, StoreError) as error:
            flight.error = error
            raise
        finally:
            with self._lock:
                del self._flights[key]
            if flight.landed is not None:
                flight.landed.set()

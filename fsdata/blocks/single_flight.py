"""A fetch of a block that others may wait for: `BlockStore` has one thread fetch for all."""

from __future__ import annotations

from fsmeta.errors import StoreError
from fsmeta.runtime import Event


class SingleFlight:
    """A fetch under way. `landed` exists only once somebody waits for it."""

    __slots__ = ("aside", "error", "landed", "result")

    def __init__(self, aside: bool = False) -> None:
        self.aside = aside  # who wants no more than a range does not wait for it
        self.landed: Event | None = None
        self.result: memoryview | None = None
        self.error: OSError | StoreError | None = None


def join(flight: SingleFlight) -> memoryview:
    """What another thread's fetch brings. Raises: what it does."""
    assert flight.landed is not None, "made before the lock was released"
    flight.landed.wait()
    if flight.error is not None:
        raise flight.error
    assert flight.result is not None, "the fetching thread ended without a word"
    return flight.result

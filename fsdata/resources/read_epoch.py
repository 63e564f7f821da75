"""Knowing when every read that might use old slices has ended, as RCU's grace period does.

`FileReader`s' users mark reads; the worker that deletes slices replaced by compaction first calls
`advance`. A read that begins after the metadata changed sees the new slices, so only reads from
before matter. Threading: one lock, held for an addition at each end of a read.
"""

from __future__ import annotations

from types import TracebackType

from fsmeta.runtime import Runtime


class _Generation:
    """The reads that began between two calls of `advance`."""

    __slots__ = ("reads",)

    def __init__(self) -> None:
        self.reads = 0


class Reading:
    """One read in flight, as a context manager."""

    __slots__ = ("_epoch", "_generation")

    def __init__(self, epoch: ReadEpoch) -> None:
        self._epoch = epoch
        self._generation: _Generation | None = None

    def __enter__(self) -> None:
        self._generation = self._epoch.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._generation is not None, "left without being entered"
        self._epoch.end(self._generation)


class ReadEpoch:
    """Counts reads by generation."""

    def __init__(self, runtime: Runtime) -> None:
        self._clock = runtime.monotonic
        self._cond = runtime.condition()
        self._now = _Generation()  # guarded by _cond
        self._old: list[_Generation] = []  # guarded by _cond: earlier ones with reads in flight

    def reading(self) -> Reading:
        """`with epoch.reading():` marks a read in flight."""
        return Reading(self)

    def begin(self) -> _Generation:
        """A read begins; give the answer to `end`."""
        with self._cond:
            generation = self._now
            generation.reads += 1
            return generation

    def end(self, generation: _Generation) -> None:
        """A read that began in `generation` has ended."""
        with self._cond:
            generation.reads -= 1
            if generation.reads == 0 and generation is not self._now:
                self._old.remove(generation)
                self._cond.notify_all()

    def advance(self, timeout: float) -> bool:
        """Wait until all reads that began before this call have ended; False if they have not."""
        deadline = self._clock() + timeout
        with self._cond:
            if self._now.reads:
                self._old.append(self._now)
                self._now = _Generation()
            before = list(self._old)
            while any(generation.reads for generation in before):
                left = deadline - self._clock()
                if left <= 0:
                    return False
                self._cond.wait(left)
            return True

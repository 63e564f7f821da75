"""Has requests wait for their limits, without a thread that waits with each.

A request that may not begin yet is copied and put aside, and the worker that read it serves others.
When its time comes a thread of the throttle serves it: it has not begun before, so an INTERRUPT
ends it with EINTR, and where the client dies meanwhile the next one gets it whole from the kernel.

The kernel allows for so many requests that no program waits for by itself: read-ahead, and pages of
maps that are written back. If those of one user waited here, they would keep the read-ahead of all
others waiting. So of these few wait. More read-ahead is refused, upon which the kernel asks for the
page that a program needs; more pages are written at once, and what comes later pays for them.

Called by the session, around its dispatcher. Threading: `_lock` is held for no request; threads are
made as they are needed, THREADS_MAX at most.
"""

from __future__ import annotations

import errno
import heapq
from collections.abc import Callable
from enum import Enum
from functools import partial
from mmap import PAGESIZE
from os import O_DIRECT
from struct import Struct
from typing import Final

from fsclient.fuse.dispatch.fast_lane import Lane
from fsclient.fuse.dispatch.subdir import Serve, Served
from fsclient.fuse.wire.pack import Answer
from fsclient.fuse.wire.parse import BODY
from fsclient.fuse.wire.protocol import WRITE_CACHE, Opcode
from fsclient.kernel.contract import FIRST_VIRTUAL_INO
from fsclient.kernel.later import Later, Take
from fsclient.qos.limiter import RateLimiter, RequestCost, Reservation
from fsmeta.runtime import Runtime
from fsmeta.types import ROOT_INO, Caller, Ino

THREADS_MAX: Final = 16
HELD_BYTES_MAX: Final = 64 << 20  # of copies; more requests wait in the worker that has read them
LEAVE_S: Final = 10.0  # a thread that has served nothing for so long ends
BACKGROUND_MAX: Final = 24  # requests that wait while no program waits for them by itself
AHEAD_S: Final = 5.0  # read-ahead that would wait longer is refused
PAGES_MINOR: Final = 45  # up to this minor of the kernel's FUSE a page is read by itself
_READ: Final = int(Opcode.READ)
_WRITE: Final = int(Opcode.WRITE)
_SIZE: Final = Struct("=16xI")  # of READ and WRITE
# no program waits for them, or they wait for something else, or they end what is held
_FREE: Final = frozenset(
    (
        Opcode.FORGET,
        Opcode.BATCH_FORGET,
        Opcode.RELEASE,
        Opcode.RELEASEDIR,
        Opcode.FLUSH,
        Opcode.INTERRUPT,
        Opcode.DESTROY,
        Opcode.INIT,
        Opcode.STATFS,
        Opcode.GETLK,
        Opcode.SETLK,
        Opcode.SETLKW,
    )
)
_COST: Final = RequestCost()
_FLAGS: Final = Struct("=20xI8xI")  # of READ and WRITE: its own, and those of the open file


def cost_of(opcode: int, view: memoryview) -> RequestCost:
    """What a request costs, by what it asks for."""
    if opcode == _READ:
        return RequestCost(read=_SIZE.unpack_from(view, BODY)[0])
    if opcode == _WRITE:
        return RequestCost(write=_SIZE.unpack_from(view, BODY)[0])
    return _COST


class _Waits(Enum):
    """What waits for a request."""

    PROGRAM = 1
    READ_AHEAD = 2
    WRITTEN_MAP = 3


def _waits_for(opcode: int, view: memoryview, cost: RequestCost) -> _Waits:
    if opcode not in (_READ, _WRITE):
        return _Waits.PROGRAM
    own, opened = _FLAGS.unpack_from(view, BODY)
    if opcode == _WRITE:
        return _Waits.WRITTEN_MAP if own & WRITE_CACHE else _Waits.PROGRAM
    ahead = cost.read > PAGESIZE and not opened & O_DIRECT
    return _Waits.READ_AHEAD if ahead else _Waits.PROGRAM


class Slots:
    """Places in the table of interrupts, for threads of the throttle."""

    def __init__(
        self,
        first: int,
        enter: Callable[[int], None],
        serving: list[int],
        interrupt: Callable[[int], bool],
    ) -> None:
        """From `first` on there are THREADS_MAX; `serving` has the request that each serves."""
        self.first = first
        self.enter = enter
        self.serving = serving
        self.interrupt = interrupt


class _HeldRequest:
    """A request that waits."""

    __slots__ = (
        "caller",
        "end",
        "ino",
        "is_background",
        "is_begun",
        "opcode",
        "reservation",
        "take",
        "view",
    )

    def __init__(
        self,
        opcode: int,
        caller: Caller,
        ino: int,
        view: memoryview,
        end: int,
        reservation: Reservation,
        is_background: bool,
    ) -> None:
        self.is_background = is_background
        self.opcode = opcode
        self.caller = caller
        self.ino = ino
        self.view = view
        self.end = end
        self.reservation = reservation
        self.take: Take[Answer | int] | None = None  # None: it was cancelled, or is answered
        self.is_begun = False


_unique: Final = Struct("=8xQ").unpack_from
_ABSENT: Final = -1  # in `serving`: the thread serves nothing


class Throttle:
    """See the module."""

    def __init__(self, runtime: Runtime, limiter: RateLimiter) -> None:
        self._runtime = runtime
        self._clock = runtime.monotonic
        self._limiter = limiter
        self._serve: Serve | None = None
        self._slots: Slots | None = None
        self._lanes: list[Lane | None] = []  # as workers see them
        self._usual_lanes: list[Lane | None] = []  # where there is no limit
        self._lock = runtime.lock()
        self._cond = runtime.condition(self._lock)
        self._held: list[
            tuple[float, int, _HeldRequest]
        ] = []  # a heap; guarded by _lock, as all below
        self._held_bytes = 0
        self._background = 0  # of those that are held
        self._number = 0
        self._free_slots = list(range(THREADS_MAX))
        self._idle = 0  # threads that wait
        self._busy = 0  # and that serve
        self._closed = False
        self._delayed = 0
        self._delayed_s = 0.0

    def numbers(self) -> dict[str, float]:
        """For `.stats`."""
        with self._lock:
            return {
                "qos_limits": len(self._limiter.limits),
                "qos_requests_held": len(self._held),
                "qos_requests_delayed_total": self._delayed,
                "qos_delay_seconds_total": self._delayed_s,
            }

    def around(
        self,
        serve: Serve,
        slots: Slots,
        root: Ino = ROOT_INO,
        lanes: list[Lane | None] | None = None,
        charged: Callable[[Caller], Caller] | None = None,
        refuses_ahead: bool = True,
    ) -> Serve:
        """`serve`, under the limits; `root` is the directory that is mounted.

        `lanes` are emptied as long as there are limits. `charged`: whom the volume knows a caller
        as. `refuses_ahead`: the kernel then reads by pages; else a program would meet the error.
        """
        self._serve, self._slots = serve, slots
        self._lanes = [] if lanes is None else lanes
        self._usual_lanes = list(self._lanes)
        self._set_lanes()
        limiter = self._limiter

        def serve_limited(
            opcode: int, caller: Caller, ino: int, view: memoryview, end: int
        ) -> Served:
            if not limiter.active or opcode in _FREE or ino >= FIRST_VIRTUAL_INO:
                return serve(opcode, caller, ino, view, end)
            about = root if ino == ROOT_INO else Ino(ino)
            payer = caller if charged is None else charged(caller)
            cost = cost_of(opcode, view)
            reservation = limiter.reserve(payer, about, cost)
            wait_s = reservation.begin - self._clock()
            if wait_s <= 0:
                return serve(opcode, caller, ino, view, end)
            waits = _waits_for(opcode, view, cost)
            is_background = waits is not _Waits.PROGRAM
            if is_background and (self._background >= BACKGROUND_MAX or wait_s > AHEAD_S):
                if waits is _Waits.WRITTEN_MAP:
                    return serve(opcode, caller, ino, view, end)
                if refuses_ahead:
                    limiter.refund(reservation)
                    return errno.EAGAIN
            held = _HeldRequest(opcode, caller, ino, view, end, reservation, is_background)
            return self._put_aside(held, wait_s)

        return serve_limited

    def _set_lanes(self) -> None:
        """Requests that come under a limit take the long way. Workers look at the list itself."""
        none: list[Lane | None] = [None] * len(self._usual_lanes)
        self._lanes[:] = none if self._limiter.active else self._usual_lanes

    def limits_changed(self) -> None:
        """What waits begins now; what comes later counts under the new limits."""
        self._set_lanes()
        with self._lock:
            now = self._clock()
            self._held = [(min(begin, now), number, held) for begin, number, held in self._held]
            heapq.heapify(self._held)
            self._cond.notify_all()

    def close(self) -> None:
        """The session has ended: drop what has not begun, and return when the rest is done.

        The programs learn of it when the kernel does.
        """
        with self._lock:
            self._closed = True
            self._held.clear()
            self._cond.notify_all()
            while self._busy:
                self._cond.wait()

    def _put_aside(self, held: _HeldRequest, wait_s: float) -> Served:
        with self._lock:
            self._delayed += 1
            self._delayed_s += wait_s
            is_full = self._held_bytes + held.end > HELD_BYTES_MAX
            if not is_full:
                self._held_bytes += held.end
                self._background += held.is_background
        if is_full:
            self._runtime.sleep(wait_s)
            assert self._serve is not None, "the session serves through `around`"
            return self._serve(held.opcode, held.caller, held.ino, held.view, held.end)
        held.view = memoryview(bytearray(held.view[: held.end]))
        return Later(partial(self._hold, held), partial(self._cancel, held))

    def _hold(self, held: _HeldRequest, take: Take[Answer | int]) -> None:
        held.take = take
        spawn: int | None = None
        with self._lock:
            if self._closed:
                return
            self._number += 1
            heapq.heappush(self._held, (held.reservation.begin, self._number, held))
            if not self._idle and self._free_slots:
                spawn = self._free_slots.pop()
            else:
                self._cond.notify()
        if spawn is not None:
            self._runtime.spawn(f"qos-{spawn}", partial(self._work, spawn))

    def _cancel(self, held: _HeldRequest) -> None:
        """An INTERRUPT: what has not begun does not; what has is told as any request is."""
        assert self._slots is not None, "the session serves through `around`"
        with self._lock:
            take, begun = held.take, held.is_begun
            if not begun and take is not None:
                held.take = None
                self._drop(held)
        if begun:
            (unique,) = _unique(held.view)
            self._slots.interrupt(unique)
        elif take is not None:
            self._limiter.refund(held.reservation)
            take(lambda: errno.EINTR)

    def _drop(self, held: _HeldRequest) -> None:
        """It waits no more. The caller holds the lock."""
        self._held = [each for each in self._held if each[2] is not held]
        heapq.heapify(self._held)
        self._leaves(held)

    def _leaves(self, held: _HeldRequest) -> None:
        """It is not in the heap any more. The caller holds the lock."""
        self._held_bytes -= held.end
        self._background -= held.is_background

    def _work(self, slot: int) -> None:
        """The body of a thread: serve what is due, until there has been nothing for a while."""
        assert self._slots is not None, "the session serves through `around`"
        place = self._slots.first + slot
        self._slots.enter(place)
        while (held := self._next(slot, place)) is not None:
            try:
                self._serve_held(held)
            finally:
                self._slots.serving[place] = _ABSENT
                with self._lock:
                    self._busy -= 1
                    self._cond.notify_all()

    def _serve_held(self, held: _HeldRequest) -> None:
        assert self._serve is not None, "the session serves through `around`"
        answer = self._serve(held.opcode, held.caller, held.ino, held.view, held.end)
        take = held.take
        assert take is not None, "what has begun is not cancelled"
        if isinstance(answer, Later):
            answer.begin(take)
        elif answer is not None:
            take(partial(_value, answer))

    def _next(self, slot: int, place: int) -> _HeldRequest | None:
        """The next request that is due, shown at `place`; None where the thread is to end."""
        assert self._slots is not None, "the session serves through `around`"
        until = self._clock() + LEAVE_S
        spawn: int | None = None
        with self._lock:
            self._idle += 1
            try:
                while True:
                    now = self._clock()
                    due = self._held[0][0] if self._held else until
                    if self._held and due <= now:
                        break
                    if self._closed or (not self._held and now >= until):
                        self._free_slots.append(slot)
                        return None
                    self._cond.wait(max(0.0, due - now))
            finally:
                self._idle -= 1
            _, _, held = heapq.heappop(self._held)
            held.is_begun = True
            self._busy += 1
            (self._slots.serving[place],) = _unique(held.view)
            self._leaves(held)
            if self._held and not self._idle and self._free_slots:
                spawn = self._free_slots.pop()
        if spawn is not None:
            self._runtime.spawn(f"qos-{spawn}", partial(self._work, spawn))
        return held


def _value(answer: Answer | int) -> Answer | int:
    return answer

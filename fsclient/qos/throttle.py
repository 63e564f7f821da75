"""Has requests wait for their limits, without a thread that waits with each.

A request that may not begin yet is copied and put aside, and the worker that read it serves others.
Requests that come under the same limits begin in the order of their arrival; nothing is taken from
a limit before one begins, so those that wait for a narrow limit leave the wide ones to others. A
thread of the throttle serves what may begin. What waits has not begun, so an INTERRUPT ends it with
EINTR, and where the client dies meanwhile the next one gets it whole from the kernel.

Some requests must not wait for long, because others wait for them in the kernel (`kinds`): for the
lock of a directory or of a page, or for one of the 64 places of requests that no program waits for
by itself, which are read-ahead and pages of maps that are written back. Beyond that, read-ahead is
refused, upon which the kernel asks for the page that a program needs; others begin out of turn.

Called by the session, around its dispatcher. Threading: `_lock` is held for no request; threads are
made as they are needed, THREADS_MAX at most.
"""

from __future__ import annotations

import errno
import heapq
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from struct import Struct
from typing import Final

from fsclient.fuse.dispatch.fast_lane import Lane
from fsclient.fuse.dispatch.subdir import Serve, Served
from fsclient.fuse.wire.pack import Answer
from fsclient.fuse.wire.parse import BODY
from fsclient.kernel.contract import FIRST_VIRTUAL_INO
from fsclient.kernel.later import Later, Take
from fsclient.qos.kinds import BACKGROUND, FOUND, FREE, RequestKind, cost_of, kind_of
from fsclient.qos.limiter import LimitKeys, RateLimiter, RequestCost
from fsmeta.runtime import Runtime
from fsmeta.types import ROOT_INO, Caller, Ino

THREADS_MAX: Final = 16
HELD_BYTES_MAX: Final = 64 << 20  # of copies; beyond, a large write ends with EINTR after AGAIN_S
AGAIN_S: Final = 1.0
LARGE_BYTES: Final = 4096
CLOSE_S: Final = 10.0  # how long requests under way may take when the session has ended
LEAVE_S: Final = 10.0  # a thread that has served nothing for so long ends
BACKGROUND_MAX: Final = 24  # requests that wait while no program waits for them by itself
PATIENCE_S: Final = 5.0  # of requests for which others wait in the kernel
_ABSENT: Final = -1  # in `serving`: the thread serves nothing
_unique: Final = Struct("=8xQ").unpack_from
_ino_of: Final = Struct("=Q").unpack_from


def not_direct(_ino: int) -> bool:
    """All files are read through the kernel's pages."""
    return False


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
        "about",
        "caller",
        "cost",
        "end",
        "ino",
        "is_begun",
        "is_late",
        "is_whole",
        "keys",
        "kind",
        "number",
        "opcode",
        "take",
        "until",
        "view",
    )

    def __init__(
        self, opcode: int, caller: Caller, ino: int, view: memoryview, end: int, cost: RequestCost
    ) -> None:
        self.opcode = opcode
        self.caller = caller
        self.ino = ino
        self.view = view
        self.end = end
        self.cost = cost
        self.keys: LimitKeys = ()
        self.about = ROOT_INO  # `ino`, as the volume calls it
        self.kind = RequestKind.PROGRAM
        self.number = 0  # in the order of arrival
        self.until = inf  # it waits no longer
        self.is_whole = True  # there is a copy of it
        self.take: Take[Answer | int] | None = None  # None: not known yet, or it was cancelled
        self.is_begun = False
        self.is_late = False  # it waited until `until`


class Throttle:
    """See the module."""

    def __init__(
        self,
        runtime: Runtime,
        limiter: RateLimiter,
        is_direct: Callable[[int], bool] = not_direct,
    ) -> None:
        """`is_direct`: whether an open file is read past the kernel's pages."""
        self._runtime = runtime
        self._clock = runtime.monotonic
        self._limiter = limiter
        self._is_direct = is_direct
        self._serve: Serve | None = None
        self._slots: Slots | None = None
        self._refuses_ahead = False
        self._lock = runtime.lock()
        self._cond = runtime.condition(self._lock)
        self._lanes: list[Lane | None] = []  # as workers see them; by _lock, as all below
        self._usual_lanes: list[Lane | None] = []  # where there is no limit
        self._queues: dict[LimitKeys, deque[_HeldRequest]] = {}  # by what limits them
        self._impatient: list[tuple[float, int, _HeldRequest]] = []  # a heap, by `until`
        self._count = 0  # of those that wait
        self._held_bytes = 0
        self._background = 0
        self._number = 0
        self._free_slots = list(range(THREADS_MAX))
        self._idle = 0  # threads that wait
        self._busy = 0  # and that serve
        self._closed = False
        self._delayed = 0

    def numbers(self) -> dict[str, float]:
        """For `.stats`."""
        with self._lock:
            return {
                "qos_limits": len(self._limiter.limits),
                "qos_requests_held": self._count,
                "qos_requests_delayed_total": self._delayed,
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
        self._serve, self._slots, self._refuses_ahead = serve, slots, refuses_ahead
        with self._lock:
            self._usual_lanes = [] if lanes is None else list(lanes)
            self._lanes = [] if lanes is None else lanes
            self._set_lanes()
        limiter = self._limiter

        def serve_limited(
            opcode: int, caller: Caller, ino: int, view: memoryview, end: int
        ) -> Served:
            if not limiter.active or opcode in FREE or ino >= FIRST_VIRTUAL_INO:
                return serve(opcode, caller, ino, view, end)
            about = root if ino == ROOT_INO else Ino(ino)
            payer, cost = caller if charged is None else charged(caller), cost_of(opcode, view)
            keys = limiter.limits_of(payer, about, cost)
            if keys:
                held = _HeldRequest(opcode, caller, ino, view, end, cost)
                held.keys, held.about = keys, about
                waits = self._must_wait(held)
                if waits is not None:
                    return waits
            answer = serve(opcode, caller, ino, view, end)
            self._note(opcode, about, answer)
            return answer

        return serve_limited

    def _note(self, opcode: int, about: Ino, answer: Served) -> None:
        """What was found, or made, comes under the limits of the directory that it is in."""
        if opcode in FOUND and isinstance(answer, bytes) and (found := _ino_of(answer)[0]):
            self._limiter.made_in(Ino(found), about)

    def _set_lanes(self) -> None:
        """Requests that come under a limit take the long way. Workers look at the list itself."""
        none: list[Lane | None] = [None] * len(self._usual_lanes)
        self._lanes[:] = none if self._limiter.active else self._usual_lanes

    def limits_changed(self) -> None:
        """What waits is looked at anew."""
        with self._lock:
            self._set_lanes()
            self._cond.notify_all()

    def look(self) -> None:
        """Rates have changed: some may begin earlier."""
        with self._lock:
            if self._count:
                self._cond.notify_all()

    def close(self) -> None:
        """The session has ended: drop what has not begun, and return when the rest is done, or does
        not end. The programs learn of it when the kernel does.
        """
        give_up_at = self._clock() + CLOSE_S
        with self._lock:
            self._closed = True
            self._queues.clear()
            self._impatient.clear()
            self._count = 0
            self._cond.notify_all()
            while self._busy and (left_s := give_up_at - self._clock()) > 0:
                self._cond.wait(left_s)

    # --- what waits ------------------------------------------------------------------------------

    def _must_wait(self, held: _HeldRequest) -> Served:
        """What a request is answered with that may not begin; None where it may."""
        now = self._clock()
        with self._lock:
            is_first = held.keys not in self._queues
            if is_first and self._limiter.begin(held.keys, held.cost, now) <= now:
                return None
            held.kind = kind_of(held.opcode, held.view, held.cost, self._is_direct(held.ino))
            if held.kind in BACKGROUND and self._background >= BACKGROUND_MAX:
                if self._is_refused(held):
                    return errno.EAGAIN
                self._limiter.begin_out_of_turn(held.keys, held.cost, now)
                return None
            self._delayed += 1
            if held.kind is not RequestKind.PROGRAM:
                held.until = now + PATIENCE_S
            if held.end > LARGE_BYTES and self._held_bytes + held.end > HELD_BYTES_MAX:
                held.is_whole, held.until = False, now + AGAIN_S
        held.view = memoryview(bytearray(held.view[: held.end if held.is_whole else BODY]))
        return Later(partial(self._hold, held), partial(self._cancel, held))

    def _is_refused(self, held: _HeldRequest) -> bool:
        """Whether a request that may not wait is refused rather than served."""
        return held.kind is RequestKind.READ_AHEAD and self._refuses_ahead

    def _hold(self, held: _HeldRequest, take: Take[Answer | int]) -> None:
        spawn: int | None = None
        with self._lock:
            if self._closed:
                return
            held.take = take
            self._number += 1
            held.number = self._number
            self._count += 1
            self._held_bytes += len(held.view)
            self._background += held.kind in BACKGROUND
            self._queues.setdefault(held.keys, deque()).append(held)
            if held.until != inf:
                heapq.heappush(self._impatient, (held.until, held.number, held))
            if not self._idle and self._free_slots:
                spawn = self._free_slots.pop()
            else:
                self._cond.notify()
        if spawn is not None:
            self._runtime.spawn(f"qos-{spawn}", partial(self._work, spawn))

    def _leaves(self, held: _HeldRequest) -> None:
        """It waits no more. The caller holds the lock."""
        queue = self._queues[held.keys]
        if queue[0] is held:
            queue.popleft()
        else:
            queue.remove(held)
        if not queue:
            del self._queues[held.keys]
        self._count -= 1
        self._held_bytes -= len(held.view)
        self._background -= held.kind in BACKGROUND

    def _cancel(self, held: _HeldRequest) -> None:
        """An INTERRUPT: what has not begun does not; what has is told as any request is."""
        assert self._slots is not None, "the session serves through `around`"
        with self._lock:
            take = held.take
            if take is not None and not held.is_begun and not self._closed:
                held.take = None
                self._leaves(held)
            else:
                take = None
        if held.is_begun:
            (unique,) = _unique(held.view)
            self._slots.interrupt(unique)
        elif take is not None:
            take(lambda: errno.EINTR)

    def _due(self, now: float) -> tuple[_HeldRequest | None, float]:
        """A request that waits no more; else when there may be one. The caller holds the lock."""
        while self._impatient:
            until, _, held = self._impatient[0]
            if held.take is not None and not held.is_begun:
                if until <= now:
                    return held, now
                break
            heapq.heappop(self._impatient)
        soonest = self._impatient[0][0] if self._impatient else inf
        first: _HeldRequest | None = None
        for keys, queue in self._queues.items():
            ready = self._limiter.ready_at(keys, now)
            if ready > now:
                soonest = min(soonest, ready)
            elif first is None or queue[0].number < first.number:
                first = queue[0]
        return first, soonest

    def _begins(self, held: _HeldRequest, now: float) -> bool:
        """Whether it begins; what it costs is taken then. The caller holds the lock."""
        is_late = now >= held.until
        if held.is_whole and not is_late:
            if self._limiter.begin(held.keys, held.cost, now) > now:
                return False
        elif held.is_whole and not self._is_refused(held):
            self._limiter.begin_out_of_turn(held.keys, held.cost, now)
        held.is_late = is_late
        held.is_begun = True
        self._leaves(held)
        return True

    # --- threads ---------------------------------------------------------------------------------

    def _work(self, slot: int) -> None:
        """The body of a thread: serve what may begin, until there has been nothing for a while."""
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
                    if self._closed:
                        self._cond.notify_all()

    def _serve_held(self, held: _HeldRequest) -> None:
        assert self._serve is not None, "the session serves through `around`"
        assert held.take is not None, "what has begun is not cancelled"
        if not held.is_whole:
            held.take(lambda: errno.EINTR)
        elif held.is_late and self._is_refused(held):
            held.take(lambda: errno.EAGAIN)
        else:
            answer = self._serve(held.opcode, held.caller, held.ino, held.view, held.end)
            self._note(held.opcode, held.about, answer)
            if isinstance(answer, Later):
                answer.begin(held.take)
            elif answer is not None:
                held.take(partial(_value, answer))

    def _next(self, slot: int, place: int) -> _HeldRequest | None:
        """The next request that begins, shown at `place`; None where the thread is to end."""
        assert self._slots is not None, "the session serves through `around`"
        leave_at = self._clock() + LEAVE_S
        spawn: int | None = None
        with self._lock:
            self._idle += 1
            try:
                while True:
                    now = self._clock()
                    held, soonest = self._due(now)
                    if held is not None and self._begins(held, now):
                        break
                    if self._closed or (not self._count and now >= leave_at):
                        self._free_slots.append(slot)
                        return None
                    if held is None:
                        self._cond.wait((soonest if self._count else leave_at) - now)
            finally:
                self._idle -= 1
            (self._slots.serving[place],) = _unique(held.view)
            self._busy += 1
            if self._count and not self._idle and self._free_slots:
                spawn = self._free_slots.pop()
        if spawn is not None:
            self._runtime.spawn(f"qos-{spawn}", partial(self._work, spawn))
        return held


def _value(answer: Answer | int) -> Answer | int:
    return answer

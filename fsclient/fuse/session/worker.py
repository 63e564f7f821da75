"""One worker: read a request, have it served, write the answer; until the mount is gone.

Called by the session, once per thread. See `session` for threads and stopping, `interrupt` for the
slots. The receive buffer is laid out so that the data of a WRITE is page-aligned.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final, NamedTuple, Protocol

from fsclient.fuse.dispatch.dispatch import Dispatcher
from fsclient.fuse.dispatch.subdir import Served
from fsclient.fuse.session.interrupt import IDLE, Interrupts
from fsclient.fuse.session.stats import SlotStats
from fsclient.fuse.session.tap import ServedRequest
from fsclient.fuse.wire import abi
from fsclient.fuse.wire.least import LEAST, UNANSWERED
from fsclient.fuse.wire.pack import Answer
from fsclient.fuse.wire.parse import BODY, supplementary_groups
from fsclient.fuse.wire.protocol import OPCODES, Opcode
from fsclient.kernel.contract import Buffer
from fsclient.kernel.later import Later, Outcome
from fsmeta.latency import BUCKETS, MICROSECONDS
from fsmeta.types import Caller

log = logging.getLogger(__name__)

# copying fewer takes less than handing over the turn to read
LARGE_BYTES: Final = 256 << 10
PIECES_MAX: Final = 1023  # IOV_MAX is 1024 and the header takes one
GONE: Final = frozenset((errno.ENODEV, errno.ECONNABORTED, errno.ENOTCONN))
RETRY: Final = frozenset((errno.EINTR, errno.EAGAIN, errno.ENOENT))  # ENOENT: taken back in time
_NOBODY: Final = Caller(-1, -1)
_SIZE: Final = Struct("=16xI")  # of READ and WRITE, as in abi.READ_IN and abi.WRITE_IN
_header_at: Final = abi.IN_HEADER.unpack_from
_INTERRUPT: Final = int(Opcode.INTERRUPT)
_WRITE: Final = int(Opcode.WRITE)
_MOVING: Final = (int(Opcode.READ), _WRITE)
_out_header: Final = abi.OUT_HEADER.pack
_OUT_BYTES: Final = abi.OUT_BYTES
_NO_OPCODE: Final = 0  # in place of every opcode beyond our tables
assert BUCKETS == 1 << 6, "the worker shifts an opcode by so many bits to its histogram"


def receive_buffer(max_write_bytes: int, resident: bool = False) -> memoryview:
    """Room for the largest request, from its header on.

    `resident`: in memory from the beginning. A process that is being killed gets no page any more,
    and a request that the kernel can't copy into its buffer then ends with EIO: fuse_dev_do_read().
    One that it can is answered by the next process.
    """
    head = abi.IN_BYTES + abi.WRITE_IN.size
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (mmap.MAP_POPULATE if resident else 0)
    room = mmap.mmap(-1, mmap.PAGESIZE + max_write_bytes, flags=flags)
    return memoryview(room)[mmap.PAGESIZE - head :]


def _length(answer: Served) -> int:
    """Bytes of an answer to READ."""
    if answer is None or isinstance(answer, int | Later):
        return 0
    return len(answer) if isinstance(answer, bytes) else sum(map(len, answer))


class Stop:
    """Whether the session's workers are to end; set once."""

    requested = False
    refuses = 0  # the errno of every request that is answered from now on; 0: it is served


class Roster(Protocol):
    """The other threads that serve: the pool, as a worker sees it."""

    reader: int
    watched: bool

    def watch(self) -> None: ...
    def take_turn(self, slot: int) -> None: ...
    def give_turn(self, slot: int) -> None: ...
    def is_surplus(self, slot: int) -> bool: ...


class Slot(NamedTuple):
    """What belongs to one worker alone, and its place in the interrupt table."""

    number: int
    stats: SlotStats
    view: memoryview  # of `receive_buffer`


class Worker:
    """Serves requests from `fd` on the thread that calls `run`."""

    def __init__(
        self,
        fd: int,
        slot: Slot,
        roster: Roster,
        dispatcher: Dispatcher,
        interrupts: Interrupts,
        clock: Callable[[], float],
    ) -> None:
        self._fd = fd
        self._number, self._stats, self._view = slot
        self._roster = roster
        self._dispatcher = dispatcher
        self._interrupts = interrupts
        self._clock = clock

    def run(self, stop: Stop) -> None:
        """Serve until the mount is gone or the session is to stop."""
        fd, slot, view, clock = self._fd, self._number, self._view, self._clock
        serve, lanes = self._dispatcher.serve, self._dispatcher.lanes
        stats = self._stats
        counts, errors, seconds = stats.counts, stats.errors, stats.seconds
        latencies, tap = stats.begin(), stats.tap
        serving = self._interrupts.serving
        roster, buffers = self._roster, [view]
        caller, size = _NOBODY, 0
        while not stop.requested:
            serving[slot] = IDLE
            if roster.reader != slot:
                if roster.is_surplus(slot):
                    return
                roster.take_turn(slot)
                continue
            try:
                got = os.readv(fd, buffers)
            except OSError as error:
                if error.errno in RETRY:
                    continue
                if error.errno in GONE:
                    return
                raise
            begun = clock()
            end, opcode, unique, ino, uid, gid, pid, extended = _header_at(view)
            serving[slot] = unique
            if not roster.watched:
                roster.watch()
            if opcode >= OPCODES:
                opcode = _NO_OPCODE
            if end != got or end < LEAST[opcode] + 8 * extended:
                if not self._refuse(got, opcode, unique):
                    return
                continue
            if opcode == _INTERRUPT:
                self._interrupt(unique)
                continue
            lane = lanes[opcode]
            answer: Served = None if lane is None or extended else lane(ino, view, end)
            if answer is None:
                if extended:
                    length, end = end, end - 8 * extended
                    groups = supplementary_groups(view, end, length)
                    caller = Caller(uid, gid, groups, pid, True)
                elif caller[3] != pid or caller[0] != uid or caller[1] != gid or caller[2]:
                    caller = Caller(uid, gid, (), pid, True)
                if opcode in _MOVING:
                    size = _SIZE.unpack_from(view, BODY)[0]
                    if size >= LARGE_BYTES:
                        roster.give_turn(slot)  # bytes are copied without the interpreter's lock
                answer = stop.refuses or serve(opcode, caller, ino, view, end)
            if stop.refuses:  # what was served meanwhile may come too late to be stored
                answer = stop.refuses
            stats.served += 1
            counts[opcode] += 1
            spent = clock() - begun
            seconds[opcode] += spent
            latencies[opcode << 6 | int(spent * MICROSECONDS).bit_length()] += 1
            if answer.__class__ is int:
                errors[opcode] += 1
            elif opcode in _MOVING:
                stats.bytes[opcode] += size if opcode == _WRITE else _length(answer)
            self._reply(unique, answer)
            if spent >= tap.floor_s:
                who = Caller(uid, gid, (), pid, True)
                tap.take(ServedRequest(unique, opcode, ino, who, view, end, answer, spent))

    def _refuse(self, got: int, opcode: int, unique: int) -> bool:
        """Answer a request that is not whole; False where nothing is sent any more."""
        if got >= abi.IN_BYTES and opcode not in UNANSWERED:
            log.error("a request of %d bytes with opcode %d is not whole", got, opcode)
            self._reply(unique, errno.EINVAL)
        return got > 0

    def _reply(self, unique: int, answer: Served) -> None:
        """Write the answer. A request that the kernel has given up on is not an error."""
        try:
            if isinstance(answer, bytes):
                os.write(self._fd, _out_header(_OUT_BYTES + len(answer), 0, unique) + answer)
            elif answer is None:
                return
            elif isinstance(answer, int):
                os.write(self._fd, abi.OUT_HEADER.pack(abi.OUT_BYTES, -answer, unique))
            elif isinstance(answer, Later):
                self._put_aside(unique, answer)
            else:
                self._write_pieces(unique, answer)
        except OSError as error:
            self._not_taken(unique, error)

    def _put_aside(self, unique: int, later: Later[Answer | int]) -> None:
        """Answer when the outcome comes, from whatever thread; this one serves other requests
        meanwhile."""
        aside = self._interrupts.aside
        is_cancelled = False

        def cancel() -> None:
            nonlocal is_cancelled
            is_cancelled = True
            later.cancel()

        aside[unique] = cancel

        def take(outcome: Outcome[Answer | int]) -> None:
            aside.pop(unique, None)
            self._reply(unique, outcome())

        later.begin(take)
        if is_cancelled or self._interrupts.interrupted():  # before it had begun
            later.cancel()

    def _write_pieces(self, unique: int, pieces: Sequence[Buffer]) -> None:
        size = abi.OUT_BYTES
        for piece in pieces:
            size += len(piece)
        head = abi.OUT_HEADER.pack(size, 0, unique)
        if len(pieces) > PIECES_MAX:
            pieces = (b"".join(pieces),)
        os.writev(self._fd, (head, *pieces))

    def _not_taken(self, unique: int, error: OSError) -> None:
        """The kernel refused an answer: the process that waits for it still needs one.

        ENOENT means that no process waits: the kernel drops a request that it has handed out only
        when the whole connection is aborted, so there are no lookups or handles to take back.
        """
        if error.errno == errno.ENOENT or error.errno in GONE:
            return
        log.error("the kernel refused an answer: %s", error)
        try:
            os.write(self._fd, abi.OUT_HEADER.pack(abi.OUT_BYTES, -errno.EIO, unique))
        except OSError as again:
            log.debug("no program waits for request %d: %s", unique, again)

    def _interrupt(self, unique: int) -> None:
        """INTERRUPT: end the request it names, be it served or parked, or have it sent again.

        The worker that read the request may not have said so yet; EAGAIN queues the INTERRUPT once
        more, until its request is found or has been answered (then the kernel says ENOENT).
        """
        (target,) = abi.INTERRUPT_IN.unpack_from(self._view, BODY)
        if not self._interrupts.interrupt(target) and not self._dispatcher.cancel(target):
            self._reply(unique, errno.EAGAIN)

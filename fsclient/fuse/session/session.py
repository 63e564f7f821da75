"""The native session on `/dev/fuse`: threads that read a request, serve it and write the answer.

Called by the mount command: `start()` agrees with the kernel and starts the workers, `wait()`
returns when the file system is unmounted or `stop()` was called. The descriptor stays its caller's.

Threading. Every worker has a slot: its receive buffer, its counters and its place in the interrupt
table belong to it alone. A worker is in readv(2), in the file system or in write(2); nothing is
held in between. `crew` says how many there are.

Stopping. A thread in readv(2) on `/dev/fuse` can't be told to leave: only a request makes it
return. `stop()` therefore asks statfs(2) of its own mount, once per worker, from a thread of its
own; each worker ends behind the next request it has answered. What that thread still asks when all
have ended fails when the descriptor is closed. The mount stays: its users wait until the descriptor
is closed (ENOTCONN) or served again. Where the mount can't be reached, `leave()` ends without them.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from fsclient.fuse.dispatch.dispatch import Dispatcher, operations
from fsclient.fuse.dispatch.fast_lane import Lane
from fsclient.fuse.dispatch.namespaced import served_in_namespace
from fsclient.fuse.dispatch.squash import Squash
from fsclient.fuse.dispatch.subdir import NotifierBelow, Serve
from fsclient.fuse.dispatch.zero_message import ZeroMessageOpens
from fsclient.fuse.mount.mount import Mounted
from fsclient.fuse.session import init
from fsclient.fuse.session.detached_calls import DetachedCalls
from fsclient.fuse.session.idle_poll import IdlePolling
from fsclient.fuse.session.interrupt import ABSENT, IDLE, Interrupts
from fsclient.fuse.session.notify import KernelNotifier
from fsclient.fuse.session.stats import OpStats, SlotStats, summed
from fsclient.fuse.session.tap import NO_TAP, Tap
from fsclient.fuse.session.thread_pool import ThreadPool
from fsclient.fuse.session.worker import GONE, RETRY, Slot, Worker, receive_buffer
from fsclient.fuse.wire import abi
from fsclient.fuse.wire.parse import BODY
from fsclient.fuse.wire.protocol import KERNEL_MAJOR, Init, Opcode
from fsclient.kernel.contract import FileSystem, Notifier, QuickAnswers
from fsclient.qos.kinds import PAGES_MINOR
from fsclient.qos.throttle import THREADS_MAX, Slots, Throttle
from fsmeta.errors import ConfigError, Corrupt
from fsmeta.runtime import Runtime
from fsmeta.types import ROOT_INO, Caller, Ino
from fsmeta.user_namespace import UserNamespace

log = logging.getLogger(__name__)

_SERVED_S: Final = 3.0  # how long requests under way may take once the session is left
_MAJOR_ONLY: Final = abi.INIT_OUT.pack(KERNEL_MAJOR, *(0,) * 11)


Around: TypeAlias = Callable[[Serve, Callable[[], int | None]], Serve]
"""Given what serves a request, and what tells the slot of the calling thread: what serves it."""

AroundLane: TypeAlias = Callable[[int, Lane], Lane]
"""Given an opcode and its fast lane: what takes its place."""


class SessionConfig(NamedTuple):
    """How a session serves."""

    threads: int = 4  # that always serve
    threads_max: int = 64  # while those are blocked
    wants: init.KernelWants = init.KernelWants()
    trace: Callable[[str], None] | None = None  # gets a line for each request
    on_corrupt: Callable[[Corrupt], None] | None = None
    idle: IdlePolling | None = None
    root: Ino = ROOT_INO  # the directory that is mounted
    tap: Tap = NO_TAP  # told of single requests
    squash: Squash | None = None  # whose requests are checked in another name
    quick: QuickAnswers | None = None  # asked before the file system
    around: tuple[Around, ...] = ()  # each wraps the serving of requests; the last is outermost
    around_lane: tuple[AroundLane, ...] = ()  # each wraps the fast lanes
    survives: bool = False  # another process goes on where this one is killed
    namespace: UserNamespace | None = None  # whose ids the kernel speaks in; None: the host's
    throttle: Throttle | None = None  # has requests wait for their limits


def _charged(
    namespace: UserNamespace | None, squash: Squash | None
) -> Callable[[Caller], Caller] | None:
    """As whom the volume knows a caller; None: as the kernel does."""
    if namespace is None:
        return None if squash is None else squash.caller
    uids, gids = namespace

    def outside(caller: Caller) -> Caller:
        known = caller._replace(uid=uids.outward(caller.uid), gid=gids.outward(caller.gid))
        return known if squash is None else squash.caller(known)

    return outside


class Session:
    """Serves one mount from one descriptor."""

    def __init__(
        self,
        mounted: Mounted,
        fs: FileSystem,
        runtime: Runtime,
        config: SessionConfig | None = None,
    ) -> None:
        self._fd, self._mountpoint = mounted
        self._fs = fs
        self._runtime = runtime
        self._config = config or SessionConfig()
        most = max(self._config.threads, self._config.threads_max)
        throttled = 0 if self._config.throttle is None else THREADS_MAX
        self._interrupts = Interrupts(most + throttled)
        self.under_way = self._interrupts.under_way
        self._stats = [SlotStats(self._config.tap) for _ in range(most)]
        self._crew = ThreadPool(
            runtime,
            self._interrupts,
            self._add_worker,
            self._fd,
            self._config.threads,
            most,
            self._looked,
        )
        self._max_write_bytes = self._config.wants.max_write_bytes
        self._dispatcher = Dispatcher(fs)
        self._opens: ZeroMessageOpens | None = None  # where the kernel opens without asking
        self.left = False  # written by `leave`
        self._kernel = KernelNotifier(self._fd)
        self.notifier: Notifier = self._kernel

    def run(self) -> None:
        """Serve until unmounted or stopped."""
        self.start()
        self.wait()

    def start(self) -> init.Agreement:
        """`agree`, and `begin`."""
        agreed = self.agree()
        self.begin()
        return agreed

    def agree(self, kept: init.Agreement | None = None) -> init.Agreement:
        """Agree with the kernel, which asks once for each mount; `kept` is what an earlier process
        has agreed to. Call once, after daemonising.

        Raises: ConfigError where the kernel is too old or the mount has gone.
        """
        agreed = kept or self._handshake()
        self._kernel = self._make_notifier(bool(agreed.flags & Init.HAS_EXPIRE_ONLY))
        self.notifier = self._kernel
        if self._config.root != ROOT_INO:
            self.notifier = NotifierBelow(self.notifier, self._config.root)
        table, quick = operations(bool(agreed.flags & Init.SETXATTR_EXT)), self._config.quick
        if self._config.wants.zero_message:
            self._opens = ZeroMessageOpens(self._fs, self._runtime)
            self._opens.amend(table)
            quick = None
        self._dispatcher = Dispatcher(
            self._fs,
            table,
            self._config.on_corrupt,
            self._config.trace,
            self._config.root,
            self._config.squash,
            quick,
        )
        if self._config.namespace is not None:
            serve = self._dispatcher.serve
            self._dispatcher.serve = served_in_namespace(serve, self._config.namespace)
        for around in self._config.around:
            self._dispatcher.serve = around(self._dispatcher.serve, self._interrupts.slot)
        for around_lane in self._config.around_lane:
            self._dispatcher.wrap_lanes(around_lane)
        if self._config.throttle is not None:
            self._limit(self._config.throttle, agreed.minor <= PAGES_MINOR)
        self._max_write_bytes = agreed.max_write_bytes
        return agreed

    def _limit(self, throttle: Throttle, by_pages: bool) -> None:
        """Serve through a throttle, whose threads have the slots behind those of the workers."""
        interrupts = self._interrupts
        slots = Slots(
            len(self._stats), interrupts.enter, interrupts.serving, interrupts.interrupt_served
        )
        charged = _charged(self._config.namespace, self._config.squash)
        serve, lanes = self._dispatcher.serve, self._dispatcher.lanes
        self._dispatcher.serve = throttle.around(
            serve, slots, self._config.root, lanes, charged, refuses_ahead=by_pages
        )

    def _make_notifier(self, expire_only: bool) -> KernelNotifier:
        if not self._config.survives:
            return KernelNotifier(self._fd, expire_only, self._mountpoint)
        run = DetachedCalls(self._runtime, self._fd).run
        return KernelNotifier(self._fd, expire_only, self._mountpoint, run)

    def can_resend(self) -> bool:
        """Whether the kernel can let another process go on with this mount."""
        return self._kernel.inval_all() and self._kernel.resend()

    def resend(self) -> None:
        """Have the kernel look up all names again, and send again what it has no answer to."""
        self._kernel.inval_all()
        self._kernel.resend()

    def begin(self) -> None:
        """Start the workers."""
        self._runtime.tell(self._crew)
        self._crew.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return when every worker has ended; False where that takes longer."""
        return self._crew.ended.wait(timeout_s)

    def adopt_handles(self, handles: Iterable[tuple[Ino, int, bool]]) -> None:
        """Inodes and handles that an earlier process has opened for readers without one, and
        whether they are directories'."""
        if self._opens is not None:
            for ino, fh, is_dir in handles:
                self._opens.adopt(ino, fh, is_dir)

    def release_handles(self) -> None:
        """End what was opened for readers without a handle. Every worker has ended."""
        if self._opens is not None:
            self._opens.close()

    def stop(self, through: str | None = None) -> None:
        """Let the workers end behind the requests they serve. Returns at once; then `wait`.

        Works through a mount that is there still, by default the one that was made: stop first,
        then unmount lazily.
        """
        self._crew.stop.requested = True
        self._runtime.spawn("fuse-stop", partial(self._nudge, through or self._mountpoint))

    def leave(self) -> None:
        """End at once, also where no way leads to the mount any more: its users get ENOTCONN.

        Workers may still wait for requests: the descriptor must stay open until the process ends.
        """
        self.left = True
        self._crew.leave(_SERVED_S)

    def waking(self, wake: Callable[[], None]) -> AbstractContextManager[None]:
        """Have `wake` called when the calling thread's request is interrupted."""
        return self._interrupts.waking(wake)

    def current_request(self) -> int | None:
        """The kernel's id of the request that the calling thread serves; None where it is none."""
        slot = self._interrupts.slot()
        unique = ABSENT if slot is None else self._interrupts.serving[slot]
        return unique if unique > IDLE else None

    def interrupted(self) -> bool:
        """Whether the request that the calling thread serves is to end with EINTR."""
        return self._interrupts.interrupted()

    def answer(self, request: int, code: int) -> None:
        """Answer a request that was parked: with an errno, or 0. From any thread."""
        try:
            self._answer(request, code, b"")
        except OSError as error:
            log.debug("no program waits for request %d: %s", request, error)

    def snapshot(self) -> dict[str, OpStats]:
        """Counts and latency of every operation so far, by name."""
        return summed(self._stats)

    def _looked(self, again: bool) -> None:
        """The pool's watcher has looked, and will look `again` soon."""
        idle = self._config.idle
        if idle is not None and again:
            idle.look(sum(slot.served for slot in self._stats))
        elif idle is not None:
            idle.rest()

    def _nudge(self, mountpoint: str) -> None:
        """A request for every worker that waits for one."""
        for _ in range(len(self._stats)):
            if self._crew.ended.is_set():
                return
            try:
                os.statvfs(mountpoint)
            except OSError as error:
                log.debug("statfs of %s: %s", mountpoint, error)

    def _add_worker(self, slot: int, crew: ThreadPool) -> Worker:
        """The worker of `slot`, with a buffer of its own."""
        view = receive_buffer(self._max_write_bytes, resident=self._config.survives)
        return Worker(
            self._fd,
            Slot(slot, self._stats[slot], view),
            crew,
            self._dispatcher,
            self._interrupts,
            self._runtime.monotonic,
        )

    def _handshake(self) -> init.Agreement:
        """Serve INIT, which comes first and alone."""
        view = receive_buffer(self._config.wants.max_write_bytes)
        while True:
            size, opcode, unique = self._next(view)
            if opcode != Opcode.INIT or size < BODY + abi.INIT_IN_OLD.size:
                self._answer(unique, errno.EIO, b"")
                continue
            offer = init.parse_init(view[BODY:size])
            if offer.major > KERNEL_MAJOR:
                self._answer(unique, 0, _MAJOR_ONLY)  # it asks again, in our words
                continue
            agreed = init.negotiate(offer, self._config.wants)
            if agreed is None:
                self._answer(unique, errno.EPROTO, b"")
                raise ConfigError(
                    f"the kernel speaks FUSE {offer.major}.{offer.minor}: get Linux 5.10 or newer"
                )
            self._answer(unique, 0, init.pack_init(agreed))
            log.debug("kernel FUSE %d.%d, flags %s", offer.major, offer.minor, agreed.flags)
            return agreed

    def _next(self, view: memoryview) -> tuple[int, int, int]:
        """Length, opcode and unique id of the next request."""
        while True:
            try:
                os.readv(self._fd, [view])
            except OSError as error:
                if error.errno in RETRY:
                    continue
                if error.errno in GONE:
                    raise ConfigError("unmounted before serving began: mount it again") from error
                raise
            size, opcode, unique = abi.IN_HEADER.unpack_from(view)[:3]
            return size, opcode, unique

    def _answer(self, unique: int, number: int, body: bytes) -> None:
        os.write(self._fd, abi.OUT_HEADER.pack(abi.OUT_BYTES + len(body), -number, unique) + body)

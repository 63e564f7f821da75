"""What the kernel is to be told, and the thread that tells it.

A row that has changed ends leases, and the kernel is told of each. An answer on its way to the
kernel may still arrive after its notification. Then the kernel drops attributes (Linux 5.8) but
keeps a name, so notifications of names are sent a second time, AGAIN_AFTER_S later, and once more
when the requests that were being served at the first one have been answered, if that took longer.
Those of inodes are not: the right answer, if it is on its way by then, would be dropped as well,
and the kernel would execute a program by its old mode.

Some of our own changes the kernel does not see in the answer to its request: open(2) that truncates
drops S_ISUID, and its answer carries no attributes; so does a commit at close(2). `stale` has them
asked for again first. Appends may end up elsewhere than in the kernel's pages: see `stale_pages`.

Threading: any method from any thread. `_cond` guards what waits; it is held across nothing. The
notifier thread holds nothing while it talks to the kernel. Notifications of names are sent by
threads of `NameNotices`, which a directory's lock may stop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final

from fsclient.kernel.contract import Notifier
from fsclient.kernel.ended_leases import EndedLeases, Lease, Notice, Repeat, try_to
from fsclient.kernel.later import Later, Take
from fsclient.kernel.name_notices import NameNotices
from fsmeta.runtime import Runtime, Thread, spawn_lasting
from fsmeta.types import Ino

log = logging.getLogger(__name__)

AGAIN_AFTER_S: Final = 0.05
AGAIN_MAX: Final = 1000  # batches of names that wait for answers; reads may hold them up, too


class KernelNotices:
    """See the module."""

    def __init__(
        self, runtime: Runtime, take: Callable[[Sequence[bytes] | None], EndedLeases]
    ) -> None:
        """`take` gives the leases that rows end, or all of them for None."""
        self._runtime = runtime
        self._take = take
        self._cond = runtime.condition()
        self._queue: deque[Sequence[bytes] | None] = deque()  # guarded by _cond; None: all rows
        self._stale_pages: set[Ino] = set()  # guarded by _cond
        self._drops: deque[tuple[Notice, Notice]] = deque()  # told how, and then; guarded by _cond
        self._again: deque[Repeat] = deque()  # the next first; guarded by _cond
        self._stopped = False  # guarded by _cond
        self._notifier: Notifier | None = None
        self._under_way: Callable[[], Collection[int]] = frozenset
        self._thread: Thread | None = None
        self._name_notices = NameNotices(runtime, self._tell_name, self._forget_names)
        self.is_slow = self._name_notices.is_slow  # of a directory: its names are told too late
        self.sent = 0  # about: threads may miss each other's

    def start(
        self, notifier: Notifier, under_way: Callable[[], Collection[int]] = frozenset
    ) -> None:
        """There is a kernel to tell from now on; `under_way` are its requests without an answer."""
        self._notifier = notifier
        self._under_way = under_way
        self._thread = spawn_lasting(self._runtime, "notifier", self._run)

    def stop(self) -> None:
        """End the notifier thread."""
        with self._cond:
            self._stopped = True
            self._cond.notify()
        if self._thread is not None:
            self._thread.join()
        self._name_notices.stop()

    def changed(self, rows: Sequence[bytes] | None) -> None:
        """Rows have changed, or all of them: the kernel is told of the leases that they end."""
        if self._notifier is None:
            return
        with self._cond:
            self._queue.append(rows)
            self._cond.notify()

    def stale(self, ino: Ino) -> None:
        """We changed attributes of `ino` otherwise than the kernel has asked for.

        From the thread that serves a request about it, or from one that serves none: the kernel is
        notified before the caller is answered. It raises nothing: what we changed is stored, and a
        caller that got an error would have it stored again.
        """
        if self._notifier is None:
            return
        try:
            self._notifier.inval_attr(ino)
        except OSError as error:
            log.warning("the kernel is told later that inode %d has changed: %s", ino, error)
            self.stale_pages(ino)

    def stale_pages(self, ino: Ino) -> None:
        """The kernel has pages of `ino` that are not what the file holds: as `stale`."""
        if self._notifier is None:
            return
        with self._cond:
            self._stale_pages.add(ino)
            self._cond.notify()

    def drop_pages(self, ino: Ino, dropped: Notice, then: Notice) -> bool:
        """Have the kernel forget pages of `ino` and ask for its attributes.

        `dropped` is called where it has, and `then` behind that in any case. False where there is
        no kernel to be told. From any thread.
        """
        notifier = self._notifier
        if notifier is None:
            return False

        def tell() -> None:
            notifier.reload(ino)
            dropped()

        return self._drop_soon(tell, then)

    def drop_range(self, ino: Ino, begin: int, end: int) -> Later[None] | None:
        """Have the kernel forget pages with these bytes, before the waiting caller is answered.

        None where there is no kernel to be told.
        """
        notifier = self._notifier
        if notifier is None:
            return None

        def start(take: Take[None]) -> None:
            def done() -> None:
                take(lambda: None)

            if not self._drop_soon(lambda: notifier.inval_pages(ino, begin, end), done):
                done()

        return Later(start)

    def _drop_soon(self, tell: Notice, then: Notice) -> bool:
        """Have the notifier `tell` the kernel and then do `then`; False where it has ended."""
        with self._cond:
            if self._stopped:
                return False
            self._drops.append((tell, then))
            self._cond.notify()
        return True

    def _run(self) -> None:
        while True:
            look_s = self._name_notices.look()
            with self._cond:
                while not (self._queue or self._stale_pages or self._drops or self._stopped):
                    left = self._left_s()
                    if left is not None and left <= 0:
                        break
                    if not self._cond.wait(look_s if left is None else min(left, look_s or left)):
                        break
                if self._stopped:
                    return
                batch = list(self._queue)
                self._queue.clear()
                pages, self._stale_pages = self._stale_pages, set()
                drops, self._drops = self._drops, deque()
            self._drop(drops)
            while (due := self._due()) is not None:
                self._repeat(due)
            ended = [self._end(rows) for rows in batch]
            before = frozenset(self._under_way())
            self._tell((ino, None) for each in ended for ino in each.inodes)
            self._tell((ino, None) for ino in pages)
            for each in ended:
                self._tell_twice(each.twice, before)

    def _left_s(self) -> float | None:
        """How long until something is to be told once more; `_cond` is held."""
        return self._again[0].when - self._runtime.monotonic() if self._again else None

    def _due(self) -> Repeat | None:
        """What is to be told once more, now."""
        with self._cond:
            left = self._left_s()
            return self._again.popleft() if left is not None and left <= 0 else None

    def _tell_twice(self, leases: Sequence[Lease], before: frozenset[int]) -> None:
        """Tell of names and listings, and have that done again."""

        def later(told: Sequence[Lease]) -> None:
            with self._cond:
                when = self._runtime.monotonic() + AGAIN_AFTER_S
                self._again.append(Repeat(when, told, before))
                self._cond.notify()

        self._tell_names(leases, later)

    def _repeat(self, due: Repeat) -> None:
        """Tell once more, unless it waits for answers, for which it goes on waiting."""
        _, leases, before, told = due
        left = frozenset(before.intersection(self._under_way()))
        if len(self._again) >= AGAIN_MAX:
            left = frozenset()

        def later(these: Sequence[Lease]) -> None:
            if left:
                with self._cond:
                    when = self._runtime.monotonic() + AGAIN_AFTER_S
                    self._again.append(Repeat(when, these, left, told=True))
                    self._cond.notify()

        if not told or not left:
            self._tell_names(leases, later)
        else:
            later(leases)

    def _tell_names(self, leases: Sequence[Lease], then: Callable[[Sequence[Lease]], None]) -> None:
        """Tell of listings, and have the names of each directory told; `then` gets what was."""
        names: dict[Ino, list[bytes]] = {}
        listings: dict[Lease, None] = {}
        for lease in leases:
            if lease[1] is None:
                listings[lease] = None
            else:
                names.setdefault(lease[0], []).append(lease[1])
        self._tell(listings)
        if alone := [lease for lease in listings if lease[0] not in names]:
            then(alone)
        for parent, those in names.items():
            told: list[Lease] = [(parent, None)] if (parent, None) in listings else []
            told += [(parent, name) for name in those]
            self._name_notices.submit(parent, those, partial(then, told))

    def _drop(self, drops: Iterable[tuple[Notice, Notice]]) -> None:
        for tell, then in drops:
            self.sent += 1
            try:
                try_to(tell)
            finally:
                then()

    def _end(self, rows: Sequence[bytes] | None) -> EndedLeases:
        """The leases that `rows` end and that the kernel has yet to be told of.

        All names go in one step where it can do that. They need no second notification: the kernel
        tells by when it asked whether an answer on its way is one of those.
        """
        ended = self._take(rows)
        if rows is None and self._notifier is not None and self._notifier.inval_all():
            self.sent += 1
            return ended._replace(twice=[lease for lease in ended.twice if lease[1] is None])
        return ended

    def _tell(self, inodes: Iterable[Lease]) -> None:
        assert self._notifier is not None
        for ino, _ in inodes:
            self.sent += 1
            try_to(partial(self._notifier.inval_inode, ino))

    def _tell_name(self, parent: Ino, name: bytes) -> None:
        """From a thread that the directory's lock may stop."""
        assert self._notifier is not None
        self.sent += 1
        try_to(partial(self._notifier.inval_entry, parent, name))

    def _forget_names(self) -> None:
        """The kernel learns of some names too late: it forgets all where one step does that."""
        if self._notifier is not None:
            self._notifier.inval_all()

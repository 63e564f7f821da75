"""What the kernel may believe and for how long, and how it learns that it no longer may.

While the store vouches for a row (client tracking), the kernel may keep what came from it for
LONG_S, so that a stat of a warm data set never leaves the kernel. Each such grant is a lease, noted
here; when the store says that others changed the row, a thread of its own sends the notifications
for its leases. Without the promise the kernel gets SHORT_S for what exists and nothing for what
does not.

No lease is missed: it is noted *before* the promise is looked at, the promise ends before leases
are taken, and a grant whose directory was taken meanwhile is noted again. An answer on its way to
the kernel may still arrive after its notification. Of attributes it is not believed then (Linux
5.8), of a name it is, so notifications of names are sent a second time, AGAIN_AFTER_S later, and
once more when the requests that were being served at the first one have been answered, if that took
longer. Those of inodes are not: the right answer, if it is on its way by then, would not be
believed either, and who executes a program would go by the mode that it had.

Some of our own changes the kernel does not see in the answer to its request: open(2) that truncates
drops S_ISUID, and its answer carries no attributes; so does a commit at close(2). `stale` has them
asked for again, before the answer. Appends may
end up elsewhere than the kernel has put their bytes: `stale_pages` has it forget those.

open(2) promises more than SHORT_S: what is believed without a promise is noted with its version,
and where an open finds another one the kernel is told before open returns (`opened`).

Threading: grants take no lock (each step on the leases is atomic); the notifier thread takes leases
and holds nothing while it talks to the kernel. Names are told by threads of `NameNotices`, which a
directory's lock may stop; in a directory where that happens the kernel gets SHORT_S.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from fsclient.kernel.contract import EntryOut, Notifier, Stat
from fsclient.kernel.later import Later, Take
from fsclient.kernel.name_notices import NameNotices
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime, Thread, spawn_lasting
from fsmeta.schema import keys
from fsmeta.txn.contended_dirs import BELIEVED_S
from fsmeta.types import Attr, Dentry, Ino

log = logging.getLogger(__name__)

LONG_S: Final = 3600.0
SHORT_S: Final = 1.0
AGAIN_AFTER_S: Final = 0.05
_DOTS: Final = (b".", b"..")
_new: Final = tuple.__new__  # makes a NamedTuple in half the time of its constructor
AGAIN_MAX: Final = 1000  # batches of names that wait for answers; reads may hold them up, too
LEASES_MAX: Final = 500_000  # of each kind: 90 MB, without news 160; then all are taken back


_Lease: TypeAlias = tuple[Ino, bytes | None]  # (directory, name), or (inode, None)


class _Ended(NamedTuple):
    """What the kernel is to forget."""

    inodes: list[Ino]  # attributes and pages
    twice: list[_Lease]  # names and listings: an answer on its way is believed


class _Again(NamedTuple):
    """What the kernel is to be told once more."""

    when: float
    leases: Sequence[_Lease]
    before: frozenset[int]  # requests that may be answered with what has ended
    told: bool = False  # a second time; only those answers are waited for


_Then: TypeAlias = Callable[[], None]


class CacheLeases:
    """Grants time to the kernel, and takes it back."""

    def __init__(self, meta: Meta, runtime: Runtime) -> None:
        self._meta = meta
        self._busy = meta.cache.busy
        self._runtime = runtime
        self._names: dict[Ino, set[bytes]] = {}
        self._name_count = 0  # about: threads may miss each other's additions
        self._inodes: set[Ino] = set()
        self._long: set[Ino] = set()  # those of them that were believed for LONG_S
        self._short: dict[Ino, tuple[int, int]] = {}  # mtime and size, believed for SHORT_S
        self._listed: set[Ino] = set()  # directories whose listing the kernel may have kept
        self._cond = runtime.condition()
        self._queue: deque[Sequence[bytes] | None] = deque()  # guarded by _cond; None: all rows
        self._stale_pages: set[Ino] = set()  # guarded by _cond
        self._drops: deque[tuple[_Then, _Then]] = deque()  # told how, and then; guarded by _cond
        self._stopped = False  # guarded by _cond
        self._notifier: Notifier | None = None
        self._under_way: Callable[[], Collection[int]] = frozenset
        self._thread: Thread | None = None
        self._again: deque[_Again] = deque()  # the next first; guarded by _cond
        self._name_notices = NameNotices(runtime, self._tell_name, self._forget_names)
        self.notifications = 0  # about: threads may miss each other's
        meta.on_change(self._changed)

    def start(
        self, notifier: Notifier, under_way: Callable[[], Collection[int]] = frozenset
    ) -> None:
        """There is a kernel to tell from now on; `under_way` are its requests without an answer."""
        self._notifier = notifier
        self._under_way = under_way
        self._thread = spawn_lasting(self._runtime, "notifier", self._run)

    def numbers(self) -> dict[str, float]:
        """For `.stats`: what the kernel may answer by itself, and what it was told to forget."""
        return {
            "kernel_notifications_total": self.notifications,
            'kernel_leases{kind="name"}': self._name_count,
            'kernel_leases{kind="inode"}': len(self._inodes),
        }

    def stop(self) -> None:
        """End the notifier thread."""
        with self._cond:
            self._stopped = True
            self._cond.notify()
        if self._thread is not None:
            self._thread.join()
        self._name_notices.stop()

    # --- grants ----------------------------------------------------------------------------------

    def entry(self, parent: Ino, name: bytes, attr: Attr) -> EntryOut:
        """What a name leads to, with the time the kernel may believe both."""
        if self._notifier is None:
            return EntryOut(attr, SHORT_S, SHORT_S)
        return EntryOut(attr, self._name_ttl(parent, name, SHORT_S), self._attr_ttl(attr))

    def absent(self, parent: Ino, name: bytes) -> EntryOut | None:
        """That a name leads nowhere; None where the kernel may not believe it."""
        ttl = 0.0 if self._notifier is None else self._name_ttl(parent, name, 0.0)
        return EntryOut(None, ttl, 0.0) if ttl else None

    def stat(self, attr: Attr) -> Stat:
        """Attributes with the time the kernel may believe them."""
        return Stat(attr, SHORT_S if self._notifier is None else self._attr_ttl(attr))

    def reading(self, ino: Ino) -> None:
        """The kernel is about to keep pages of a file, maybe without asking for its attributes.

        To be called before the store is asked what is in them.
        """
        while True:
            inodes = self._inodes
            inodes.add(ino)
            if inodes is self._inodes:
                return

    def _make_room(self) -> None:
        """Where there are too many leases, begin anew: most are of what nobody uses any more."""
        if max(len(self._inodes), self._name_count) >= LEASES_MAX:
            self._changed(None)

    def _names_of(self, parent: Ino) -> set[bytes]:
        """The leased names of a directory, to be added to."""
        names = self._names.get(parent)
        return self._names.setdefault(parent, set()) if names is None else names

    def _attr_ttl(self, attr: Attr) -> float:
        self._make_room()
        ino = attr.ino
        if attr.is_dir and self._busy.has_dir(ino):
            return BELIEVED_S
        while True:
            inodes = self._inodes
            inodes.add(ino)
            long = self._meta.vouches_inode(ino)
            if ino in inodes and inodes is self._inodes:
                if long:
                    self._long.add(ino)
                    return LONG_S
                self._short[ino] = (attr.mtime_ns, attr.size)
                return SHORT_S

    def _name_ttl(self, parent: Ino, name: bytes, otherwise: float) -> float:
        self._make_room()
        if self._busy.has_dir(parent):
            return BELIEVED_S if otherwise else 0.0  # no lease: it would end with the next news
        while True:
            names = self._names_of(parent)
            if name not in names:
                self._name_count += 1
                names.add(name)
            long = self._meta.vouches_names(parent) and not self._name_notices.is_slow(parent)
            ttl = LONG_S if long else otherwise
            if self._names.get(parent) is names:
                return ttl

    def entries(self, parent: Ino, found: Sequence[tuple[bytes, Attr]]) -> dict[bytes, EntryOut]:
        """`entry` for many names of a directory at once."""
        if self._notifier is None:
            return {name: EntryOut(attr, SHORT_S, SHORT_S) for name, attr in found}
        self._make_room()
        inos = [attr.ino for _, attr in found]
        while True:
            inodes, names = self._inodes, self._names_of(parent)
            before = len(names)
            names.update([name for name, _ in found])
            inodes.update(inos)
            self._name_count += len(names) - before
            slow = self._name_notices.is_slow(parent)
            name_ttl = LONG_S if self._meta.vouches_names(parent) and not slow else SHORT_S
            if self._busy.has_dir(parent):
                name_ttl = BELIEVED_S
            long = self._meta.vouched_inodes(inos)
            taken = inodes is not self._inodes or self._names.get(parent) is not names
            if not taken and inodes.issuperset(inos):
                break
        self._long.update(long)
        if long is inos:
            return {name: _new(EntryOut, (attr, name_ttl, LONG_S)) for name, attr in found}
        self._short.update(
            (attr.ino, (attr.mtime_ns, attr.size)) for _, attr in found if attr.ino not in long
        )
        return {
            name: EntryOut(attr, name_ttl, LONG_S if attr.ino in long else SHORT_S)
            for name, attr in found
        }

    def unknown(self, parent: Ino, names: Sequence[Dentry]) -> list[Dentry]:
        """Those of a listing, without `.` and `..`, that the kernel may not still believe."""
        held = self._names.get(parent)
        if not held or not self._meta.vouches_names(parent):
            return [dentry for dentry in names if dentry[0] not in _DOTS]
        inodes, long = self._inodes, self._long
        return [
            dentry
            for dentry in names
            if (dentry[1] not in long or dentry[0] not in held or dentry[1] not in inodes)
            and dentry[0] not in _DOTS
        ]

    def listing(self, ino: Ino) -> tuple[bool, bool]:
        """Whether the kernel may keep the listing of a directory that is being opened, and whether
        one that it has kept is still true."""
        if self._notifier is None or not self._meta.vouches_names(ino):
            return False, False
        keep = ino in self._listed
        self._listed.add(ino)
        return True, keep

    def forget(self, ino: Ino) -> None:
        """The kernel has dropped an inode, and with it what it believed of it."""
        self._inodes.discard(ino)
        self._long.discard(ino)
        self._short.pop(ino, None)
        self._listed.discard(ino)
        self._name_count -= len(self._names.pop(ino, ()))

    # --- taking back -----------------------------------------------------------------------------

    def stale(self, ino: Ino) -> None:
        """We changed attributes of `ino` otherwise than the kernel has asked for.

        From the thread that serves a request about it, or from one that serves none: who is
        answered may go on at once, so the kernel knows before. It raises nothing: what we changed
        is stored, and who has heard of an error would have it stored again.
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

    def named(self, parent: Ino) -> None:
        """We gave a directory a name that the kernel has not asked for."""
        self._changed([keys.dir_row(parent), keys.inode_row(parent)])

    def opened(self, attr: Attr) -> None:
        """A file is being opened, and these are its attributes.

        From the thread that serves the request: `inval_attr` waits for nobody.
        """
        told = self._short.get(attr.ino)
        if told is not None and told != (attr.mtime_ns, attr.size):
            self._short.pop(attr.ino, None)
            assert self._notifier is not None
            self._notifier.inval_attr(attr.ino)

    def drop_pages(self, ino: Ino, then: Callable[[], None]) -> bool:
        """Have the kernel forget pages of `ino` and ask for its attributes, then call `then`.

        False where there is no kernel to be told. From any thread.
        """
        notifier = self._notifier
        return notifier is not None and self._drop_soon(lambda: notifier.reload(ino), then)

    def drop_range(self, ino: Ino, begin: int, end: int) -> Later[None] | None:
        """Have the kernel forget pages with these bytes, before who waits for it is answered.

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

    def _drop_soon(self, tell: _Then, then: _Then) -> bool:
        """Have the notifier `tell` the kernel and then do `then`; False where it has ended."""
        with self._cond:
            if self._stopped:
                return False
            self._drops.append((tell, then))
            self._cond.notify()
        return True

    def _changed(self, rows: Sequence[bytes] | None) -> None:
        """Called by the store's thread, after our own caches have dropped the rows."""
        if self._notifier is None:
            return
        with self._cond:
            self._queue.append(rows)
            self._cond.notify()

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

    def _due(self) -> _Again | None:
        """What is to be told once more, now."""
        with self._cond:
            left = self._left_s()
            return self._again.popleft() if left is not None and left <= 0 else None

    def _tell_twice(self, leases: Sequence[_Lease], before: frozenset[int]) -> None:
        """Tell of names and listings, and have that done again."""

        def later(told: Sequence[_Lease]) -> None:
            with self._cond:
                when = self._runtime.monotonic() + AGAIN_AFTER_S
                self._again.append(_Again(when, told, before))
                self._cond.notify()

        self._tell_names(leases, later)

    def _repeat(self, due: _Again) -> None:
        """Tell once more, unless it waits for answers, for which it goes on waiting."""
        _, leases, before, told = due
        left = frozenset(before.intersection(self._under_way()))
        if len(self._again) >= AGAIN_MAX:
            left = frozenset()

        def later(these: Sequence[_Lease]) -> None:
            if left:
                with self._cond:
                    when = self._runtime.monotonic() + AGAIN_AFTER_S
                    self._again.append(_Again(when, these, left, told=True))
                    self._cond.notify()

        if not told or not left:
            self._tell_names(leases, later)
        else:
            later(leases)

    def _tell_names(
        self, leases: Sequence[_Lease], then: Callable[[Sequence[_Lease]], None]
    ) -> None:
        """Tell of listings, and have the names of each directory told; `then` gets what was."""
        names: dict[Ino, list[bytes]] = {}
        listings: dict[_Lease, None] = {}
        for lease in leases:
            if lease[1] is None:
                listings[lease] = None
            else:
                names.setdefault(lease[0], []).append(lease[1])
        self._tell(listings)
        if alone := [lease for lease in listings if lease[0] not in names]:
            then(alone)
        for parent, those in names.items():
            told: list[_Lease] = [(parent, None)] if (parent, None) in listings else []
            told += [(parent, name) for name in those]
            self._name_notices.submit(parent, those, partial(then, told))

    def _drop(self, drops: Iterable[tuple[_Then, _Then]]) -> None:
        for tell, then in drops:
            self.notifications += 1
            try:
                _try_to(tell)
            finally:
                then()

    def _end(self, rows: Sequence[bytes] | None) -> _Ended:
        """The leases that `rows` end and that the kernel has yet to be told of.

        All names go in one step where it can do that. They need no second notification: the kernel
        tells by when it asked whether an answer on its way is one of those.
        """
        ended = self._take(rows)
        if rows is None and self._notifier is not None and self._notifier.inval_all():
            self.notifications += 1
            return ended._replace(twice=[lease for lease in ended.twice if lease[1] is None])
        return ended

    def _tell(self, inodes: Iterable[_Lease]) -> None:
        assert self._notifier is not None
        for ino, _ in inodes:
            self.notifications += 1
            _try_to(partial(self._notifier.inval_inode, ino))

    def _tell_name(self, parent: Ino, name: bytes) -> None:
        """From a thread that the directory's lock may stop."""
        assert self._notifier is not None
        self.notifications += 1
        _try_to(partial(self._notifier.inval_entry, parent, name))

    def _forget_names(self) -> None:
        """The kernel hears of some names too late: it forgets all where one step does that."""
        if self._notifier is not None:
            self._notifier.inval_all()

    def _take(self, rows: Sequence[bytes] | None) -> _Ended:
        """The leases that `rows` end; all of them for None."""
        if rows is None:
            inodes, self._inodes = self._inodes, set()
            self._long = set()
            self._short = {}
            names, self._names = self._names, {}
            self._name_count = 0
            every: list[_Lease] = []
            while self._listed:
                every.append((self._listed.pop(), None))
            for parent, held in list(names.items()):
                every += [(parent, name) for name in list(held)]
            return _Ended(list(inodes), every)
        ended = _Ended([], [])
        for row in rows:
            ino = Ino(keys.id_of(row))
            if row[:1] == keys.INODE_PREFIX and ino in self._inodes:
                self._inodes.discard(ino)
                self._long.discard(ino)
                ended.inodes.append(ino)
            elif row[:1] == keys.DIR_PREFIX:
                held = self._names.pop(ino, set())
                self._listed.discard(ino)
                self._name_count -= len(held)
                ended.twice.append((ino, None))  # the listing the kernel may have kept
                ended.twice.extend((ino, name) for name in list(held))
        return ended


def _try_to(tell: _Then) -> None:
    """Tell the kernel; an error is of this notification, and does not stop those behind it."""
    try:
        tell()
    except OSError as error:
        log.warning("the kernel was not told of a change: %s", error)

"""Ids of slices on their way: which of those handed out may still become part of a file.

`Meta` takes ids for writers and compaction and says what became of them. The lowest that is open is
this client's *floor*: it will never commit a slice below it. Sessions show their floors with each
beat, so `gc` knows without a clock which objects no commit will refer to any more
(docs/design/deletion-gc-repair).

Slices of a commit in doubt may be part of a file already, which another client has changed since:
they are offered again only when `settle` has said that they are not
(docs/design/metadata-transactions).

Threading: any method from any thread; one lock, held while the next batch of ids is fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from fsmeta.errors import Ambiguous, Doubt, Voided
from fsmeta.runtime import Runtime
from fsmeta.types import SliceId


class Supply(Protocol):
    """Where ids come from, ever higher ones."""

    def take(self) -> int:
        """The next id. Raises: StoreError."""

    def following(self) -> int | None:
        """What `take` would give without asking the store; None where it would ask."""

    def let_go_if_idle(self) -> None:
        """Give up what is left of a batch of which nothing was taken since the last call."""

    def let_go(self) -> None:
        """Give up what is left of a batch."""


class Committing:
    """See `SliceAllocator.committing`."""

    __slots__ = ("_ids", "_of")

    def __init__(self, of: SliceAllocator, ids: Collection[int]) -> None:
        self._of = of
        self._ids = ids

    def __enter__(self) -> None:
        self._of.begin(self._ids)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if isinstance(error, Ambiguous):
            self._of.doubt(self._ids, error.doubt)
        else:
            self._of.end(self._ids, kind is None)


class SliceAllocator:
    """Hands out ids and keeps those that are open."""

    def __init__(self, runtime: Runtime, supply: Supply) -> None:
        self._supply = supply
        self._lock = runtime.lock()
        self._open: dict[int, None] = {}  # guarded by _lock, as all below; in order, so ascending
        self._busy: set[int] = set()  # in a commit, or in one whose outcome is not known
        self._given_up: set[int] = set()  # of the busy ones
        self._doubts: dict[int, Doubt] = {}  # of the busy ones: by what to ask for their fate
        self._applied: set[int] = set()  # part of a file, which their owner does not know yet
        # A lock of its own: a store that holds commits back reports them under its lock, and
        # `take` may be waiting for that store.
        self._kept: dict[int, int] = {}  # committed, and not in the store yet; how many times
        self._keeping = runtime.lock()

    def take(self) -> SliceId:
        """The next id, open from now on. Raises: StoreError."""
        with self._lock:  # both at once, or the floor could pass an id that is not noted yet
            number = self._supply.take()
            self._open[number] = None
        return SliceId(number)

    def committing(self, ids: Collection[int]) -> Committing:
        """Around a commit of these slices: where it works they are no longer open.

        Where its outcome is unknown they stay open until it is known: see `settle`.
        """
        return Committing(self, ids)

    def begin(self, ids: Collection[int]) -> None:
        """A commit of these is under way."""
        with self._lock:
            self._busy.update(ids)

    def end(self, ids: Collection[int], committed: bool) -> None:
        """It has worked, or it certainly has not."""
        with self._lock:
            self._busy.difference_update(ids)
            if committed:
                self._close(ids)
            elif self._given_up:
                self._close(self._given_up.intersection(ids))

    def give_up(self, ids: Iterable[int]) -> None:
        """These will not be committed, unless they are being committed now."""
        with self._lock:
            gone = set(ids)
            self._given_up |= gone & self._busy
            self._applied -= gone
            self._close(gone - self._busy)

    def doubt(self, ids: Collection[int], doubt: Doubt | None) -> None:
        """It may have worked. Without a `doubt` that will never be known."""
        if doubt is not None:
            with self._lock:
                self._doubts.update(dict.fromkeys(ids, doubt))

    def settle(self, ids: Collection[int], fate: Callable[[Doubt], bool]) -> set[int]:
        """Those of `ids` that a commit has made part of a file, though that was in doubt.

        Ask before they are offered again. `fate` is that of `Transactor`, and so is what is raised.
        """
        if not self._doubts and not self._applied:
            return set()
        with self._lock:
            doubts = {self._doubts[number] for number in ids if number in self._doubts}
        for doubt in doubts:
            self._settled(doubt, fate(doubt))
        with self._lock:
            return self._applied.intersection(ids)

    def settle_all(self, fate: Callable[[Doubt], bool]) -> None:
        """Ask about every commit in doubt: what is given up may lie below the floor then."""
        with self._lock:
            doubts = set(self._doubts.values())
        for doubt in doubts:
            try:
                self._settled(doubt, fate(doubt))
            except Voided:  # it is over; the holder of its slices must learn so
                self._settled(doubt, None)

    def _settled(self, doubt: Doubt, applied: bool | None) -> None:
        """What became of a commit is known; None: it will never be known."""
        with self._lock:
            ids = {number for number, each in self._doubts.items() if each == doubt}
            gone = ids & self._given_up
            if applied:
                self._applied |= ids - gone
                self._close(ids)
            else:
                self._close(gone)
            over = gone if applied is None else ids
            self._busy -= over
            for number in over:
                del self._doubts[number]

    def keep(self, ids: Iterable[int], kept: bool) -> None:
        """Commits of these are held back; or, not `kept`, one of them no more. Never waits."""
        with self._keeping:
            for number in ids:
                count = self._kept.pop(number, 0) + (1 if kept else -1)
                if count:
                    self._kept[number] = count

    def _close(self, ids: Iterable[int]) -> None:
        """The caller holds the lock."""
        for number in ids:
            self._open.pop(number, None)
            self._given_up.discard(number)

    def let_go_if_idle(self) -> None:
        """A client that writes nothing must not hold the floor down with ids it never uses."""
        self._supply.let_go_if_idle()

    def let_go(self) -> None:
        """Take the next ids from a new batch."""
        self._supply.let_go()

    def floor(self, handed_out: int) -> int:
        """No slice below it will be committed by us.

        `handed_out`: the next id that was free a moment ago, read after the last `let_go_if_idle`.
        """
        with self._lock:
            following = self._supply.following()
            bounds = [*list(self._open)[:1], handed_out if following is None else following]
            with self._keeping:
                bounds += [min(self._kept)] if self._kept else []
            return min(bounds)

"""The verbs of `Meta` for the data of files: slices on their way, written, read and compacted.

Threading: any method from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsmeta.meta.runner import VerbRunner
from fsmeta.meta.sessions import SessionVerbs
from fsmeta.ops.data import extent, fitting
from fsmeta.ops.names import lookup
from fsmeta.rules.context import Changed, Env
from fsmeta.schema import keys
from fsmeta.store.contract import Call
from fsmeta.txn.txn import Txn
from fsmeta.types import ROOT_CALLER, Attr, Caller, Ino, SessionId, Slice, SliceId


class FileDataVerbs(VerbRunner):
    """See the module."""

    sessions: SessionVerbs  # in whose name slices are committed; `Meta` has it

    def new_slice_id(self) -> SliceId:
        return self.slices.take()

    def give_up_slices(self, ids: Iterable[SliceId]) -> None:
        """These were taken and will not become part of a file."""
        self.slices.give_up(ids)

    def read_chunk(self, ino: Ino, index: int) -> list[Slice]:
        """The slices of one 64 MiB chunk, oldest first."""
        known = extent.known_chunk(self.cache, ino, index)
        if known is not None:
            return known
        if index == 0:
            self._neighbours.missed_chunk(ino)
        return self._view(extent.read_chunk, ROOT_CALLER, ino, index)

    def write_slices(
        self,
        ino: Ino,
        batch: Sequence[tuple[int, Slice]],
        length: int,
        mtime_ns: int,
        unprivileged: Caller | None = None,
        session: SessionId | None = None,
    ) -> Changed:
        """Make stored slices part of a file: (chunk index, slice) in order.

        In no other name than that of `session`, where it is given. Those that an earlier commit in
        doubt has brought are left out. Raises: Fenced; Voided where gc may have deleted them while
        another client took us for dead.
        """
        self._turns.wait(ino)
        known = self.slices.settle([piece.id for _, piece in batch], self.transactor.fate)
        if known:
            batch, length = extent.without(batch, known)
            if not batch:
                attr = self._attr_now(ino)
                self.slices.give_up(known)
                return Changed(attr, attr)
        ids, now_ns = [piece.id for _, piece in batch], self._now_ns()

        def verb(txn: Txn) -> Changed:
            txn.fence = self.sessions.fence_for(ids, session)
            env = Env(ROOT_CALLER, now_ns, *self._rules)
            return extent.write(txn, env, ino, batch, length, mtime_ns, unprivileged)

        args = (ino, batch, length, mtime_ns, unprivileged)
        with self.slices.committing(ids):
            changed = self.transactor.run(verb, Call(extent.write, ROOT_CALLER, now_ns, args))
        self.slices.give_up(known)
        return changed

    def _attr_now(self, ino: Ino) -> Attr:
        self.store.poll_invalidations()
        return lookup.known_attr(self.cache, ino) or self._view(lookup.getattr_, ROOT_CALLER, ino)

    def settle_doubts(self) -> None:
        """Find out what became of commits of slices whose answer was lost. Raises: StoreError."""
        self.slices.settle_all(self.transactor.fate)

    def fitting(self, ino: Ino, batch: Sequence[tuple[int, Slice]]) -> int:
        """How many bytes there is room for, of what `write_slices` refused for lack of it."""
        known = self.slices.settle([piece.id for _, piece in batch], self.transactor.fate)
        there = sum(piece.length for _, piece in batch if piece.id in known)
        left = extent.without(batch, known)[0]
        return there + self._view(fitting.fitting, ROOT_CALLER, ino, left)

    def forget_chunks(self, inos: Iterable[Ino]) -> None:
        """Ask the store again for what is in these files."""
        self.cache.drop([keys.inode_row(ino) for ino in inos])

    def compact_chunk(
        self, ino: Ino, index: int, old: Sequence[Slice], new: Sequence[Slice]
    ) -> bool:
        """Put `new` in place of `old`; False where another client was first."""
        ids, now_ns = [piece.id for piece in new if piece.stored], self._now_ns()
        exchange = extent.Exchange(old, new)

        def verb(txn: Txn) -> bool:
            txn.fence = self.sessions.fence_for(ids)
            env = Env(ROOT_CALLER, now_ns, *self._rules)
            return extent.replace_prefix(txn, env, ino, index, exchange)

        with self._turns.take(ino), self.slices.committing(ids):
            return self.transactor.run(verb, Call(extent.replace_prefix))

"""The verbs of `Meta` for packing small files, see `ops/data/packing`.

Called by fsclient's `packer` and `leader`, and by tests, as `meta.packing`.
Threading: any method from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from fsmeta.meta.ids.slice_allocator import SliceAllocator
from fsmeta.ops.data import packing, segments
from fsmeta.ops.data.deletion import Drops
from fsmeta.ops.data.packing import PackedSlices, Small, Thin
from fsmeta.schema.segments import OpenSegment
from fsmeta.store.contract import Call
from fsmeta.txn.retry import Transactor
from fsmeta.txn.txn import Txn
from fsmeta.types import Ino, SliceId


class PackVerbs:
    """See the module."""

    def __init__(
        self,
        run: Transactor,
        slices: SliceAllocator,
        fence_for: Callable[..., bytes | None],
        poll_invalidations: Callable[[], None],
    ) -> None:
        self._poll_invalidations = poll_invalidations
        self._run = run
        self._slices = slices
        self._fence_for = fence_for

    def pack(self, segment: SliceId, members: Sequence[PackedSlices]) -> list[Ino]:
        """Those of `members` that have their part of `segment` now; fewer than two: none.

        Raises: EBUSY where a change of one of them is held back; Fenced, Voided.
        """

        def verb(txn: Txn) -> list[Ino]:
            txn.fence = self._fence_for((segment,))
            return packing.pack(txn, segment, members)

        with self._slices.committing((segment,)):
            return self._run.run(verb, Call(packing.pack))

    def unchanged(self, files: Sequence[Small]) -> list[Small]:
        """Those of `files` that are still as they are said to be."""
        self._poll_invalidations()  # what other clients were answered by now is known here
        return self._run.view(lambda txn: packing.unchanged(txn, files))

    def unshared(self, files: Sequence[Small]) -> list[Small]:
        """Those of `files` whose bytes no clone and no snapshot uses."""
        return self._run.view(lambda txn: packing.unshared(txn, files))

    def thin(self, noted: Drops, shared: Sequence[SliceId]) -> list[Thin]:
        """Segments that are worth packing anew once the drops in `noted` are dealt with."""
        return self._run.view(lambda txn: packing.thin(txn, noted, shared))

    def still_in(self, segment: Thin) -> list[Small]:
        """Those of its members whose bytes are in it and nowhere else."""
        return self._run.view(lambda txn: packing.still_in(txn, segment))

    def open_segment(self, segment: OpenSegment) -> None:
        """A segment is stored, and files will come to list it. Raises: Fenced, Voided."""

        def verb(txn: Txn) -> None:
            txn.fence = self._fence_for((segment.id,), segment.session)
            segments.open_segment(txn, segment)

        with self._slices.committing((segment.id,)):
            self._run.run(verb)

    def close_segment(self, segment: OpenSegment) -> None:
        """No other file will list it. Raises: StoreError; then it is to be tried again."""
        self._run.run(lambda txn: segments.close_segment(txn, segment))

    def close_abandoned(self) -> None:
        """Those of sessions that have ended: their clients can't go on with them."""
        for segment in self._run.view(segments.open_ones):
            self._run.run(partial(segments.close_abandoned, segment=segment))

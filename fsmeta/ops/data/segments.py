"""Segments that are stored before the files in them are seen: one file after the other comes to
list its part, in the order in which they are published.

Such a segment is *open* (table K) until the last of its files has it. That counts as a use, so R is
exact at every moment, whatever is deleted meanwhile: `1 + R = chunks that list it + drops in X +
1 where it is open`. The last file takes over that use; if the client dies before, the leader ends
it.

Called by a publisher, after its client has packed what waits in its journal (docs/design/packing).
"""

from __future__ import annotations

from fsmeta.errors import Voided
from fsmeta.ops.data.extent import record_drops
from fsmeta.schema import keys, slices
from fsmeta.schema.segments import PACKED, OpenSegment, is_open_segment, pack_members, unpack_open
from fsmeta.store.contract import FENCE_FIELD
from fsmeta.txn.txn import Txn
from fsmeta.types import Ino


def open_segment(txn: Txn, segment: OpenSegment) -> None:
    """A segment is stored, and files will come to list it."""
    txn.put(keys.CLONES, segment.field, segment.pack())


def join(txn: Txn, segment: OpenSegment, ino: Ino, last: bool) -> None:
    """This commit makes the first chunk of `ino` list `segment`; `last`: no other will.

    `extent.write` has read what it listed before, unless the file was empty.
    Raises: Voided where it is not open any more: then it may be gone.
    """
    if txn.first:
        txn.expect(keys.CLONES, segment.field, segment.pack())
    elif txn.get(keys.CLONES, segment.field) != segment.pack():
        raise Voided(f"segment {segment.id} was left by our session, which others have ended")
    chunk = (keys.inode_row(ino), keys.chunk_field(0))
    before = txn.get(*chunk) if chunk in txn.reads else None  # all of it is checked from here on
    if any(each.id == segment.id for each in slices.unpack_slices(ino, 0, before)):
        if last:  # this use is counted already: the file was written over, or copied to by others
            _close(txn, segment)
        return
    field = keys.pack_u64(segment.id)
    counted = True
    if last:
        txn.delete(keys.CLONES, segment.field)
        counted = txn.get(keys.SHARED_SLICES, field) is not None
    else:
        txn.add(keys.SHARED_SLICES, field, 1)
    if counted:
        txn.append(PACKED, field, pack_members([ino]))


def close_segment(txn: Txn, segment: OpenSegment) -> None:
    """No further file will list a segment."""
    if txn.get(keys.CLONES, segment.field) == segment.pack():
        _close(txn, segment)


def _close(txn: Txn, segment: OpenSegment) -> None:
    txn.delete(keys.CLONES, segment.field)
    record_drops(txn, [(segment.id, segment.size)])


def open_ones(txn: Txn) -> list[OpenSegment]:
    """All open segments."""
    fields = txn.get_row(keys.CLONES)
    return [unpack_open(*each) for each in fields.items() if is_open_segment(each[0])]


def close_abandoned(txn: Txn, segment: OpenSegment) -> None:
    """`close_segment` of a session that can't commit any more; else nothing is done."""
    alive = txn.get(keys.session_row(segment.session), FENCE_FIELD)
    if alive is None:
        close_segment(txn, segment)

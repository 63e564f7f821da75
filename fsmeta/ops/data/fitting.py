"""How much of a write the limits leave room for, where all of it would be refused.

`Meta.fitting` runs it when a commit was ENOSPC or EDQUOT. Nothing is changed: the caller commits
what fits, and that commit is checked again.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsmeta.ops.data.extent import split
from fsmeta.rules import quota
from fsmeta.rules.context import Env, get_attr
from fsmeta.schema import keys, slices
from fsmeta.slices import fitting as first_bytes, growth
from fsmeta.txn.txn import Txn
from fsmeta.types import Ino, Slice, space_room


def fitting(txn: Txn, env: Env, ino: Ino, batch: Sequence[tuple[int, Slice]]) -> int:
    """How many bytes of `batch`, as `extent.write` takes it, fit: whole slices, and then the begin
    of one. Raises: ESTALE.
    """
    attr = get_attr(txn, ino)
    left = quota.free_space_of_all(txn, env, attr)
    if left is None:
        return sum(piece.length for _, piece in batch)
    room = space_room(attr, left)
    end, taken = attr.size, 0
    chunks: dict[int, list[Slice]] = {}
    for index, piece in batch:
        for at, part in [(index, piece)] if index >= 0 else split(piece, end):
            if at not in chunks:
                value = txn.get(keys.inode_row(ino), keys.chunk_field(at))
                chunks[at] = [*slices.unpack_slices(ino, at, value)]
            fits = first_bytes(chunks[at], part, room)
            taken += fits
            if fits < part.length:
                return taken
            room -= growth(chunks[at], part)
            chunks[at].append(part)
        if index < 0:
            end += piece.length
    return taken

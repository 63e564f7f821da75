"""Packing small files: many slices of one block each become parts of one, the segment.

A file is packed only while its first chunk lists exactly one record, and only if that is the record
by which its bytes were read. One commit moves all members, so the uses of the segment are exact
from the start: R counts those beyond the first, as of any shared slice, and what the files listed
before is dropped as by any other change.

Clones and snapshots share segments as they share any slice. A sealed inode is never a member, so
nothing of a snapshot is rewritten, even where it alone uses a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from fsmeta.ops.data.deletion import Drops, count_drops
from fsmeta.ops.data.extent import record_drops
from fsmeta.schema import keys as schema, slices
from fsmeta.schema.segments import PACKED, pack_members, unpack_members
from fsmeta.schema.snapshot_inos import is_snapshot_ino
from fsmeta.store.contract import COMMIT_OPS_MAX
from fsmeta.txn.txn import Txn
from fsmeta.types import Ino, Slice, SliceId, SliceKind

MEMBERS_MAX: Final = 128  # of a segment: with more rows a script of Redis 7.0 takes milliseconds
SHARE: Final = 2  # fewer than one in so many members left: they are packed anew

assert 3 * MEMBERS_MAX < COMMIT_OPS_MAX, "a check and a record each, and some to spare"


class Small(NamedTuple):
    """A file whose first chunk lists `piece` and nothing else."""

    ino: Ino
    piece: Slice


class PackedSlices(NamedTuple):
    """A file, and where its bytes are in the segment."""

    was: Small
    piece: Slice


class Thin(NamedTuple):
    """A segment that few of its members still use, and the inodes that were packed into it."""

    segment: SliceId
    members: list[Ino]


def pack(txn: Txn, segment: SliceId, members: Sequence[PackedSlices]) -> list[Ino]:
    """Give each of `members` its part of `segment`, unless it was changed; those that have it now.

    Where they would be fewer than two nothing is done, and the segment is the caller's to delete.
    """
    assert len(members) <= MEMBERS_MAX, len(members)
    assert len({each.was.ino for each in members}) == len(members), "a file has one first chunk"
    keys = [_key(each.was.ino) for each in members]
    same: list[PackedSlices] = []
    for each, key, value in zip(members, keys, txn.get_many(keys), strict=True):
        old, new = each.was.piece, each.piece
        assert (old.pos, old.length, new.id) == (new.pos, new.length, segment), each
        if _is_still(each.was, value):
            same.append(each)
        else:
            txn.drop_check(*key)
    if len(same) < 2:
        return []
    for each in same:
        txn.put(*_key(each.was.ino), slices.pack_slices([each.piece]))
    record_drops(txn, [(each.was.piece.id, each.was.piece.size) for each in same])
    inos = [each.was.ino for each in same]
    field = schema.pack_u64(segment)
    txn.add(schema.SHARED_SLICES, field, len(same) - 1)
    txn.put(PACKED, field, pack_members(inos))
    return inos


def unchanged(txn: Txn, files: Sequence[Small]) -> list[Small]:
    """Those of `files` that are still as they are said to be."""
    values = txn.get_many([_key(each.ino) for each in files])
    return [each for each, value in zip(files, values, strict=True) if _is_still(each, value)]


def unshared(txn: Txn, files: Sequence[Small]) -> list[Small]:
    """Those of `files` whose slices no other chunk uses, by the present counts."""
    fields = [schema.pack_u64(each.piece.id) for each in files]
    values = txn.get_many([(schema.SHARED_SLICES, field) for field in fields])
    return [
        each
        for each, field, value in zip(files, fields, values, strict=True)
        if not schema.unpack_count(schema.SHARED_SLICES, field, value)
    ]


def _is_still(file: Small, value: bytes | None) -> bool:
    """Whether a chunk lists what is said of a file that may change."""
    return value == slices.pack_slices([file.piece]) and not is_snapshot_ino(file.ino)


def thin(txn: Txn, noted: Drops, shared: Sequence[SliceId]) -> list[Thin]:
    """Segments among `shared` that fewer than half of their members use once `noted` is dealt with.

    Clones count as members do.
    """
    fields = [schema.pack_u64(each) for each in shared]
    keys = [(row, field) for field in fields for row in (PACKED, schema.SHARED_SLICES)]
    values = iter(txn.get_many(keys))
    counts = count_drops(noted)
    found: list[Thin] = []
    for segment, field in zip(shared, fields, strict=True):
        packed, uses = next(values), next(values)
        if packed is None:
            continue
        members = unpack_members(field, packed)
        drops, _ = counts.get(segment, (0, 0))
        left = 1 + schema.unpack_count(schema.SHARED_SLICES, field, uses) - drops
        if 0 < SHARE * left < len(members):
            found.append(Thin(segment, members))
    return found


def still_in(txn: Txn, segment: Thin) -> list[Small]:
    """Those of its members whose bytes are in it and nowhere else."""
    found: list[Small] = []
    values = txn.get_many([_key(ino) for ino in segment.members])
    for ino, value in zip(segment.members, values, strict=True):
        listed = slices.unpack_slices(ino, 0, value)
        if len(listed) == 1 and listed[0].id == segment.segment:
            found.append(Small(ino, listed[0]))
    return found


def part(segment: SliceId, size: int, off: int, of: Slice) -> Slice:
    """The record that shows the bytes of `of` where they are in a segment of `size` bytes."""
    return Slice(of.pos, segment, size, off, of.length, SliceKind.SEGMENT)


def _key(ino: Ino) -> tuple[bytes, bytes]:
    return schema.inode_row(ino), schema.chunk_field(0)

"""The content of a file: chunks of slices. Writing, truncating, compacting them.

`used` counts the bytes that slices cover, so overwriting costs nothing and holes are free. To keep
it exact a write must know what it covers; an append covers nothing, unless space is reserved beyond
the end (FLAG_BEYOND).
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from fsmeta.ops.data.long_chunks import covered_with, slices_of
from fsmeta.rules import access, quota
from fsmeta.rules.context import Changed, Env, get_attr, require_own_bytes, require_unsealed
from fsmeta.schema import inode, keys, slices as schema_slices
from fsmeta.schema.snapshot_inos import is_snapshot_ino
from fsmeta.schema.xattrs import CAPABILITY_FIELD
from fsmeta.slices import ChunkView, covered
from fsmeta.store.contract import COMMIT_OPS_ENOUGH
from fsmeta.txn.cached_fields import Missing
from fsmeta.txn.row_cache import RowCache
from fsmeta.txn.txn import Txn
from fsmeta.types import (
    CHUNK_BYTES,
    FILE_SIZE_MAX,
    FLAG_BEYOND,
    Attr,
    Caller,
    Ino,
    Slice,
    SliceId,
    space_of,
)

DROPS_A_FIELD: Final = 500  # of X: what the leader takes at once must fit into a commit
CHUNKS_NAMED: Final = 1000  # as many are asked for by their names, more with the whole row


def known_chunk(cache: RowCache, ino: Ino, index: int) -> list[Slice] | None:
    """`read_chunk` without asking the store; None where it has to be asked."""
    value = cache.get(keys.inode_row(ino), keys.chunk_field(index), need_vouched=True)
    return None if isinstance(value, Missing) else slices_of(ino, index, value)


def read_chunk(txn: Txn, env: Env, ino: Ino, index: int) -> list[Slice]:
    """The slices of one chunk, oldest first; none where the file has a hole or ends.

    Raises: ESTALE where there is no such file any more, which is no hole.
    """
    del env
    row, field = keys.inode_row(ino), keys.chunk_field(index)
    value, file = txn.get_with((row, field), witness=(row, keys.VOLATILE_FIELD))
    if file is None:
        raise OSError(errno.ESTALE, f"inode {ino} is gone")
    return slices_of(ino, index, value)


def without(
    batch: Sequence[tuple[int, Slice]], known: Collection[int]
) -> tuple[list[tuple[int, Slice]], int]:
    """What is left of a batch for `write` without the slices `known`, and its length."""
    left = [(index, piece) for index, piece in batch if piece.id not in known]
    ends = [index * CHUNK_BYTES + piece.end for index, piece in left if index >= 0]
    return left, max(ends, default=0)


def write(
    txn: Txn,
    env: Env,
    ino: Ino,
    batch: Sequence[tuple[int, Slice]],
    length: int,
    mtime_ns: int,
    unprivileged: Caller | None,
) -> Changed:
    """Add slices (chunk index, slice), whose data are already stored; AT_END appends to the file.

    The file grows to `length` if it is shorter; appends find out by themselves. The data were
    written at `mtime_ns`, perhaps before a chmod that is already here, so ctime does not go back.
    `unprivileged` has written some of them without CAP_FSETID: S_ISUID goes together with the
    content that it was set for.
    Raises: ESTALE, ENOSPC, EDQUOT, EROFS, ShowsObject.
    """
    require_unsealed(ino)
    attr = get_attr(txn, ino)
    require_own_bytes(attr)
    row = keys.inode_row(ino)
    by_chunk: dict[int, list[Slice]] = {}
    for index, piece in batch:
        by_chunk.setdefault(index, []).append(piece)
    if min(by_chunk, default=0) < 0:
        by_chunk, length = _placed(txn, attr, batch)
        # the kernel does this before writes through its cache, which not all appends go through
        txn.delete(row, CAPABILITY_FIELD)
    overlapped = [
        (row, keys.chunk_field(index))
        for index, new in by_chunk.items()
        if attr.flags & FLAG_BEYOND
        or index * CHUNK_BYTES + min(each.pos for each in new) < attr.size
    ]
    txn.get_many(overlapped)
    for key in overlapped:  # compaction leaves what is covered, and any other change shows in `v`
        txn.compare_tail(*key)
    used = attr.used
    for index, new in by_chunk.items():
        field = keys.chunk_field(index)
        before, after = covered_with(ino, index, txn.reads.get((row, field)), new)
        used += after - before
        txn.append(row, field, schema_slices.pack_slices(new))
    ctime_ns = max(attr.ctime_ns, mtime_ns)
    size = max(attr.size, length)
    assert size > CHUNK_BYTES * max(by_chunk, default=-1), "a chunk begins below the file's end"
    new_attr = attr._replace(size=size, used=used, mtime_ns=mtime_ns, ctime_ns=ctime_ns)
    if attr.nlink:
        quota.charge(txn, env, attr, space=new_attr.space - attr.space, inodes=0)
    txn.put(row, keys.VOLATILE_FIELD, inode.pack_volatile(new_attr))
    mode = attr.mode if unprivileged is None else access.drop_suid(unprivileged, attr)
    if mode != attr.mode:
        new_attr = new_attr._replace(mode=mode)
        txn.put(row, keys.ATTR_FIELD, inode.pack_attr(new_attr))
    return Changed(attr, new_attr)


def _placed(
    txn: Txn, attr: Attr, batch: Sequence[tuple[int, Slice]]
) -> tuple[dict[int, list[Slice]], int]:
    """Slices by chunk, each append where the file ends by then; and where it ends after all.

    A slice that comes to lie across the end of a chunk has two users. Raises: EFBIG.
    """
    by_chunk: dict[int, list[Slice]] = {}
    end = attr.size
    for index, piece in batch:
        if index >= 0:
            by_chunk.setdefault(index, []).append(piece)
            end = max(end, index * CHUNK_BYTES + piece.end)
        else:
            if end + piece.length > FILE_SIZE_MAX:
                raise OSError(errno.EFBIG, f"append at {end}")
            parts = split(piece, end)
            for at, part in parts:
                by_chunk.setdefault(at, []).append(part)
            txn.add(keys.SHARED_SLICES, keys.pack_u64(piece.id), len(parts) - 1)
            end += piece.length
    return by_chunk, end


def split(piece: Slice, begin: int) -> list[tuple[int, Slice]]:
    """`piece` at the offset `begin` of a file, as one record for each chunk that it touches."""
    parts: list[tuple[int, Slice]] = []
    at, left = begin, piece.length
    while left:
        index, pos = divmod(at, CHUNK_BYTES)
        length = min(left, CHUNK_BYTES - pos)
        off = piece.off + piece.length - left
        parts.append((index, piece._replace(pos=pos, off=off, length=length)))
        at, left = at + length, left - length
    return parts


def change_size(txn: Txn, env: Env, attr: Attr, size: int) -> Attr:
    """truncate(2): attributes with the new size; the caller writes them.

    What lies beyond is dropped at once, so that growing again shows zeros; what is reserved beyond
    the end stays where the file grows. A file of very many chunks is left with a size above `size`,
    or with FLAG_BEYOND: the caller commits that and calls again.
    Raises: EISDIR, EINVAL, EFBIG, ShowsObject.
    """
    if stat.S_ISDIR(attr.mode):
        raise OSError(errno.EISDIR, "is a directory")
    if not stat.S_ISREG(attr.mode) or size < 0:
        raise OSError(errno.EINVAL, "not a regular file, or a negative size")
    if size > FILE_SIZE_MAX:
        raise OSError(errno.EFBIG, f"size {size}")
    require_own_bytes(attr)
    flags = attr.flags & ~FLAG_BEYOND
    if size > attr.size:
        return attr._replace(size=size)
    if (size == attr.size and flags == attr.flags) or not attr.used:
        return attr._replace(size=size, flags=flags)
    chunks = chunks_of(txn, attr, size // CHUNK_BYTES)
    count = how_many_fit([value for _, value in reversed(chunks)])
    if count < len(chunks):
        chunks = chunks[-count:]
        size, flags = chunks[0][0] * CHUNK_BYTES, attr.flags
    used = attr.used - _cut(txn, attr.ino, chunks, size)
    if attr.nlink:
        quota.charge(txn, env, attr, space=space_of(used) - attr.space, inodes=0)
    return attr._replace(size=min(size, attr.size), used=used, flags=flags)


def is_cut(before: Attr, after: Attr, size: int) -> bool:
    """Whether a change of the size to `size` has done all of it: see `change_size`."""
    return after.size == size and (size > before.size or not after.flags & FLAG_BEYOND)


def chunks_of(txn: Txn, attr: Attr, begin: int, end: int | None = None) -> list[tuple[int, bytes]]:
    """What the chunks `begin..end` hold, in order; those that hold nothing are left out.

    Without `end`, all from `begin` on.

    No chunk begins at or beyond the file's size, unless space is reserved there, so a few can be
    asked for by name, and what is remembered need not be asked for. That further ones appear
    meanwhile shows in `v`.
    """
    row = keys.inode_row(attr.ino)
    last = (attr.size - 1) // CHUNK_BYTES + 1
    if attr.flags & FLAG_BEYOND:
        last = FILE_SIZE_MAX // CHUNK_BYTES
    indexes = range(begin, last if end is None else min(end, last))
    if len(indexes) <= CHUNKS_NAMED:
        values = txn.get_many([(row, keys.chunk_field(index)) for index in indexes])
        return [(index, value) for index, value in zip(indexes, values, strict=True) if value]
    fields = txn.get_inodes([row])[0].fields
    names = sorted(field for field in fields if field[:1] == b"c")
    return [(keys.id_of(name), fields[name]) for name in names if keys.id_of(name) in indexes]


def how_many_fit(chunks: Iterable[bytes]) -> int:
    """How many of these chunks, from the first one on, one commit can drop; at least one."""
    ops = count = 0
    for value in chunks:
        if ops > COMMIT_OPS_ENOUGH:
            break
        ops += 3 + len(value) // (schema_slices.SLICE_BYTES * DROPS_A_FIELD)  # see `bury`
        count += 1
    return count


def _cut(txn: Txn, ino: Ino, chunks: Sequence[tuple[int, bytes]], size: int) -> int:
    """Drop the slices of `chunks` beyond `size`; how many covered bytes went with them."""
    row = keys.inode_row(ino)
    last, pos = divmod(size, CHUNK_BYTES)
    lost = 0
    for index, value in chunks:
        field = keys.chunk_field(index)
        txn.expect(row, field, value)
        old = schema_slices.unpack_slices(ino, index, value)
        if index > last or pos == 0:
            txn.delete(row, field)
            bury(txn, old)
            lost += covered(old)
        elif any(each.end > pos for each in old):
            end = schema_slices.hole(pos, CHUNK_BYTES - pos)
            left = covered([*old, end])
            if left:
                txn.append(row, field, schema_slices.pack_slices([end]))
            else:  # a file that uses nothing lists nothing, see `change_size`
                txn.delete(row, field)
                bury(txn, old)
            lost += covered(old) - left
    return lost


def bury(txn: Txn, slices: Sequence[Slice], kept: Sequence[Slice] = ()) -> None:
    """A chunk that listed `slices` and `kept` lists only `kept`: record what it has dropped.

    The background worker finds out whether other chunks use those.
    """
    still = {each.id for each in kept}
    dead = {each.id: each.size for each in slices if each.stored and each.id not in still}
    record_drops(txn, list(dead.items()))


def record_drops(txn: Txn, drops: Sequence[tuple[SliceId, int]]) -> None:
    """Each of these (id, size) was dropped by a chunk, or as often by so many."""
    for begin in range(0, len(drops), DROPS_A_FIELD):
        part = drops[begin : begin + DROPS_A_FIELD]
        # other chunks may have dropped the same slice before, if it is shared
        txn.append(keys.DEAD_SLICES, keys.pack_u64(part[0][0]), schema_slices.pack_dead(part))


class Exchange:
    """Other records for what a chunk lists; all that depends on these alone is worked out once."""

    def __init__(self, old: Sequence[Slice], new: Sequence[Slice]) -> None:
        self.old, self.new = old, new
        self.packed = schema_slices.pack_slices(old)
        self._more, self._less = _beyond(new, old), _beyond(old, new)

    def grown(self, later: Sequence[Slice]) -> int:
        """How many more bytes are covered now, where `later` are laid over old and new."""
        return _left_of(self._more, later) - _left_of(self._less, later)


def _beyond(these: Sequence[Slice], those: Sequence[Slice]) -> list[Slice]:
    """The ranges that `these` cover and `those` do not."""
    view = ChunkView(these)
    for begin, end in ChunkView(those).covered_ranges():
        view.lay(schema_slices.hole(begin, end - begin))
    return [schema_slices.reserved(begin, end - begin) for begin, end in view.covered_ranges()]


def _left_of(ranges: Sequence[Slice], later: Sequence[Slice]) -> int:
    """Bytes of `ranges` that none of `later` touches."""
    if not ranges or not later:
        return sum(piece.length for piece in ranges)
    view = ChunkView(ranges)
    for piece in later:
        view.lay(schema_slices.hole(piece.pos, piece.length))
    return view.used


def replace_prefix(txn: Txn, env: Env, ino: Ino, index: int, exchange: Exchange) -> bool:
    """Compaction: put the new records in place of a chunk's first ones, if those are the old.

    What was appended meanwhile stays behind them. Small holes have become zeros, which take space
    from here on. False where another client was first; then the caller owns the new slices and
    deletes them. Writers don't wait for it, and each write begun meanwhile is a conflict: so it
    does little.
    """
    row, field = keys.inode_row(ino), keys.chunk_field(index)
    value = txn.get(row, field)
    if is_snapshot_ino(ino) or value is None or not value.startswith(exchange.packed):
        return False
    rest = value[len(exchange.packed) :]
    packed = schema_slices.pack_slices(exchange.new) + rest
    later = schema_slices.unpack_slices(ino, index, rest)
    grown = exchange.grown(later)
    if grown:
        attr = get_attr(txn, ino)
        used = attr.used + grown
        txn.put(row, keys.VOLATILE_FIELD, inode.pack_volatile(attr._replace(used=used)))
        if attr.nlink:  # no user asked for it, so no limit stops it
            space = space_of(used) - attr.space
            quota.charge(txn, env, attr, space=space, inodes=0, limited=False)
    if packed:
        txn.put(row, field, packed)
    else:
        txn.delete(row, field)
    bury(txn, exchange.old, kept=[*exchange.new, *later])
    return True

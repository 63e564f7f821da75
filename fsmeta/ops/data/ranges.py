"""fallocate(2) and copy_file_range(2): ranges of files, as records of their chunks.

No data is moved by either. A hole is a record; a copy lists the source's slices again, and each new
use of a slice is counted (`schema/keys`, R). What is reserved is a record, too: it reads as zeros
and counts as covered, so a write over it covers no more than before, and no limit can refuse it.
A copy has a hole there.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Sequence
from typing import Final, NamedTuple

from fsmeta.ops.data.extent import bury, chunks_of, how_many_fit, split
from fsmeta.ops.data.gc import share
from fsmeta.ops.data.long_chunks import covered_with
from fsmeta.rules import quota
from fsmeta.rules.context import Changed, Env, get_attr, require_own_bytes, require_unsealed
from fsmeta.schema import inode, keys, slices
from fsmeta.slices import ChunkRange, ChunkView, covered, resolve
from fsmeta.txn.txn import Txn
from fsmeta.types import (
    CHUNK_BYTES,
    FILE_SIZE_MAX,
    FLAG_APPEND,
    FLAG_ATTACHED,
    FLAG_BEYOND,
    FLAG_IMMUTABLE,
    Attr,
    Ino,
    Slice,
    SliceId,
    SliceKind,
)

KEEP_SIZE: Final = 1  # linux/falloc.h
PUNCH_HOLE: Final = 2
ZERO_RANGE: Final = 16
MODES: Final = frozenset({0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE})
RESERVED_MAX: Final = 1 << 44  # bytes that one call reserves: the largest file of ext4
RESERVE_CHUNKS_MAX: Final = 1000  # in one commit; each is read by its name, and written
RESERVE_RECORDS_MAX: Final = 4000  # in one commit, or those of one chunk: 100 kB
COPY_CHUNKS_MAX: Final = 64  # of the target, in one commit: 4 GiB
COPY_RECORDS_MAX: Final = 1000  # in one commit; each may count one more use


class Ranged(NamedTuple):
    """How far a step came, and what it changed."""

    end: int
    changed: Changed


class Span(NamedTuple):
    """A range of a file."""

    ino: Ino
    begin: int
    end: int


def fallocate(txn: Txn, env: Env, mode: int, span: Span, reserves: bool = False) -> Ranged:
    """fallocate(2) of a range; where there are very many chunks, of its first part.

    `reserves`: the volume's version allows reserved space. Without it sizes are set and ranges
    cleared, as what earlier clients have left in a journal expects.
    Raises: EOPNOTSUPP for modes that are none of MODES, ENODEV, EPERM, EFBIG, ENOSPC,
    EDQUOT, ESTALE.
    """
    require_unsealed(span.ino)
    if mode not in MODES:
        raise OSError(errno.EOPNOTSUPP, f"fallocate mode {mode:#x}")
    attr = _get_file(txn, span.ino, errno.ENODEV)
    if attr.flags & FLAG_IMMUTABLE or (attr.flags & FLAG_APPEND and mode & ~KEEP_SIZE):
        raise OSError(errno.EPERM, "the file is immutable, or append-only")
    if span.end > FILE_SIZE_MAX:
        raise OSError(errno.EFBIG, f"fallocate to {span.end}")
    require_own_bytes(attr)
    end, grown, flags = span.end, 0, attr.flags
    if reserves and not mode & PUNCH_HOLE:
        end, grown = _reserve(txn, attr, span, hiding=mode & ZERO_RANGE != 0)
        if mode & KEEP_SIZE and end > attr.size:
            flags |= FLAG_BEYOND
    elif mode & (PUNCH_HOLE | ZERO_RANGE):
        end, grown = _clear(txn, attr, span)
    size = attr.size if mode & KEEP_SIZE else max(attr.size, end)
    changed = _put(txn, env, attr, size, attr.used + grown)
    if flags != attr.flags:
        changed = changed._replace(flags=flags)
        txn.put(keys.inode_row(attr.ino), keys.ATTR_FIELD, inode.pack_attr(changed))
    return Ranged(end, Changed(attr, changed))


def _reserve(txn: Txn, attr: Attr, span: Span, hiding: bool) -> tuple[int, int]:
    """Have a range covered, and all of it read as zeros if `hiding`; how far that went, and how
    many bytes more are covered.
    """
    row = keys.inode_row(attr.ino)
    first = span.begin // CHUNK_BYTES
    indexes = range(first, min((span.end - 1) // CHUNK_BYTES + 1, first + RESERVE_CHUNKS_MAX))
    fields = [(row, keys.chunk_field(index)) for index in indexes]
    grown = records = 0
    end = span.begin
    for index, value in zip(indexes, txn.get_many(fields), strict=True):
        if records > RESERVE_RECORDS_MAX:
            break
        base = index * CHUNK_BYTES
        begin, end = max(span.begin - base, 0), min(span.end - base, CHUNK_BYTES)
        old = slices.unpack_slices(attr.ino, index, value)
        view = ChunkView(old)
        new = [
            slices.reserved(part.begin, part.end - part.begin)
            for part in ([ChunkRange(begin, end)] if hiding else view.uncovered(begin, end))
        ]
        before = view.used
        for piece in new:
            view.lay(piece)
        grown += view.used - before
        end += base
        if hiding and not any(part.slice for part in view.segments()):
            kept = view.covered_ranges()
            bury(txn, old)
            txn.put(
                row,
                keys.chunk_field(index),
                slices.pack_slices(
                    slices.reserved(part.begin, part.end - part.begin) for part in kept
                ),
            )
            records += len(kept)
        elif new:
            txn.append(row, keys.chunk_field(index), slices.pack_slices(new))
            records += len(new)
    return end, grown


def _get_file(txn: Txn, ino: Ino, code: int) -> Attr:
    """Raises: ESTALE; `code` for what is no regular file."""
    attr = get_attr(txn, ino)
    if not stat.S_ISREG(attr.mode):
        raise OSError(code, f"inode {ino} is no regular file")
    return attr


def _put(txn: Txn, env: Env, attr: Attr, size: int, used: int) -> Attr:
    """The file has other content now."""
    new = attr._replace(size=size, used=used, mtime_ns=env.now_ns, ctime_ns=env.now_ns)
    if attr.nlink:
        quota.charge(txn, env, attr, space=new.space - attr.space, inodes=0)
    txn.put(keys.inode_row(attr.ino), keys.VOLATILE_FIELD, inode.pack_volatile(new))
    return new


def _clear(txn: Txn, attr: Attr, span: Span) -> tuple[int, int]:
    """Let a range be a hole; how far that went, and how many bytes more are covered: none."""
    row = keys.inode_row(attr.ino)
    if span.begin >= attr.size and not attr.flags & FLAG_BEYOND:
        return span.end, 0
    found = chunks_of(txn, attr, span.begin // CHUNK_BYTES, (span.end - 1) // CHUNK_BYTES + 1)
    end = span.end
    count = how_many_fit(value for _, value in found)
    if count < len(found):
        end = found[count][0] * CHUNK_BYTES
        found = found[:count]
    grown = 0
    for index, value in found:
        field = keys.chunk_field(index)
        txn.expect(row, field, value)
        first = max(span.begin - index * CHUNK_BYTES, 0)
        last = min(end - index * CHUNK_BYTES, CHUNK_BYTES)
        zeros = slices.hole(first, last - first)
        before, after = covered_with(attr.ino, index, value, [zeros])
        if not after:
            txn.delete(row, field)
            bury(txn, slices.unpack_slices(attr.ino, index, value))
        else:
            txn.compare_tail(row, field)  # as in `extent.write`
            if after != before:
                txn.append(row, field, slices.pack_slices([zeros]))
        grown += after - before
    return end, grown


def copy_file_range(txn: Txn, env: Env, source: Span, ino: Ino, begin: int) -> Ranged:
    """Let `ino` show from `begin` on what `source` holds, or the first part of that.

    The source ends at its size at the latest. Raises: EINVAL where both ranges overlap in one file
    or one is no regular file, EFBIG, ENOSPC, EDQUOT, EROFS, ESTALE.
    """
    require_unsealed(ino)
    return copy_range(txn, env, source, ino, begin)


def copy_range(txn: Txn, env: Env, source: Span, ino: Ino, begin: int) -> Ranged:
    """`copy_file_range` into a tree that is being built and will be sealed."""
    txn.get_many((*inode.attr_keys(source.ino), *inode.attr_keys(ino)))
    origin = _get_file(txn, source.ino, errno.EINVAL)
    target = _get_file(txn, ino, errno.EINVAL)
    if origin.flags & FLAG_ATTACHED:
        raise OSError(errno.EXDEV, "shows an object of a bucket, which is to be read")
    if target.flags & FLAG_IMMUTABLE:
        raise OSError(errno.EPERM, "the file is immutable")
    require_own_bytes(target)
    source = source._replace(end=min(source.end, origin.size))
    if source.begin >= source.end:
        return Ranged(begin, Changed(target, target))
    length = source.end - source.begin
    if begin + length > FILE_SIZE_MAX:
        raise OSError(errno.EFBIG, f"copy to {begin + length}")
    if ino == source.ino and begin < source.end and source.begin < begin + length:
        raise OSError(errno.EINVAL, "the ranges overlap")
    most = (begin // CHUNK_BYTES + COPY_CHUNKS_MAX) * CHUNK_BYTES - begin
    source = source._replace(end=source.begin + min(length, most))
    pieces, copied = _shifted(_view(txn, origin, source), begin - source.begin)
    end = begin + (copied or source.end - source.begin)
    used = target.used + _splice(txn, target, pieces)
    return Ranged(end, Changed(target, _put(txn, env, target, max(target.size, end), used)))


def _view(txn: Txn, attr: Attr, span: Span) -> list[Slice]:
    """What shows in a range, as records whose `pos` is an offset in the file; holes too."""
    found = dict(chunks_of(txn, attr, span.begin // CHUNK_BYTES, (span.end - 1) // CHUNK_BYTES + 1))
    row = keys.inode_row(attr.ino)
    view: list[Slice] = []
    at = span.begin
    for index, value in sorted(found.items()):
        txn.expect(row, keys.chunk_field(index), value)
        base = index * CHUNK_BYTES
        for part in resolve(slices.unpack_slices(attr.ino, index, value)):
            first, last = max(base + part.pos, at), min(base + part.end, span.end)
            if first >= last or part.slice is None:
                continue
            if first > at:
                view.append(slices.hole(at, first - at))
            off = part.off + first - base - part.pos
            view.append(part.slice._replace(pos=first, off=off, length=last - first))
            at = last
    if at < span.end:
        view.append(slices.hole(at, span.end - at))
    return view


def _shifted(view: Sequence[Slice], delta: int) -> tuple[dict[int, list[Slice]], int]:
    """`view` at another place, by chunk; and after how many bytes it was cut, if it was.

    A hole's record has its own length as its size.
    """
    out: dict[int, list[Slice]] = {}
    count = done = 0
    for piece in view:
        for index, part in split(piece, piece.pos + delta):
            if count == COPY_RECORDS_MAX:
                return out, done
            if piece.kind is SliceKind.HOLE:
                part = slices.hole(part.pos, part.length)
            out.setdefault(index, []).append(part)
            done, count = done + part.length, count + 1
    return out, 0


def _splice(txn: Txn, attr: Attr, pieces: dict[int, list[Slice]]) -> int:
    """Lay records over a file's chunks, and count the uses; how many more bytes are covered."""
    row = keys.inode_row(attr.ino)
    fields = [(row, keys.chunk_field(index)) for index in pieces]
    grown = 0
    uses: dict[SliceId, int] = {}
    for (index, new), value in zip(pieces.items(), txn.get_many(fields), strict=True):
        old = slices.unpack_slices(attr.ino, index, value)
        if not covered(old):  # nothing for holes to hide
            new = [each for each in new if each.stored]
        if not new:
            continue
        left = covered([*old, *new])
        grown += left - covered(old)
        if not left:  # nothing but holes: a file that uses nothing lists nothing, see `change_size`
            txn.delete(row, keys.chunk_field(index))
            bury(txn, old)
            continue
        txn.append(row, keys.chunk_field(index), slices.pack_slices(new))
        known = {each.id for each in old}
        for sid in {each.id for each in new if each.stored} - known:
            uses[sid] = uses.get(sid, 0) + 1
    share(txn, uses)
    return grown

"""The part of a stored tensor that a rank needs, as ranges of its file.

DCP stores each tensor as an archive of `torch.save`. A rank of another number of ranks needs a part
of it. The ends of the archive say where the tensor's items are; the part is some runs of its bytes.
Called by `StorageReader`. Pure; nothing that a pickle names is executed.
"""

from __future__ import annotations

import itertools
import math
import zipfile
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Final, NamedTuple, cast

import torch

from fsmeta.errors import ConfigError
from slicefs.lifecycle.shards.dcp_metadata import DTYPES
from slicefs.lifecycle.shards.reading import LOCAL_HEADER_BYTES, behind_header
from slicefs.lifecycle.shards.torch_file import Storage, StoredTensor, load_archive
from slicefs.stores.seekable import SeekableReader

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

HEAD_BYTES: Final = 1 << 10  # torch 2.13 writes 600 to 730 bytes before the items
TAIL_BYTES: Final = 1 << 10  # and 560 for the archive's directory, behind 400 of small members
_HAS_DESCRIPTOR: Final = 1 << 3  # among the flags of a member of a zip
_ZIP64_BYTES: Final = (1 << 32) - 1  # from here on, sizes have eight bytes
_TORCH_TYPES: Final = {words: getattr(torch, name) for name, words in DTYPES.items()}


class PartPlan(NamedTuple):
    """How a part is read and put together."""

    runs: Sequence[tuple[int, int]]  # bytes `begin..end` of the archive, in the part's order
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the part
    run_shape: tuple[int, ...]  # of the items that one run brings: the last axes of `shape`
    run_strides: tuple[int, ...]  # in items, within a run

    def assemble(self, runs: Sequence[memoryview]) -> torch.Tensor:
        """The part, of what was read of its runs."""
        parts = [
            torch.frombuffer(bytearray(run), dtype=self.dtype).as_strided(
                self.run_shape, self.run_strides
            )
            for run in runs
        ]
        whole = parts[0] if len(parts) == 1 else torch.stack(tuple(parts))
        return whole.reshape(self.shape)


def plan_part(
    head: bytes | memoryview,
    tail: bytes | memoryview,
    length: int,
    offsets: Sequence[int],
    lengths: Sequence[int],
    max_gap: int,
) -> PartPlan | None:
    """The runs of the part of `lengths` items at `offsets` of the tensor in an archive.

    `length`: bytes of the archive, of which `head` and `tail` are the ends. Runs that are less than
    `max_gap` bytes apart are read as one. None: the archive must be read whole, because it holds
    something else than one plain tensor.
    """
    head, tail = memoryview(head), memoryview(tail)
    ends = _Ends(head, tail, length)
    try:
        stored = load_archive(ends, "archive")
        if not isinstance(stored, StoredTensor) or not stored.is_dense():
            return None
        begin = _begin(stored.storage, head, ends)
    except (ConfigError, OSError, zipfile.BadZipFile):
        return None
    inside = zip(offsets, lengths, stored.shape, strict=False)
    fits = len(offsets) == len(lengths) == len(stored.shape) and all(
        offset >= 0 and offset + count <= size for offset, count, size in inside
    )
    if not fits:
        return None
    dtype = _TORCH_TYPES[stored.dtype]
    item = dtype.itemsize
    begin += item * (stored.offset + _dot(offsets, stored.strides))
    split = _split(lengths, stored.strides, max_gap // item)
    run = _span(lengths[split:], stored.strides[split:])
    outer = itertools.product(*(range(count) for count in lengths[:split]))
    begins = (begin + item * _dot(index, stored.strides) for index in outer)
    return PartPlan(
        runs=[(at, at + item * run) for at in begins],
        dtype=dtype,
        shape=tuple(lengths),
        run_shape=tuple(lengths[split:]),
        run_strides=stored.strides[split:],
    )


def _begin(storage: Storage, head: memoryview, ends: _Ends) -> int:
    """Where the items begin. Raises: BadZipFile where the next member says otherwise.

    Nothing has a checksum of the header that tells the begin, so one flipped bit would move it.
    """
    begin = behind_header(storage, head[storage.header : storage.header + LOCAL_HEADER_BYTES])
    with zipfile.ZipFile(cast(IO[bytes], ends)) as archive:
        members = sorted(archive.infolist(), key=lambda member: member.header_offset)
        ends_of = [*(member.header_offset for member in members[1:]), archive.start_dir]
    for member, end in zip(members, ends_of, strict=True):
        follows = begin + storage.size + _descriptor_bytes(member) == end
        if follows and member.header_offset == storage.header:
            return begin
    raise zipfile.BadZipFile("the members do not follow each other")


def _descriptor_bytes(member: zipfile.ZipInfo) -> int:
    """Of the sizes that stand once more behind a member."""
    if not member.flag_bits & _HAS_DESCRIPTOR:
        return 0
    return 24 if member.file_size >= _ZIP64_BYTES else 16


def _split(lengths: Sequence[int], strides: Sequence[int], max_gap: int) -> int:
    """The first axis whose items, and all behind, are read as one run; in items."""
    for axis in reversed(range(len(lengths))):
        gap = strides[axis] - _span(lengths[axis + 1 :], strides[axis + 1 :])
        if lengths[axis] > 1 and gap > max_gap:
            return axis + 1
    return 0


def _span(lengths: Sequence[int], strides: Sequence[int]) -> int:
    """How many items lie from the first of a view to its last."""
    return 1 + sum((n - 1) * s for n, s in zip(lengths, strides, strict=True))


def _dot(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * s for i, s in zip(index, strides, strict=False))


class _Ends(SeekableReader):
    """An archive of which the ends are known; what lies between can't be read."""

    def __init__(self, head: memoryview, tail: memoryview, length: int) -> None:
        super().__init__(length)
        self._head, self._tail = head, tail

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Raises: ValueError for bytes that are not known."""
        view = memoryview(buffer).cast("B")
        end = min(self._at + len(view), self._size)
        if self._at >= end:
            return 0
        tail_begin = self._size - len(self._tail)
        if end <= len(self._head):
            part = self._head[self._at : end]
        elif self._at >= tail_begin:
            part = self._tail[self._at - tail_begin : end - tail_begin]
        else:
            raise ValueError("it lies between the ends")
        view[: len(part)] = part
        self._at = end
        return len(part)


def part_bytes(lengths: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a part."""
    return math.prod(lengths) * int(dtype.itemsize)


def ends(begin: int, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where the ends of an archive are in its file."""
    return (begin, begin + HEAD_BYTES), (begin + length - TAIL_BYTES, begin + length)

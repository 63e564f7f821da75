"""Checksums of a payload's frames: how a table of them is made, and how bytes are verified by it.

`format/block_v1` calls it for blocks that are stored as they are. Two kinds of tables are known:

- *Single*: the CRC-32C of each frame, 64 KiB. Objects of version 1 have it.
- *Running*: the CRC-32C of everything up to the end of each frame. A range is verified by the entry
  before it, which the sum goes on from, and its last one: one call however many frames it has. So
  small frames cost writers something, and readers nothing. Objects of version 3 have it.

Pure functions: any thread may call them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from struct import Struct
from typing import Final

from fsdata.format.block_v2 import Buffer
from fsdata.resources.crc import crc32c
from fsmeta.types import FRAME_BYTES_MAX

ENTRY_BYTES: Final = 4
STEP_BYTES: Final = 1 << 20  # judged at a time: 40 µs for which other threads wait
_HOLD: Final = 0  # the GIL: to hand it over for some µs costs more
_ENTRY: Final = Struct("<I")
assert STEP_BYTES % FRAME_BYTES_MAX == 0, "each step ends with a frame"


def table_bytes(length: int, log2: int) -> int:
    """The length of a table of `length` bytes."""
    return ENTRY_BYTES * -(-length >> log2)


def single_table(pieces: Sequence[Buffer], log2: int) -> bytes:
    """One CRC a frame of the concatenated pieces."""
    if len(pieces) > 1:
        return _table_of_many(pieces, log2, running=False)
    view, step = memoryview(pieces[0]), 1 << log2
    return _packed([crc32c(view[at : at + step], 0, _HOLD) for at in range(0, len(view), step)])


def running_table(pieces: Sequence[Buffer], log2: int) -> bytes:
    """The CRC up to the end of each frame of the concatenated pieces."""
    if len(pieces) > 1:
        return _table_of_many(pieces, log2, running=True)
    view, step, crc = memoryview(pieces[0]), 1 << log2, 0
    return _packed(
        [crc := crc32c(view[at : at + step], crc, _HOLD) for at in range(0, len(view), step)]
    )


def _table_of_many(pieces: Sequence[Buffer], log2: int, running: bool) -> bytes:
    """A table where frames may span pieces."""
    crcs: list[int] = []
    crc, room = 0, 1 << log2
    for piece in pieces:
        view = memoryview(piece)
        while len(view):
            part = view[:room]
            crc = crc32c(part, crc, _HOLD)
            room -= len(part)
            view = view[len(part) :]
            if room == 0:
                crcs.append(crc)
                crc, room = crc if running else 0, 1 << log2
    if room < 1 << log2:
        crcs.append(crc)
    return _packed(crcs)


def is_right_single(table: bytes, log2: int, begin: int, view: memoryview) -> bool:
    """Whether `view` is the payload from `begin` on, where a frame begins."""
    found = single_table((view,), log2)
    at = ENTRY_BYTES * (begin >> log2)
    return found == table[at : at + len(found)]


def is_right_running(table: bytes, log2: int, begin: int, view: memoryview) -> bool:
    """Whether `view` is the payload from `begin` to the end of a frame."""
    crc = _up_to(table, begin >> log2)
    for at in range(0, len(view), STEP_BYTES):
        part = view[at : at + STEP_BYTES]
        crc = crc32c(part, crc, _HOLD)
        if crc != _up_to(table, -(-(begin + at + len(part)) >> log2)):
            return False
    return True


def _up_to(table: bytes, frames: int) -> int:
    """The sum of the first `frames` frames."""
    if frames == 0:
        return 0
    (crc,) = _ENTRY.unpack_from(table, ENTRY_BYTES * (frames - 1))
    return int(crc)


def _packed(crcs: Sequence[int]) -> bytes:
    return _words(len(crcs)).pack(*crcs)


@cache
def _words(count: int) -> Struct:
    return Struct(f"<{count}I")

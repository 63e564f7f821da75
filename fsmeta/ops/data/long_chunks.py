"""What chunks of many slices list and cover, remembered by their bytes.

A chunk that is written in small pieces has hundreds of records, and each write has to know how many
bytes it covers anew. A list mostly differs from the one before by what was appended to it, so only
that is parsed and laid. The answers are functions of the bytes alone: nothing that is remembered
here can be wrong, whichever chunk it was, and forgetting costs time only.

Called by verbs, any thread: an entry is taken out while it is used, and a second thread that wants
it meanwhile loses time only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar

from fsmeta.schema.slices import SLICE_BYTES, pack_slices, unpack_slices
from fsmeta.slices import ChunkView, covered
from fsmeta.types import Ino, Slice

LONG_BYTES: Final = 32 * SLICE_BYTES  # shorter lists are parsed in less time than it takes to look
KEPT: Final = 16  # chunks of each kind; one of 16,384 pages is 6 MB, a usual one 0.2

_Key: TypeAlias = tuple[Ino, int]
_T = TypeVar("_T")


class _ListedChunk(NamedTuple):
    value: bytes
    slices: list[Slice]  # never changed


class _Laid(NamedTuple):
    value: bytes
    view: ChunkView  # of all of `value`


_listed: Final[dict[_Key, _ListedChunk]] = {}
_laid: Final[dict[_Key, _Laid]] = {}


def slices_of(ino: Ino, index: int, value: bytes | None) -> list[Slice]:
    """`unpack_slices`. Raises: Corrupt."""
    if value is None or len(value) < LONG_BYTES:
        return unpack_slices(ino, index, value)
    key = (ino, index)
    known = _listed.pop(key, None)
    if known is None or not value.startswith(known.value):
        slices = unpack_slices(ino, index, value)
    elif len(value) == len(known.value):
        slices = known.slices
    else:
        slices = known.slices + unpack_slices(ino, index, value[len(known.value) :])
    _keep(_listed, key, _ListedChunk(value, slices))
    return slices.copy()


def covered_with(
    ino: Ino, index: int, value: bytes | None, new: Sequence[Slice]
) -> tuple[int, int]:
    """Bytes that the records `value` cover, and those with `new` behind them. Raises: Corrupt."""
    if value is None or len(value) < LONG_BYTES:
        old = unpack_slices(ino, index, value)
        return covered(old), covered([*old, *new])
    key = (ino, index)
    known = _laid.pop(key, None)
    if known is None or not value.startswith(known.value):
        view, rest = ChunkView(), value
    else:
        view, rest = known.view, value[len(known.value) :]
    for piece in unpack_slices(ino, index, rest):
        view.lay(piece)
    before = view.used
    for piece in new:
        view.lay(piece)
    _keep(_laid, key, _Laid(value + pack_slices(new), view))  # as it will be once that is committed
    return before, view.used


def _keep(table: dict[_Key, _T], key: _Key, entry: _T) -> None:
    """Remember an entry as the latest, and forget the oldest."""
    table[key] = entry
    while len(table) > KEPT:
        try:
            table.pop(next(iter(table)), None)
        except (StopIteration, RuntimeError):  # another thread has just changed the table
            return

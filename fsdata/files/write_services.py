"""What all writers of a mount share, and what they want of the metadata.

`FileWriter` uses it; the client puts it together, tests stand in for parts of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from fsdata.blocks.blocks import BlockStore
from fsdata.files.upload_pool import UploadPool
from fsdata.resources.memory_budget import MemoryBudget
from fsmeta.runtime import Runtime
from fsmeta.types import Ino, Slice, SliceId


class SliceSink(Protocol):
    """Where slices become part of a file: the metadata, seen from here."""

    def new_slice_id(self) -> SliceId:
        """An id that no slice had or will have. Raises: StoreError."""

    def commit(
        self, ino: Ino, batch: Sequence[tuple[int, Slice]], length: int, mtime_ns: int
    ) -> None:
        """Append records (chunk index or AT_END, slice) in order; the file is at least `length`
        bytes then, and exactly that where appends went to the end that this client knew of.

        On return every view this client has of the file shows them. Raises: OSError, StoreError;
        then the same slices will be offered again, perhaps with more behind them. Whether nothing
        was applied the sink has to find out first, where it does not know (Ambiguous).
        """

    def fitting(self, ino: Ino, batch: Sequence[tuple[int, Slice]]) -> int:
        """How many bytes of a batch that was refused for a limit could be committed: of whole
        slices in order, and then of the begin of one. Raises: OSError, StoreError.
        """

    def give_up_slices(self, ids: Iterable[SliceId]) -> None:
        """These ids will not be offered again."""


KeepWrite: TypeAlias = Callable[[Ino, SliceId, int, bool, int, memoryview], None]
"""Told of bytes that a slice has taken: inode, slice, offset in the file, append, time, bytes."""


class WriteServices(NamedTuple):
    """What all writers of a mount share."""

    runtime: Runtime
    blocks: BlockStore
    budget: MemoryBudget
    pool: UploadPool
    sink: SliceSink
    keep: KeepWrite | None = None  # what is to outlive this process

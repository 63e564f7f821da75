"""How the blocks of a volume are stored now. Older blocks may differ, and their heads say how."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fsdata.format.block_v1 import Codec, Opener
from fsmeta.types import BLOCK_BYTES_MAX, FRAME_BYTES, SliceId

if TYPE_CHECKING:
    from fsdata.format.encryption import Sealer


class BlockLayout(NamedTuple):
    """What new blocks are like."""

    codec: Codec = Codec.NONE
    block_bytes: int = BLOCK_BYTES_MAX  # of a full block; all blocks but the last are full
    sealer: Sealer | None = None  # encrypts them
    frame_bytes: Callable[[], int] = lambda: FRAME_BYTES
    fills: bool = True  # it spares a copy to let the store fill buffers of ours

    @property
    def is_as_is(self) -> bool:
        """Whether they are not compressed."""
        return self.codec is Codec.NONE

    @property
    def plain(self) -> bool:
        """Whether they are stored as they are."""
        return self.is_as_is and self.sealer is None

    def opener(self, slice_id: SliceId, block: int) -> Opener | None:
        """What opens a block that is encrypted; None where the volume is not."""
        return None if self.sealer is None else partial(self.sealer.cipher, slice_id, block)

"""The xattr `user.slicefs.durable`: whether others see a file, and the store has its data.

`1`, or `0` while something of it waits; of a directory: while anything waits that is published in
order with it. `….flush` first stores what is written to files that are open; `….wait` answers when
it is `1`, or after WAIT_S: `slicefs flush` asks anew.

Threading: functions only.
"""

from __future__ import annotations

import errno
from typing import Final

from fsclient.file_io import FileIO
from fsclient.writeback import WriteBack
from fsmeta.engine import Meta
from fsmeta.types import ROOT_CALLER, Ino

DURABLE_XATTR: Final = b"user.slicefs.durable"
FLUSH_XATTR: Final = DURABLE_XATTR + b".flush"
WAIT_XATTR: Final = DURABLE_XATTR + b".wait"
WAIT_S: Final = 2.0  # a thread that serves is taken for so long


def ask_durable(
    meta: Meta, io: FileIO, writeback: WriteBack | None, ino: Ino, name: bytes
) -> bytes:
    """The value of an xattr whose name begins with DURABLE_XATTR.

    Raises: ENODATA, ESTALE, and what failed to be stored.
    """
    if name not in (DURABLE_XATTR, FLUSH_XATTR, WAIT_XATTR):
        raise OSError(errno.ENODATA, "no such attribute")
    is_dir = meta.getattr(ROOT_CALLER, ino).is_dir
    if name == FLUSH_XATTR:
        io.flush_open(None if is_dir else ino)
    if io.has_unstored(None if is_dir else ino):
        return b"0"
    if writeback is None:
        return b"1"
    if name == WAIT_XATTR:
        writeback.settle(ino, WAIT_S)
    return b"1" if writeback.is_durable(ino) else b"0"

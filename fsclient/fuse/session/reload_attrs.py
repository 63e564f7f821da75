"""Having the kernel ask for the attributes of an open file, now.

A notification makes it forget them, but it goes on by the size it knew: O_APPEND writes there, and
nothing in the protocol sets it. It learns a size from an answer to a question of its own. So the
file is looked at, as name_to_handle_at(2) names it: by its inode, which the kernel has at hand.
That needs CAP_DAC_READ_SEARCH; without it O_APPEND is put right by `FileIO.write` alone.

Called by the notifier, in its thread. The look is a request to ourselves: a thread that serves must
never call this.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from collections.abc import Callable
from functools import partial
from typing import Final

from fsclient.fuse.session.detached_calls import Call
from fsmeta.types import Ino

log = logging.getLogger(__name__)

GENERATION: Final = 1  # of every inode: see `pack`
_INO64_GEN: Final = 0x81  # FILEID_INO64_GEN of linux/exportfs.h
_HANDLE: Final = struct.Struct("=IiIII")  # length, type; inode's upper and lower half, generation


class Reloader:
    """Looks at inodes of one mount."""

    def __init__(self, mountpoint: str, run: Callable[[Call], None]) -> None:
        """What asks the mount is called by `run`."""
        self._run = run
        # opening it costs nothing; it can't be kept open, which would keep the mount from ending
        self._door = os.path.join(mountpoint, ".config")
        self._device: int | None = None  # which file system it is, once it was seen
        self._open = getattr(ctypes.CDLL(None, use_errno=True), "open_by_handle_at", None)

    def reload(self, ino: Ino) -> None:
        """Let the kernel ask for attributes of `ino` that it has been told to forget."""
        if self._open is None:
            return
        try:
            self._run(partial(self._look, ino))
        except OSError as error:
            log.debug("looking at inode %d through %s: %s", ino, self._door, error)
            if isinstance(error, PermissionError):
                self._open = None

    def _look(self, ino: Ino) -> None:
        """Raises: OSError."""
        door = os.open(self._door, os.O_RDONLY)
        try:
            self._look_from(door, ino)
        finally:
            os.close(door)

    def _look_from(self, door: int, ino: Ino) -> None:
        device = os.fstat(door).st_dev
        self._device = self._device or device
        if self._device != device:
            return  # detached: something else is there
        handle = _HANDLE.pack(12, _INO64_GEN, ino >> 32, ino & 0xFFFFFFFF, GENERATION)
        assert self._open is not None
        fd = self._open(door, ctypes.create_string_buffer(handle, len(handle)), os.O_PATH)
        if fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        try:
            os.fstat(fd)
        finally:
            os.close(fd)

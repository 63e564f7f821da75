"""`SeekableReader`: the position in a file that is read, for all files whose size is known.

Called by the files of trees, of steps and of archives: each says what its bytes are.
"""

from __future__ import annotations

import errno
import io


class SeekableReader(io.RawIOBase):
    """A file of `size` bytes. A subclass reads from `_at` on, and moves it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move there. Raises: UnsupportedOperation, an OSError, for a place before the begin."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise io.UnsupportedOperation(errno.EINVAL, "a place before the begin of the file")
        self._at = base + offset
        return self._at

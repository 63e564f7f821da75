"""A set of slice ids in bounded memory: a bit each, in pages of which a few are in memory.

gc marks each slice that a chunk refers to. Ids are given out in order, with rare leaps, so the bits
are dense: a billion slices are 120 MiB of a file. It is a temporary one, or one with a name, which
holds what was in the set when `flush` returned, and perhaps more. One thread.
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from typing import IO, Final

PAGE_BYTES: Final = 64 << 10  # 524,288 ids: what a chunk of a volume's life fits into
PAGES_MAX: Final = 256  # 16 MiB of memory
_IDS: Final = 8 * PAGE_BYTES


class SliceBitmap:
    """Ids from 0 on."""

    def __init__(
        self,
        pages_max: int = PAGES_MAX,
        path: str | None = None,
        slots: Mapping[int, int] | None = None,
    ) -> None:
        """A new set, or what is in the file `path` where `slots` are those of when it was flushed.

        Raises: OSError.
        """
        self._file: IO[bytes]
        if path is None:
            self._file = tempfile.TemporaryFile(prefix="slicefs-gc-")  # noqa: SIM115
        else:
            self._file = open(path, "w+b" if slots is None else "r+b")  # noqa: SIM115
        self._pages: OrderedDict[int, bytearray] = OrderedDict()  # the last was used last
        self._dirty: set[int] = set()
        self.slots = dict(slots or {})  # where in the file a page is; 100 bytes for half a million
        self._max = pages_max
        self.count = 0

    def add(self, number: int) -> None:
        """Put an id in. Raises: OSError where the temporary directory is full."""
        index, at = divmod(number, _IDS)
        page = self._page(index)
        mask = 1 << (at & 7)
        if not page[at >> 3] & mask:
            page[at >> 3] |= mask
            self._dirty.add(index)
            self.count += 1

    def __contains__(self, number: int) -> bool:
        index, at = divmod(number, _IDS)
        return bool(self._page(index)[at >> 3] & 1 << (at & 7))

    def _page(self, index: int) -> bytearray:
        page = self._pages.get(index)
        if page is not None:
            self._pages.move_to_end(index)
            return page
        slot = self.slots.get(index)
        found = b""
        if slot is not None:
            found = os.pread(self._file.fileno(), PAGE_BYTES, slot * PAGE_BYTES)
        page = self._pages[index] = bytearray(found.ljust(PAGE_BYTES, b"\0"))
        if len(self._pages) > self._max:
            old, content = self._pages.popitem(last=False)
            if old in self._dirty:
                self._write(old, content)
        return page

    def _write(self, index: int, content: bytearray) -> None:
        slot = self.slots.setdefault(index, len(self.slots))
        os.pwrite(self._file.fileno(), content, slot * PAGE_BYTES)
        self._dirty.discard(index)

    def flush(self) -> None:
        """Have everything in the file, also if the machine fails. Raises: OSError."""
        for index in sorted(self._dirty):
            self._write(index, self._pages[index])
        os.fsync(self._file.fileno())

    def clear(self) -> None:
        """Take everything out."""
        self._pages.clear()
        self._dirty.clear()
        self.slots.clear()
        self.count = 0

    def close(self) -> None:
        """Let go of the file; a temporary one is gone."""
        self._file.close()

"""`read_many` and `prefetch`: batches of whole files and ranges, many files at a time.

Small files are read in bulk, without opening each (`bulk`). The others are opened, judged and read
as by any reader, many at a time.

Called by `Client`. Threading: any thread; the threads of a batch end with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeAlias

from slicefs.client import bulk, files
from slicefs.client.bulk import KnownFile
from slicefs.client.parallel import RUNTIME, Readers
from slicefs.client.paths import CallerView
from slicefs.client.ranges import MAX_GAP_BYTES, WHOLE, Item, MergedRead, WantedRange, cut, plan

READERS: Final = 16  # files at a time: most of a small read is waiting for the store
BULK_FROM: Final = 2  # files: one by itself takes as many requests when it is opened
UNSURE_MAX: Final = 1 << 20  # bytes of memory for a range, however short the file is
PREFETCH_BATCH: Final = 64  # files: what is read of them is dropped again at once

Prefetch: TypeAlias = "Future[int]"
"""How many bytes were read, once it is done."""


class BatchReader:
    """Reads of many files of one volume."""

    def __init__(self, view: Callable[[], CallerView]) -> None:
        self._view = view
        self._readers = Readers(READERS)

    def read_many(self, items: Sequence[Item], max_gap: int = MAX_GAP_BYTES) -> list[memoryview]:
        """Each item's bytes, in order. Raises: what the first failed read met."""
        spans = plan(items, max_gap)
        view = self._view()
        out = [memoryview(b"")] * len(items)
        if len(spans) >= BULK_FROM and not view.vfs.atimes.on:
            done, spans = bulk.read(view, spans, self._readers)
            for place, data in done:
                out[place] = data

        def read(span: MergedRead) -> None:
            for place, data in _read(view, span):
                out[place] = data

        self._readers.run(spans, read)
        return out

    def read_known(self, known: Sequence[KnownFile]) -> list[memoryview]:
        """Each file's bytes, by its slice. Raises: as `read_many`."""
        spans = [
            MergedRead(file.path, 0, WHOLE, (WantedRange(place, 0, WHOLE),))
            for place, file in enumerate(known)
        ]
        done, left = bulk.read(self._view(), spans, self._readers, known)
        out = [memoryview(b"")] * len(known)
        for place, data in done:
            out[place] = data
        for span, data in zip(left, self.read_many([each.path for each in left]), strict=True):
            out[span.parts[0].place] = data
        return out

    def prefetch(self, items: Sequence[Item]) -> Prefetch:
        """Read items for the caches' sake, in a thread of its own."""
        done: Prefetch = Future()

        def run() -> None:
            total = 0
            try:
                for begin in range(0, len(items), PREFETCH_BATCH):
                    found = self.read_many(items[begin : begin + PREFETCH_BATCH])
                    total += sum(map(len, found))
            except BaseException as error:  # noqa: BLE001  (told by the future)
                done.set_exception(error)
            else:
                done.set_result(total)

        RUNTIME.spawn("slicefs-prefetch", run)
        return done


def _read(view: CallerView, span: MergedRead) -> list[tuple[int, memoryview]]:
    """The wanted parts of one span."""
    path = span.path
    ino, fh = view.run(path, lambda: files.open_raw(view, path, os.O_RDONLY, 0))
    try:
        end = span.end
        if end == WHOLE:
            end = view.run(path, lambda: view.vfs.getattr(view.caller, ino, fh).attr.size)
        elif end - span.begin > UNSURE_MAX:  # perhaps a limit, not a length
            opened = view.vfs.files.get(ino)  # None of virtual files
            size = 0 if opened is None else opened.known_length
            end = min(end, max(size, span.begin + UNSURE_MAX))
        data = memoryview(bytearray(max(0, end - span.begin)))
        done = files.read_into(view, path, (ino, fh), span.begin, data)
        return cut(span, data[:done])
    finally:
        view.run(path, lambda: view.vfs.release(ino, fh))

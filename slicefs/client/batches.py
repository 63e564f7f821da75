"""`read_many` and `prefetch`: batches of whole files and ranges, many files at a time.

Names in one directory are learned by listing it where a batch wants many of them, and attributes
come many in one request; then each file is opened, judged and read as by any reader. Blocks that
several files share (segments) are fetched once.

Called by `Client`. Threading: any thread; the threads of a batch end with it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeAlias

from fsmeta.errors import StoreError
from slicefs.client import files, names
from slicefs.client.parallel import RUNTIME, Readers
from slicefs.client.paths import View
from slicefs.client.ranges import MAX_GAP_BYTES, WHOLE, Item, Span, cut, plan

READERS: Final = 16  # files at a time: most of a small read is waiting for the store
LISTED_FROM: Final = 32  # names wanted of a directory: from here on a listing costs less
PREFETCH_BATCH: Final = 64  # files: what is read of them is dropped again at once

Prefetch: TypeAlias = "Future[int]"
"""How many bytes were read, once it is done."""


class BatchReader:
    """Reads of many files of one volume."""

    def __init__(self, view: Callable[[], View]) -> None:
        self._view = view
        self._readers = Readers(READERS)

    def read_many(self, items: Sequence[Item], max_gap: int = MAX_GAP_BYTES) -> list[memoryview]:
        """Each item's bytes, in order. Raises: what the first failed read met."""
        spans = plan(items, max_gap)
        view = self._view()
        self._learn(view, spans)
        return self._readers.read_all(spans, lambda span: _read(view, span), len(items))

    def _learn(self, view: View, spans: Sequence[Span]) -> None:
        """List directories of which many names are wanted; what fails is met again by the reads."""
        folders = Counter(os.path.dirname(span.path) for span in spans)
        for folder, count in folders.items():
            if count < LISTED_FROM:
                continue
            try:
                for _ in names.entries(view, view.find(folder or ".").ino, attrs=True):
                    pass
            except (OSError, StoreError):
                continue

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


def _read(view: View, span: Span) -> list[tuple[int, memoryview]]:
    """The wanted parts of one span."""
    path = span.path
    ino, fh = view.run(path, lambda: files.open_raw(view, path, os.O_RDONLY, 0))
    try:
        end = span.end
        if end == WHOLE:
            end = view.run(path, lambda: view.vfs.getattr(view.caller, ino, fh).attr.size)
        data = memoryview(bytearray(max(0, end - span.begin)))
        done = files.read_into(view, path, (ino, fh), span.begin, data)
        return cut(span, data[:done])
    finally:
        view.run(path, lambda: view.vfs.release(ino, fh))

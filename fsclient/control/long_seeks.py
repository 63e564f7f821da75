"""lseek(2) for holes and data of long files, on threads of its own.

A file may have millions of chunks, each of which has to be read from the metadata: any user could
hold the threads that serve requests with a few such calls. What is found in the first chunks is
answered at once.

Threading: any thread.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from fsclient.control.job_threads import JobThreads
from fsclient.files.file_ranges import FileRanges
from fsclient.kernel.later import Later
from fsmeta.runtime import Runtime

AT_ONCE: Final = 2  # the work is Python's, so more would only take turns


class LongSeeks:
    """See the module."""

    def __init__(self, ranges: FileRanges, runtime: Runtime) -> None:
        self._ranges = ranges
        self._jobs = JobThreads(runtime, "seek", AT_ONCE)

    def lseek(self, fh: int, offset: int, whence: int) -> int | Later[int]:
        """See `FileRanges`. Raises: ENXIO, EINVAL, EAGAIN."""
        found = self._ranges.lseek(fh, offset, whence)
        if found is not None:
            return found
        stop: list[bool] = []  # once the caller is interrupted
        search = partial(self._ranges.lseek_far, fh, offset, whence, partial(bool, stop))
        later = self._jobs.later(search)

        def cancel() -> None:
            stop.append(True)
            later.cancel()

        return Later(later.begin, cancel)

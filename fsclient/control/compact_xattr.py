"""The xattr `user.slicefs.compact`: getting it rewrites a file's scattered chunks, where that pays.

`slicefs compact` asks for it, one file at a time. The answer is JSON: how many chunks the file has
and how many were rewritten. Only root and the file's owner may ask, because it costs reads and
writes. What is pending on this mount is stored first.

Threading: any thread; the work is done in threads of its own, a few at a time.
"""

from __future__ import annotations

import errno
import json
from functools import partial
from typing import Final

from fsclient.background.compactor import Compactor
from fsclient.background.tidy_queue import TidyQueue
from fsclient.control.job_threads import JobThreads
from fsclient.files.file_io import FileIO
from fsclient.files.handles.open_files import OpenFiles
from fsclient.kernel.later import Later
from fsdata.blocks.blocks import BlockStore
from fsmeta.meta.meta import Meta
from fsmeta.runtime import Runtime
from fsmeta.types import Caller, FileType, Ino

COMPACT_XATTR: Final = b"user.slicefs.compact"
AT_ONCE: Final = 4


class Compaction:
    """Answers for one mount."""

    def __init__(
        self, meta: Meta, io: FileIO, blocks: BlockStore, files: OpenFiles, runtime: Runtime
    ) -> None:
        self._meta = meta
        self._io = io
        self._blocks = blocks
        self._files = files
        self._runtime = runtime
        self._jobs = JobThreads(runtime, "compact", AT_ONCE)

    def later(self, caller: Caller, ino: Ino) -> Later[bytes]:
        """Compact a file. Raises: EPERM, EINVAL where it is none, EAGAIN where too many ask."""
        attr = self._meta.getattr(caller, ino)
        if caller.uid not in (0, attr.uid):
            raise OSError(errno.EPERM, "only root and its owner compact a file")
        if attr.type is not FileType.REG:
            raise OSError(errno.EINVAL, "only files are compacted")
        return self._jobs.later(partial(self._compact, ino))

    def close(self) -> None:
        """Answer what waits, and end the threads."""
        self._jobs.close()

    def _compact(self, ino: Ino) -> bytes:
        self._io.unstored.flush_open(ino)
        # one of its own, whose count is that of this file
        compactor = Compactor(self._meta, self._blocks, self._files, TidyQueue(self._runtime))
        indexes = list(self._meta.ranges.chunks(ino))
        for index in indexes:
            compactor.compact(ino, index)
        done = compactor.compacted
        return json.dumps({"chunks": len(indexes), "compacted": done}).encode()

"""Asking a mount to compact files, one by one or a whole tree: what `slicefs compact` does.

Threading: `compact` in the caller's thread; see `trees/walk`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from fsclient.trees.walk import Dir, Failure, Failures, Walk, split
from fsmeta.runtime import Runtime

THREADS: Final = 4  # as many as a mount compacts at once
_XATTR: Final = "user.slicefs.compact"  # see fsclient/control/compact_xattr
_OPEN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_FILE: Final = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EINVAL)


class Compacted(NamedTuple):
    """What was looked at, what was rewritten, and what failed."""

    files: int
    chunks: int
    compacted: int
    failed: int
    failures: list[Failure]


class _Compactor:
    """Asks for each file."""

    def __init__(self, runtime: Runtime) -> None:
        self._lock = runtime.lock()
        self.files = self.chunks = self.compacted = 0  # guarded by _lock

    def entries(self, where: Dir, names: Sequence[str]) -> None:
        for name in names:
            try:
                fd = os.open(name, _OPEN, dir_fd=where.fd)
            except OSError as error:
                if error.errno in _NO_FILE:  # it is a symlink or special, or has gone
                    continue
                raise
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    self._add(json.loads(os.getxattr(fd, _XATTR)))
            finally:
                os.close(fd)

    def _add(self, answer: dict[str, int]) -> None:
        with self._lock:
            self.files += 1
            self.chunks += answer["chunks"]
            self.compacted += answer["compacted"]

    def leave(self, where: Dir, parent_fd: int) -> bool:
        del where, parent_fd
        return True


def compact(
    paths: Sequence[str],
    runtime: Runtime,
    threads: int = THREADS,
    progress: Callable[[int, int], object] = lambda *_: None,
) -> Compacted:
    """Compact files, and all files below directories."""
    compactor, failures = _Compactor(runtime), Failures(runtime)

    def shown() -> None:
        progress(compactor.files, compactor.compacted)

    for path in paths:
        try:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                Walk(compactor, runtime, failures, threads, shown).run(path)
                continue
            above, name = split(path)
            top = Dir(None, above, 0)
            top.fd = os.open(above, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                compactor.entries(top, (name,))
            finally:
                os.close(top.fd)
        except OSError as error:
            failures.add(path, error)
    numbers = compactor.files, compactor.chunks, compactor.compacted
    return Compacted(*numbers, failures.count, failures.first)

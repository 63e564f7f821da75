"""Removing trees in parallel, also those that programs change meanwhile: `slicefs rmr`.

What is removed is named by the descriptor of its directory, so a directory that is exchanged for a
symlink leads nowhere else. An interrupted run is repeated; it finds what is left.

Threading: `remove` in the caller's thread; see `trees/walk`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fsclient.trees.walk import THREADS, Dir, Failure, Failures, Walk, split
from fsmeta.runtime import Runtime


class Removed(NamedTuple):
    """What is gone, and what could not be removed."""

    files: int
    directories: int
    failed: int
    failures: list[Failure]


class _TreeRemover:
    """Unlinks names, then directories."""

    def __init__(self, runtime: Runtime) -> None:
        self._lock = runtime.lock()
        self.files = 0  # guarded by _lock
        self.directories = 0  # guarded by _lock

    def entries(self, where: Dir, names: Sequence[str]) -> None:
        for name in names:
            try:
                os.unlink(name, dir_fd=where.fd)
            except FileNotFoundError:
                continue  # another run, or another program
            with self._lock:
                self.files += 1

    def leave(self, where: Dir, parent_fd: int) -> bool:
        if where.failed:
            return True
        try:
            os.rmdir(where.name, dir_fd=parent_fd)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        with self._lock:
            self.directories += 1
        return True


def remove(
    paths: Sequence[str],
    runtime: Runtime,
    threads: int = THREADS,
    progress: Callable[[int, int], object] = lambda *_: None,
) -> Removed:
    """Remove files and whole directories; failures are reported at the end, the rest is removed."""
    failures, remover = Failures(runtime), _TreeRemover(runtime)
    for path in paths:
        named = path.rstrip("/") or "/"
        try:
            if not stat.S_ISDIR(os.lstat(named).st_mode):
                _unlink(named)
                remover.files += 1
                continue
            shown = lambda: progress(remover.files, remover.directories)  # noqa: E731
            Walk(remover, runtime, failures, threads, shown).run(named)
        except OSError as error:
            failures.add(path, error)
    return Removed(remover.files, remover.directories, failures.count, failures.first)


def _unlink(path: str) -> None:
    """One name that is no directory. Raises: OSError."""
    above, name = split(path)
    fd = os.open(above, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)

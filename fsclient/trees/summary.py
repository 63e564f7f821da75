"""Counting trees in parallel: files, directories, bytes and space, and which directories are large.

`slicefs summary` and `slicefs info -r` call it. A file with several names counts once, as with
du(1). Threading: `summarize` in the caller's thread; see `trees/walk`.
"""

from __future__ import annotations

import heapq
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from fsclient.trees.walk import THREADS, Dir, Failure, Failures, Walk
from fsmeta.runtime import Runtime

DEPTH_MAX: Final = 10
ENTRIES_MAX: Final = 1000
_FILES, _DIRS, _BYTES, _SPACE = range(4)
_BLOCK: Final = 512  # bytes of st_blocks


class SubtreeSum(NamedTuple):
    """A directory or file with all that is below it."""

    path: str
    depth: int
    kind: str  # "directory" or "file"
    files: int
    directories: int
    bytes: int
    space: int


class Summary(NamedTuple):
    """A tree; `parts` are its largest directories and files by depth."""

    top: SubtreeSum
    parts: list[SubtreeSum]
    failed: int
    failures: list[Failure]

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            **self.top._asdict(),
            "parts": [each._asdict() for each in self.parts],
            "failed": self.failed,
            "failures": [each._asdict() for each in self.failures],
        }


class _SubtreeCounter:
    """Adds up; keeps the largest of each directory that is shown."""

    def __init__(self, runtime: Runtime, depth: int, entries: int) -> None:
        self._lock = runtime.lock()
        self._depth = depth
        self._entries = entries
        self._seen: set[int] = set()  # inodes with several names; guarded by _lock, as all below
        self.large: dict[Dir, list[tuple[int, str, SubtreeSum]]] = {}
        self.files = 0
        self.top: SubtreeSum | None = None

    def entries(self, where: Dir, names: Sequence[str]) -> None:
        for name in names:
            try:
                found = os.stat(name, dir_fd=where.fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            with self._lock:
                self.files += 1
                where.sums[_FILES] += 1
                if found.st_nlink > 1:
                    if found.st_ino in self._seen:
                        continue
                    self._seen.add(found.st_ino)
                size = found.st_size if stat.S_ISREG(found.st_mode) else 0
                space = found.st_blocks * _BLOCK
                where.sums[_BYTES] += size
                where.sums[_SPACE] += space
                if where.depth < self._depth:
                    path = os.path.join(where.path, name)
                    self._keep(where, SubtreeSum(path, where.depth + 1, "file", 1, 0, size, space))

    def leave(self, where: Dir, parent_fd: int) -> bool:
        del parent_fd
        with self._lock:
            where.sums[_DIRS] += 1
            files, directories, size, space = where.sums
            part = SubtreeSum(where.path, where.depth, "directory", files, directories, size, space)
            if where.above is None:
                self.top = part
                return True
            for at, value in enumerate(where.sums):
                where.above.sums[at] += value
            if where.depth <= self._depth:
                self._keep(where.above, part)
        return True

    def _keep(self, where: Dir, part: SubtreeSum) -> None:
        """Among the largest in `where`. The caller holds the lock."""
        kept = self.large.setdefault(where, [])
        item = (part.space, part.path, part)
        if len(kept) < self._entries:
            heapq.heappush(kept, item)
        else:
            heapq.heappushpop(kept, item)

    def parts(self) -> list[SubtreeSum]:
        """All that were kept, as a tree is printed: largest first below each."""
        above = {each.path: where for where in self.large for _, _, each in self.large[where]}
        below: dict[str, list[SubtreeSum]] = {}
        for where, kept in self.large.items():
            below[where.path] = [part for _, _, part in sorted(kept, reverse=True)]
        out: list[SubtreeSum] = []
        todo = [part for path, parts in below.items() if path not in above for part in parts[::-1]]
        while todo:
            part = todo.pop()
            out.append(part)
            todo += below.get(part.path, [])[::-1]
        return out


def summarize(
    path: str,
    runtime: Runtime,
    depth: int = 0,
    entries: int = 10,
    threads: int = THREADS,
    progress: Callable[[int], object] = lambda _: None,
) -> Summary:
    """Count all below `path`. Raises: OSError where it cannot be entered."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        size = found.st_size if stat.S_ISREG(found.st_mode) else 0
        return Summary(SubtreeSum(path, 0, "file", 1, 0, size, found.st_blocks * _BLOCK), [], 0, [])
    counter, failures = _SubtreeCounter(runtime, depth, entries), Failures(runtime)
    Walk(counter, runtime, failures, threads, lambda: progress(counter.files)).run(path)
    assert counter.top is not None, "the walk has left its top"
    name = counter.top.path
    prefix = path.rstrip("/") or "/"

    def placed(part: SubtreeSum) -> SubtreeSum:
        return part._replace(path=prefix + part.path[len(name) :])

    parts = [placed(part) for part in counter.parts()]
    return Summary(placed(counter.top), parts, failures.count, failures.first)

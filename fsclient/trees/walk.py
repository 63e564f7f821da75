"""A parallel walk of a directory tree that never follows a link and never leaves its mount.

Each directory is opened relative to the descriptor of the one above it, with O_NOFOLLOW, and its
mount id must be that of the top: a name that is exchanged for a symlink, or that has another mount
on it (a bind mount, too), is reported and not entered. So root may walk trees of users that change
them meanwhile.

The visitor gets the names of a directory in batches, from several threads, and is called when all
that is below a directory has been visited. Tasks are taken last in, first out, and a scan works off
its own batches where many wait: open descriptors are bounded by threads times depth, memory too.

Threading: `walk` runs in the caller's thread and starts `threads` others; `_cond` is a leaf.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, Protocol

from fsmeta.runtime import Runtime

THREADS: Final = 8
THREADS_MAX: Final = 256
BATCH: Final = 200  # names
WAITING_MAX: Final = 64  # batches; then the scanning thread works itself
PASSES_MAX: Final = 10  # over one directory that programs fill while it is emptied
LOOK_S: Final = 0.2
FAILURES_MAX: Final = 1000  # that are kept; more are counted
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MOUNT_ID: Final = re.compile(r"^mnt_id:\s*(\d+)$", re.MULTILINE)


class Failure(NamedTuple):
    """What went wrong with one path."""

    path: str
    why: str


class Failures:
    """Failures of several threads; the first ones are kept."""

    def __init__(self, runtime: Runtime) -> None:
        self._lock = runtime.lock()
        self.first: list[Failure] = []  # guarded by _lock
        self.count = 0  # guarded by _lock

    def add(self, path: str, error: OSError | str) -> None:
        """Note one."""
        why = error if isinstance(error, str) else error.strerror or str(error)
        with self._lock:
            self.count += 1
            if len(self.first) < FAILURES_MAX:
                self.first.append(Failure(path, why))


class Dir:
    """A directory that is being visited."""

    def __init__(self, above: Dir | None, name: str, depth: int) -> None:
        self.above = above
        self.name = name
        self.depth = depth
        self.fd = -1
        self.pending = 1  # the scan, batches and directories below; guarded by the walk's _cond
        self.failed = False
        self.passes = 0
        self.sums = [0, 0, 0, 0]  # the visitor's

    @property
    def path(self) -> str:
        """From the top on, for messages."""
        return self.name if self.above is None else os.path.join(self.above.path, self.name)


class Visitor(Protocol):
    """What is done with a tree; the methods are called from several threads."""

    def entries(self, where: Dir, names: Sequence[str]) -> None:
        """Names in `where` that are no directories. Raises: OSError."""

    def leave(self, where: Dir, parent_fd: int) -> bool:
        """All below is visited and `where.fd` is closed; False asks for another pass.

        Raises: OSError.
        """


def mount_id(fd: int) -> int:
    """The mount that a descriptor is on; bind mounts of one file system differ."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
        found = _MOUNT_ID.search(file.read())
    assert found is not None, "Linux tells it since 3.15"
    return int(found[1])


def split(path: str) -> tuple[str, str]:
    """The directory that has `path`, and the name there, as the kernel resolves both.

    `link/..` is above what the link names, so `..` is not struck out of the text.
    """
    above, name = os.path.split(path.rstrip("/") or "/")
    if name in ("", ".", ".."):
        above, name = os.path.split(os.path.realpath(path))
    return above or ".", name or "."


class Walk:
    """One walk over one tree."""

    def __init__(
        self,
        visitor: Visitor,
        runtime: Runtime,
        failures: Failures,
        threads: int = THREADS,
        progress: Callable[[], object] = bool,
    ) -> None:
        self._visitor = visitor
        self._runtime = runtime
        self._failures = failures
        self._threads = threads
        self._progress = progress
        self._cond = runtime.condition()
        self._tasks: list[Callable[[], None]] = []  # guarded by _cond, as all below
        self._over = False
        self._top_fd = -1
        self._mount = 0

    def run(self, path: str) -> None:
        """Visit all below the directory `path`. Raises: OSError where it cannot be entered."""
        above, name = split(path)
        self._top_fd = os.open(above, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            top = Dir(None, name, 0)
            if not self._enter(top, raising=True):
                return
            self._tasks.append(partial(self._scan, top))
            threads = [self._runtime.spawn(f"walk-{n}", self._work) for n in range(self._threads)]
            try:
                self._wait()
            finally:
                with self._cond:
                    self._over = True
                    self._tasks.clear()
                    self._cond.notify_all()
                for thread in threads:
                    thread.join()
        finally:
            os.close(self._top_fd)

    def _wait(self) -> None:
        while True:
            with self._cond:
                if self._over:
                    return
                self._cond.wait(LOOK_S)
            self._progress()

    def _work(self) -> None:
        while True:
            with self._cond:
                while not self._tasks and not self._over:
                    self._cond.wait()
                if self._over:
                    return
                task = self._tasks.pop()
            try:
                task()
            except BaseException:
                with self._cond:
                    self._over = True
                    self._cond.notify_all()
                raise

    # --- one directory ---------------------------------------------------------------------------

    def _enter(self, where: Dir, raising: bool = False) -> bool:
        """Open a directory; False where that fails. Raises: OSError, if it is to."""
        parent = self._top_fd if where.above is None else where.above.fd
        try:
            where.fd = os.open(where.name, _OPEN, dir_fd=parent)
            found = mount_id(where.fd)
            if where.above is None:
                self._mount = found
            elif found != self._mount:
                os.close(where.fd)
                where.fd = -1
                raise OSError(errno.EXDEV, "another file system is mounted here; it is left alone")
        except OSError as error:
            if raising:
                raise
            self._fail(where, where.path, error)
            return False
        return True

    def _fail(self, where: Dir, path: str, error: OSError) -> None:
        self._failures.add(path, error)
        above: Dir | None = where
        while above is not None and not above.failed:
            above.failed = True
            above = above.above

    def _scan(self, where: Dir) -> None:
        """List a directory and hand out what is in it."""
        files: list[str] = []
        try:
            with os.scandir(where.fd) as entries:
                for entry in entries:
                    if self._over:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        self._add(
                            where, partial(self._visit, Dir(where, entry.name, where.depth + 1))
                        )
                        continue
                    files.append(entry.name)
                    if len(files) == BATCH:
                        self._hand_out(where, files)
                        files = []
        except OSError as error:
            self._fail(where, where.path, error)
        if files:
            self._hand_out(where, files)
        self._done(where)

    def _hand_out(self, where: Dir, names: list[str]) -> None:
        task = partial(self._batch, where, names)
        if len(self._tasks) < WAITING_MAX:
            self._add(where, task)
            return
        with self._cond:
            where.pending += 1
        task()

    def _add(self, where: Dir, task: Callable[[], None]) -> None:
        with self._cond:
            where.pending += 1
            self._tasks.append(task)
            self._cond.notify()

    def _batch(self, where: Dir, names: list[str]) -> None:
        for name in names:
            if self._over:
                break
            try:
                self._visitor.entries(where, (name,))
            except OSError as error:
                self._fail(where, os.path.join(where.path, name), error)
        self._done(where)

    def _visit(self, where: Dir) -> None:
        """A directory below; it counts for the one above until it is left."""
        if self._enter(where):
            self._scan(where)
        else:
            assert where.above is not None
            self._done(where.above)

    def _done(self, where: Dir | None) -> None:
        """One part of `where` is visited; the last one leaves it, and so on upwards."""
        while where is not None:
            with self._cond:
                where.pending -= 1
                if where.pending:
                    return
            if self._over or self._leave(where):
                with suppress(OSError):
                    if where.fd >= 0:
                        os.close(where.fd)
                        where.fd = -1
                where = where.above
                continue
            return
        with self._cond:
            self._over = True
            self._cond.notify_all()

    def _leave(self, where: Dir) -> bool:
        """False where the directory is to be scanned once more."""
        parent = self._top_fd if where.above is None else where.above.fd
        try:
            if self._visitor.leave(where, parent):
                return True
        except OSError as error:
            self._fail(where, where.path, error)
            return True
        where.passes += 1
        if where.failed or where.passes >= PASSES_MAX:
            if not where.failed:
                self._fail(where, where.path, OSError(errno.ENOTEMPTY, "others fill it"))
            return True
        self._add(where, partial(self._scan, where))
        return False

"""What all files being written share: upload threads, and the clock that flushes idle files.

Each `FileWriter` submits its blocks here and registers while it holds uncommitted data. A flusher
thread sleeps until the first of them is due and wakes for nothing else. The budget calls `push`
when writers want memory that others hold in half-filled buffers.

Threading: one lock for the register. Lock order: a file's lock, then this one; files are called
without it.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Protocol

from fsdata.budget import Budget
from fsdata.pool import WorkerPool
from fsmeta.runtime import Runtime, Thread

UPLOAD_THREADS = 4  # a local disk is busy with two; remote stores are given more
IDLE_S = 5.0  # data nobody touched for so long is made durable unasked, as the kernel does
AGE_FACTOR = 6  # data of a file that is written all the time waits 6 × IDLE_S: dirty_expire's 30 s
TICK_SHARE = 4  # the flusher looks at most 4 times an IDLE_S, however many files come and go


class Dirty(Protocol):
    """A file with data that is not committed."""

    def due(self) -> float:
        """When it is to be flushed, in monotonic seconds; `inf` if it has become clean."""

    def flush_idle(self) -> None:
        """Flush now, on an upload thread; failures are kept for the next call."""

    def push(self) -> None:
        """Start uploading what is held back in buffers."""


class UploadPool:
    """Upload threads, the register of dirty files, and the flusher."""

    def __init__(
        self,
        runtime: Runtime,
        budget: Budget,
        threads: int = UPLOAD_THREADS,
        idle_s: float = IDLE_S,
    ) -> None:
        self._runtime = runtime
        self._workers = WorkerPool(runtime, "upload", threads)
        self.idle_s = idle_s
        self._cond = runtime.condition()
        self._dirty: dict[Dirty, float] = {}  # guarded by _cond, as all below: not before when
        self._uploads = 0  # jobs queued and running
        self._asleep = False  # the flusher waits without a timeout
        self._flusher: Thread | None = None
        self._closed = False
        budget.on_push(self.push)

    def submit(self, upload: Upload) -> None:
        """Run `upload` on one of the threads."""
        with self._cond:
            self._uploads += 1
        self._workers.submit(partial(self._run, upload))

    def _run(self, upload: Upload) -> None:
        try:
            upload()
        finally:
            with self._cond:
                self._uploads -= 1

    def uploads(self) -> int:
        """Uploads queued and running: a gauge."""
        with self._cond:
            return self._uploads

    def watch(self, file: Dirty) -> None:
        """`file` holds uncommitted data from now on."""
        with self._cond:
            self._dirty[file] = 0.0
            if self._flusher is None and not self._closed:
                self._flusher = self._runtime.spawn("flusher", self._flush_idle)
            elif self._asleep:
                self._asleep = False
                self._cond.notify()

    def forget(self, file: Dirty) -> None:
        """`file` is clean."""
        with self._cond:
            self._dirty.pop(file, None)

    def dirty(self) -> int:
        """Files with uncommitted data: a gauge."""
        with self._cond:
            return len(self._dirty)

    def push(self) -> None:
        """Start uploading what files hold back, unless uploads under way will free memory soon."""
        with self._cond:
            files = [] if self._uploads else list(self._dirty)
        for file in files:
            file.push()

    def _flush_idle(self) -> None:
        """The flusher's body: hand files that are due to the upload threads."""
        while (due := self._next_due()) is not None:
            for file in due:
                self._workers.submit(file.flush_idle)

    def _next_due(self) -> list[Dirty] | None:
        """Wait for files that are due; None when the pool is closed."""
        with self._cond:
            while not self._closed:
                now = self._runtime.monotonic()
                times = {file: max(file.due(), at) for file, at in self._dirty.items()}
                due = [file for file, at in times.items() if at <= now]
                for file in due:
                    self._dirty[file] = now + self.idle_s  # when to try again if it fails
                if due:
                    return due
                first = min(times.values(), default=inf)
                self._asleep = first == inf
                if self._asleep:
                    self._cond.wait()
                else:
                    self._cond.wait(max(first - now, self.idle_s / TICK_SHARE))
            return None

    def close(self) -> None:
        """Finish what was submitted and end all threads. Files are to be flushed before."""
        with self._cond:
            self._closed = True
            self._cond.notify_all()
        if self._flusher is not None:
            self._flusher.join()
        self._workers.close()


class Upload(Protocol):
    """A job that uploads one block and keeps its own failure."""

    def __call__(self) -> None: ...

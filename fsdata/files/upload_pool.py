"""What all files being written share: upload threads, and the clock that flushes idle files.

Each `FileWriter` submits its blocks here and registers while it holds uncommitted data. A flusher
thread sleeps until the first of them is due and wakes for nothing else. The budget calls `push`
when writers want memory that other files hold in half-filled buffers.

Threading: one lock for the register. Lock order: a file's lock, this one, the threads' own; files
are called without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Final, Protocol

from fsdata.resources.memory_budget import MemoryBudget
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.runtime import Runtime, Thread, spawn_lasting

UPLOAD_THREADS = 4  # a local disk is busy with two; distant stores are given more, see `Flow`
IDLE_S = 5.0  # data that is not touched for so long is made durable unasked, as the kernel does
AGE_FACTOR = 6  # data of a file that is written all the time waits 6 × IDLE_S: dirty_expire's 30 s
FAR_UPLOADS: Final = 20  # at a time, of 4 MiB: 800 MB/s where each takes 100 ms
NEAR_S: Final = 0.02  # an upload that takes less fills the link with its neighbours
FULL_S: Final = 1.0  # one that takes longer is on a link of 16 MiB/s or less, which four fill
ALONE: Final = 2.0  # times the quickest: more at a time make each hardly slower
CROWDED: Final = 4.0  # times the quickest: they take turns
STEP: Final = 0.5  # threads more or less for each upload: four become eight in eight uploads
NEWEST: Final = 0.1  # weight of the last one in the mean
FORGET: Final = 1.001  # the quickest of long ago may have been on another way
NONE_S: Final = 0.001  # another thread was uploading that block
WHOLE_BYTES: Final = 1 << 20  # what is smaller says nothing about blocks
TICK_SHARE = 4  # the flusher looks at most 4 times an IDLE_S, however many files come and go


class Dirty(Protocol):
    """A file with data that is not committed."""

    def due(self) -> float:
        """When it is to be flushed, in monotonic seconds; `inf` if it has become clean."""

    @property
    def pending_bytes(self) -> int:
        """How many bytes of slices are not committed."""

    def flush_idle(self, wait: bool = False) -> None:
        """Flush now, on an upload thread or another; failures are kept for the next call.

        `wait`: also while another thread flushes it.
        """

    def push(self) -> None:
        """Start uploading what is held back in buffers."""


class Flow:
    """How many uploads at a time fill the way to the store, estimated by how long each takes.

    Where more of them at a time take no longer each, time passes on the way and more fit in; where
    each takes longer, they share a link or a processor that is full (as TCP Vegas has it). What is
    near is left alone, and so is a link so slow that more at a time would wait out their timeouts.
    Threading: the caller's lock.
    """

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self._most = most
        self._size = float(least)
        self._quickest_s = inf
        self._mean_s = 0.0

    def took(self, seconds: float, waiting: bool) -> int:
        """An upload of a whole block has ended, and others wait for a thread; how many are good."""
        self._quickest_s = min(self._quickest_s * FORGET, seconds)
        self._mean_s += (seconds - self._mean_s) * NEWEST if self._mean_s else seconds
        shared = self._mean_s / self._quickest_s
        if waiting and NEAR_S < self._mean_s < FULL_S and shared < ALONE:
            self._size = min(float(self._most), self._size + STEP)
        elif shared > CROWDED or not NEAR_S < self._mean_s < FULL_S:
            self._size = max(float(self.least), self._size - STEP)
        return int(self._size)


class UploadPool:
    """Upload threads, the register of dirty files, and the flusher."""

    def __init__(
        self,
        runtime: Runtime,
        budget: MemoryBudget,
        threads: int = UPLOAD_THREADS,
        idle_s: float = IDLE_S,
        most: int = 0,
        pool: Callable[[Runtime, str, int], WorkerPool] = WorkerPool,
        file_bytes_max: int | None = None,
    ) -> None:
        """`most`: threads where the store is far; else there are never more than `threads`.

        `file_bytes_max`: of one file on their way to the store, before its writers wait; None: as
        many as there is memory for.
        """
        self.file_bytes_max = file_bytes_max
        self._runtime = runtime
        self._workers = pool(runtime, "upload", threads)
        self.idle_s = idle_s
        self._cond = runtime.condition()
        self._dirty: dict[Dirty, float] = {}  # guarded by _cond, as all below: not before when
        self._uploads = 0  # jobs queued and running
        self._refused = False  # a writer waits for memory, and `push` left it to those jobs
        self._flow = Flow(threads, most) if most > threads else None
        self._threads = threads
        self._asleep = False  # the flusher waits without a timeout
        self._flusher: Thread | None = None
        self._closed = False
        self._budget = budget
        budget.on_push(self.push)

    def submit(self, upload: Upload, size: int = 0) -> None:
        """Run `upload`, which is of so many bytes, on one of the threads."""
        with self._cond:
            self._uploads += 1
        self._workers.submit(partial(self._run, upload, size))

    def _run(self, upload: Upload, size: int) -> None:
        begun = self._runtime.monotonic()
        try:
            upload()
        finally:
            with self._cond:
                self._uploads -= 1
                unmet = self._refused and not self._uploads
                if unmet:
                    self._refused = False
            if unmet:  # a writer for which that was too little pushes again
                self._budget.poke()
            took_s = self._runtime.monotonic() - begun
            if self._flow is not None and size >= WHOLE_BYTES and took_s > NONE_S:
                self._adapt(self._flow, took_s)

    def _adapt(self, flow: Flow, took_s: float) -> None:
        """Have as many threads as are good."""
        with self._cond:
            before = self._threads
            self._threads = flow.took(took_s, self._uploads >= before)
            if self._threads != before:
                self._workers.resize(self._threads)

    def threads(self) -> int:
        """Uploads at a time: a gauge."""
        return self._threads

    def uploads(self) -> int:
        """Uploads queued and running: a gauge."""
        with self._cond:
            return self._uploads

    def watch(self, file: Dirty) -> None:
        """`file` holds uncommitted data from now on."""
        with self._cond:
            self._dirty[file] = 0.0
            if self._flusher is None and not self._closed:
                self._flusher = spawn_lasting(self._runtime, "flusher", self._flush_idle)
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

    def pending_bytes(self) -> int:
        """How many bytes are written and not committed."""
        with self._cond:
            files = list(self._dirty)
        return sum(file.pending_bytes for file in files)

    def flush_dirty(self) -> None:
        """Store and commit what is written by now; each file keeps its failures."""
        with self._cond:
            files = list(self._dirty)
        for file in files:
            file.push()
        for file in files:
            file.flush_idle(wait=True)

    def push(self) -> None:
        """Start uploading what files hold back, unless uploads under way will free memory soon.

        And commit it then: slices take memory until they are committed.
        """
        with self._cond:
            self._refused = self._uploads > 0
            files = [] if self._uploads else list(self._dirty)
        for file in files:
            file.push()
        for file in files:
            self.submit(file.flush_idle)

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

"""Copying an object's bytes into new slices: the data half of copy-up.

Blocks are read and stored on the upload threads, a few at a time, so memory is bounded and what is
far away is asked for in parallel. Nothing refers to the slices until the caller commits them; the
objects of a client that is killed are gc's.

Threading: `copy` from any thread but an upload thread, which it waits for.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from fsdata.blocks.blocks import BlockStore
from fsdata.resources.worker_pool import run_told
from fsmeta.errors import StoreError
from fsmeta.runtime import Runtime
from fsmeta.types import CHUNK_BYTES, Slice

IN_FLIGHT_MAX: Final = 8  # blocks of 4 MiB: 32 MiB, and 130 MB/s for each 100 ms of a round trip
LOOK_S: Final = 0.2  # how late an interrupt may be

Get = Callable[[int, int], bytes]
"""Bytes of the object. Raises: ESTALE, EIO, Unavailable."""

Submit = Callable[[Callable[[], None]], None]
"""Runs a job on an upload thread."""


class ObjectCopier:
    """Copies one object."""

    def __init__(
        self,
        runtime: Runtime,
        blocks: BlockStore,
        submit: Submit,
        get: Get,
        stopped: Callable[[], bool],
    ) -> None:
        """`stopped`: the request that waits for it has been interrupted."""
        self._blocks = blocks
        self._submit = submit
        self._get = get
        self._stopped = stopped
        self._cond = runtime.condition()
        self._slices: Sequence[Slice] = ()
        self._flying = 0  # guarded by _cond, as below
        self._error: OSError | StoreError | None = None
        self._interrupted = False

    def copy(self, slices: Sequence[Slice]) -> None:
        """Fill `slices`, one for each chunk, in order; they survive a loss of power then.

        Raises: ESTALE, EINTR, ENOSPC, EIO, Unavailable; then nothing is left of them, as far as the
        store can be reached.
        """
        self._slices = slices
        try:
            for job in self._jobs(slices):
                if not self._begin():
                    break
                self._submit(partial(self._run, job))
            self._await_ended()
            self._blocks.sync([(piece.id, piece.size) for piece in slices])
        except (OSError, StoreError):
            with self._cond:
                flying = self._flying  # the last of those removes all
            if not flying:
                self.remove()
            raise

    def remove(self) -> None:
        """Delete what no commit will name; what can't be deleted is gc's."""
        try:
            self._blocks.delete([(piece.id, piece.size) for piece in self._slices])
        except (OSError, StoreError):
            pass

    def _jobs(self, slices: Sequence[Slice]) -> Iterator[Callable[[], None]]:
        for index, piece in enumerate(slices):
            for block, begin in enumerate(range(0, piece.size, self._blocks.block_bytes)):
                end = min(begin + self._blocks.block_bytes, piece.size)
                base = index * CHUNK_BYTES
                yield partial(self._copy_block, piece, block, base + begin, base + end)

    def _copy_block(self, piece: Slice, block: int, begin: int, end: int) -> None:
        data = self._get(begin, end)
        self._blocks.put_block(piece.id, block, data, rewritten=True)

    def _run(self, job: Callable[[], None]) -> None:
        """What an upload thread does: one block, unless another has failed."""
        if self._error is None:
            run_told(job, "a block was not copied", self._ended)
        else:
            self._ended(None)

    def _ended(self, error: OSError | StoreError | None) -> None:
        with self._cond:
            self._flying -= 1
            self._error = self._error or error
            left = self._interrupted and not self._flying
            self._cond.notify_all()
        if left:
            self.remove()

    def _begin(self) -> bool:
        """Wait until one more block may fly; False where one of them has failed."""
        with self._cond:
            while self._flying >= IN_FLIGHT_MAX and self._error is None:
                self._wait()
            self._flying += self._error is None
            return self._error is None

    def _await_ended(self) -> None:
        """Raises: what a block has met."""
        with self._cond:
            while self._flying and not self._interrupted:
                self._wait()
            if self._error is not None:
                raise self._error

    def _wait(self) -> None:
        """The caller holds the lock."""
        self._cond.wait(LOOK_S)
        if self._stopped():
            self._interrupted = True
            self._error = self._error or OSError(errno.EINTR, "interrupted")

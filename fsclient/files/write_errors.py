"""Storing all that is written at once, and keeping account of what could not be stored.

`FileIO` notes what is lost when a file's last handle goes, `Client.stop` what is lost at its end;
`umount` reports both, because the program that wrote may have ignored close(2). A write that a
limit refused at close(2) is an ordinary answer to one user, and is not reported at `umount`.

Threading: `flush_together` has threads of its own while it runs. `WriteErrors`: any method from any
thread; one lock, a leaf.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from fsclient.files.handles.open_files import OpenFile
from fsclient.volume.paths import path_of
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import Ambiguous, StoreError, Unavailable
from fsmeta.runtime import Runtime
from fsmeta.schema import inode, keys
from fsmeta.store.contract import Store
from fsmeta.types import Ino

log = logging.getLogger(__name__)

FLUSHES: Final = 16  # files at a time: a store that hangs takes the time of one
_REFUSED: Final = frozenset({errno.EDQUOT, errno.ENOSPC})
NAMED_MAX: Final = 100  # files remembered by inode; of more only the number

Failed = tuple[Ino, Exception]


def flush_together(
    runtime: Runtime, flush: Callable[[OpenFile], None], files: Sequence[OpenFile]
) -> list[Failed]:
    """Store all these files; what could not be, and why.

    Once one was tried for as long as requests are repeated, while none could be stored, the store
    is away, and files that were not begun are not tried.
    """
    failed: list[Failed] = []
    lock = runtime.lock()
    stored = False  # guarded by lock, as `failed` and the next
    away: Exception | None = None

    def one(file: OpenFile) -> None:
        nonlocal stored, away
        error = away
        if error is None:
            try:
                flush(file)
            except (OSError, StoreError) as caught:
                error = caught
        with lock:
            if error is None or not file.dirty:  # what failed before has been made good
                stored = True
                away = None
                return
            failed.append((file.ino, error))
            if not stored and isinstance(error, (Unavailable, Ambiguous)):
                away = error

    if len(files) <= 1:
        for file in files:
            one(file)
        return failed
    pool = WorkerPool(runtime, "flush", FLUSHES)
    for file in files:
        pool.submit(partial(one, file))
    pool.close()
    return failed


class WriteError(NamedTuple):
    """What users are told of data that were written and not stored."""

    files: int
    first: str  # the path of one of them
    why: str

    def __str__(self) -> str:
        others = self.files - 1
        more = f" and {others} more file{'s' * (others > 1)}" if others else ""
        return f"data written to {self.first}{more} could not be stored and are lost: {self.why}"


def _has_names(ino: Ino, records: Sequence[bytes | None]) -> bool:
    """Whether a file is there: one without names goes when its mounts have noticed."""
    a, v = records
    return a is not None and v is not None and inode.unpack_inode(ino, a, v).nlink > 0


def _say(ino: Ino, error: Exception) -> None:
    log.error("inode %d: data written and not stored is lost: %s", ino, error)


class WriteErrors:
    """Files whose data were written and not stored."""

    def __init__(self, runtime: Runtime) -> None:
        self._lock = runtime.lock()
        self._found: dict[Ino, Exception] = {}  # guarded by _lock, as below
        self._unnamed = 0

    def closed(self, ino: Ino, error: Exception) -> None:
        """Something of a file is lost, and close(2) has said so."""
        if isinstance(error, OSError) and error.errno in _REFUSED:
            _say(ino, error)
        else:
            self.add(ino, error)

    def add(self, ino: Ino, error: Exception) -> None:
        """Something of a file is lost."""
        _say(ino, error)
        with self._lock:
            if len(self._found) < NAMED_MAX:
                self._found.setdefault(ino, error)
            elif ino not in self._found:
                self._unnamed += 1

    def told(self, store: Store) -> WriteError | None:
        """What is to be said; nothing of files that are gone since."""
        with self._lock:
            found, unnamed = list(self._found.items()), self._unnamed
        if not found:
            return None
        try:
            rows = [keys.inode_row(ino) for ino, _ in found]
            there = zip(found, store.read_many(rows, keys.ATTR_FIELDS), strict=True)
            left = [each for each, records in there if _has_names(each[0], records)]
            if not left and not unnamed:
                return None
            first, error = (left or found)[0]
            return WriteError(len(left) + unnamed, path_of(store, first), str(error))
        except (OSError, StoreError):  # the metadata are away, too
            first, error = found[0]
            return WriteError(len(found) + unnamed, f"inode {first}", str(error))

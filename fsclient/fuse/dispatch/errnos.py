"""The one place where errors become errnos.

Called by the edge of each transport: the dispatcher of the native one, `fuse/pyfuse3/serving`. An
OSError goes to the kernel as it is. Of the store's, as NFS and CephFS do:
    Unavailable, Ambiguous    EIO     retries are over by the time one gets here; no program expects
                                      ETIMEDOUT of read(2), and NFS soft mounts say EIO
    Fenced                    ESTALE  what this mount knew is void; it joins anew by itself, and the
                                      program must look its names up again
    StoreFull                 ENOSPC
    LimitExceeded             EDQUOT  the verb should have named the errno; logged
    Corrupt                   EIO     and `on_corrupt` is told, which makes the mount read-only
    ObjectMissing, -Damaged   EIO     bytes that are wrong are never data
    anything else             EIO     with its traceback in the log
Every EIO is logged at ERROR, every other errno at DEBUG. Threading: any thread.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Final

from fsmeta.errors import Corrupt, Fenced, LimitExceeded, Refused, StoreError, StoreFull

log = logging.getLogger(__name__)

_ERRNO_LIMIT: Final = 512  # the kernel takes answers above -512 only
_STORE_ERRNOS: Final[tuple[tuple[type[StoreError], int], ...]] = (
    (Fenced, errno.ESTALE),
    (StoreFull, errno.ENOSPC),
    (LimitExceeded, errno.EDQUOT),
    (StoreError, errno.EIO),
)


class Errnos:
    """Judges what the operations of one mount have raised."""

    def __init__(self, on_corrupt: Callable[[Corrupt], None] | None = None) -> None:
        self._on_corrupt = on_corrupt
        self._refused = ""  # what the object store has refused for good: said once

    def judge(self, error: Exception, name: str, ino: int) -> int:
        """The errno for `error` of operation `name`, logged as it deserves."""
        if isinstance(error, OSError):
            number = error.errno
            if number is not None and 0 < number < _ERRNO_LIMIT and number != errno.EIO:
                log.debug("%s ino %d: %s", name, ino, error)
                return number
            log.error("%s ino %d: %r", name, ino, error, exc_info=number != errno.EIO)
            return errno.EIO
        for kind, number in _STORE_ERRNOS:
            if isinstance(error, kind):
                again = isinstance(error, Refused) and str(error) == self._refused
                level = logging.DEBUG if again else logging.ERROR
                log.log(level, "%s ino %d: %s: %s", name, ino, type(error).__name__, error)
                if isinstance(error, Refused):
                    self._refused = str(error)
                if isinstance(error, Corrupt) and self._on_corrupt is not None:
                    self._on_corrupt(error)
                return number
        log.error("%s ino %d: unforeseen", name, ino, exc_info=error)
        return errno.EIO

"""The file of `--access-log`: a thread that writes what the access log tells.

The thread begins with the first line. Where the disk is full or slow, lines are dropped and
counted: a log never holds up a mount. Threading: opened and closed by the thread that mounts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Final

from fsclient.kernel.contract import Buffer
from fsclient.kernel.later import Outcome
from fsclient.observe.access_log import AccessLog
from fsclient.observe.log_file import LogFile
from fsdata.resources.private_paths import open_private
from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime, spawn_lasting

log = logging.getLogger(__name__)

_PIECE_BYTES: Final = 1 << 20
_MODE: Final = 0o600  # names of files are their owners' business
GATHER_S: Final = 0.05  # between two writes: a wake-up for each request would cost more than it
END_S: Final = 10.0  # how long leaving waits for the disk


class AccessFile:
    """Writes lines to a file until the log ends."""

    def __init__(self, path: str, max_bytes: int, access: AccessLog, runtime: Runtime) -> None:
        """Raises: ConfigError."""
        try:
            fd = _open(path)
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(
                f"can't write the access log {path}: {why}; choose another --access-log"
            ) from error
        self._runtime = runtime
        self._file = LogFile(path, fd, max_bytes, _open)
        self._queue = access.subscribe()
        self._ready = runtime.event()
        self._piece: Sequence[Buffer] = ()
        self._failed = False
        self._thread = spawn_lasting(runtime, "access-log", self._run)

    def _run(self) -> None:
        while True:
            self._ready.clear()
            self._queue.wait(_PIECE_BYTES, self._take)
            self._ready.wait()
            if not any(self._piece):
                return
            try:
                self._file.write(b"".join(self._piece))
                self._failed = False
            except OSError as error:
                if not self._failed:
                    log.warning("the access log loses lines: %s", error)
                self._failed = True
            self._runtime.sleep(GATHER_S)

    def _take(self, outcome: Outcome[Sequence[Buffer]]) -> None:
        self._piece = outcome()
        self._ready.set()

    def close(self) -> None:
        """The log has ended: return when its lines are written."""
        self._thread.join(END_S)


def _open(path: str) -> int:
    return open_private(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)

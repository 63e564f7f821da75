"""From a request to its answer: the one opcode table, and the one place where errors become errnos.

Called by the session's workers, several at once; the table is read only after construction. Knows
neither threads nor the descriptor, so it is tested without a kernel.

Errors. An OSError goes to the kernel as it is. Of the store's, as NFS and CephFS do:
    Unavailable, Ambiguous    EIO     retries are over by the time one gets here; no program expects
                                      ETIMEDOUT of read(2), and NFS soft mounts say EIO
    Fenced                    ESTALE  what this mount knew is void; it joins anew by itself, and the
                                      program must look its names up again
    StoreFull                 ENOSPC
    LimitExceeded             EDQUOT  the verb should have named the errno; logged
    Corrupt                   EIO     and `on_corrupt` is told, which makes the mount read-only
    ObjectMissing, -Damaged   EIO     bytes that are wrong are never data
    anything else             EIO     with its traceback in the log
Every EIO is logged at ERROR, every other errno at DEBUG. Opcodes without a row answer ENOSYS; the
kernel then does without, for the life of the mount: POLL (always ready).
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Final

from fsclient.fuse.dispatch import files, flags, locks, names, ranges, xattrs
from fsclient.fuse.dispatch.subdir import Serve, Served, put_below, served_below
from fsclient.fuse.wire.operation import Operation
from fsclient.fuse.wire.pack import Answer
from fsclient.fuse.wire.protocol import OPCODES, Opcode
from fsclient.kernel.contract import FileSystem
from fsclient.kernel.later import Later, Outcome
from fsmeta.errors import Corrupt, Fenced, LimitExceeded, Refused, StoreError, StoreFull
from fsmeta.types import ROOT_INO, Caller, Ino

log = logging.getLogger(__name__)

_ERRNO_LIMIT: Final = 512  # the kernel takes answers above -512 only
_STORE_ERRNOS: Final[tuple[tuple[type[StoreError], int], ...]] = (
    (Fenced, errno.ESTALE),
    (StoreFull, errno.ENOSPC),
    (LimitExceeded, errno.EDQUOT),
    (StoreError, errno.EIO),
)


def operations(setxattr_ext: bool) -> list[Operation | None]:
    """The table, by opcode."""
    rows = {
        **names.OPERATIONS,
        **xattrs.OPERATIONS,
        **flags.OPERATIONS,
        **files.OPERATIONS,
        **ranges.OPERATIONS,
        **locks.OPERATIONS,
    }
    if not setxattr_ext:
        rows[Opcode.SETXATTR] = xattrs.SETXATTR_OLD
    table: list[Operation | None] = [None] * OPCODES
    for opcode, row in rows.items():
        table[opcode] = row
    return table


def operation_name(opcode: int) -> str:
    """What metrics and traces call an opcode."""
    if opcode in Opcode.__members__.values():
        return Opcode(opcode).name.lower()
    return f"opcode_{opcode}"


class Dispatcher:
    """Serves requests from one file system."""

    def __init__(
        self,
        fs: FileSystem,
        setxattr_ext: bool = True,
        on_corrupt: Callable[[Corrupt], None] | None = None,
        trace: Callable[[str], None] | None = None,
        root: Ino = ROOT_INO,
    ) -> None:
        """`trace` gets a line for each request and its outcome (`-o debug`); `root` is mounted."""
        self._fs = fs
        self._table = operations(setxattr_ext)
        self._on_corrupt = on_corrupt
        self._refused = ""  # what the object store has refused for good: said once
        self._trace = trace
        self.cancel = fs.cancel  # of a request that was put aside
        self.serve: Serve = self._serve if trace is None else self._serve_traced
        if root != ROOT_INO:
            put_below(self._table, root)
            self.serve = served_below(self.serve, root)

    def _serve(self, opcode: int, caller: Caller, ino: int, view: memoryview, end: int) -> Served:
        """The answer behind its header, an errno, or when one comes; None where the kernel waits
        for nothing, or is answered by another way.

        `opcode` is below OPCODES; `view` begins with the header, the body ends at `end`.
        """
        operation = self._table[opcode]
        if operation is None:
            return errno.ENOSYS
        name, parse, handle, answered = operation
        try:
            answer = handle(self._fs, caller, ino, *parse(view, end))
            if isinstance(answer, Later):
                return self._put_aside(answer, name, ino)
            return answer
        except Exception as error:  # noqa: BLE001  (the edge: whatever it is, the kernel waits)
            number = self._errno_of(error, name, ino)
            return number if answered else None

    def _put_aside(self, later: Later[Answer], name: str, ino: int) -> Later[Answer | int]:
        """`later`, with an errno for what it raises."""

        def judge(outcome: Outcome[Answer]) -> Answer | int:
            try:
                return outcome()
            except Exception as error:  # noqa: BLE001  (the edge, as in `_serve`)
                return self._errno_of(error, name, ino)

        return later.map(judge)

    def _serve_traced(
        self, opcode: int, caller: Caller, ino: int, view: memoryview, end: int
    ) -> Served:
        answer = self._serve(opcode, caller, ino, view, end)
        if self._trace is not None:
            asked = self._describe(opcode, ino, view, end)
            who = f"uid {caller.uid} gid {caller.gid} pid {caller.pid}"
            self._trace(f"{asked} by {who} -> {_outcome(answer)}")
        return answer

    def _describe(self, opcode: int, ino: int, view: memoryview, end: int) -> str:
        """`lookup(1, b'name')`."""
        operation = self._table[opcode]
        if operation is None:
            return f"{operation_name(opcode)}({ino})"
        try:
            arguments = operation.parse(view, end)
        except OSError as error:
            return f"{operation.name}({ino}, {error})"
        shown = (f"{a.nbytes} bytes" if isinstance(a, memoryview) else repr(a) for a in arguments)
        return f"{operation.name}({', '.join((str(ino), *shown))})"

    def _errno_of(self, error: Exception, name: str, ino: int) -> int:
        """The errno for `error`, logged as it deserves."""
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


def _outcome(answer: Served) -> str:
    if answer is None:
        return "no answer"
    if isinstance(answer, Later):
        return "answered later"
    if isinstance(answer, int):
        return errno.errorcode.get(answer, str(answer))
    size = len(answer) if isinstance(answer, bytes) else sum(len(piece) for piece in answer)
    return f"{size} bytes"

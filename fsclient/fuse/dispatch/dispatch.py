"""From a request to its answer: the one opcode table.

Called by the session's workers, several at once; the table is read only after construction. Knows
neither threads nor the descriptor, so it is tested without a kernel.

What an operation raises becomes an errno in `errnos`. Opcodes without a row answer ENOSYS; the
kernel then does without, for the life of the mount: POLL (always ready).
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from fsclient.fuse.dispatch import files, flags, locks, names, ranges, xattrs
from fsclient.fuse.dispatch.errnos import Errnos
from fsclient.fuse.dispatch.fast_lane import Lane, lane_below, lanes_of, no_lanes
from fsclient.fuse.dispatch.squash import Squash, served_squashed
from fsclient.fuse.dispatch.subdir import Serve, Served, put_below, served_below
from fsclient.fuse.wire.operation import Operation
from fsclient.fuse.wire.pack import Answer
from fsclient.fuse.wire.protocol import OPCODES, Opcode
from fsclient.kernel.contract import LEASED_S, FileSystem, QuickAnswers
from fsclient.kernel.later import Later, Outcome
from fsmeta.errors import Corrupt
from fsmeta.types import ROOT_INO, Caller, Ino


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
        table: list[Operation | None] | None = None,
        on_corrupt: Callable[[Corrupt], None] | None = None,
        trace: Callable[[str], None] | None = None,
        root: Ino = ROOT_INO,
        squash: Squash | None = None,
        quick: QuickAnswers | None = None,
    ) -> None:
        """`table`: of `operations`, perhaps with other rows; it belongs to the dispatcher then.
        `trace` gets a line for each request and its outcome (`-o debug`); `root` is mounted.

        `quick` is asked first, except on mounts that trace or squash. It knows nothing of other
        rows, so there is none beside them.
        """
        self._fs = fs
        self._table = operations(setxattr_ext=True) if table is None else table
        self._errnos = Errnos(on_corrupt)
        self._trace = trace
        self.cancel = fs.locks.cancel  # of a request that was parked
        self.serve: Serve = self._serve if trace is None else self._serve_traced
        plain = not (trace or squash)
        self.lanes = lanes_of(quick, LEASED_S) if quick is not None and plain else no_lanes()
        if root != ROOT_INO:
            self.lanes = [lane_below(lane, root) for lane in self.lanes]
            put_below(self._table, root)
            self.serve = served_below(self.serve, root)
        if squash is not None:
            self.serve = served_squashed(self.serve, squash)

    def wrap_lanes(self, wrap: Callable[[int, Lane], Lane]) -> None:
        """Have lanes called through what `wrap` makes of an opcode and its lane."""
        for opcode, lane in enumerate(self.lanes):
            if lane is not None:
                self.lanes[opcode] = wrap(opcode, lane)

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
            number = self._errnos.judge(error, name, ino)
            return number if answered else None

    def _put_aside(self, later: Later[Answer], name: str, ino: int) -> Later[Answer | int]:
        """`later`, with an errno for what it raises."""

        def judge(outcome: Outcome[Answer]) -> Answer | int:
            try:
                return outcome()
            except Exception as error:  # noqa: BLE001  (the edge, as in `_serve`)
                return self._errnos.judge(error, name, ino)

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
            arguments = operation.fields(view, end)
        except OSError as error:
            return f"{operation.name}({ino}, {error})"
        shown = (f"{a.nbytes} bytes" if isinstance(a, memoryview) else repr(a) for a in arguments)
        return f"{operation.name}({', '.join((str(ino), *shown))})"


def _outcome(answer: Served) -> str:
    if answer is None:
        return "no answer"
    if isinstance(answer, Later):
        return "answered later"
    if isinstance(answer, int):
        return errno.errorcode.get(answer, str(answer))
    size = len(answer) if isinstance(answer, bytes) else sum(len(piece) for piece in answer)
    return f"{size} bytes"

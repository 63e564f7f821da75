"""The verbs of `Meta` for ranges of files, and for files without names.

Called by fsclient's `files/file_ranges`, by `clones` and by tests, as `meta.ranges`.
Threading: any method from any thread.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, Final

from fsmeta.meta.deletion import fields_of
from fsmeta.meta.file_turns import FileTurns
from fsmeta.ops.data import ranges
from fsmeta.ops.names import tmpfile
from fsmeta.ops.names.create import NewNode
from fsmeta.rules.context import Changed
from fsmeta.rules.settings import RESERVED_VERSION
from fsmeta.schema import keys
from fsmeta.txn.retry import Transactor
from fsmeta.types import CHUNK_BYTES, FILE_SIZE_MAX, ROOT_CALLER, Attr, Caller, Ino

_FIELDS_MAX: Final = 2 * FILE_SIZE_MAX // CHUNK_BYTES  # of an inode's row: more than it can have


class RangeVerbs:
    """See the module."""

    def __init__(
        self,
        run: Callable[..., Any],
        transactor: Transactor,
        version: Callable[[], int],
        turns: FileTurns,
    ) -> None:
        """`run` runs a verb of `ops` with what `Meta` knows; `version` is that of the volume."""
        self._run = run
        self._transactor = transactor
        self._version = version
        self._turns = turns

    def chunks(self, ino: Ino) -> list[int]:
        """Which chunks of a file have slices, in order."""
        fields = fields_of(self._transactor, keys.inode_row(ino), _FIELDS_MAX)
        return sorted(keys.id_of(field) for field, _ in fields if field[:1] == b"c")

    def tmpfile(self, caller: Caller, parent: Ino, node: NewNode, linkable: bool) -> Attr:
        """A file without a name (O_TMPFILE); `linkable`: link(2) may give it one."""
        attr: Attr = self._run(tmpfile.tmpfile, caller, parent, node, linkable)
        return attr

    def fallocate(self, ino: Ino, mode: int, begin: int, end: int) -> Changed:
        """fallocate(2) of `begin..end`; very many chunks are changed in several commits.

        Space is reserved where the volume's version allows that. Raises: ENOSPC for too much.
        """
        reserves = self._version() >= RESERVED_VERSION
        if reserves and not mode & ranges.PUNCH_HOLE and end - begin > ranges.RESERVED_MAX:
            raise OSError(errno.ENOSPC, f"{end - begin} bytes to reserve at once")
        first: Attr | None = None
        while True:
            self._turns.wait(ino)
            span = ranges.Span(ino, begin, end)
            ranged = self._run(ranges.fallocate, ROOT_CALLER, mode, span, reserves)
            begin, (before, after) = ranged
            first = first or before
            if begin >= end:
                return Changed(first, after)

    def copy_file_range(self, source: ranges.Span, ino: Ino, begin: int) -> ranges.Ranged:
        """Show `source` in `ino` from `begin` on, or a first part of it: `Ranged` says how far."""
        self._turns.wait(ino)
        ranged: ranges.Ranged = self._run(ranges.copy_file_range, ROOT_CALLER, source, ino, begin)
        return ranged

"""One row of the opcode table. Called by the dispatch tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from fsclient.fuse.wire.pack import Answer
from fsclient.kernel.later import Later

# (view of the request, end of its body) → the handler's arguments behind the first three
Parse: TypeAlias = Callable[[memoryview, int], tuple[object, ...]]
# (file system, caller, inode of the header, *parsed) → the answer behind its header, or when it
# comes; None where it comes by another way
Handle: TypeAlias = Callable[..., Answer | Later[Answer] | None]


class Operation(NamedTuple):
    """What to call a request in traces and metrics, how to read it and its handler."""

    name: str
    parse: Parse
    handle: Handle
    answered: bool = True  # False: the kernel waits for nothing, not even an errno

    def fields(self, view: memoryview, end: int) -> tuple[object, ...]:
        """What `parse` finds, for traces and logs; a record of a whole struct as its fields."""
        parsed = self.parse(view, end)
        if len(parsed) == 1 and isinstance(parsed[0], tuple):
            return parsed[0]
        return parsed

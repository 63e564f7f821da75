"""A mount of a directory below the root: the kernel's root node is that directory.

The kernel calls the root of a mount ROOT_ID, whatever it is. Only requests need to be put right,
and notifications: no answer names the root of a mount. `Dispatcher` and `Session` use this where a
mount is not of the whole volume; other mounts pay nothing for it.

Threading: as what they wrap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fsclient.fuse.wire.operation import Operation
from fsclient.fuse.wire.pack import Answer
from fsclient.fuse.wire.protocol import ROOT_ID, Opcode
from fsclient.kernel.contract import FileSystem, Notifier
from fsclient.kernel.later import Later
from fsmeta.types import Caller, Ino

Served: TypeAlias = Answer | Later[Answer | int] | int | None
Serve: TypeAlias = Callable[[int, Caller, int, memoryview, int], Served]


def served_below(serve: Serve, root: Ino) -> Serve:
    """`serve` for a kernel whose root is the directory `root`."""

    def serve_below(opcode: int, caller: Caller, ino: int, view: memoryview, end: int) -> Served:
        return serve(opcode, caller, root if ino == ROOT_ID else ino, view, end)

    return serve_below


def put_below(table: list[Operation | None], root: Ino) -> None:
    """Put right those requests whose body names a directory, too: where a rename leads."""
    for opcode in (Opcode.RENAME, Opcode.RENAME2):
        operation = table[opcode]
        assert operation is not None, "the table has all operations"
        table[opcode] = operation._replace(handle=_rename_below(operation, root))


def _rename_below(operation: Operation, root: Ino) -> Callable[..., Answer | Later[Answer]]:
    def rename(
        fs: FileSystem, caller: Caller, parent: Ino, new_parent: int, *rest: object
    ) -> Answer | Later[Answer]:
        new_parent = root if new_parent == ROOT_ID else new_parent
        answer = operation.handle(fs, caller, parent, new_parent, *rest)
        assert answer is not None, "a rename is answered"
        return answer

    return rename


class NotifierBelow:
    """Notifications for a kernel whose root is the directory `root`."""

    def __init__(self, notifier: Notifier, root: Ino) -> None:
        self._notifier = notifier
        self._root = root

    def _node(self, ino: Ino) -> Ino:
        return Ino(ROOT_ID) if ino == self._root else ino

    def inval_inode(self, ino: Ino) -> None:
        self._notifier.inval_inode(self._node(ino))

    def inval_pages(self, ino: Ino, begin: int, end: int) -> None:
        self._notifier.inval_pages(self._node(ino), begin, end)

    def reload(self, ino: Ino) -> None:
        self._notifier.reload(self._node(ino))

    def inval_attr(self, ino: Ino) -> None:
        self._notifier.inval_attr(self._node(ino))

    def inval_entry(self, parent: Ino, name: bytes) -> None:
        self._notifier.inval_entry(self._node(parent), name)

    def inval_all(self) -> bool:
        return self._notifier.inval_all()


_CONFORMS: type[Notifier] = NotifierBelow

"""A prefix of an S3 bucket as a side of a sync.

Objects have no modes, links or directories: of a local tree the files are copied. Requests are
repeated with growing pauses, and fewer are sent at a time where the store says SlowDown.
Threading: any method from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Final, NoReturn

from fsclient.sync.items import PIECE_BYTES, Content, Item, Kind, Place, Refused
from fsdata.objects.contract import ObjectInfo, ObjectStore
from fsmeta.errors import ObjectMissing
from fsmeta.runtime import Runtime

LARGE_BYTES: Final = 64 << 20  # above it one object at a time is held in memory
OBJECT_MAX: Final = 1 << 30  # of one PUT, which is held in memory
_DELETES: Final = 1000


class BucketPlace:
    """The objects below `prefix`, which is empty or ends with `/`; or the object `only` there."""

    has_modes = False

    def __init__(self, objects: ObjectStore, prefix: str, runtime: Runtime, only: str = "") -> None:
        self._objects = objects
        self._prefix = prefix
        self._only = only
        self._large = runtime.lock()

    def close(self) -> None:
        self._objects.close()

    def list(self) -> Iterator[Item]:
        if self._only:
            info = self._objects.head(self._prefix + self._only)
            if info is not None:
                yield self._item(info)
            return
        for info in self._objects.list(self._prefix):
            if info.key != self._prefix:  # the marker that consoles make for a folder
                yield self._item(info)

    def _item(self, info: ObjectInfo) -> Item:
        kind = Kind.DIR if info.key.endswith("/") else Kind.FILE
        return Item(info.key[len(self._prefix) :], kind, info.size, info.mtime_ns)

    def read(self, item: Item) -> Content:
        return Content(self._pieces(item), {})

    def _pieces(self, item: Item) -> Iterator[bytes]:
        key = self._prefix + item.key
        try:
            if item.size <= PIECE_BYTES:
                whole = self._objects.get(key)
                _require_size(len(whole), item)
                yield whole
                return
            done = 0
            while done < item.size:
                piece = self._objects.get(key, done, min(item.size, done + PIECE_BYTES))
                done += len(piece)
                if not piece:
                    break
                yield piece
            _require_size(done, item)
        except ObjectMissing as error:
            raise Refused("it has vanished") from error

    def write(self, item: Item, content: Content) -> None:
        if item.size > OBJECT_MAX:
            raise Refused("it is larger than 1 GiB: copy it with a tool that has multipart uploads")
        with ExitStack() as held:
            if item.size > LARGE_BYTES:
                held.enter_context(self._large)
            self._objects.put(self._prefix + item.key, list(content.pieces))

    def make(self, item: Item) -> None:
        """Directories are in the keys of what is in them."""

    def link(self, first: str, key: str) -> NoReturn:
        raise AssertionError(f"no hard links in a bucket: {first} {key}")

    def dress(self, item: Item) -> None:
        """There is nothing to dress."""

    def delete(self, items: Sequence[Item]) -> None:
        for begin in range(0, len(items), _DELETES):
            part = items[begin : begin + _DELETES]
            self._objects.delete(*(self._prefix + each.key for each in part))


def _require_size(size: int, item: Item) -> None:
    """Raises: Refused."""
    if size != item.size:
        raise Refused("it was changed while it was copied: run the command again")


_CONFORMS: Callable[[ObjectStore, str, Runtime], Place] = BucketPlace

"""A prefix of an S3 bucket as a side of a sync.

Objects have no modes, links or directories: of a local tree the files are copied, and links and
directories as objects that stand for them, where that is asked for. Requests are
repeated with growing pauses, and fewer are sent at a time where the store says SlowDown.
Threading: any method from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, NoReturn

from fsclient.sync.items import PIECE_BYTES, Content, Item, ItemKind, ItemRefused, SyncSide
from fsclient.volume.object_stores import Stack
from fsdata.objects.contract import ObjectInfo
from fsdata.objects.s3.multipart import OBJECT_MAX, Multipart, send_in_parts
from fsdata.objects.s3.s3 import S3Objects
from fsmeta.errors import ObjectMissing
from fsmeta.runtime import Runtime

LARGE_BYTES: Final = 64 << 20  # above it one object at a time is sent, in parts
_DELETES: Final = 1000


class Bucket(NamedTuple):
    """A bucket that is open."""

    raw: S3Objects
    stack: Stack  # of `raw`


class BucketPlace:
    """The objects below `prefix`, which is empty or ends with `/`; or the object `only` there."""

    has_modes = False

    def __init__(self, bucket: Bucket, prefix: str, runtime: Runtime, only: str = "") -> None:
        self._objects = bucket.stack.store
        self._uploads = Multipart(bucket.raw, bucket.stack.retrying.repeat)
        self._runtime = runtime
        self._leaving = bucket.stack.leaving
        self._prefix = prefix
        self._only = only
        self._large = runtime.lock()

    def stop(self) -> None:
        """No request is repeated any more."""
        self._leaving.set()

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
        kind = ItemKind.DIR if info.key.endswith("/") else ItemKind.FILE
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
            raise ItemRefused("it has vanished") from error

    def write(self, item: Item, content: Content) -> None:
        if item.size > OBJECT_MAX:
            raise ItemRefused("it is larger than 5 TiB, which no object can be")
        key = self._prefix + item.key
        if item.size <= LARGE_BYTES:
            self._objects.put(key, list(content.pieces))
            return
        with self._large:  # so that memory is bounded, however many threads there are
            send_in_parts(self._uploads, key, item.size, content.pieces, self._runtime)

    def make(self, item: Item) -> None:
        """An empty object whose key ends with `/` means a directory."""
        self._objects.put(self._prefix + item.key, ())

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
        raise ItemRefused("it was changed while it was copied: run the command again")


_CONFORMS: Callable[[Bucket, str, Runtime], SyncSide] = BucketPlace

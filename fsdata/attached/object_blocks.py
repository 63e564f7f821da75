"""The blocks of attached objects, as an object store would have them if they had been written.

A block of an object is asked for with `If-Match` and gets the head of a block that is stored as it
is (`fsdata/format/block_v1`), with checksums of the bytes that came. So the block layer and the
cache disks treat it as any other: verified wherever it is read from, counted, evicted, warmed.

A block is named as one of a slice whose id is a digest of what the bytes are: the store's address,
bucket, key, ETag and length. An object that has changed has another ETag and so other blocks; what
is kept of the old ones is never found under it. Ids of slices have 64 bits at most, these have 161.

An object is known while something holds its `ShownObject`; nothing else asks for its blocks.

Threading: any method from any thread. `_lock` is a leaf and not held during a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Final
from weakref import WeakValueDictionary

from fsdata.attached.source import AttachedSource
from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.read_plan import WHOLE_BYTES, Access, BlockRead
from fsdata.blocks.warmup import WarmupRequest
from fsdata.format.block_v1 import encode
from fsdata.format.object_keys import object_key, parse_key
from fsdata.objects.contract import Buffer, ObjectInfo, ObjectStore, Range, fill
from fsmeta.errors import ObjectMissing
from fsmeta.runtime import Runtime
from fsmeta.types import BLOCK_BYTES_MAX, FRAME_BYTES, AttachedObject, SliceId

BLOCK_BYTES: Final = BLOCK_BYTES_MAX  # whatever the volume's are: requests cost by their number
PART_BYTES: Final = WHOLE_BYTES  # what a read somewhere fetches: less costs as much
_DIGEST_BYTES: Final = 20  # 2^80 objects until two are the same by chance
_FIRST_ID: Final = 1 << 8 * _DIGEST_BYTES  # so no slice has such an id
_KEY_CHARS_MIN: Final = len(object_key(SliceId(_FIRST_ID), 0, 1))


class ShownObject:
    """An object of `length` bytes that a file shows, in blocks that `blocks` reads."""

    __slots__ = ("__weakref__", "_found", "_source", "blocks", "id", "length")

    def __init__(
        self, source: AttachedSource, found: AttachedObject, length: int, blocks: BlockStore
    ) -> None:
        self._source = source
        self._found = found
        self.length = length
        self.blocks = blocks
        self.id = _id_of(source.place, found, length, blocks.block_bytes)

    def block_read(self, begin: int, end: int, access: Access) -> BlockRead:
        """The read of bytes from `begin` on, to `end` or to where their block ends."""
        index, first = divmod(begin, self.blocks.block_bytes)
        length = self.blocks.length_of(self.length, index)
        return BlockRead((self.id, index), length, first, min(length, first + end - begin), access)

    def requests(self, begin: int, end: int) -> Iterator[WarmupRequest]:
        """The blocks that have bytes `begin..end`."""
        unit = self.blocks.block_bytes
        for index in range(begin // unit, -(-min(end, self.length) // unit)):
            yield WarmupRequest(self.id, self.length, index, self.blocks)

    def fetch(self, index: int, length: int) -> bytes:
        """A block as its object has it. Raises: ESTALE, EIO, Unavailable."""
        begin = index * self.blocks.block_bytes
        return self._source.get(self._found, begin, begin + length)


def _id_of(place: str, found: AttachedObject, length: int, unit: int) -> SliceId:
    """A number for what the bytes are."""
    words = (place, found.bucket, found.key, found.etag, str(length), str(unit))
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for word in words:
        data = word.encode(errors="surrogateescape")
        digest.update(len(data).to_bytes(4, "little") + data)
    return SliceId(_FIRST_ID + int.from_bytes(digest.digest(), "little"))


class ObjectBlocks:
    """An object store in front of the volume's, which has blocks of attached objects, too."""

    def __init__(self, runtime: Runtime, objects: ObjectStore) -> None:
        self._objects = objects
        self._lock = runtime.lock()
        self._shown: WeakValueDictionary[SliceId, ShownObject] = WeakValueDictionary()

    def show(self, shown: ShownObject) -> ShownObject:
        """Know an object, for as long as what this returns is held."""
        with self._lock:
            return self._shown.setdefault(shown.id, shown)

    def _block(self, key: str) -> bytes | None:
        """A block of an attached object with its head; None: the volume's store has the key.

        Raises: ESTALE, EIO, Unavailable, ObjectMissing.
        """
        name = parse_key(key) if len(key) >= _KEY_CHARS_MIN else None
        if name is None or name.slice_id < _FIRST_ID:
            return None
        with self._lock:
            shown = self._shown.get(name.slice_id)
        if shown is None:
            raise ObjectMissing(f"{key}: no file that is read shows it")
        data = shown.fetch(name.block, name.length)
        return b"".join(encode((data,), frame_bytes=FRAME_BYTES))

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        data = self._block(key)
        return self._objects.get(key, begin, end) if data is None else data[begin:end]

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        data = self._block(key)
        if data is None:
            return self._objects.get_ranges(key, ranges)
        return [data[begin:end] for begin, end in ranges]

    def get_into(self, key: str, pieces: Sequence[memoryview]) -> int:
        data = self._block(key)
        return self._objects.get_into(key, pieces) if data is None else fill(pieces, data)

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        self._objects.put(key, pieces)

    def delete(self, *keys: str) -> None:
        self._objects.delete(*keys)

    def head(self, key: str) -> ObjectInfo | None:
        return self._objects.head(key)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self._objects.list(prefix, after)

    def sync(self, keys: Iterable[str]) -> None:
        self._objects.sync(keys)

    def close(self) -> None:
        self._objects.close()


def _conforms(objects: ObjectBlocks) -> ObjectStore:
    return objects

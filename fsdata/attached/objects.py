"""Reading the objects that attached files show, and no other bytes than those.

Where an object is, an `AttachedSource` knows: a bucket or a directory of the host. An object that
was replaced or removed is ESTALE where it is asked for, and no read mixes two of its versions.

Blocks come through the caches of the mount (`object_blocks`). Reads that go on where one ended come
from whole blocks; others fetch a part of one, unless the block is here already.

Threading: any method from any thread. Locks are leaves; none is held during a request.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from fsdata.attached.directory import DIRECTORY, HostDirectory
from fsdata.attached.object_blocks import BLOCK_BYTES, PART_BYTES, ObjectBlocks, ShownObject
from fsdata.attached.source import AttachedSource
from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.layout import BlockLayout
from fsdata.blocks.read_plan import RANDOM, STREAM, Access
from fsdata.disk_cache.cache import DiskCache
from fsdata.objects.contract import Buffer
from fsdata.resources.block_cache import BlockCache
from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime
from fsmeta.types import AttachedObject, Ino

NEAR_BYTES: Final = 2 * BLOCK_BYTES  # a kernel that reads ahead sends its reads in no order
PARTS_MAX: Final = 2  # a read of more of them is one of whole blocks

_Place: TypeAlias = tuple[str, str, str]


class AttachedCaches(NamedTuple):
    """The caches of a mount, for blocks of attached objects."""

    objects: ObjectBlocks
    disks: bool
    kept: tuple[BlockStore, BlockStore]  # wholes and parts, through memory and the cache disks
    passing: tuple[BlockStore, BlockStore]  # the same, through memory alone


def attached_caches(
    runtime: Runtime, objects: ObjectBlocks, cache: BlockCache, disks: DiskCache | None
) -> AttachedCaches:
    """`disks` are before `objects`; None where none of them may have a copy."""

    def of(unit: int, copies: DiskCache | None) -> BlockStore:
        layout = BlockLayout(block_bytes=unit, fills=False)
        return BlockStore(runtime, copies or objects, cache, layout, copies)

    kept, passing = ((of(BLOCK_BYTES, copies), of(PART_BYTES, copies)) for copies in (disks, None))
    return AttachedCaches(objects, disks is not None, kept, passing)


class AttachedObjects:
    """The objects that the attached files of a volume show."""

    def __init__(
        self,
        runtime: Runtime,
        find: Callable[[Ino], AttachedObject],
        caches: AttachedCaches,
    ) -> None:
        """`find` says what a file shows."""
        self._runtime = runtime
        self._find = find
        self._caches = caches
        self._lock = runtime.lock()
        self._closed = False  # guarded by _lock, as is all below
        self._sources: dict[_Place, AttachedSource] = {}

    def source(self, ino: Ino) -> tuple[AttachedObject, Callable[[int, int], bytes]]:
        """What a file shows, and how its bytes are read past all caches. Raises: as `find`."""
        found = self._find(ino)
        return found, partial(self._get, found)

    def reader(self, ino: Ino) -> AttachedReader:
        """For one open handle. Raises: as `find`."""
        return AttachedReader(self._runtime, partial(self.blocks, self._find(ino)))

    def warmed(self, ino: Ino, length: int) -> ShownBlocks | None:
        """What a file of `length` bytes shows; None where no cache disk may have it.

        Raises: as `find`, EIO where the client can't read there.
        """
        found = self._find(ino)
        if found.endpoint == DIRECTORY or not self._caches.disks:
            return None
        return self.blocks(found, length)

    def blocks(self, found: AttachedObject, length: int) -> ShownBlocks:
        """An object of `length` bytes. Raises: EIO where the client can't read there."""
        source, caches = self._source(found), self._caches
        whole, parts = (
            caches.objects.show(ShownObject(source, found, length, blocks))
            for blocks in (caches.kept if source.on_disks else caches.passing)
        )
        return ShownBlocks(whole, parts)

    def close(self) -> None:
        """Let go of connections; later reads fail."""
        with self._lock:
            self._closed = True
            sources = list(self._sources.values())
            self._sources.clear()
        for source in sources:
            source.close()

    def _get(self, found: AttachedObject, begin: int, end: int) -> bytes:
        """Bytes of an object. Raises: ESTALE where it is another one now, EIO, Unavailable."""
        return self._source(found).get(found, begin, end)

    def _source(self, found: AttachedObject) -> AttachedSource:
        """Raises: EIO where the client can't read there."""
        place = found.endpoint, found.region, found.bucket
        with self._lock:
            if self._closed:
                raise OSError(errno.EIO, "the client has left the volume")
            known = self._sources.get(place)
        if known is not None:
            return known
        try:
            made = _open(self._runtime, found)
        except ConfigError as error:
            raise OSError(errno.EIO, f"{found.bucket} can't be read: {error}") from error
        with self._lock:
            kept = self._sources.setdefault(place, made) if not self._closed else None
        if kept is not made:
            made.close()
        if kept is None:
            raise OSError(errno.EIO, "the client has left the volume")
        return kept


def _open(runtime: Runtime, found: AttachedObject) -> AttachedSource:
    """Raises: ConfigError."""
    if found.endpoint == DIRECTORY:
        return HostDirectory(found.bucket)
    try:
        from fsdata.attached.bucket import AttachedBucket
    except ImportError as error:
        raise ConfigError("s3:// needs a package: pip install 'slicefs[s3]'") from error
    return AttachedBucket(runtime, found)


class ShownBlocks(NamedTuple):
    """An object in large blocks, and in small ones for what is read somewhere."""

    whole: ShownObject
    parts: ShownObject


class AttachedReader:
    """Reads of one open handle of an attached file."""

    def __init__(self, runtime: Runtime, find: Callable[[int], ShownBlocks]) -> None:
        """`find` gives the blocks of a file that is so long."""
        self._find = find
        self._lock = runtime.lock()
        self._at = 0  # where the furthest of the last reads ended; guarded by _lock
        self._shown: ShownBlocks | None = None  # replaced as a whole

    def read(self, offset: int, size: int, length: int) -> Sequence[Buffer]:
        """See `FileReader.read`. Raises: ESTALE, EIO, Unavailable."""
        end = min(offset + size, length)
        if end <= offset:
            return []
        shown = self._shown
        if shown is None or shown.whole.length != length:
            shown = self._shown = self._find(length)
        with self._lock:
            near = abs(offset - self._at) <= NEAR_BYTES
            self._at = max(self._at, end) if near else end
        far = not near and end - offset <= PARTS_MAX * PART_BYTES
        out: list[Buffer] = []
        while offset < end:
            piece = _far(shown, offset, end) if far else _read(shown.whole, offset, end, STREAM)
            out.append(piece)
            offset += len(piece)
        return out

    def close(self) -> None:
        """A handle is closed; blocks stay for others."""


def _read(shown: ShownObject, offset: int, end: int, access: Access) -> memoryview:
    """Bytes from `offset` on, to `end` or to where their block ends."""
    return shown.blocks.read(shown.block_read(offset, end, access))


def _far(shown: ShownBlocks, offset: int, end: int) -> memoryview:
    """The same out of a small block, unless the large one is here or not much larger."""
    read = shown.whole.block_read(offset, end, RANDOM)
    if read.length <= PARTS_MAX * PART_BYTES:
        return _read(shown.whole, offset, end, STREAM)  # and is kept whole
    if shown.whole.blocks.lacks(read) is None:
        return shown.whole.blocks.read(read)
    return _read(shown.parts, offset, end, RANDOM)

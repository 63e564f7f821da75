"""The metadata of a volume as a stream of bytes, and a volume made of one.

    MAGIC, then one zstd frame of blocks: a 32-bit length, and so many bytes of msgpack
    first block       a map: version, the volume's settings
    further blocks    lists: row, field, value, row, field, value, …
    last block        a map: records, and the SHA-256 of all bytes of the frame before it

A field may come twice, with the same value. `docs/FORMAT.md` says the same,
`docs/design/redis-and-backups` why. Called by `slicefs dump` and `load` and by automatic backups.
Threading: one thread.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, Protocol

import msgpack
import zstandard

from fsmeta.errors import ConfigError
from fsmeta.rules import settings as volume
from fsmeta.rules.rate_limits import DEMANDS
from fsmeta.rules.settings import VolumeFormat
from fsmeta.schema import keys as schema
from fsmeta.schema.locks import GRANT_PREFIX, LOCK_PREFIX
from fsmeta.store.contract import Commit, Record, Store
from fsmeta.store.writes import Delete, DeleteRow, Put, Write
from fsmeta.types import is_name

log = logging.getLogger(__name__)

MAGIC: Final = b"slicefs metadata dump 1\n"
_BLOCK_BYTES: Final = 256 << 10  # of msgpack; a record more may follow
_BLOCK_MAX: Final = 64 << 20  # far above any block we write: a longer one is damage
_READ_BYTES: Final = 256 << 10
_LENGTH: Final = struct.Struct(">I")
_LOAD_OPS: Final = 1000  # writes in one commit; takes Redis 3 ms
_OF_SESSIONS: Final = frozenset({schema.SESSION_PREFIX, LOCK_PREFIX, GRANT_PREFIX})
_LEFT_OUT: Final = frozenset(
    {schema.SESSIONS, schema.ENDED, schema.BACKGROUND, schema.SHARED, schema.SYNCED, DEMANDS}
)
_OF_THE_STORE: Final = (schema.COUNTERS, schema.LINEAGE)  # says nothing of the volume

_LOADING: Final = b"loading"  # beside the settings: a load was interrupted, or is under way

# What was made after the dump has ids above its counters, and may be met again: in the object
# store, in caches, in kernels. So ids go on where none of that can be.
_IDS_SKIPPED: Final = {
    schema.NEXT_INO: 1 << 32,
    schema.NEXT_SLICE: 1 << 40,
    schema.NEXT_SESSION: 1 << 20,
}


class Sink(Protocol):
    """Where a dump goes."""

    def write(self, data: bytes, /) -> object: ...


class DumpSource(Protocol):
    """Where one comes from; as a binary file."""

    def read(self, size: int, /) -> bytes: ...


class Counted(NamedTuple):
    """What was dumped or loaded so far; an inode counts when its attributes do."""

    inodes: int
    records: int


Progress = Callable[[Counted], object]


def _ignore(_counted: Counted) -> None:
    """Ignore progress."""


# --- writing -------------------------------------------------------------------------------------


def dump(store: Store, sink: Sink, progress: Progress = _ignore) -> Counted:
    """Write everything in `store`, as it is now.

    Raises: NoVolume, ConfigError where another dump is under way, StoreError, OSError of the sink.
    """
    (value,) = store.read([(schema.FORMAT, schema.FORMAT_FIELD)])
    settings = volume.require(value)
    inodes = records = 0
    writer = _Writer(sink)
    writer.block(_pack({"version": settings.version, "name": settings.name}))
    with store.everything() as everything:
        for batch in _batches(everything):
            writer.block(_pack(list(itertools.chain.from_iterable(batch))))
            records += len(batch)
            inodes += sum(field == schema.ATTR_FIELD for _, field, _ in batch)
            progress(Counted(inodes, records))
    writer.end(records)
    return Counted(inodes, records)


def _batches(everything: Iterator[Record]) -> Iterator[list[Record]]:
    """What belongs into a dump, in blocks."""
    batch: list[Record] = []
    size = 0
    for record in everything:
        row, field, value = record
        if row in _LEFT_OUT or row[:1] in _OF_SESSIONS or record[:2] == _OF_THE_STORE:
            continue
        batch.append(record)
        size += len(row) + len(field) + len(value) + 6
        if size >= _BLOCK_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Writer:
    """Blocks, compressed and digested."""

    def __init__(self, sink: Sink) -> None:
        sink.write(MAGIC)
        self._sink = sink
        self._frame = zstandard.ZstdCompressor(level=3, write_checksum=True).compressobj()
        self._digest = hashlib.sha256()

    def block(self, packed: bytes) -> None:
        """One block."""
        block = _LENGTH.pack(len(packed)) + packed
        self._digest.update(block)
        self._sink.write(self._frame.compress(block))

    def end(self, records: int) -> None:
        """The last block, and the end of the frame."""
        self.block(_pack({"records": records, "sha256": self._digest.digest()}))
        self._sink.write(self._frame.flush())


def _pack(thing: object) -> bytes:
    return bytes(msgpack.packb(thing, use_bin_type=True))


# --- reading -------------------------------------------------------------------------------------


class Dump:
    """A dump that is being read. Raises: ConfigError wherever it is not what `dump` has written."""

    def __init__(self, source: DumpSource) -> None:
        if source.read(len(MAGIC)) != MAGIC:
            raise ConfigError("this is not a dump of SliceFS metadata")
        self._source = source
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._buffer = bytearray()
        self._digest = hashlib.sha256()
        self.head = self._block()
        version = self.head.get("version") if isinstance(self.head, dict) else None
        if not isinstance(version, int):
            raise ConfigError("the dump is damaged: its head has no version")
        if version > schema.METADATA_VERSION:
            raise ConfigError(
                f"the dump has metadata version {version}, this slicefs knows up to "
                f"{schema.METADATA_VERSION}: upgrade slicefs"
            )

    def records(self) -> Iterator[list[Record]]:
        """All that was dumped, block by block; at the end it is certain that nothing is missing."""
        count = 0
        while True:
            before = self._digest.digest()
            block = self._block()
            if isinstance(block, dict):
                break
            count += len(block) // 3
            yield [(block[i], block[i + 1], block[i + 2]) for i in range(0, len(block), 3)]
        if block.get("records") != count or block.get("sha256") != before:
            raise ConfigError("the dump is damaged: its contents are not what was written")
        while not self._frame.eof:  # its checksum is left
            self._feed()

    def _block(self) -> Any:
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if length > _BLOCK_MAX:
            raise ConfigError(f"the dump is damaged: a block of {length} bytes")
        packed = self._take(length)
        self._digest.update(_LENGTH.pack(length) + packed)
        try:
            return msgpack.unpackb(packed, raw=False)
        except Exception as error:  # msgpack raises half a dozen unrelated types
            raise ConfigError(f"the dump is damaged: {error}") from error

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._feed()
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _feed(self) -> None:
        data = b"" if self._frame.eof else self._source.read(_READ_BYTES)
        if not data:
            raise ConfigError("the dump ends early: it was cut off, or never finished")
        try:
            self._buffer += self._frame.decompress(data)
        except zstandard.ZstdError as error:
            raise ConfigError(f"the dump is damaged: {error}") from error


# --- loading -------------------------------------------------------------------------------------


def load(store: Store, source: DumpSource, progress: Progress = _ignore) -> VolumeFormat:
    """Make the volume that was dumped in `store`, which is empty; its settings come last.

    Raises: ConfigError where the store is not empty or the dump is damaged; StoreError.
    """
    dumped = Dump(source)
    _prepare(store)
    settings = b""
    inodes = count = misnamed = 0
    for batch in dumped.records():
        writes: list[Write] = []
        for row, field, value in batch:
            if (row, field) == (schema.FORMAT, schema.FORMAT_FIELD):
                settings = value
            else:
                writes.append(Put(row, field, _moved(row, field, value)))
        _write(store, writes)
        count += len(batch)
        inodes += sum(field == schema.ATTR_FIELD for _, field, _ in batch)
        misnamed += sum(
            row[:1] == schema.DIR_PREFIX and not is_name(field) for row, field, _ in batch
        )
        progress(Counted(inodes, count))
    if misnamed:
        log.warning(
            "the dump has %d names that nothing can have: `slicefs fsck --repair` gives others",
            misnamed,
        )
    if not settings:
        raise ConfigError("the dump is damaged: it has no settings")
    begun: Write = Delete(schema.FORMAT, _LOADING)
    _write(store, [Put(schema.FORMAT, schema.FORMAT_FIELD, settings), begun])
    store.sync()
    return volume.unpack_format(settings)


def verify(store: Store, source: DumpSource, progress: Progress = _ignore) -> list[str]:
    """What is in `store` otherwise than in the dump it was just loaded from; at most a hundred."""
    problems: list[str] = []
    inodes = count = 0
    for batch in Dump(source).records():
        values: list[bytes | None] = []
        for begin in range(0, len(batch), _LOAD_OPS):
            values += store.read([(row, field) for row, field, _ in batch[begin:][:_LOAD_OPS]])
        for (row, field, value), there in zip(batch, values, strict=True):
            if there != _moved(row, field, value):
                problems.append(f"row {row!r} field {field!r} is not what was dumped")
        if len(problems) > 100:
            break
        count += len(batch)
        inodes += sum(field == schema.ATTR_FIELD for _, field, _ in batch)
        progress(Counted(inodes, count))
    return problems[:100]


def _moved(row: bytes, field: bytes, value: bytes) -> bytes:
    """A value as it is loaded."""
    if row != schema.COUNTERS or field not in _IDS_SKIPPED:
        return value
    return b"%d" % (schema.unpack_count(row, field, value) + _IDS_SKIPPED[field])


def _write(store: Store, writes: list[Write]) -> None:
    for begin in range(0, len(writes), _LOAD_OPS):
        store.commit(Commit(None, b"", 0, (), (), writes[begin : begin + _LOAD_OPS]))


def _prepare(store: Store) -> None:
    """Make sure that the store has nothing but what an interrupted load has left, and remove that.

    Raises: ConfigError.
    """
    keys = [(schema.FORMAT, schema.FORMAT_FIELD), (schema.FORMAT, _LOADING)]
    value, loading = store.read(keys)
    volume.require_absent(value)
    cursor: bytes | None = b""
    while cursor is not None:
        page = store.scan_rows(b"", cursor)
        if page.rows and loading is None:
            raise ConfigError("the database is not empty: choose another one")
        _write(store, [DeleteRow(row) for row in page.rows if row != schema.FORMAT])
        cursor = page.cursor
    _write(store, [Put(schema.FORMAT, _LOADING, b"1")])

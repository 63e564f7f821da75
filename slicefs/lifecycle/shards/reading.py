"""The bytes of planned tensors, read in ranges of their shards, in bounded memory.

Called by `lifecycle/unshard`. A flat tensor is never in memory: its parts are read some MiB at a
time, several requests at once. Of a tensor of blocks, the tensor and one block are. Each storage
that was touched is compared with the checksum that torch stored, by `finish`: bytes are counted as
they pass, and only those that no tensor needed are read besides. Bytes that are read again, for a
tensor with two names, are compared with what has passed. Belongs to one thread.
"""

from __future__ import annotations

import array
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from fsmeta.errors import ConfigError
from slicefs.checkpoint.safetensors import ITEM_BYTES
from slicefs.lifecycle.shards.plan import Flat, Literal, Placed, PlannedTensor, StorageRange
from slicefs.lifecycle.shards.strides import in_order, place
from slicefs.lifecycle.shards.torch_file import Storage
from slicefs.stores.tree import Buffer, Tree

PIECE_BYTES: Final = 4 << 20  # of one read
WINDOW_BYTES: Final = 16 << 20  # of the reads that run at a time
WINDOW_PIECES: Final = 64  # of small tensors; more would make a window of many small requests
GAP_BYTES: Final = 64 << 10  # unwanted bytes that cost less than another request
_HALVES: Final = 64 << 10  # bytes of F16 at a time: each item is an object meanwhile
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")  # of a member of a zip: name and extra follow
LOCAL_HEADER_BYTES: Final = _LOCAL_HEADER.size
_LOCAL_MAGIC: Final = b"PK\x03\x04"
# Items of `array`, by their types in safetensors; BF16 and F16 are not among them.
_ARRAYS: Final = {
    "F64": "d",
    "F32": "f",
    "I64": "q",
    "I32": "i",
    "I16": "h",
    "I8": "b",
    "U64": "Q",
    "U32": "I",
    "U16": "H",
    "U8": "B",
    "BOOL": "B",
}


class Passed(NamedTuple):
    """How much of a storage was read, and the CRC-32 of it."""

    end: int
    crc: int


class ShardReader:
    """Reads planned tensors from one tree."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._begins: dict[Storage, int] = {}  # of a storage's bytes in its file
        self._passed: dict[Storage, Passed] = {}
        self._edges: dict[Storage, list[int]] = {}  # where wanted ranges begin and end, in order
        self._marks: dict[Storage, dict[int, int]] = {}  # the CRC-32 up to an edge that has passed

    def expect(self, tensors: Sequence[PlannedTensor]) -> None:
        """Tell what is to be read, before anything is: so bytes read twice are compared, too."""
        edges: dict[Storage, set[int]] = {}
        for tensor in tensors:
            for part in _ranges(tensor):
                edges.setdefault(part.storage, set()).update((part.begin, part.end))
        for storage, found in edges.items():
            self._edges[storage] = sorted(found.union(self._edges.get(storage, ())))

    def tensors(self, tensors: Sequence[PlannedTensor]) -> Iterator[Buffer]:
        """The bytes of these tensors, in order. Raises: ConfigError for shards that are damaged."""
        window: list[tuple[StorageRange, Flat]] = []
        size = 0
        for tensor in tensors:
            if not isinstance(tensor, Flat):
                yield from self._flush(window)
                window, size = [], 0
                yield tensor.data if isinstance(tensor, Literal) else self._assembled(tensor)
                continue
            for piece in _pieces(tensor):
                window.append((piece, tensor))
                size += piece.end - piece.begin
                if size >= WINDOW_BYTES or len(window) >= WINDOW_PIECES:
                    yield from self._flush(window)
                    window, size = [], 0
        yield from self._flush(window)

    def finish(self) -> None:
        """Compare each storage that was touched with its checksum. Raises: ConfigError."""
        for storage in list(self._passed):
            self._catch_up(storage, storage.size)
            if self._passed[storage].crc != storage.crc:
                raise _changed(storage.path)

    def _flush(self, window: Sequence[tuple[StorageRange, Flat]]) -> Iterator[Buffer]:
        found = self._read([part for part, _ in window])
        for (_, tensor), data in zip(window, found, strict=True):
            yield convert(data, tensor.stored, tensor.spec.dtype)

    def _read(self, parts: Sequence[StorageRange]) -> list[memoryview]:
        self._locate([part.storage for part in parts])
        wanted = []
        for storage, begin, end in parts:
            base = self._begins[storage]
            wanted.append((storage.path, base + begin, base + end))
        found = self._tree.read_ranges(wanted, GAP_BYTES)
        for part, data in zip(parts, found, strict=True):
            if len(data) != part.end - part.begin:
                raise _cut(part.storage.path)
            self._pass(part, data)
        return found

    def _locate(self, storages: Sequence[Storage]) -> None:
        """Find where these storages begin: behind a header whose length only itself says."""
        unknown = [each for each in dict.fromkeys(storages) if each not in self._begins]
        wanted = [(each.path, each.header, each.header + LOCAL_HEADER_BYTES) for each in unknown]
        for storage, data in zip(unknown, self._tree.read_ranges(wanted, 0), strict=True):
            self._begins[storage] = behind_header(storage, data)

    def _pass(self, part: StorageRange, data: memoryview) -> None:
        """Count bytes that were read into the checksum of their storage.

        Bytes that have passed before are compared with those. Raises: ConfigError.
        """
        storage, begin, last = part
        if begin > self._passed.get(storage, Passed(0, 0)).end:
            self._catch_up(storage, begin)
        at, crc = self._passed.get(storage, Passed(0, 0))
        marks = self._marks.setdefault(storage, {0: 0})
        known = min(at, last)
        if begin < known and zlib.crc32(data[: known - begin], marks[begin]) != marks[known]:
            raise _changed(storage.path)
        edges = self._edges.get(storage, [])
        for index in range(bisect_right(edges, at), bisect_right(edges, last)):
            crc = zlib.crc32(data[at - begin : edges[index] - begin], crc)
            at = edges[index]
            marks[at] = crc
        if at < last:
            crc = zlib.crc32(data[at - begin :], crc)
            at = last
            marks[at] = crc
        self._passed[storage] = Passed(at, crc)

    def _catch_up(self, storage: Storage, end: int) -> None:
        """Read what no tensor has needed so far."""
        while (at := self._passed.get(storage, Passed(0, 0)).end) < end:
            self._read([StorageRange(storage, at, min(end, at + PIECE_BYTES))])

    def _assembled(self, tensor: Placed) -> Buffer:
        """The bytes of a tensor of blocks."""
        out: bytearray | None = None
        for offsets, block in tensor.blocks:
            begin, end = block.span()
            stored = self._one(StorageRange(block.storage, begin, end))
            data = in_order(stored, block.shape, block.strides, ITEM_BYTES[block.dtype])
            if block.shape == tensor.spec.shape:
                return convert(data, block.dtype, tensor.spec.dtype)
            if out is None:
                out = bytearray(tensor.spec.nbytes)
            place(out, tensor.spec.shape, offsets, block.shape, data)
        return memoryview(out or b"")

    def _one(self, part: StorageRange) -> memoryview:
        [found] = self._read([part])
        return found


def behind_header(storage: Storage, header: memoryview) -> int:
    """Where the bytes of a storage begin in its file. Raises: ConfigError."""
    if len(header) != LOCAL_HEADER_BYTES:
        raise _cut(storage.path)
    magic, name, extra = _LOCAL_HEADER.unpack(header)
    if magic != _LOCAL_MAGIC:
        raise ConfigError(f"{storage.path}: is no file of torch.save: copy it again")
    return storage.header + LOCAL_HEADER_BYTES + int(name) + int(extra)


def _pieces(tensor: Flat) -> Iterator[StorageRange]:
    for storage, begin, end in tensor.parts:
        for at in range(begin, end, PIECE_BYTES):
            yield StorageRange(storage, at, min(at + PIECE_BYTES, end))


def _ranges(tensor: PlannedTensor) -> Iterator[StorageRange]:
    """What is read of a tensor, as it is read."""
    if isinstance(tensor, Flat):
        yield from _pieces(tensor)
    elif isinstance(tensor, Placed):
        for _, block in tensor.blocks:
            yield StorageRange(block.storage, *block.span())


def _changed(path: str) -> ConfigError:
    return ConfigError(f"{path}: its bytes are not what was saved (CRC-32): copy it again")


def _cut(path: str) -> ConfigError:
    return ConfigError(f"{path}: is cut off: copy it again")


def convert(data: memoryview, stored: str, wanted: str) -> Buffer:
    """Items of one type as another: any type but complex ones as F32. Little-endian."""
    if stored == wanted:
        return data
    assert wanted == "F32", "all that is converted is converted to F32"
    if stored == "BF16":  # the upper half of an F32
        out = bytearray(2 * len(data))
        out[2::4] = data[0::2]
        out[3::4] = data[1::2]
        return out
    if stored == "F16":
        return b"".join(_halves(data[at : at + _HALVES]) for at in range(0, len(data), _HALVES))
    items = array.array(_ARRAYS[stored])
    items.frombytes(data)
    return array.array("f", items).tobytes()


def _halves(data: memoryview) -> bytes:
    count = len(data) // 2
    return struct.pack(f"<{count}f", *struct.unpack(f"<{count}e", data))


def is_convertible(stored: str) -> bool:
    """Whether `convert` makes F32 of this type."""
    return stored in _ARRAYS or stored in ("BF16", "F16")

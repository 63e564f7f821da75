"""`.metadata` of a DCP checkpoint, and its stored tensors, read without torch.

Both are pickles. Nothing in them is executed: an unpickler that knows a dozen names builds plain
records, and refuses every other name. Called by `verify` and `unshard`.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from fsmeta.errors import Corrupt
from slicefs.lifecycle.shards.pickles import DIMENSIONS_MAX, Budget, Fixed, Ordered, check_pickle
from slicefs.lifecycle.shards.strides import in_order

METADATA: Final = ".metadata"
UNPACKED_BYTES_MAX: Final = 64 << 20  # beyond the archive's length, where a member is compressed
_LOCAL_BYTES: Final = 30  # of the header before a file in a zip, which name and extra follow
_NAME_AND_EXTRA: Final = struct.Struct("<HH")
DTYPES: Final[Mapping[str, str]] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
_DCP: Final = "torch.distributed.checkpoint"
_RECORDS: Final = frozenset(
    {
        (f"{_DCP}.metadata", "Metadata"),
        (f"{_DCP}.metadata", "MetadataIndex"),
        (f"{_DCP}.metadata", "TensorStorageMetadata"),
        (f"{_DCP}.metadata", "BytesStorageMetadata"),
        (f"{_DCP}.metadata", "ChunkStorageMetadata"),
        (f"{_DCP}.metadata", "TensorProperties"),
        (f"{_DCP}.metadata", "StorageMeta"),
        (f"{_DCP}.filesystem", "_StorageInfo"),
    }
)


_OTHERS: Final = frozenset(
    {
        (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch", "Size"),
        ("collections", "OrderedDict"),
        ("torch.serialization", "_get_layout"),
        ("builtins", "set"),
        ("pathlib", "PosixPath"),
        ("pathlib", "Path"),
    }
)


def is_of_checkpoints(module: str, name: str) -> bool:
    """Whether the metadata of a checkpoint may name this: nothing of it does more than hold values.

    A pickle that names anything else runs what its writer wants in the process that loads it.
    """
    return (module, name) in _RECORDS | _OTHERS or (module == "torch" and name in DTYPES)


class Chunk(NamedTuple):
    """A part of a tensor, and the bytes that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shard: str
    begin: int
    length: int


class TensorEntry(NamedTuple):
    """A tensor of a checkpoint."""

    dtype: str  # in safetensors' words
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class BytesEntry(NamedTuple):
    """Anything else: what torch.save wrote of it."""

    shard: str
    begin: int
    length: int


class CheckpointMetadata(NamedTuple):
    """What a checkpoint holds, by name."""

    tensors: Mapping[str, TensorEntry]
    others: Mapping[str, BytesEntry]

    def shard_lengths(self) -> dict[str, int]:
        """Each shard's file, and how long it is at least."""
        lengths: dict[str, int] = {}
        chunks = [chunk for each in self.tensors.values() for chunk in each.chunks]
        places = [(chunk.shard, chunk.begin + chunk.length) for chunk in chunks]
        places += [(other.shard, other.begin + other.length) for other in self.others.values()]
        for shard, end in places:
            lengths[shard] = max(lengths.get(shard, 0), end)
        return lengths


class _Record:
    """An object of torch's, as its fields."""

    def __init__(self, *values: Any) -> None:
        self.values = values
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class _Storage(NamedTuple):
    """The name of a typed storage."""

    dtype: str


class _View(NamedTuple):
    """A tensor as torch.save describes it: a storage, and the way through it."""

    key: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class _MetadataUnpickler(pickle.Unpickler):
    """Builds records of known names."""

    def __init__(self, file: io.BytesIO) -> None:
        data = file.getvalue()
        check_pickle(data)
        super().__init__(file)
        self._budget = Budget(data)

    def find_class(self, module: str, name: str) -> Any:
        """Raises: UnpicklingError for a name that no checkpoint has."""
        if (module, name) in _RECORDS:
            return type(name, (_Record,), {})
        known: Mapping[tuple[str, str], Any] = {
            (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _value,
            ("torch", "Size"): tuple,
            ("collections", "OrderedDict"): Ordered,
            ("torch._utils", "_rebuild_tensor_v2"): _view,
            ("torch._utils", "_rebuild_tensor_v3"): _view,
            ("torch.serialization", "_get_layout"): _value,
            ("builtins", "set"): set,
            ("pathlib", "PosixPath"): _path,
            ("pathlib", "Path"): _path,
        }
        if (module, name) in known:
            found = known[module, name]
            copies = found in (tuple, Ordered, set, _path)
            return self._budget.copied(found) if copies else Fixed(found)
        if module in ("torch", "torch.storage") and (name in DTYPES or name.endswith("Storage")):
            return _Storage(name)
        raise pickle.UnpicklingError(f"{module}.{name} is not what a checkpoint consists of")

    def persistent_load(self, pid: Any) -> Any:
        """The key of a storage in its archive."""
        return str(pid[2])


def _value(value: Any) -> Any:
    return value


def _path(*words: str) -> str:
    return "/".join(words)


def require_plain(others: Sequence[Any]) -> None:
    """Raises: ValueError for a tensor whose values are not those that are stored.

    `others`: the last arguments of torch's function, hooks, which are empty, and bits that say to
    conjugate or to negate.
    """
    if any(isinstance(each, Mapping) and each for each in others):
        raise ValueError("a tensor that is conjugated or negated: save it with .resolve_conj()")


def _view(key: str, offset: int, sizes: Any, strides: Any, *others: Any) -> _View:
    require_plain(others)
    if max(len(sizes), len(strides)) > DIMENSIONS_MAX:
        raise ValueError(f"a tensor of more than {DIMENSIONS_MAX} dimensions")
    found = _View(key, int(offset), tuple(sizes), tuple(strides))
    if any(not isinstance(each, int) or each < 0 for each in (*found[2], *found[3], found[1])):
        raise ValueError("a tensor of no size")
    return found


def read_metadata(data: bytes, where: str) -> CheckpointMetadata:
    """Raises: Corrupt."""
    try:
        state = _MetadataUnpickler(io.BytesIO(data)).load().state
        places: dict[tuple[str, tuple[int, ...] | None], Any] = {}
        for index, info in state["storage_data"].items():
            offset = index.state.get("offset")
            places[index.state["fqn"], None if offset is None else tuple(offset)] = info.state
        tensors, others = {}, {}
        for name, entry in state["state_dict_metadata"].items():
            if type(entry).__name__ == "TensorStorageMetadata":
                tensors[name] = _tensor(name, entry.state, places)
            else:
                others[name] = BytesEntry(*_place(places[name, None]))
    except (
        *(pickle.UnpicklingError, KeyError, TypeError, AttributeError, ValueError),
        *(EOFError, IndexError, ImportError, OverflowError, RecursionError, MemoryError),
    ) as error:
        raise _corrupt(where, error) from error
    return CheckpointMetadata(tensors, others)


def _tensor(name: str, state: Any, places: Mapping[Any, Any]) -> TensorEntry:
    dtype = DTYPES[state["properties"].state[0].dtype]
    chunks = []
    for chunk in state["chunks"]:
        offsets, sizes = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
        info = places[name, offsets] if (name, offsets) in places else places[name, None]
        chunks.append(Chunk(offsets, sizes, *_place(info)))
    shape = tuple(state["size"])
    if any(not isinstance(each, int) or each < 0 for each in shape):
        raise ValueError(f"{name} has no size")
    return TensorEntry(dtype, shape, tuple(chunks))


def _place(info: Mapping[str, Any]) -> tuple[str, int, int]:
    if info.get("transform_descriptors"):
        raise ValueError("its shards are compressed by an extension: load it with torch")
    shard = str(info["relative_path"])
    if shard.startswith("/") or ".." in shard.split("/"):
        raise ValueError(f"{shard!r} is not a relative path")
    begin, length = int(info["offset"]), int(info["length"])
    if begin < 0 or length < 0:
        raise ValueError(f"{shard!r} has {length} bytes at {begin}")
    return shard, begin, length


def read_tensor(data: bytes, item_bytes: int, where: str) -> memoryview:
    """The bytes of one tensor, in order, from what torch.save wrote of it. Raises: Corrupt."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            [description] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            _require_small(archive.getinfo(description), len(data))
            view = _MetadataUnpickler(io.BytesIO(archive.read(description))).load()
            if not isinstance(view, _View):
                raise ValueError("holds no tensor")
            member = archive.getinfo(description.removesuffix("data.pkl") + f"data/{view.key}")
            _require_small(member, len(data))
            stored = _member(data, archive, member)
    except (
        *(zipfile.BadZipFile, pickle.UnpicklingError, KeyError, ValueError, TypeError),
        *(EOFError, IndexError, NotImplementedError, AttributeError, OverflowError),
        *(RecursionError, MemoryError, zlib.error),
    ) as error:
        raise _corrupt(where, error) from error
    return _in_order(stored, view, item_bytes, where)


def _require_small(member: zipfile.ZipInfo, length: int) -> None:
    """Raises: BadZipFile for a member that would be far larger than its archive."""
    if member.file_size > length + UNPACKED_BYTES_MAX:
        raise zipfile.BadZipFile(f"{member.filename} has {member.file_size} bytes")


def _member(data: bytes, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> memoryview:
    """The bytes of a file in an archive that is in memory, without a copy if they are stored.

    Raises: BadZipFile, ValueError.
    """
    if member.compress_type != zipfile.ZIP_STORED:
        return memoryview(archive.read(member))
    with archive.open(member):  # compares the two headers
        pass
    lengths = data[member.header_offset + 26 : member.header_offset + _LOCAL_BYTES]
    begin = member.header_offset + _LOCAL_BYTES + sum(_NAME_AND_EXTRA.unpack(lengths))
    found = memoryview(data)[begin : begin + member.file_size]
    if len(found) != member.file_size or zlib.crc32(found) != member.CRC:
        raise zipfile.BadZipFile(f"Bad CRC-32 for file {member.filename!r}")
    return found


def _in_order(stored: memoryview, view: _View, item_bytes: int, where: str) -> memoryview:
    """The items of a view in row-major order."""
    begin = view.offset * item_bytes
    if len(view.sizes) != len(view.strides):
        raise _corrupt(where, ValueError("its strides are not those of its shape"))
    last = sum((n - 1) * s for n, s in zip(view.sizes, view.strides, strict=True))
    count = math.prod(view.sizes)
    if count * item_bytes > len(stored):
        raise _corrupt(where, ValueError("its storage is too short"))
    if count and begin + (last + 1) * item_bytes > len(stored):
        raise _corrupt(where, ValueError("its storage is too short"))
    return in_order(stored[begin:], view.sizes, view.strides, item_bytes)


def _corrupt(where: str, error: Exception) -> Corrupt:
    return Corrupt(where.encode(errors="surrogateescape"), b"checkpoint", str(error))

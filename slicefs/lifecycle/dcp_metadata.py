"""`.metadata` of a DCP checkpoint, and its stored tensors, read without torch.

Both are pickles. Nothing in them is executed: an unpickler that knows a dozen names builds plain
records, and refuses every other name. Called by `verify` and `unshard`.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from fsmeta.errors import Corrupt

METADATA: Final = ".metadata"
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


class _Reader(pickle.Unpickler):
    """Builds records of known names."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises: UnpicklingError for a name that no checkpoint has."""
        if (module, name) in _RECORDS:
            return type(name, (_Record,), {})
        known: Mapping[tuple[str, str], Any] = {
            (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _value,
            ("torch", "Size"): tuple,
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _view,
            ("torch.serialization", "_get_layout"): _value,
            ("builtins", "set"): set,
            ("pathlib", "PosixPath"): _path,
            ("pathlib", "Path"): _path,
        }
        if (module, name) in known:
            return known[module, name]
        if module == "torch" and (name in DTYPES or name.endswith("Storage")):
            return _Storage(name)
        raise pickle.UnpicklingError(f"{module}.{name} is not what a checkpoint consists of")

    def persistent_load(self, pid: Any) -> Any:
        """The key of a storage in its archive."""
        return str(pid[2])


def _value(value: Any) -> Any:
    return value


def _path(*words: str) -> str:
    return "/".join(words)


def _view(key: str, offset: int, sizes: Any, strides: Any, *_: Any) -> _View:
    return _View(key, int(offset), tuple(sizes), tuple(strides))


def read_metadata(data: bytes, where: str) -> CheckpointMetadata:
    """Raises: Corrupt."""
    try:
        state = _Reader(io.BytesIO(data)).load().state
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
        *(EOFError, IndexError, ImportError, UnicodeDecodeError),
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
    return TensorEntry(dtype, tuple(state["size"]), tuple(chunks))


def _place(info: Mapping[str, Any]) -> tuple[str, int, int]:
    if info.get("transform_descriptors"):
        raise ValueError("its shards are compressed by an extension: load it with torch")
    shard = str(info["relative_path"])
    if shard.startswith("/") or ".." in shard.split("/"):
        raise ValueError(f"{shard!r} is not a relative path")
    return shard, int(info["offset"]), int(info["length"])


def read_tensor(data: memoryview, item_bytes: int, where: str) -> memoryview:
    """The bytes of one tensor, in order, from what torch.save wrote of it. Raises: Corrupt."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            [description] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            view = _Reader(io.BytesIO(archive.read(description))).load()
            if not isinstance(view, _View):
                raise ValueError("holds no tensor")
            stored = archive.read(description.removesuffix("data.pkl") + f"data/{view.key}")
    except (
        *(zipfile.BadZipFile, pickle.UnpicklingError, KeyError, ValueError, TypeError),
        *(EOFError, IndexError, NotImplementedError),
    ) as error:
        raise _corrupt(where, error) from error
    return _in_order(memoryview(stored), view, item_bytes, where)


def _in_order(stored: memoryview, view: _View, item_bytes: int, where: str) -> memoryview:
    """The items of a view in row-major order."""
    count, strides = 1, []
    for size in reversed(view.sizes):
        strides.append(count)
        count *= size
    wanted = tuple(reversed(strides))
    begin = view.offset * item_bytes
    dense = all(s == w or n <= 1 for s, w, n in zip(view.strides, wanted, view.sizes, strict=True))
    if dense or count == 0:
        if begin + count * item_bytes > len(stored):
            raise _corrupt(where, ValueError("its storage is too short"))
        return stored[begin : begin + count * item_bytes]
    out = bytearray(count * item_bytes)
    at = 0
    for offset in _offsets(view, len(view.sizes) - 1):
        source = (view.offset + offset) * item_bytes
        out[at : at + item_bytes] = stored[source : source + item_bytes]
        at += item_bytes
    return memoryview(out)


def _offsets(view: _View, last: int) -> list[int]:
    """Where each item of a view is, in row-major order."""
    found = [0]
    for axis in range(last + 1):
        steps = [index * view.strides[axis] for index in range(view.sizes[axis])]
        found = [base + step for base in found for step in steps]
    return found


def _corrupt(where: str, error: Exception) -> Corrupt:
    return Corrupt(where.encode(errors="surrogateescape"), b"checkpoint", str(error))

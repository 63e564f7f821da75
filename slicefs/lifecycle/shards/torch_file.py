"""A file of `torch.save`, read without torch: its objects, with tensors as places in the file.

Called by the layouts of this folder. Such a file is a zip archive: a pickle, and one member for
each storage, not compressed. Only the archive's directory and the pickle are read. Nothing in the
pickle is executed: torch's own classes become plain records, a class of any other package becomes a
`StandIn` that holds what was stored and does nothing, and names of Python's standard library that
no checkpoint needs are refused.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final, NamedTuple, cast

from fsmeta.errors import ConfigError
from slicefs.checkpoint.safetensors import ITEM_BYTES, TensorSpec
from slicefs.lifecycle.shards.dcp_metadata import DTYPES, require_plain
from slicefs.lifecycle.shards.pickles import (
    DIMENSIONS_MAX,
    Budget,
    Fixed,
    Ordered,
    check_pickle,
    short,
)
from slicefs.lifecycle.shards.strides import is_dense
from slicefs.stores.tree import Tree

PICKLE_BYTES_MAX: Final = 1 << 30  # of one rank: a million names and shapes take a tenth of it
_STORAGES: Final[Mapping[str, str]] = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "UntypedStorage": "",  # its tensors say of what type they are
}
# Modules of the standard library whose classes trainers store; all become stand-ins.
_HARMLESS: Final = frozenset(
    {
        *("_codecs", "argparse", "array", "collections", "copyreg", "dataclasses", "datetime"),
        *("decimal", "enum", "fractions", "functools", "numbers", "pathlib", "random", "types"),
        *("typing", "uuid", "zoneinfo"),
    }
)
_BUILTINS: Final = frozenset(
    {
        *("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int"),
        *("list", "object", "range", "slice", "str", "tuple", "Ellipsis"),
    }
)


class Storage(NamedTuple):
    """The bytes behind tensors: a member of an archive."""

    path: str  # of the file, in its tree
    header: int  # where the member's local header begins in the file
    size: int
    crc: int


class StoredTensor(NamedTuple):
    """A tensor of a file: the way through a storage, in items."""

    storage: Storage
    dtype: str  # in safetensors' words
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def spec(self) -> TensorSpec:
        """Its type and shape."""
        return TensorSpec(self.dtype, self.shape)

    @property
    def numel(self) -> int:
        """How many items it has."""
        return self.spec.nbytes // ITEM_BYTES[self.dtype]

    def is_dense(self) -> bool:
        """Whether its items stand in order in its storage, without gaps."""
        return self.numel == 0 or is_dense(self.shape, self.strides)

    def span(self) -> tuple[int, int]:
        """The bytes `begin..end` of the storage around all its items."""
        item = ITEM_BYTES[self.dtype]
        begin = self.offset * item
        if self.numel == 0:
            return begin, begin
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return begin, begin + (last + 1) * item


class StandIn:
    """What a pickle says of an object whose class is not known: its arguments and its state."""

    module = ""
    name = ""
    budget: Budget | None = None

    def __new__(cls, *values: Any, **_: Any) -> StandIn:
        """Called by the pickle in place of the class."""
        if cls.budget is not None:
            cls.budget.take(len(values))
        made = super().__new__(cls)
        made.values = values
        made.state = None
        made.entries = {}
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        self.values: tuple[Any, ...]
        self.state: Any
        self.entries: dict[Any, Any]

    def __call__(self, *values: Any) -> StandIn:
        return type(self)(*values)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value

    def append(self, value: Any) -> None:
        """The pickle adds to what it takes for a list."""
        self.entries[len(self.entries)] = value

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def read_torch_file(tree: Tree, path: str) -> Any:
    """What a file of `torch.save` holds. Raises: ConfigError for a file that is none or is cut."""
    try:
        with tree.open_read(path) as file:
            return load_archive(file, path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: is missing: copy all files of the checkpoint again") from error
    except zipfile.BadZipFile as error:
        raise no_archive(tree, path, error) from error


def load_archive(file: io.IOBase, path: str) -> Any:
    """As `read_torch_file`; `path` is for errors. Raises: BadZipFile, ConfigError."""
    try:
        with zipfile.ZipFile(cast(IO[bytes], file)) as archive:
            members = {each.filename: each for each in archive.infolist()}
            [name] = [each for each in members if each.count("/") == 1 and each.endswith(_PICKLE)]
            _require_stored(members[name])
            if members[name].file_size > PICKLE_BYTES_MAX:
                raise ConfigError(
                    f"{path}: its pickle has {members[name].file_size} bytes, at most "
                    f"{PICKLE_BYTES_MAX} are read: load it with torch"
                )
            order = members.get(f"{name.removesuffix(_PICKLE)}/byteorder")
            if order is not None:
                _require_stored(order)
                if order.file_size != len(_LITTLE) or archive.read(order) != _LITTLE:
                    raise ConfigError(
                        f"{path}: is of a big-endian machine: load it with torch there"
                    )
            return _Unpickler(archive.read(name), path, name, members).load()
    except (
        *(pickle.UnpicklingError, KeyError, ValueError, TypeError),
        *(EOFError, IndexError, NotImplementedError, AttributeError, UnicodeDecodeError),
        *(OverflowError, RecursionError, MemoryError),
    ) as error:
        raise ConfigError(
            f"{path}: is damaged or no file of torch.save ({short(error)}): copy it again"
        ) from error


_PICKLE: Final = "/data.pkl"
_LITTLE: Final = b"little"
_OLD_MAGIC: Final = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # of torch before 1.6, behind a version
_OLD_BYTES: Final = 64


def no_archive(tree: Tree, path: str, error: Exception) -> ConfigError:
    """What is wrong with a file that is no zip archive."""
    if _OLD_MAGIC in tree.read(path, 0, _OLD_BYTES):
        return ConfigError(
            f"{path}: has the old format of torch.save: save it again with torch's zip format"
        )
    return ConfigError(
        f"{path}: is damaged or no file of torch.save ({short(error)}): copy it again"
    )


def _require_stored(member: zipfile.ZipInfo) -> None:
    """Raises: UnpicklingError."""
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise pickle.UnpicklingError(f"{member.filename} is compressed")


def stored_tensors(value: Any) -> Iterator[StoredTensor]:
    """The tensors in dictionaries and lists."""
    if isinstance(value, StoredTensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from stored_tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from stored_tensors(each)


class _TypedStorage(NamedTuple):
    dtype: str


class _ItemType(NamedTuple):
    dtype: str


class _Unpickler(pickle.Unpickler):
    """Builds records and stand-ins; never imports what a pickle names."""

    def __init__(
        self, data: bytes, path: str, name: str, members: Mapping[str, zipfile.ZipInfo]
    ) -> None:
        check_pickle(data)
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._budget = Budget(data)
        self._path = path
        self._base = name.removesuffix(_PICKLE)
        self._members = members
        self._stand_ins: dict[tuple[str, str], type[StandIn]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Raises: UnpicklingError for a name that no checkpoint needs."""
        known = _KNOWN.get((module, name))
        if known is not None:
            return self._budget.copied(known) if known in _COPYING else Fixed(known)
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _TypedStorage(_STORAGES[name])
        if module == "torch" and name in DTYPES:
            return _ItemType(DTYPES[name])
        root = module.partition(".")[0]
        if root in ("builtins", "__builtin__"):
            allowed = name in _BUILTINS
        else:
            allowed = root in _HARMLESS or root not in sys.stdlib_module_names
        if not allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not what a checkpoint consists of")
        if (module, name) not in self._stand_ins:
            about = {"module": module, "name": name, "budget": self._budget}
            made = type("StandIn", (StandIn,), about)
            self._stand_ins[module, name] = made
        return self._stand_ins[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """A storage: its member of the archive, and its type."""
        kind, typed, key = pid[:3]
        if kind != "storage" or not isinstance(typed, _TypedStorage):
            raise pickle.UnpicklingError(f"a {kind} of an unknown type")
        member = self._members[f"{self._base}/data/{key}"]
        _require_stored(member)
        return Storage(self._path, member.header_offset, member.file_size, member.CRC), typed.dtype


def _tensor(
    stored: tuple[Storage, str], offset: Any, shape: Any, strides: Any, *others: Any
) -> StoredTensor:
    """Raises: ValueError for a tensor that is not in its storage."""
    storage, dtype = stored
    if not isinstance(storage, Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    if max(len(shape), len(strides)) > DIMENSIONS_MAX:
        raise ValueError(f"a tensor of more than {DIMENSIONS_MAX} dimensions")
    require_plain(others)
    for each in others:
        if isinstance(each, _ItemType):
            dtype = each.dtype
    found = StoredTensor(storage, dtype, int(offset), tuple(shape), tuple(strides))
    sizes = (found.offset, *found.shape, *found.strides)
    if not all(isinstance(each, int) and each >= 0 for each in sizes):
        raise ValueError("a tensor of no size")
    if len(found.shape) != len(found.strides) or found.span()[1] > storage.size:
        raise ValueError(f"a tensor of shape {found.shape} is not in its storage")
    if found.spec.nbytes > storage.size:
        raise ValueError(f"a tensor of shape {found.shape} repeats items of its storage")
    return found


def _first(value: Any, *_: Any) -> Any:
    return value


def _subclass(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """A tensor of a class of its own: the tensor, or for a ShardedTensor what it consists of."""
    if isinstance(kind, type) and issubclass(kind, StandIn) and kind.name == "ShardedTensor":
        if not isinstance(state, tuple):
            raise pickle.UnpicklingError("a ShardedTensor without a state")
        return ShardedRecord(state)
    return function(*arguments)


class ShardedRecord(NamedTuple):
    """A ShardedTensor of torch, as its state: local shards, metadata, and more."""

    state: tuple[Any, ...]


def _attribute(owner: Any, name: Any) -> type[StandIn]:
    """A class in a class: of a stand-in, another one. Raises: UnpicklingError."""
    if not (isinstance(owner, type) and issubclass(owner, StandIn)):
        raise pickle.UnpicklingError("an attribute of an object is not what a checkpoint has")
    found = {"module": owner.module, "name": f"{owner.name}.{name}", "budget": owner.budget}
    return type("StandIn", (StandIn,), found)


def _dictionary(*_: Any) -> dict[Any, Any]:
    return {}


def _encoded(text: Any, codec: Any) -> bytes:
    if codec not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"bytes in the code {codec!r}")
    return str(text).encode("latin-1")


_KNOWN: Final[Mapping[tuple[str, str], Any]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._tensor", "_rebuild_from_type_v2"): _subclass,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): Ordered,
    ("collections", "defaultdict"): _dictionary,
    ("builtins", "getattr"): _attribute,
    ("__builtin__", "getattr"): _attribute,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("_codecs", "encode"): _encoded,
}
# What copies the items of its arguments.
_COPYING: Final = frozenset({Ordered, set, tuple, _encoded})

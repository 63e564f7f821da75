"""What an unshard writes, planned: files, their tensors, and the parts of each in the shards.

A plan is made of what the shards say of themselves, before anything is written; whatever does not
add up is refused then. Pure; called by the layouts of this folder.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from fsmeta.errors import ConfigError
from slicefs.checkpoint.safetensors import ITEM_BYTES, TensorSpec
from slicefs.lifecycle.shards.torch_file import Storage, StoredTensor

MODEL: Final = "model.safetensors"
OPTIMIZER: Final = "optim.safetensors"
PLAIN_VALUES_MAX: Final = 1_000_000  # with param_groups of a million names a header is full
PLAIN_DEPTH_MAX: Final = 64  # settings are nested a few times


class StorageRange(NamedTuple):
    """Bytes `begin..end` of a storage."""

    storage: Storage
    begin: int
    end: int


class Flat(NamedTuple):
    """A tensor whose bytes are these parts, one behind the other; `stored` is their type."""

    spec: TensorSpec
    stored: str
    parts: tuple[StorageRange, ...]


class Placed(NamedTuple):
    """A tensor of blocks, each with the place of its first item; together they cover it."""

    spec: TensorSpec
    blocks: tuple[tuple[tuple[int, ...], StoredTensor], ...]


class Literal(NamedTuple):
    """A tensor whose bytes are known."""

    spec: TensorSpec
    data: bytes


PlannedTensor: TypeAlias = Flat | Placed | Literal


class PlannedFile(NamedTuple):
    """A safetensors file to write."""

    name: str
    tensors: tuple[tuple[str, PlannedTensor], ...]
    metadata: Mapping[str, str]


class ShardPlan(NamedTuple):
    """What becomes of the shards of one step."""

    files: tuple[PlannedFile, ...]
    shards: tuple[str, ...]  # names in the step, removed in this order
    beside: tuple[str, ...] = ()  # archives that were read and stay
    lost: tuple[str, ...] = ()  # what of the shards is in no file


def planned_file(
    name: str, tensors: Mapping[str, PlannedTensor], metadata: Mapping[str, str] | None = None
) -> PlannedFile:
    """The tensors in this order: that of their storages, so that each is read once.

    Raises: ConfigError where the parts of a tensor are not as large as it is.
    """
    for tensor_name, tensor in tensors.items():
        found = _bytes_of(tensor)
        if found != tensor.spec.nbytes:
            raise ConfigError(
                f"{name}: {tensor_name} would have {found} bytes, its shape needs "
                f"{tensor.spec.nbytes}: unshard it with its own library"
            )
    return PlannedFile(name, tuple(tensors.items()), {"format": "pt", **(metadata or {})})


def _bytes_of(tensor: PlannedTensor) -> int:
    """How many bytes the parts of a tensor become."""
    item = ITEM_BYTES[tensor.spec.dtype]
    if isinstance(tensor, Literal):
        return len(tensor.data)
    if isinstance(tensor, Placed):
        return item * sum(block.numel for _, block in tensor.blocks)
    stored = sum(part.end - part.begin for part in tensor.parts)
    return stored * item // ITEM_BYTES[tensor.stored]


def whole(tensor: StoredTensor, dtype: str | None = None) -> PlannedTensor:
    """A tensor that is in one storage; `dtype` is what it becomes, its own where it is None."""
    spec = TensorSpec(dtype or tensor.dtype, tensor.shape)
    if tensor.is_dense():
        return Flat(spec, tensor.dtype, (StorageRange(tensor.storage, *tensor.span()),))
    return Placed(spec, (((0,) * len(tensor.shape), tensor),))


def part_of(tensor: StoredTensor, begin: int, end: int) -> StorageRange:
    """Items `begin..end` of a dense tensor."""
    item = ITEM_BYTES[tensor.dtype]
    first = tensor.offset + begin
    return StorageRange(tensor.storage, first * item, (tensor.offset + end) * item)


def join_flat(
    tensors: Sequence[StoredTensor], begin: int, shape: Sequence[int], dtype: str | None = None
) -> Flat:
    """A tensor of the items from `begin` on of these, one behind the other."""
    count, at, parts = math.prod(shape), 0, []
    end = begin + count
    for each in tensors:
        first, last = max(begin, at), min(end, at + each.numel)
        if first < last:
            parts.append(part_of(each, first - at, last - at))
        at += each.numel
    stored = same_type(tensors)
    return Flat(TensorSpec(dtype or stored, tuple(shape)), stored, tuple(parts))


def same_type(tensors: Sequence[StoredTensor]) -> str:
    """The type that these tensors have in common. Raises: ConfigError."""
    for each in tensors:
        if each.dtype != tensors[0].dtype:
            raise ConfigError(
                f"{each.storage.path}: has {each.dtype} where other shards have "
                f"{tensors[0].dtype}: keep the files of one save"
            )
    return tensors[0].dtype


def require_flat(value: Any, where: str, what: str) -> StoredTensor:
    """A flat tensor of a file. Raises: ConfigError."""
    if not isinstance(value, StoredTensor) or len(value.shape) != 1 or not value.is_dense():
        raise ConfigError(f"{where}: {what} is no flat tensor: unshard it with its own library")
    return value


def scalar(value: Any) -> PlannedTensor | None:
    """A number, or a tensor of one item, as a tensor; None for anything else."""
    if isinstance(value, StoredTensor):
        return whole(value) if value.numel == 1 else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, float):
        return Literal(TensorSpec("F64", ()), struct.pack("<d", value))
    if not -(2**63) <= value < 2**63:
        return None
    return Literal(TensorSpec("I64", ()), struct.pack("<q", value))


def plain_json(value: Any) -> str:
    """The plain values of a state as JSON: numbers, text, lists and dictionaries of them.

    Raises: ConfigError for one that is too large for a header.
    """
    return json.dumps(_Plain().of(value, 0), separators=(",", ":"), sort_keys=True)


class _Plain:
    """Makes plain values; a pickle can say one list many times in a few bytes."""

    def __init__(self) -> None:
        self._left = PLAIN_VALUES_MAX

    def of(self, value: Any, depth: int) -> Any:
        """The plain values of this one. Raises: ConfigError."""
        self._left -= 1 + (len(value) >> 6 if isinstance(value, str) else 0)
        if self._left < 0 or depth > PLAIN_DEPTH_MAX:
            raise ConfigError(
                f"the trainer's values are more than {PLAIN_VALUES_MAX} or nested deeper than "
                f"{PLAIN_DEPTH_MAX}: load the shards with torch"
            )
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Mapping):
            return {str(name): self.of(each, depth + 1) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.of(each, depth + 1) for each in value]
        return None


def missing_ranks(found: Iterable[int], count: int) -> list[int]:
    """The ranks below `count` that are not there."""
    return sorted(set(range(count)) - set(found))

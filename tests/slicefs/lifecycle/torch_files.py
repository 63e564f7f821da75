"""Files of `torch.save`, written without torch: the same archive, the same pickle.

A tensor is a `FakeTensor`; an object of a class of torch's or of a trainer's is a `Made`.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

STORAGES: Final = {
    "F32": ("FloatStorage", "f"),
    "F64": ("DoubleStorage", "d"),
    "F16": ("HalfStorage", "e"),
    "BF16": ("BFloat16Storage", "H"),
    "I64": ("LongStorage", "q"),
    "U8": ("ByteStorage", "B"),
}


class Named:
    """A name that a pickle gives: `module.name`."""

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name


class Made:
    """An object: a name called with arguments, then given a state."""

    def __init__(self, module: str, name: str, *arguments: Any, state: Any = None) -> None:
        self.made_by = Named(module, name)
        self.arguments = arguments
        self.state = state


class FakeTensor:
    """A tensor: items of one type in a storage, which tensors may share."""

    def __init__(
        self,
        values: Sequence[Any],
        shape: Sequence[int] | None = None,
        dtype: str = "F32",
        *,
        strides: Sequence[int] | None = None,
        offset: int = 0,
    ) -> None:
        self.storage = FakeStorage(tuple(values), dtype)
        self.shape = tuple(shape) if shape is not None else (len(values),)
        self.strides = tuple(strides) if strides is not None else dense(self.shape)
        self.offset = offset


class FakeStorage(NamedTuple):
    """The items behind a tensor."""

    values: tuple[Any, ...]
    dtype: str

    @property
    def data(self) -> bytes:
        """The bytes."""
        return struct.pack(f"<{len(self.values)}{STORAGES[self.dtype][1]}", *self.values)


class _Key(NamedTuple):
    storage: FakeStorage
    key: str


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor in order."""
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


_Base: Any = pickle._Pickler  # the one in Python: its `save` can be taken over


class _Pickler(_Base):  # type: ignore[misc]
    """As torch's own: protocol 2, storages by persistent names."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 2)
        self.storages: dict[int, _Key] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Key):
            return None
        kind = STORAGES[value.storage.dtype][0]
        return "storage", Named("torch", kind), value.key, "cpu", len(value.storage.values)

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        if isinstance(value, Named):
            self.write(b"c" + f"{value.module}\n{value.name}\n".encode())
        elif isinstance(value, Made):
            self.save(value.made_by)
            self.save(value.arguments)
            self.write(pickle.REDUCE)
            if value.state is not None:
                self.save(value.state)
                self.write(pickle.BUILD)
        elif isinstance(value, FakeTensor):
            fresh = _Key(value.storage, str(len(self.storages)))
            stored = self.storages.setdefault(id(value.storage), fresh)
            arguments: tuple[Any, ...] = (
                stored,
                value.offset,
                value.shape,
                value.strides,
                False,
                {},
            )
            self.save(Made("torch._utils", "_rebuild_tensor_v2", *arguments))
        else:
            super().save(value, save_persistent_id)


def torch_save(value: Any, path: Path) -> None:
    """Write `value` as `torch.save` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{path.stem}/data.pkl", file.getvalue())
        archive.writestr(f"{path.stem}/byteorder", b"little")
        for storage, key in pickler.storages.values():
            archive.writestr(f"{path.stem}/data/{key}", storage.data)
        archive.writestr(f"{path.stem}/version", b"3\n")


def size(*shape: int) -> Made:
    """A `torch.Size`."""
    return Made("torch", "Size", list(shape))


def sharded_tensor(
    shape: Sequence[int], every: Sequence[Any], mine: Mapping[int, FakeTensor]
) -> Made:
    """A ShardedTensor: its shards as offsets and sizes, and the tensors of those of this rank."""
    api = "torch.distributed._shard"
    shards = [
        Made(f"{api}.metadata", "ShardMetadata", state=(None, _metadata(*each))) for each in every
    ]
    local = [
        Made(
            f"{api}.sharded_tensor.shard",
            "Shard",
            state={"tensor": tensor, "metadata": shards[index]},
        )
        for index, tensor in mine.items()
    ]
    about = Made(
        f"{api}.sharded_tensor.metadata",
        "ShardedTensorMetadata",
        state={"shards_metadata": shards, "size": size(*shape)},
    )
    return Made(
        "torch._tensor",
        "_rebuild_from_type_v2",
        Named("torch._utils", "_rebuild_wrapper_subclass"),
        Named(f"{api}.sharded_tensor.api", "ShardedTensor"),
        (),
        (local, about, None, None, False),
    )


def _metadata(offsets: Sequence[int], sizes: Sequence[int]) -> dict[str, Any]:
    return {"shard_offsets": list(offsets), "shard_sizes": list(sizes), "placement": None}

"""The safetensors format: a header of names, types, shapes and offsets, then the bytes.

Written one tensor at a time; the header is known before the first byte. Pure; called by
`lifecycle/unshard`, and by tests as a reader. The format: 8 bytes of length (little-endian), JSON,
then all tensors without gaps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from fsmeta.errors import ConfigError, Corrupt

HEADER_BYTES_MAX: Final = 100_000_000  # as the format's own readers have it
_LENGTH: Final = struct.Struct("<Q")
_ALIGN: Final = 8  # of the first tensor
ITEM_BYTES: Final[Mapping[str, int]] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
}


class TensorSpec(NamedTuple):
    """One tensor: its type in the format's words, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Located(NamedTuple):
    """A tensor and where its bytes are in the file."""

    spec: TensorSpec
    begin: int
    end: int


def encode_header(
    tensors: Sequence[tuple[str, TensorSpec]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The bytes before the first tensor, for tensors in this order. Raises: ConfigError."""
    header: dict[str, object] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    at = 0
    for name, spec in tensors:
        if name in header or name == "__metadata__":
            raise ConfigError(f"tensor {name}: the name is taken")
        end = at + spec.nbytes
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH.size) % _ALIGN)
    if len(text) > HEADER_BYTES_MAX:
        raise ConfigError(f"{len(tensors)} tensors: the header of one file is full; split it")
    return _LENGTH.pack(len(text)) + text


def header_length(first: bytes, where: str) -> int:
    """Bytes of length and header together, from the file's first 8. Raises: Corrupt."""
    if len(first) < _LENGTH.size:
        raise _corrupt(where, "shorter than 8 bytes")
    length = int(_LENGTH.unpack_from(first)[0])
    if not 2 <= length <= HEADER_BYTES_MAX:
        raise _corrupt(where, f"a header of {length} bytes")
    return _LENGTH.size + length


def decode_header(data: bytes, size: int, where: str) -> dict[str, Located]:
    """The tensors of a file of `size` bytes, from all bytes before them. Raises: Corrupt."""
    begin = header_length(data, where)
    try:
        header = json.loads(data[_LENGTH.size : begin])
        header.pop("__metadata__", None)
        found = {}
        for name, each in header.items():
            spec = TensorSpec(each["dtype"], tuple(each["shape"]))
            first, last = each["data_offsets"]
            found[name] = Located(spec, begin + first, begin + last)
            if last - first != spec.nbytes:
                raise ValueError(f"{name} has {last - first} bytes, not {spec.nbytes}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(where, str(error)) from error
    at = begin
    for name, located in sorted(found.items(), key=lambda item: item[1].begin):
        if located.begin != at:
            raise _corrupt(where, f"{name} begins at {located.begin}, not {at}")
        at = located.end
    if at != size:
        raise _corrupt(where, f"{size} bytes, not {at}")
    return found


def header_metadata(data: bytes, where: str) -> dict[str, str]:
    """The `__metadata__` of a file, from all bytes before its tensors. Raises: Corrupt."""
    begin = header_length(data, where)
    try:
        found = json.loads(data[_LENGTH.size : begin]).get("__metadata__", {})
        return {str(name): str(value) for name, value in found.items()}
    except (ValueError, AttributeError) as error:
        raise _corrupt(where, str(error)) from error


def _corrupt(where: str, why: str) -> Corrupt:
    return Corrupt(where.encode(errors="surrogateescape"), b"safetensors", why)

"""The volume's settings, and how a volume begins."""

from __future__ import annotations

import re
import uuid
from typing import Any, Final, NamedTuple

from fsmeta import schema
from fsmeta.errors import ConfigError, Corrupt, NoVolume
from fsmeta.ops.inode import put_attr
from fsmeta.transact import Txn
from fsmeta.types import BLOCK_BYTES_MAX, ROOT_INO, Usage

BLOCK_BYTES_MIN: Final = 64 << 10
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")  # also a bucket name in S3
COMPRESSIONS: Final = ("none", "lz4", "zstd")


class VolumeFormat(NamedTuple):
    """What `slicefs format` decides. `unknown` keeps settings of later versions."""

    name: str
    uuid: str
    storage: str  # kind of object store: file, mem
    bucket: str  # where in that store
    block_bytes: int
    compression: str
    capacity: int  # bytes; 0: no limit
    inodes: int  # 0: no limit
    version: int = schema.METADATA_VERSION
    unknown: dict[str, Any] | None = None

    @property
    def limits(self) -> Usage:
        """Capacity and inodes as usage is measured against."""
        return Usage(self.capacity, self.inodes)


_TYPES: Final[dict[str, type]] = {
    "name": str,
    "uuid": str,
    "storage": str,
    "bucket": str,
    "block_bytes": int,
    "compression": str,
    "capacity": int,
    "inodes": int,
    "version": int,
}
assert {*_TYPES, "unknown"} == {*VolumeFormat._fields}


def new_format(
    name: str,
    storage: str,
    bucket: str,
    block_bytes: int = BLOCK_BYTES_MAX,
    compression: str = "none",
    capacity: int = 0,
    inodes: int = 0,
) -> VolumeFormat:
    """Validated settings of a new volume. Raises: ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"volume name {name!r}: use 3 to 63 of a-z, 0-9 and '-', not at either end"
        )
    if block_bytes & (block_bytes - 1) or not BLOCK_BYTES_MIN <= block_bytes <= BLOCK_BYTES_MAX:
        raise ConfigError("--block-size: use a power of two from 64KiB to 4MiB")
    if compression not in COMPRESSIONS:
        raise ConfigError(f"--compress {compression}: use one of {', '.join(COMPRESSIONS)}")
    if capacity < 0 or inodes < 0:
        raise ConfigError("--capacity and --inodes can't be negative; 0 means no limit")
    return VolumeFormat(
        name, str(uuid.uuid4()), storage, bucket, block_bytes, compression, capacity, inodes
    )


def pack_format(settings: VolumeFormat) -> bytes:
    """The value of the settings in F."""
    record = settings._asdict()
    unknown = record.pop("unknown") or {}
    return schema.pack_map({**unknown, **record})


def unpack_format(value: bytes) -> VolumeFormat:
    """Raises: Corrupt, ConfigError for a volume of a later version."""
    record = schema.unpack_map(schema.FORMAT, schema.FORMAT_FIELD, value)
    version = record.get("version")
    if not isinstance(version, int):
        raise Corrupt(schema.FORMAT, schema.FORMAT_FIELD, "no version")
    if version > schema.METADATA_VERSION:
        raise ConfigError(
            f"the volume has metadata version {version}, this slicefs knows up to "
            f"{schema.METADATA_VERSION}: upgrade slicefs"
        )
    known = {name: record.pop(name, None) for name in _TYPES}
    for name, kind in _TYPES.items():
        if type(known[name]) is not kind:
            raise Corrupt(schema.FORMAT, schema.FORMAT_FIELD, f"{name} is {known[name]!r}")
    return VolumeFormat(**known, unknown=record or None)


def require_none(txn: Txn) -> None:
    """Raises: ConfigError where there is a volume already."""
    value = txn.get(schema.FORMAT, schema.FORMAT_FIELD)
    if value is not None:
        name = unpack_format(value).name
        raise ConfigError(f"there is a volume {name!r} already: choose another database")


def create_volume(txn: Txn, settings: VolumeFormat, owner: tuple[int, int], now_ns: int) -> None:
    """Write the settings and the root directory into an empty store.

    Raises: ConfigError where there is a volume already.
    """
    require_none(txn)
    txn.put(schema.FORMAT, schema.FORMAT_FIELD, pack_format(settings))
    uid, gid = owner
    put_attr(txn, schema.new_attr(ROOT_INO, 0o40755, uid, gid, ROOT_INO, now_ns))
    txn.put(schema.COUNTERS, schema.NEXT_INO, b"%d" % (ROOT_INO + 1))
    txn.put(schema.COUNTERS, schema.NEXT_SLICE, b"1")
    txn.add(schema.USAGE, schema.INODES, 1)


def load_format(txn: Txn) -> VolumeFormat:
    """Raises: NoVolume."""
    value = txn.get(schema.FORMAT, schema.FORMAT_FIELD)
    if value is None:
        raise NoVolume
    return unpack_format(value)

"""The volume's settings, and how a volume begins."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from fsmeta.errors import ConfigError, Corrupt, NoVolume
from fsmeta.rules.context import put_attr
from fsmeta.schema import inode, keys
from fsmeta.txn.txn import Txn
from fsmeta.types import (
    BLOCK_BYTES_MAX,
    FRAME_BYTES,
    FRAME_BYTES_MAX,
    FRAME_BYTES_MIN,
    ROOT_INO,
    SpaceUsage,
)

BLOCK_BYTES_MIN: Final = 64 << 10
_PART: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.-]{0,99}")  # of paths: of caches, of journals
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")  # also a bucket name in S3
COMPRESSIONS: Final = ("none", "lz4", "zstd")
FIRST_VERSION: Final = 1
ENCRYPTED_VERSION: Final = 2  # a client that knows only 1 would write what is not encrypted
FRAMES_VERSION: Final = 3  # one that knows only 2 would take small frames for damage
ATTACHED_VERSION: Final = 4  # one that knows only 3 would show zeros for attached files
RESERVED_VERSION: Final = 5  # one that knows only 4 would take reserved space for corruption
FRAME_SIZES: Final = tuple(
    1 << log2 for log2 in range(FRAME_BYTES_MIN.bit_length() - 1, FRAME_BYTES_MAX.bit_length())
)
_SHOWN_OF_ENCRYPTION: Final = ("cipher", "wrap", "holder")
assert ENCRYPTED_VERSION < FRAMES_VERSION < ATTACHED_VERSION < RESERVED_VERSION
assert RESERVED_VERSION <= keys.METADATA_VERSION


# how far accounting has come: no inode is charged; those with a mark are; and those that are made
# get one; and every inode has one, so limits can be set
OFF: Final = ""
ARMED: Final = "armed"
COUNTING: Final = "counting"
ON: Final = "on"
_ACCOUNTING: Final = (OFF, ARMED, COUNTING, ON)


class VolumeFormat(NamedTuple):
    """What `slicefs format` decides. `unknown` keeps settings of later versions."""

    name: str
    uuid: str
    storage: str  # kind of object store: file, s3, rados, mem
    bucket: str  # where in that store
    block_bytes: int
    compression: str
    capacity: int  # bytes; 0: no limit
    inodes: int  # 0: no limit
    version: int = FIRST_VERSION
    shards: int = 0  # buckets that share the objects; 0: there is one
    hash_prefix: bool = False  # keys begin with a hash
    options: dict[str, str] | None = None  # of the object store
    encryption: dict[str, str] | None = (
        None  # the wrapped key of the data, see fsdata/format/key_wrap
    )
    changes: int = 0  # of these settings since the volume was made
    epoch: int = 0  # of the last quota scan; see docs/design/locks-permissions-quotas
    accounting: str = OFF
    trash_days: int = 0  # how long what is deleted can be restored; 0: not at all
    frame_bytes: int = FRAME_BYTES_MAX  # of new blocks that are stored as they are
    unknown: dict[str, Any] | None = None

    def with_encryption(self, record: dict[str, str]) -> VolumeFormat:
        """These settings with the data's key wrapped as `record` says."""
        version = max(self.version, ENCRYPTED_VERSION)
        return self._replace(encryption=record, version=version)

    def with_frames(self, frame_bytes: int) -> VolumeFormat:
        """These settings with frames of another size. Raises: ConfigError."""
        if frame_bytes not in FRAME_SIZES:
            raise ConfigError("--frame-size: use a power of two from 4KiB to 64KiB")
        version = FIRST_VERSION if frame_bytes == FRAME_BYTES_MAX else FRAMES_VERSION
        return self._replace(frame_bytes=frame_bytes, version=max(self.version, version))

    def with_attached(self) -> VolumeFormat:
        """These settings where files may show objects of buckets."""
        return self._replace(version=max(self.version, ATTACHED_VERSION))

    def with_reserved(self) -> VolumeFormat:
        """These settings where files may have reserved space."""
        return self._replace(version=max(self.version, RESERVED_VERSION))

    def shown(self) -> dict[str, Any]:
        """What users may see: nothing that helps to guess a passphrase."""
        out = {name: value for name, value in self._asdict().items() if name != "unknown"}
        if self.encryption is not None:
            record = self.encryption
            out["encryption"] = {n: record[n] for n in _SHOWN_OF_ENCRYPTION if n in record}
        return out

    @property
    def edition(self) -> bytes:
        """What sessions that follow these settings have in their fence."""
        return b"%d" % (self.changes + 1)

    @property
    def charged(self) -> int:
        """The mark of inodes that are charged to quotas; 0 where none is."""
        return 0 if self.accounting == OFF else self.epoch

    @property
    def born(self) -> int:
        """The mark of inodes that are made now."""
        return self.epoch if self.accounting in (COUNTING, ON) else 0

    @property
    def limits(self) -> SpaceUsage:
        """Capacity and inodes as usage is measured against."""
        return SpaceUsage(self.capacity, self.inodes)


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
    "shards": int,
    "hash_prefix": bool,
    "options": dict,
    "encryption": dict,
    "changes": int,
    "epoch": int,
    "accounting": str,
    "trash_days": int,
    "frame_bytes": int,
}
# fields that are left out of the record where they are what a volume without them has
_OPTIONAL: Final[dict[str, Any]] = {
    "shards": 0,
    "hash_prefix": False,
    "options": None,
    "encryption": None,
    "changes": 0,
    "epoch": 0,
    "accounting": OFF,
    "trash_days": 0,
    "frame_bytes": FRAME_BYTES_MAX,
}
TRASH_DAYS_MAX: Final = 3650  # ten years of hours are listed by one look
SHARDS_MAX: Final = 256  # each is a bucket, and a listing begins in all of them
assert {*_TYPES, "unknown"} == {*VolumeFormat._fields}


class FormatChoices(NamedTuple):
    """Settings of a new volume that have a default. Fields as those of `VolumeFormat`."""

    block_bytes: int = BLOCK_BYTES_MAX
    compression: str = "none"
    capacity: int = 0
    inodes: int = 0
    shards: int = 0
    hash_prefix: bool = False
    options: dict[str, str] | None = None
    trash_days: int = 0
    frame_bytes: int = FRAME_BYTES


DEFAULT_CHOICES: Final = FormatChoices()


def new_format(
    name: str, storage: str, bucket: str, choices: FormatChoices = DEFAULT_CHOICES
) -> VolumeFormat:
    """Validated settings of a new volume. Raises: ConfigError."""
    block_bytes, shards = choices.block_bytes, choices.shards
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"volume name {name!r}: use 3 to 63 of a-z, 0-9 and '-', not at either end"
        )
    if block_bytes & (block_bytes - 1) or not BLOCK_BYTES_MIN <= block_bytes <= BLOCK_BYTES_MAX:
        raise ConfigError("--block-size: use a power of two from 64KiB to 4MiB")
    if choices.compression not in COMPRESSIONS:
        known = ", ".join(COMPRESSIONS)
        raise ConfigError(f"--compress {choices.compression}: use one of {known}")
    if choices.capacity < 0 or choices.inodes < 0:
        raise ConfigError("--capacity and --inodes can't be negative; 0 means no limit")
    if not 0 <= choices.trash_days <= TRASH_DAYS_MAX:
        raise ConfigError(f"--trash-days: from 0 (no trash) to {TRASH_DAYS_MAX}")
    if shards != 0 and not 2 <= shards <= SHARDS_MAX:
        raise ConfigError(f"--shards: from 2 to {SHARDS_MAX} buckets, or 0 for one")
    return VolumeFormat(
        name,
        str(uuid.uuid4()),
        storage,
        bucket,
        block_bytes,
        choices.compression,
        choices.capacity,
        choices.inodes,
        shards=shards,
        hash_prefix=choices.hash_prefix,
        options=choices.options or None,
        trash_days=choices.trash_days,
    ).with_frames(choices.frame_bytes)


def pack_format(settings: VolumeFormat) -> bytes:
    """The value of the settings in F."""
    record = settings._asdict()
    unknown = record.pop("unknown") or {}
    for name, usual in _OPTIONAL.items():
        if record[name] == usual:
            del record[name]
    return keys.pack_map({**unknown, **record})


def unpack_format(value: bytes) -> VolumeFormat:
    """Raises: Corrupt, ConfigError for a volume of a later version."""
    record = keys.unpack_map(keys.FORMAT, keys.FORMAT_FIELD, value)
    version = record.get("version")
    if not isinstance(version, int):
        raise Corrupt(keys.FORMAT, keys.FORMAT_FIELD, "no version")
    if version > keys.METADATA_VERSION:
        raise ConfigError(
            f"the volume has metadata version {version}, this slicefs knows up to "
            f"{keys.METADATA_VERSION}: upgrade slicefs"
        )
    known: dict[str, Any] = {}
    for name, kind in _TYPES.items():
        if name in _OPTIONAL and name not in record:
            continue
        known[name] = record.pop(name, None)
        if type(known[name]) is not kind or not _is_texts(known[name]):
            raise Corrupt(keys.FORMAT, keys.FORMAT_FIELD, f"{name} is {known[name]!r}")
    if known.get("accounting", OFF) not in _ACCOUNTING:
        raise Corrupt(keys.FORMAT, keys.FORMAT_FIELD, f"accounting is {known['accounting']!r}")
    if known.get("frame_bytes", FRAME_BYTES_MAX) not in FRAME_SIZES:
        raise Corrupt(keys.FORMAT, keys.FORMAT_FIELD, f"frames of {known['frame_bytes']} bytes")
    for word in ("name", "uuid"):
        if not _PART.fullmatch(known[word]):
            raise Corrupt(keys.FORMAT, keys.FORMAT_FIELD, f"{word} is {known[word]!r}")
    return VolumeFormat(**known, unknown=record or None)


def _is_texts(value: object) -> bool:
    """Whether a map has texts only."""
    if not isinstance(value, dict):
        return True
    return all(type(each) is str for pair in value.items() for each in pair)


def require_none(txn: Txn) -> None:
    """Raises: ConfigError where there is a volume already."""
    require_absent(txn.get(keys.FORMAT, keys.FORMAT_FIELD))


def require_absent(value: bytes | None) -> None:
    """Raises: ConfigError where `value`, the settings in a store, says that it has a volume."""
    if value is not None:
        name = unpack_format(value).name
        raise ConfigError(f"there is a volume {name!r} already: choose another database")


def create_volume(
    txn: Txn, settings: VolumeFormat, owner: tuple[int, int], now_ns: int, store_epoch: bytes = b""
) -> None:
    """Write the settings and the root directory into an empty store, whose past is `store_epoch`.

    Raises: ConfigError where there is a volume already.
    """
    require_none(txn)
    txn.put(keys.FORMAT, keys.FORMAT_FIELD, pack_format(settings))
    uid, gid = owner
    put_attr(txn, inode.new_attr(ROOT_INO, 0o40755, (uid, gid), ROOT_INO, now_ns))
    txn.put(keys.COUNTERS, keys.NEXT_INO, b"%d" % (ROOT_INO + 1))
    txn.put(keys.COUNTERS, keys.NEXT_SLICE, b"1")
    if store_epoch:
        txn.put(keys.COUNTERS, keys.LINEAGE, store_epoch)
    txn.add(keys.USAGE, keys.INODES, 1)


def change_format(txn: Txn, change: Callable[[VolumeFormat], VolumeFormat]) -> VolumeFormat:
    """Replace the settings by what `change` makes of them. Raises: NoVolume."""
    after = change(load_format(txn))
    txn.put(keys.FORMAT, keys.FORMAT_FIELD, pack_format(after))
    return after


def load_format(txn: Txn) -> VolumeFormat:
    """Raises: NoVolume."""
    return require(txn.get(keys.FORMAT, keys.FORMAT_FIELD))


def require(value: bytes | None) -> VolumeFormat:
    """The settings in a store. Raises: NoVolume."""
    if value is None:
        raise NoVolume
    return unpack_format(value)

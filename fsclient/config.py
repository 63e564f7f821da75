"""What users write, turned into what the rest trusts: URLs, sizes, stores.

Called by the commands and by `client`. Everything that can be wrong in it is a ConfigError of one
line.
"""

from __future__ import annotations

import os
import re
from typing import Final

from fsdata.codec import Codec
from fsdata.obj_file import FileObjects
from fsdata.obj_mem import MemObjects
from fsdata.objects import ObjectStore
from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime
from fsmeta.store import Store
from fsmeta.store_redis import RedisStore
from fsmeta.store_sqlite import SqliteStore
from fsmeta.volume import VolumeFormat

STORAGES: Final = ("file", "mem")
CODECS: Final = {"none": Codec.NONE, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTPE]?)(i?)B?", re.IGNORECASE)
_POWERS: Final = {unit: power for power, unit in enumerate(("", "K", "M", "G", "T", "P", "E"))}
_META_HELP: Final = "use redis://HOST:PORT/DB or sqlite:///FILE.db"


def parse_size(text: str) -> int:
    """Bytes in `4MiB`, `1.5G` or `4096`; K, M, … are powers of 1024 with or without the `i`.

    Raises: ConfigError.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"size {text!r}: write a number and a unit, as in 4MiB or 100GiB")
    number, unit, _ = match.groups()
    return int(float(number) * 1024 ** _POWERS[unit.upper()])


def format_size(size: int) -> str:
    """`size` bytes as people read them: 4.0 MiB."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024 or unit == "PiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the last unit takes everything")


def open_store(url: str, runtime: Runtime, create: bool = False) -> Store:
    """The metadata engine that `url` names; `create` makes a SQLite file that is not there.

    Raises: ConfigError.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ConfigError(f"metadata URL {url!r} has no scheme: {_META_HELP}")
    if scheme in ("redis", "rediss", "unix"):
        return RedisStore(url, runtime)
    if scheme in ("sqlite", "sqlite3"):
        return SqliteStore(sqlite_path(rest), runtime, create)
    raise ConfigError(f"metadata URL scheme {scheme!r} is unknown: {_META_HELP}")


def sqlite_path(rest: str) -> str:
    """The file in `sqlite://` + `rest`: `/name.db` is in the working directory, any other path as
    it stands.

    Raises: ConfigError.
    """
    if rest.strip("/") == "":
        raise ConfigError(f"the metadata URL names no file: {_META_HELP}")
    if rest.startswith("/") and rest.count("/") == 1:
        return os.path.abspath(rest[1:])
    return os.path.abspath(rest)


def normal_bucket(storage: str, bucket: str) -> str:
    """The bucket as the volume keeps it. Raises: ConfigError."""
    if storage not in STORAGES:
        raise ConfigError(f"--storage {storage}: use one of {', '.join(STORAGES)}")
    if storage == "mem":
        return bucket or "mem"
    if not bucket:
        raise ConfigError("--bucket: name the directory that will hold the data")
    return os.path.abspath(bucket)


_MEMORY: Final[dict[str, MemObjects]] = {}  # by bucket: what format and mount of one process share


def open_objects(settings: VolumeFormat, runtime: Runtime, create: bool = False) -> ObjectStore:
    """The volume's object store, without wrappers. Raises: ConfigError."""
    if settings.storage == "mem":
        return _MEMORY.setdefault(settings.bucket, MemObjects(runtime))
    if settings.storage == "file":
        root = os.path.join(settings.bucket, settings.name)
        if not create and not os.path.isdir(root):
            raise ConfigError(
                f"the data directory {root} is not there: mount its disk, or restore it"
            )
        try:
            return FileObjects(runtime, root)
        except OSError as error:
            raise ConfigError(
                f"--bucket {settings.bucket}: {error.strerror}; choose a directory you may write"
            ) from error
    raise ConfigError(f"this slicefs does not know storage {settings.storage!r}: upgrade slicefs")

"""Names of volumes: `slicefs://VOLUME/PATH` and `META-URL#PATH`, turned into a metadata URL.

`slicefs://VOLUME/DIRECTORY@NAME` is a snapshot of the directory, `slicefs://VOLUME/@NAME` one of
the root.

The URL of VOLUME is in the environment (`SLICEFS_META_VOLUME`) or in a profile file, a line
`VOLUME URL` each: the one that `SLICEFS_VOLUMES` names, else `~/.slicefs/volumes`. Errors never
show a URL's password.

Called by `Client`, `open_tree` and fsspec. Threading: functions only.
"""

from __future__ import annotations

import os
import re
from typing import Final

from fsmeta.errors import ConfigError
from fsmeta.schema.snapshot_inos import SHELF_NAME
from fsmeta.store.redis.url import SCHEMES as REDIS_SCHEMES
from fsmeta.store.url import shown_url

SCHEME: Final = "slicefs"
_METADATA: Final = frozenset({*REDIS_SCHEMES, "tikv", "sqlite", "sqlite3"})
_FILE_BYTES_MAX: Final = 1 << 20  # of the profile file: a mistake, not a list of volumes
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def is_volume_url(url: str) -> bool:
    """Whether a URL names a volume, by its name or by its metadata."""
    scheme, separator, _ = url.partition("://")
    return bool(separator) and (scheme == SCHEME or scheme in _METADATA)


def split_volume_url(url: str) -> tuple[str, str]:
    """The metadata URL and the path in the volume. Raises: ConfigError."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme in _METADATA:
        meta, _, path = url.partition("#")
        return meta, path
    if scheme != SCHEME or not separator:
        raise ConfigError(
            f"{shown_url(url)!r} names no volume: use slicefs://VOLUME/PATH, redis://…, tikv://… "
            "or sqlite://…"
        )
    name, _, path = rest.partition("/")
    return meta_url(name), snapshot_path(path)


def snapshot_path(path: str) -> str:
    """The path in the volume of `DIRECTORY@SNAPSHOT/REST`; other paths are as they are.

    A name with an `@` is reached by `META-URL#PATH`, which knows no snapshots.
    """
    words = path.split("/")
    for index, word in enumerate(words):
        folder, separator, snapshot = word.rpartition("@")
        if separator and snapshot:
            return "/".join(
                (
                    *words[:index],
                    *([folder] if folder else []),
                    *_snapshot_dir(snapshot),
                    *words[index + 1 :],
                )
            )
    return path


def _snapshot_dir(snapshot: str) -> tuple[str, str]:
    return os.fsdecode(SHELF_NAME), snapshot


def meta_url(name: str) -> str:
    """The metadata URL of a volume by its name. Raises: ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{SCHEME}://{name}: no volume has this name: use {SCHEME}://VOLUME/PATH")
    variable = variable_of(name)
    found = os.environ.get(variable, "") or _in_profile(name)
    if not found:
        raise ConfigError(
            f"{SCHEME}://{name}: its metadata URL is unknown: set {variable}, "
            f"or add a line `{name} URL` to {_profile()}"
        )
    if not is_volume_url(found) or found.startswith(f"{SCHEME}://"):
        raise ConfigError(
            f"the URL of volume {name} in {variable} or {_profile()} is no metadata URL: "
            "use redis://…, tikv://… or sqlite://…"
        )
    return found


def variable_of(name: str) -> str:
    """The environment variable with a volume's metadata URL."""
    return f"SLICEFS_META_{name.upper().replace('-', '_')}"


def _profile() -> str:
    return os.path.expanduser(os.environ.get("SLICEFS_VOLUMES") or "~/.slicefs/volumes")


def _in_profile(name: str) -> str:
    """The URL of a volume in the profile file, or "". Raises: ConfigError."""
    path = _profile()
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            text = file.read(_FILE_BYTES_MAX)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"the list of volumes {path}: {error.strerror}: correct it") from error
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name:
            return words[1]
    return ""

"""The secrets of a request: which SliceFS volume is meant, and the keys to it.

The keys are those of JuiceFS's driver. What is secret reaches `slicefs` through the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from csi.errors import invalid
from csi.names import file_name

META_VARIABLE: Final = "SLICEFS_META"
NO_LOCAL_VARIABLE: Final = "SLICEFS_NO_LOCAL_STORES"  # the client looks before it opens a store
META: Final = f"env:{META_VARIABLE}"  # the argument that stands for the metadata URL
_KEYS: Final = (
    "name",
    "metaurl",
    "storage",
    "bucket",
    "access-key",
    "secret-key",
    "format-options",
)
_FORMAT_WORDS: Final = (
    "block-size",
    "frame-size",
    "compress",
    "capacity",
    "inodes",
    "trash-days",
    "shards",
    "hash-prefix",
    "store-option",
)
_LOCAL: Final = ("sqlite", "sqlite3", "unix", "file", "mem")  # of one host
_URL: Final = re.compile(r"[a-z][a-z0-9+]*://\S+")


@dataclass(frozen=True)
class Backend:
    """A SliceFS volume as the secrets describe it. `repr` shows no secret."""

    name: str
    environment: Mapping[str, str]
    storage: str
    bucket: str
    format_words: tuple[str, ...]
    allow_local: bool  # whether metadata and data may be files of the host

    def __repr__(self) -> str:
        return f"Backend({self.name!r})"

    @property
    def key(self) -> str:
        """The same for the same metadata URL; says nothing about it."""
        return file_name(self.environment[META_VARIABLE])

    @property
    def server(self) -> str:
        """The metadata URL without user and password."""
        scheme, _, rest = self.environment[META_VARIABLE].partition("://")
        return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"

    @property
    def can_format(self) -> bool:
        """Whether a volume that is not there yet can be made."""
        return bool(self.storage and self.bucket)


def refuse_local(what: str, kind: str) -> None:
    """Raises: CsiError where a store is of this kind: files or sockets of the host."""
    if kind in _LOCAL:
        raise invalid(
            f"{what} is {kind}, on the node itself: use a store that all nodes reach, or start "
            "slicefs-csi with --allow-local-stores"
        )


def parse_secrets(secrets: Mapping[str, str], allow_local: bool) -> Backend:
    """Raises: CsiError where a key is missing, unknown, malformed, or names a store of the host."""
    unknown = sorted(set(secrets) - set(_KEYS))
    if unknown:
        raise invalid(
            f"the secret has the unknown key {unknown[0][:40]!r}; known: {', '.join(_KEYS)}"
        )
    if not secrets:
        raise invalid(
            "the request has no secret: name one in the class, as by "
            "csi.storage.k8s.io/provisioner-secret-name and -namespace"
        )
    for key in ("name", "metaurl"):
        if not secrets.get(key):
            raise invalid(f"the secret has no {key!r}: add it, and name the secret in the class")
    if any("\0" in value for value in secrets.values()):
        raise invalid("a value in the secret has a NUL byte: correct it")
    if not _URL.fullmatch(secrets["metaurl"].strip()):
        raise invalid("metaurl in the secret is no URL: use redis://HOST:PORT/DB or tikv://…")
    if bool(secrets.get("access-key")) != bool(secrets.get("secret-key")):
        raise invalid("the secret has one of access-key and secret-key: give both or none")
    storage = secrets.get("storage", "").strip()
    if not allow_local:
        refuse_local("metaurl in the secret", secrets["metaurl"].strip().partition("://")[0])
        refuse_local("storage in the secret", storage)
    environment = {META_VARIABLE: secrets["metaurl"].strip()}
    if secrets.get("access-key"):
        environment["ACCESS_KEY"] = secrets["access-key"].strip()
        environment["SECRET_KEY"] = secrets["secret-key"].strip()
    return Backend(
        secrets["name"].strip(),
        environment,
        storage,
        secrets.get("bucket", "").strip(),
        _format_words(secrets.get("format-options", "")),
        allow_local,
    )


def _format_words(text: str) -> tuple[str, ...]:
    words: list[str] = []
    for option in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = option.lstrip("-").partition("=")
        if name not in _FORMAT_WORDS:
            raise invalid(
                f"format-options: there is no {name[:40]!r}; known: {', '.join(_FORMAT_WORDS)}"
            )
        words += [f"--{name}", *([value] if equals else [])]
    return tuple(words)

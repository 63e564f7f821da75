"""`-o` options of the kernel and of fusermount3: which there are and what they mean.

Called by `mount` and by the command line, which keeps its own options apart with `is_known`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from fsmeta.errors import ConfigError

MAX_READ_BYTES: Final = 1 << 20

# mount(2) flags: the bit to set or, where the option is the other's opposite, to clear
_SET: Final = {
    "ro": 1 << 0,
    "nosuid": 1 << 1,
    "nodev": 1 << 2,
    "noexec": 1 << 3,
    "sync": 1 << 4,
    "dirsync": 1 << 7,
    "nosymfollow": 1 << 8,
    "noatime": 1 << 10,
    "nodiratime": 1 << 11,
    "relatime": 1 << 21,
    "strictatime": 1 << 24,
    "lazytime": 1 << 25,
}
_CLEAR: Final = {
    "rw": _SET["ro"],
    "suid": _SET["nosuid"],
    "dev": _SET["nodev"],
    "exec": _SET["noexec"],
    "async": _SET["sync"],
    "atime": _SET["noatime"],
    "diratime": _SET["nodiratime"],
    "norelatime": _SET["relatime"],
    "nostrictatime": _SET["strictatime"],
    "nolazytime": _SET["lazytime"],
}
# mount(8) and systemd read these from fstab; they say nothing to us
_IGNORED: Final = frozenset(
    (
        "defaults",
        "auto",
        "noauto",
        "user",
        "nouser",
        "users",
        "nofail",
        "_netdev",
        "default_permissions",
    )
)
_PLAIN: Final = frozenset(("allow_other",))
_COMMENTS: Final = ("x-", "X-")


class MountOptions(NamedTuple):
    """How a file system is mounted."""

    flags: int = 0  # MS_* of mount(2)
    allow_other: bool | None = None  # None: as root
    max_read_bytes: int = MAX_READ_BYTES

    def words(self) -> list[str]:
        """The flags as fusermount3 spells them."""
        return [word for word, bit in _SET.items() if self.flags & bit]


def is_known(option: str) -> bool:
    """Whether `option` is for us; `x-…` words are comments to mount(8)."""
    word = option.partition("=")[0]
    return (
        word in _SET
        or word in _CLEAR
        or word in _IGNORED
        or word in _PLAIN
        or word == "max_read"
        or word.startswith(_COMMENTS)
    )


def is_read_only(options: Iterable[str]) -> bool:
    """Whether `ro` is the last word on it."""
    return bool(parse_options(options).flags & _SET["ro"])


def parse_options(options: Iterable[str]) -> MountOptions:
    """The meaning of `-o` words, later ones winning.

    Raises: ConfigError for a word that is unknown or has a bad value.
    """
    flags = 0
    allow_other: bool | None = None
    max_read_bytes = MAX_READ_BYTES
    for option in options:
        word, equals, value = option.partition("=")
        if not is_known(option):
            raise ConfigError(f"unknown mount option {option!r}: see `slicefs mount --help`")
        if equals and word != "max_read" and not word.startswith(_COMMENTS):
            raise ConfigError(f"mount option {option!r}: {word} takes no value")
        flags = (flags | _SET.get(word, 0)) & ~_CLEAR.get(word, 0)
        if word == "allow_other":
            allow_other = True
        elif word == "max_read":
            max_read_bytes = _max_read(value)
    return MountOptions(flags, allow_other, max_read_bytes)


def _max_read(value: str) -> int:
    if not re.fullmatch("[0-9]{4,7}", value) or not 4096 <= int(value) <= MAX_READ_BYTES:
        raise ConfigError(f"max_read={value}: give a number from 4096 to {MAX_READ_BYTES}")
    return int(value)

"""`-o` options of the kernel and of fusermount3: which there are and what they mean.

Called by `mount` and by the command line, which keeps its own options apart with `is_known`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
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
# of these the last word counts
ATIME_MODES: Final = ("noatime", "relatime", "strictatime")
_ATIME_BITS: Final = _SET["noatime"] | _SET["relatime"] | _SET["strictatime"]
_ABOUT_ATIME: Final = frozenset((*ATIME_MODES, "atime", "norelatime", "nostrictatime"))
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
_PLAIN: Final = frozenset(("allow_other", "acl", "noacl"))
_ROOT_ONLY: Final = frozenset(("strictatime", "nodiratime"))  # of fusermount3 3.14
_COMMENTS: Final = ("x-", "X-")


class MountOptions(NamedTuple):
    """How a file system is mounted."""

    flags: int = 0  # MS_* of mount(2)
    allow_other: bool | None = None  # None: as root
    max_read_bytes: int = MAX_READ_BYTES
    acl: bool | None = None  # whether the kernel checks ACLs; None: where the volume has any

    def words(self) -> list[str]:
        """The flags as fusermount3 spells them; `relatime` is what the kernel does unasked.

        Raises: ConfigError for those that it does not pass on.
        """
        words = [word for word, bit in _SET.items() if self.flags & bit and word != "relatime"]
        if refused := [word for word in words if word in _ROOT_ONLY]:
            raise ConfigError(f"{refused[0]}: fusermount3 does not know it; mount as root for that")
        return words


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


def with_atime(options: Sequence[str], mode: str | None) -> tuple[str, ...]:
    """`options` with a word about atime: `mode`, or `noatime` where nothing is said.

    So what the kernel shows for a mount is what the mount does.
    Raises: ConfigError where both are said, and differ.
    """
    said = [word for word in options if word in _ABOUT_ATIME]
    if not said:
        return (*options, mode or "noatime")
    flags = parse_options(said).flags
    meant = next((each for each in ATIME_MODES if flags & _SET[each]), "relatime")
    if mode is not None and mode != meant:
        raise ConfigError(f"--atime-mode {mode} and -o {said[-1]} say different things: drop one")
    return tuple(options)


def parse_options(options: Iterable[str]) -> MountOptions:
    """The meaning of `-o` words, later ones winning.

    Raises: ConfigError for a word that is unknown or has a bad value.
    """
    flags = 0
    allow_other: bool | None = None
    max_read_bytes = MAX_READ_BYTES
    acl: bool | None = None
    for option in options:
        word, equals, value = option.partition("=")
        if not is_known(option):
            raise ConfigError(f"unknown mount option {option!r}: see `slicefs mount --help`")
        if equals and word != "max_read" and not word.startswith(_COMMENTS):
            raise ConfigError(f"mount option {option!r}: {word} takes no value")
        if word in ATIME_MODES:
            flags &= ~_ATIME_BITS
        flags = (flags | _SET.get(word, 0)) & ~_CLEAR.get(word, 0)
        if word == "allow_other":
            allow_other = True
        elif word == "max_read":
            max_read_bytes = _max_read(value)
        elif word in ("acl", "noacl"):
            acl = word == "acl"
    return MountOptions(flags, allow_other, max_read_bytes, acl)


def _max_read(value: str) -> int:
    if not re.fullmatch("[0-9]{4,7}", value) or not 4096 <= int(value) <= MAX_READ_BYTES:
        raise ConfigError(f"max_read={value}: give a number from 4096 to {MAX_READ_BYTES}")
    return int(value)

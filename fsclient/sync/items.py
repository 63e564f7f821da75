"""What a tree holds for a sync: items by key, the rules that choose among them, and the seam.

A key is the path below the top with `/` between names; that of a directory ends with `/`. Listings
come in the order of the keys' bytes, as S3 has it, so two of them are compared as streams.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple, Protocol

PIECE_BYTES: Final = 4 << 20  # of a file in memory at a time, for each thread
LINK_SUFFIX: Final = ".rclonelink"  # of an object with the target of a link, as rclone has it
TARGET_MAX: Final = 4095  # of a symlink
TEMPORARY: Final = re.compile(r"\.slicefs-sync\.[0-9a-f]{16}")
_NAME_MAX: Final = 255


class ItemKind(Enum):
    """What an item is."""

    FILE = "file"
    DIR = "directory"
    LINK = "symlink"
    OTHER = "special file"


class Item(NamedTuple):
    """One name. What an object does not have is None."""

    key: str
    kind: ItemKind
    size: int
    mtime_ns: int
    mode: int | None = None
    uid: int = -1
    gid: int = -1
    atime_ns: int = 0
    target: str = ""
    inode: tuple[int, int] | None = None  # of a file with several names


class Content(NamedTuple):
    """The bytes of a file, in pieces, and its extended attributes."""

    pieces: Iterator[bytes]
    xattrs: Mapping[str, bytes]


class ItemRefused(Exception):
    """One item cannot be copied; the text says why."""


class SyncSide(Protocol):
    """One side of a sync. The methods raise OSError, StoreError or Refused."""

    has_modes: bool  # directories, links, modes and exact times can be kept here

    def list(self) -> Iterator[Item]:
        """All items in order. Raises where any part cannot be listed."""

    def read(self, item: Item) -> Content:
        """A file's content; it is read while `pieces` are taken."""

    def write(self, item: Item, content: Content) -> None:
        """Make or replace a file: it appears whole or not at all."""

    def make(self, item: Item) -> None:
        """Make a directory or a symlink."""

    def link(self, first: str, key: str) -> None:
        """Make `key` another name of the file `first`."""

    def dress(self, item: Item) -> None:
        """Give a directory its mode and times, once all is in it."""

    def delete(self, items: Sequence[Item]) -> None:
        """Remove items; a directory that is not empty stays."""

    def stop(self) -> None:
        """The run is interrupted: what waits for a store ends, with an error. From any thread."""

    def close(self) -> None:
        """Let go of descriptors and connections."""


def order(key: str) -> bytes:
    """What keys are sorted by."""
    return os.fsencode(key)


def names_of(key: str) -> list[str]:
    """The names on the way to an item. Raises: Refused where one of them leads elsewhere."""
    names = key.removesuffix("/").split("/")
    for name in names:
        if name in ("", ".", "..") or "\0" in name or len(os.fsencode(name)) > _NAME_MAX:
            raise ItemRefused("its key is no path below the destination")
    return names


class PathFilter:
    """`--include` and `--exclude`: an include wins; a directory's exclusion counts for all below.

    A pattern without `/` is for the last name, another one for the whole key; `*` and `?` stop at
    `/`, `**` does not; a `/` at the end is for directories alone.
    """

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        self._include = [_Pattern(each) for each in include]
        self._exclude = [_Pattern(each) for each in exclude]

    def allow(self, key: str) -> bool:
        """Whether an item takes part."""
        if not self._exclude or any(each.fits(key) for each in self._include):
            return True
        above = key
        while above:
            if any(each.fits(above) for each in self._exclude):
                return False
            head, slash, _ = above.removesuffix("/").rpartition("/")
            above = head + slash
        return True


class _Pattern:
    def __init__(self, text: str) -> None:
        self._folders = text.endswith("/")
        text = text.removesuffix("/")
        self._whole = "/" in text
        parts = re.split(r"(\*\*|\*|\?)", text.removeprefix("/"))
        words = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
        self._regex = re.compile("".join(words.get(p) or re.escape(p) for p in parts), re.DOTALL)

    def fits(self, key: str) -> bool:
        if self._folders and not key.endswith("/"):
            return False
        path = key.removesuffix("/")
        return bool(self._regex.fullmatch(path if self._whole else path.rpartition("/")[2]))

"""The names in a tar archive, by ranged reads of its headers alone.

A plain tar is read header by header: of a 200 MB archive, a few kilobytes travel. A compressed one
has no index: it is streamed through its decompressor up to a limit. Called by `clean`.
"""

from __future__ import annotations

import tarfile
from typing import IO, Final, cast

from slicefs.stores.seekable import SeekableReader
from slicefs.stores.tree import Tree

HEADER_BYTES: Final = 64 << 10  # of one read: headers of small neighbours come with it
SUFFIXES: Final = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".tar.zst")
_PLAIN: Final = ".tar"
MEMBERS_MAX: Final = 1_000_000  # an archive of a run has thousands


class _TarRanges(SeekableReader):
    """An archive in a tree; `seek` costs nothing, a read fetches one window."""

    def __init__(self, tree: Tree, path: str, size: int, window: int) -> None:
        super().__init__(size)
        self._tree, self._path = tree, path
        self._window = window
        self._begin, self._data = 0, b""
        self.fetched = 0  # bytes

    def read(self, size: int | None = -1) -> bytes:
        """Bytes from here."""
        wanted = self._size - self._at if size is None or size < 0 else size
        end = min(self._at + wanted, self._size)
        if self._at >= end:
            return b""
        if not self._begin <= self._at or end > self._begin + len(self._data):
            stop = min(max(end, self._at + self._window), self._size)
            self._begin, self._data = self._at, self._tree.read(self._path, self._at, stop)
            self.fetched += len(self._data)
        out = self._data[self._at - self._begin : end - self._begin]
        self._at += len(out)
        return out


def is_archive(name: str) -> bool:
    """Whether a name is that of an archive that `tar_names` reads."""
    return name.lower().endswith(SUFFIXES)


def tar_names(tree: Tree, path: str, size: int) -> tuple[list[str], int]:
    """The names of an archive's members, and how many bytes were read.

    Raises: OSError (EBADMSG) where it is no tar, or is cut off.
    """
    plain = path.lower().endswith(_PLAIN)
    file = _TarRanges(tree, path, size, HEADER_BYTES if plain else 1 << 20)
    try:
        if path.lower().endswith(".zst"):
            return _zst_names(file), file.fetched
        mode = "r:" if plain else "r|*"
        with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
            names = []
            for member in archive:
                names.append(member.name)
                if len(names) > MEMBERS_MAX:
                    break
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise OSError(74, f"is no whole archive: {error}", path) from error
    return names, file.fetched


def _zst_names(file: _TarRanges) -> list[str]:
    import zstandard

    try:
        with (
            zstandard.ZstdDecompressor().stream_reader(cast("IO[bytes]", file)) as plain,
            tarfile.open(fileobj=plain, mode="r|") as archive,
        ):
            return [member.name for member in archive]
    except zstandard.ZstdError as error:
        raise tarfile.ReadError(str(error)) from error

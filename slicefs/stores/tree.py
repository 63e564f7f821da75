"""`Tree`: a namespace of files, the same over a directory, a bucket and a volume.

Datasets, manifests and checkpoints work on trees. A path is relative to the tree's root, its words
separated by `/`; bytes that are not UTF-8 stand in it as `os.fsdecode` writes them. A file that is
written is whole and visible after `close`, or not there; so is an overwrite.

Errors are `OSError`: FileNotFoundError, PermissionError, EIO where a store fails for long.
Threading: any method from any thread. A tree pickles to its URL and connects anew after a fork.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

from slicefs.client.ranges import MAX_GAP_BYTES, Item

Buffer: TypeAlias = bytes | bytearray | memoryview
TEMPORARY: Final = ".slicefs-tmp-"  # names of files that are being written; no listing has them


class Info(NamedTuple):
    """One file."""

    path: str
    size: int
    mtime_ns: int = 0
    tag: str = ""  # changes with the content, where the store has such: an ETag


class Entry(NamedTuple):
    """One name directly in a directory."""

    name: str
    is_dir: bool
    size: int = 0


class Writer(Protocol):
    """A file that is being written. `close` makes it visible, `abort` leaves nothing.

    Leaving a `with` block closes it, and aborts it where the block has raised.
    """

    def write(self, data: Buffer, /) -> int:
        """Take all of `data`; it is copied or stored when this returns."""

    def close(self) -> None:
        """Make the file visible, whole and durable. A second call does nothing."""

    def abort(self) -> None:
        """Leave nothing. Does nothing after `close`."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@runtime_checkable
class RangeWriter(Writer, Protocol):
    """A `Writer` that can show bytes of another file of its tree without reading them."""

    def begin_copies(self, path: str, size: int) -> bool:
        """Open the file that `copy_range` takes from; False where it is not there with `size`."""

    def copy_range(self, begin: int, end: int) -> None:
        """Append bytes `begin..end` of that file."""


class Tree(Protocol):
    """Files by path."""

    @property
    def url(self) -> str:
        """What opens this tree again; without secrets where the URL had none."""

    def open_read(self, path: str) -> io.BufferedIOBase:
        """A file to read: `read`, `readinto`, `seek`. Raises: FileNotFoundError."""

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes `begin..end` of a file, fewer past its end. Raises: FileNotFoundError."""

    def read_ranges(self, items: Sequence[Item], max_gap: int = MAX_GAP_BYTES) -> list[memoryview]:
        """Each item's bytes, in order: neighbours merged, several requests at a time.

        Raises: FileNotFoundError, and whatever else the first failed read met.
        """

    def writer(self, path: str, *, size: int | None = None) -> Writer:
        """Begin to write a file; `size` is a hint. Missing directories are made."""

    def write_atomic(self, path: str, chunks: Iterable[Buffer]) -> None:
        """Write a file from `chunks`; where iterating raises nothing is left."""

    def list(self, prefix: str = "", after: str = "") -> Iterator[Info]:
        """Files whose paths begin with `prefix` and come behind `after`, in order of their bytes.

        All below, streamed; directories are not listed. An empty answer where there are none.
        """

    def list_dir(self, path: str = "") -> Iterator[Entry]:
        """Names directly in a directory, in order. Raises: FileNotFoundError, NotADirectoryError.

        In a bucket a directory is there while a file is below it; else it is empty.
        """

    def stat(self, path: str) -> Info:
        """One file. Raises: FileNotFoundError, IsADirectoryError."""

    def exists(self, path: str) -> bool:
        """Whether there is a file, or a directory with this name."""

    def remove(self, path: str) -> None:
        """Remove a file. Raises: FileNotFoundError."""

    def remove_tree(self, path: str) -> int:
        """Remove everything below a directory and the directory; how many files. Not atomic."""

    def copy(self, path: str, new_path: str) -> None:
        """Copy a file, by the store itself where it can. Raises: FileNotFoundError."""

    def rename(self, path: str, new_path: str) -> None:
        """Move a file and replace what is there; in a bucket: copy, then remove."""

    def makedirs(self, path: str) -> None:
        """Make a directory and those above; nothing in a bucket."""

    def close(self) -> None:
        """Let go of connections; the tree opens new ones if it is used again."""


class FirstFiles(NamedTuple):
    """What one request tells of a directory."""

    infos: list[Info]  # the first files below it, in order
    keys: list[str]  # of all that it tells, relative to the directory; some end with `/`
    last: str  # where `Tree.list` goes on behind; empty: there is no more


@runtime_checkable
class FlatTree(Tree, Protocol):
    """A `Tree` without directories: one request tells many files, and one removes many."""

    def first_files(self, path: str) -> FirstFiles:
        """The first files below a directory, by one request."""

    def remove_files(self, paths: Sequence[str]) -> None:
        """Remove files; those not there are fine. Where it raises, some may be gone."""


class BaseWriter:
    """The common half of a `Writer`: `with` blocks, and what happens once."""

    def __init__(self) -> None:
        self.closed = False

    def _finish(self) -> None:
        """Make it visible."""
        raise NotImplementedError

    def _drop(self) -> None:
        """Leave nothing."""
        raise NotImplementedError

    def close(self) -> None:
        """See `Writer`. Where it fails, nothing is left."""
        if self.closed:
            return
        try:
            self._finish()
        except BaseException:
            self.abort()
            raise
        self.closed = True

    def abort(self) -> None:
        """See `Writer`."""
        if not self.closed:
            self.closed = True
            self._drop()

    def writable(self) -> bool:
        """Yes."""
        return True

    def flush(self) -> None:
        """Nothing is promised before `close`; file objects have it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        if not getattr(self, "closed", True):
            self.abort()


def write_all(writer: Writer, chunks: Iterable[Buffer]) -> None:
    """Write `chunks` and close, or leave nothing."""
    with writer:
        for chunk in chunks:
            writer.write(chunk)


def clean_path(path: str) -> str:
    """A path without empty words and dots. Raises: ValueError where it leads out of the tree."""
    words = [word for word in path.split("/") if word not in ("", ".")]
    if ".." in words:
        raise ValueError(f"path {path!r}: '..' leads out of the tree: name the file directly")
    return "/".join(words)

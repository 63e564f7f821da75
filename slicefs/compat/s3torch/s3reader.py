"""`S3Reader`: one object as a file to read, with its key; and which kind of reader is wanted.

A reader is opened when it is first read. What came with a batch is in memory; the rest is read by
ranges, several at a time. Threading: a reader belongs to one thread.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from fsmeta.errors import ConfigError
from slicefs.compat.options import accepted
from slicefs.stores.tree import Tree


class S3Reader(io.BufferedIOBase):
    """An object: `bucket`, `key`, `read`, `readinto`, `seek`, `tell`."""

    def __init__(self, tree: Tree, bucket: str, key: str, data: memoryview | None = None) -> None:
        super().__init__()
        self._tree = tree
        self._bucket, self._key = bucket, key
        self._data = data
        self._file: io.BufferedIOBase | None = None

    def __reduce__(self) -> tuple[Callable[..., S3Reader], tuple[Any, ...]]:
        data = None if self._data is None else bytes(self._data)
        return _restored, (self._tree, self._bucket, self._key, data)

    @property
    def bucket(self) -> str:
        """The bucket, or the volume or directory that the object is in."""
        return self._bucket

    @property
    def key(self) -> str:
        """The name of the object in it."""
        return self._key

    def _opened(self) -> io.BufferedIOBase:
        """Raises: ValueError, FileNotFoundError."""
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if self._file is None:
            held = self._data
            self._file = self._tree.open_read(self._key) if held is None else io.BytesIO(held)
        return self._file

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def read(self, size: int | None = -1) -> bytes:
        """Bytes from here, all of them without `size`. Raises: FileNotFoundError."""
        return self._opened().read(-1 if size is None else size)

    def read1(self, size: int = -1) -> bytes:
        """Some bytes, by one read."""
        return self._opened().read1(size)

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` as far as the object goes."""
        return self._opened().readinto(buffer)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; the new position."""
        return self._opened().seek(offset, whence)

    def tell(self) -> int:
        """The position."""
        return 0 if self._file is None and not self.closed else self._opened().tell()

    def close(self) -> None:
        """Let go of what it holds."""
        if self._file is not None:
            self._file.close()
        self._file = self._data = None
        super().close()


def _restored(tree: Tree, bucket: str, key: str, data: bytes | None) -> S3Reader:
    return S3Reader(tree, bucket, key, None if data is None else memoryview(data))


class ReaderKind(NamedTuple):
    """What `S3ReaderConstructor` gives."""

    name: str
    buffer_size: int | None = None
    max_gap_size: float | None = None


S3ReaderConstructorProtocol: TypeAlias = ReaderKind
SEQUENTIAL: Final = ReaderKind("sequential")
RANGE_BASED: Final = "range_based"


class S3ReaderConstructor:
    """Names the kinds of readers. Only `range_based` changes something: nothing is read ahead."""

    @staticmethod
    def sequential() -> ReaderKind:
        """Small objects are read whole, with their neighbours."""
        return SEQUENTIAL

    @staticmethod
    def range_based(buffer_size: int | None = None) -> ReaderKind:
        """Objects are read by ranges, when a program reads them."""
        return ReaderKind(RANGE_BASED, buffer_size)

    @staticmethod
    def dcp_optimized(max_gap_size: float | None = None) -> ReaderKind:
        """What `S3StorageReader` always does."""
        return ReaderKind("dcp_optimized", max_gap_size=max_gap_size)

    @staticmethod
    def default() -> ReaderKind:
        """As `sequential`."""
        return SEQUENTIAL

    @staticmethod
    def get_reader_type_string(constructor: ReaderKind | None) -> str:
        """Its name."""
        return (constructor or SEQUENTIAL).name


def kind_of(where: str, constructor: Any) -> ReaderKind:
    """The kind that a program has asked for. Raises: ConfigError for a constructor of its own."""
    if constructor is None:
        return SEQUENTIAL
    if not isinstance(constructor, ReaderKind):
        raise ConfigError(
            f"{where}: reader_constructor: take one of S3ReaderConstructor, or leave it out"
        )
    sizes = {"buffer_size": constructor.buffer_size, "max_gap_size": constructor.max_gap_size}
    accepted(where, **sizes)
    return constructor

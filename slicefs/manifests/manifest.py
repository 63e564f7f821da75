"""Manifests: names, sizes and digests of a tree, frozen in one file that readers map.

    header   magic, version, counts, offsets                       64 bytes
    root     the URL of the tree, UTF-8 with surrogates
    index    for each file: offset of its name, size, mtime, digest 56 bytes, sorted by name
    names    the names, one after another
    slices   where the bytes of each file are, if that is there    25 bytes each
    trailer  BLAKE2b-256 of everything before                      32 bytes

Opening a manifest maps it: a million files are listed and found without a request for metadata, and
without memory of their size. A digest of zeros means that it was not taken. With slices, which a
manifest of a snapshot can have, reading asks for no metadata either. docs/FORMAT.md has the layout.

Threading: a `Manifest` is immutable.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, overload

from fsmeta.errors import ConfigError
from fsmeta.schema.slices import SLICE_BYTES, pack_slices, unpack_slices
from fsmeta.types import Ino, Slice
from slicefs.stores.opening import open_tree
from slicefs.stores.tree import Info, Tree
from slicefs.stores.volume import VolumeTree

MAGIC: Final = b"SlcM"
VERSION: Final = 1
VERSION_SLICES: Final = 2  # of those with slices
DIGEST_BYTES: Final = 32
_HEADER: Final = struct.Struct(
    "<4sHHQQQQQ16x"
)  # …, root bytes, files, index at, names at, slices at
_ENTRY: Final = struct.Struct("<QQq32s")
_COPY_BYTES: Final = 8 << 20
_FILES_AT_ONCE: Final = 1024  # whose slices are asked for
FILES_MAX: Final = 1 << 32  # of a manifest: more are several trees
SUFFIX: Final = ".slicefs-manifest"

assert _HEADER.size == 64, "readers find the root behind it"
assert _ENTRY.size == 56, "readers find entries by their number"


class File(NamedTuple):
    """One file of a manifest."""

    path: str
    size: int
    mtime_ns: int
    digest: bytes  # BLAKE2b-256 of its bytes; empty where it was not taken
    slice: Slice | None = None  # where its bytes are, if they are in one slice of a snapshot


class Manifest(Sequence[File]):
    """Files in the order of their names' bytes."""

    def __init__(self, data: bytes | mmap.mmap, name: str = "manifest") -> None:
        """Raises: ConfigError where `data` is no manifest, or damaged."""
        self._data = data
        self._name = name
        if len(data) < _HEADER.size + DIGEST_BYTES:
            raise ConfigError(f"{name}: is no manifest: it is too short")
        found = _HEADER.unpack_from(data)
        magic, version, _, root_bytes, count, index_at, names_at, slices_at = found
        if magic != MAGIC:
            raise ConfigError(f"{name}: is no manifest")
        if version not in (VERSION, VERSION_SLICES):
            raise ConfigError(f"{name}: a manifest of version {version}: upgrade slicefs")
        self._end = len(data) - DIGEST_BYTES
        self.has_slices = version == VERSION_SLICES
        self._slices_at: int = slices_at if self.has_slices else self._end
        sound = (
            _HEADER.size + root_bytes == index_at
            and count <= FILES_MAX
            and index_at + count * _ENTRY.size == names_at
            and names_at <= self._slices_at <= self._end
            and self._end - self._slices_at == self.has_slices * count * SLICE_BYTES
        )
        if not sound:
            raise ConfigError(f"{name}: the manifest is damaged: write it again")
        self._count: int = count
        self._index_at: int = index_at
        self._names_at: int = names_at
        self.root = bytes(data[_HEADER.size : index_at]).decode("utf-8", "surrogateescape")

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<Manifest of {self.root}: {self._count} files>"

    @overload
    def __getitem__(self, index: int) -> File: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[File]: ...
    def __getitem__(self, index: int | slice) -> File | Sequence[File]:
        if isinstance(index, slice):
            return [self._file(each) for each in range(*index.indices(self._count))]
        at = index + self._count if index < 0 else index
        if not 0 <= at < self._count:
            raise IndexError(f"file {index} of {self._count}")
        return self._file(at)

    def _entry(self, at: int) -> tuple[int, int, int, bytes]:
        begin = self._index_at + at * _ENTRY.size
        found: tuple[int, int, int, bytes] = _ENTRY.unpack_from(self._data, begin)
        return found

    def _path(self, at: int) -> bytes:
        begin = self._names_at + self._entry(at)[0]
        last = at + 1 == self._count
        end = self._slices_at if last else self._names_at + self._entry(at + 1)[0]
        return bytes(self._data[begin:end])

    def _file(self, at: int) -> File:
        _, size, mtime_ns, digest = self._entry(at)
        path = os.fsdecode(self._path(at))
        return File(path, size, mtime_ns, digest if any(digest) else b"", self._slice(at))

    def _slice(self, at: int) -> Slice | None:
        """Raises: Corrupt."""
        if not self.has_slices:
            return None
        begin = self._slices_at + at * SLICE_BYTES
        record = bytes(self._data[begin : begin + SLICE_BYTES])
        return unpack_slices(Ino(0), 0, record)[0] if any(record) else None

    def find(self, path: str) -> File:
        """One file by its path. Raises: KeyError."""
        at = self._first(os.fsencode(path))
        if at == self._count or self._path(at) != os.fsencode(path):
            raise KeyError(path)
        return self._file(at)

    def below(self, prefix: str) -> Iterator[File]:
        """Files whose paths begin with `prefix`."""
        key = os.fsencode(prefix)
        for at in range(self._first(key), self._count):
            if not self._path(at).startswith(key):
                return
            yield self._file(at)

    def _first(self, key: bytes) -> int:
        """The number of the first file whose name is not before `key`."""
        low, high = 0, self._count
        while low < high:
            middle = (low + high) // 2
            if self._path(middle) < key:
                low = middle + 1
            else:
                high = middle
        return low

    def verify(self) -> None:
        """Whether all of it is as it was written. Raises: ConfigError."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for begin in range(0, self._end, _COPY_BYTES):
            digest.update(self._data[begin : min(begin + _COPY_BYTES, self._end)])
        if digest.digest() != self._data[self._end :]:
            raise ConfigError(f"{self._name}: the manifest is damaged: write it again")


def pack(root: str, files: Iterable[File], slices: bool = False) -> bytes:
    """A manifest's bytes. Raises: ValueError for two files of one name."""
    listed = sorted((os.fsencode(file.path), file) for file in files)
    names, index, offset = io.BytesIO(), io.BytesIO(), 0
    before = None
    for key, file in listed:
        if key == before or not key:
            raise ValueError(f"{file.path!r} is listed twice, or has no name")
        before = key
        digest = file.digest or bytes(DIGEST_BYTES)
        index.write(_ENTRY.pack(offset, file.size, file.mtime_ns, digest))
        offset += names.write(key)
    top = root.encode("utf-8", "surrogateescape")
    index_at = _HEADER.size + len(top)
    names_at = index_at + len(listed) * _ENTRY.size
    version, slices_at, tail = VERSION, 0, b""
    if slices:
        version, slices_at = VERSION_SLICES, names_at + offset
        tail = b"".join(
            bytes(SLICE_BYTES) if file.slice is None else pack_slices([file.slice])
            for _, file in listed
        )
    head = _HEADER.pack(MAGIC, version, 0, len(top), len(listed), index_at, names_at, slices_at)
    body = b"".join((head, top, index.getvalue(), names.getvalue(), tail))
    return body + hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


def write_manifest(
    tree: Tree,
    target: Tree,
    path: str,
    *,
    prefix: str = "",
    digests: bool = False,
    slices: bool = False,
) -> Manifest:
    """List `tree` below `prefix` and write that to `path` of `target`; `digests` reads all files.

    `slices`: of a snapshot, note where the bytes are: readers of the manifest then ask for no
    metadata. Raises: OSError, RuntimeError where a file changes while it is read; ConfigError for
    slices of what is no snapshot.
    """
    files = [
        File(info.path, info.size, info.mtime_ns, _digest(tree, info) if digests else b"")
        for info in tree.list(prefix)
    ]
    if slices:
        files = list(_with_slices(tree, files))
    data = pack(tree.url, files, slices)
    target.write_atomic(path, (data,))
    return Manifest(data, path)


def _with_slices(tree: Tree, files: Sequence[File]) -> Iterator[File]:
    """Raises: ConfigError."""
    if not isinstance(tree, VolumeTree):
        raise ConfigError(f"{tree.url}: has no slices: name a snapshot, slicefs://VOLUME/PATH@NAME")
    for begin in range(0, len(files), _FILES_AT_ONCE):
        part = files[begin : begin + _FILES_AT_ONCE]
        for file, piece in zip(part, tree.slices([file.path for file in part]), strict=True):
            yield file._replace(slice=piece)


def _digest(tree: Tree, info: Info) -> bytes:
    digest, size = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    with tree.open_read(info.path) as file:
        while chunk := file.read(_COPY_BYTES):
            digest.update(chunk)
            size += len(chunk)
    if size != info.size:
        raise RuntimeError(f"{info.path}: it changed while it was read: write the manifest again")
    return digest.digest()


def open_manifest(url: str | os.PathLike[str]) -> Manifest:
    """The manifest that a URL names: mapped from a local file, else read once.

    Raises: ConfigError, OSError.
    """
    text = os.fspath(url)
    folder, _, name = text.rpartition("/")
    if "://" not in text:
        with open(text, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ConfigError(f"{text}: is no manifest: it is empty")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return Manifest(data, text)
    return Manifest(open_tree(folder).read(name), name)

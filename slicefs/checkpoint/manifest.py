"""The manifest of a step: what it holds, with sizes and digests. It is written last.

A step without a manifest is not published. A manifest that does not decode, or whose own digest is
wrong, is `Corrupt`. Digests of a file: SHA-256 of the whole, for comparing copies, and the CRC-32C
of each chunk, so that a range is verified without reading the rest. Where the store can show bytes
of one file in another, there is a digest of each piece, too, by which the next step finds what did
not change.
"""

from __future__ import annotations

import errno
import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from fsdata.resources.crc import crc32c
from fsmeta.errors import Corrupt

VERSION: Final = 2  # 1 has no digests of pieces
CHUNK_BYTES: Final = 256 << 10  # of a file, under one CRC: what a small read costs at most
PIECE_BYTES: Final = 1 << 20  # what a changed byte costs at most when the next step is saved
MANIFEST_BYTES_MAX: Final = 1536 << 20  # 16 TB have 512 MB of CRCs, and as much of pieces
_PIECE_DIGEST_BYTES: Final = 16  # BLAKE2b
_CRC: Final = "I"  # of `array`: 32 bits


class FileEntry(NamedTuple):
    """One file of a step."""

    size: int
    sha256: str
    crcs: array[int]  # CRC-32C of each chunk
    chunk_bytes: int = CHUNK_BYTES
    pieces: tuple[bytes, ...] = ()  # BLAKE2b of each, or none

    def check(self, name: str, index: int, data: bytes | memoryview) -> None:
        """Raises: EIO where chunk `index` is not what was written."""
        begin, end = self.bounds(index)
        if len(data) != end - begin or crc32c(data) != self.crcs[index]:
            raise OSError(errno.EIO, f"bytes {begin} to {end} are not what was saved", name)

    def bounds(self, index: int) -> tuple[int, int]:
        """Where chunk `index` begins and ends."""
        begin = index * self.chunk_bytes
        return begin, min(begin + self.chunk_bytes, self.size)


class Digester:
    """Digests a file while it is written from its begin to its end."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._whole = hashlib.sha256()
        self._crcs = array(_CRC)
        self._crc, self._filled, self._size = 0, 0, 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes."""
        view = memoryview(data).cast("B")
        self._whole.update(view)
        self._size += len(view)
        while len(view):
            part = view[: self._chunk_bytes - self._filled]
            self._crc = crc32c(part, self._crc)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == self._chunk_bytes:
                self._crcs.append(self._crc)
                self._crc, self._filled = 0, 0

    def entry(self) -> FileEntry:
        """What has been written so far, as the whole file."""
        crcs = self._crcs + array(_CRC, [self._crc] if self._filled else [])
        return FileEntry(self._size, self._whole.hexdigest(), crcs, self._chunk_bytes)


class StepManifest(NamedTuple):
    """A published step."""

    step: int
    owner: str  # the token of the save that published it
    run: str  # the name of the run that the saver was given
    data: str  # the folder of the files in the step's directory; empty: the directory itself
    ephemeral: bool
    files: Mapping[str, FileEntry]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    def encode(self) -> bytes:
        """The bytes of the manifest's file."""
        files = {
            name: [
                *(entry.size, entry.sha256, entry.chunk_bytes, _pack(entry.crcs)),
                b"".join(entry.pieces).hex(),
            ]
            for name, entry in sorted(self.files.items())
        }
        body = {**self._asdict(), "files": files, "version": VERSION}
        text = _canonical(body)
        return _canonical({**body, "digest": hashlib.sha256(text).hexdigest()})


def decode(data: bytes, where: str) -> StepManifest:
    """Raises: Corrupt."""
    try:
        body = json.loads(data)
        digest = body.pop("digest")
        if body["version"] not in (1, VERSION):
            raise ValueError(f"version {body['version']} is not known; use a newer SliceFS")
        if hashlib.sha256(_canonical(body)).hexdigest() != digest:
            raise ValueError("its digest is wrong")
        return StepManifest(
            step=int(body["step"]),
            owner=str(body["owner"]),
            run=str(body["run"]),
            data=_safe(str(body["data"]), empty=True),
            ephemeral=bool(body["ephemeral"]),
            files=dict(_files(body["files"])),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(where.encode(errors="surrogateescape"), b"manifest", str(error)) from error


def _files(files: Mapping[str, Any]) -> Iterable[tuple[str, FileEntry]]:
    for name, (size, sha256, chunk_bytes, packed, *more) in files.items():
        pieces = _unpack_pieces(*more)
        entry = FileEntry(int(size), str(sha256), _unpack(packed), int(chunk_bytes), pieces)
        if pieces and len(pieces) != -(-entry.size // PIECE_BYTES):
            raise ValueError(f"{name}: the number of its pieces is wrong")
        if entry.chunk_bytes < 1 or len(entry.crcs) != -(-entry.size // entry.chunk_bytes):
            raise ValueError(f"{name}: the number of its checksums is wrong")
        yield _safe(name), entry


def safe_name(name: str) -> str:
    """A relative path of a file in a step. Raises: ValueError."""
    return _safe(name)


def _safe(name: str, *, empty: bool = False) -> str:
    if empty and not name:
        return name
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in name or name == "":
        raise ValueError(f"{name!r} is not a relative path")
    return name


def _pack(crcs: array[int]) -> str:
    """Eight digits each."""
    return _swapped(crcs).tobytes().hex()


def _unpack(text: str) -> array[int]:
    return _swapped(array(_CRC, bytes.fromhex(text)))


def _swapped(crcs: array[int]) -> array[int]:
    """From this machine's order of bytes to big-endian, or back."""
    swapped = crcs[:]
    if sys.byteorder == "little":
        swapped.byteswap()
    return swapped


def _unpack_pieces(text: str = "") -> tuple[bytes, ...]:
    data, size = bytes.fromhex(text), _PIECE_DIGEST_BYTES
    if len(data) % size:
        raise ValueError("a digest of a piece is cut")
    return tuple(data[at : at + size] for at in range(0, len(data), size))


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii")

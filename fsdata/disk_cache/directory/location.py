"""The directory of a cache disk: the disk's identity, whether it is there, and its state files.

    DIR/disk-id              the identity of this disk, wherever it is mounted
    DIR/UUID/usage           bytes of each shard (`disk_cache/directory/usage`)
    DIR/UUID/fetching        locks of objects being fetched (`directory/fetch_claims`)
    DIR/UUID/tmp/            files being written; old ones are leftovers of a crash

Threading: any method from any thread; `prepare` and `restore` from one at a time.
"""

from __future__ import annotations

import errno
from itertools import count
from typing import Final

from fsdata.disk_cache.directory.fetch_claims import FetchClaims
from fsdata.disk_cache.directory.file_io import CacheFiles
from fsdata.disk_cache.directory.format import BadFile
from fsdata.disk_cache.directory.usage import UsageFile
from fsmeta.runtime import Runtime

ID_FILE: Final = "disk-id"
ID_MAGIC: Final = b"slicefs cache disk 1\n"
ID_BYTES: Final = 16
TMP_AGE_NS: Final = 600 * 10**9  # no write takes ten minutes on a disk that is any good


class CacheLocation:
    """One volume's part of one directory."""

    def __init__(self, runtime: Runtime, files: CacheFiles, root: str, volume: str) -> None:
        self.root = root
        self.base = f"{root}/{volume}"
        self.usage = UsageFile(files, f"{self.base}/usage")
        self.claims = FetchClaims(runtime, files, f"{self.base}/fetching")
        self.id = b""  # until `prepare`
        self._runtime = runtime
        self._files = files
        self._mark = f"{runtime.random_bits(64):016x}"
        self._numbers = count()
        self._device = 0

    def prepare(self) -> None:
        """Make the directories, and learn or invent the disk's id. Raises: OSError."""
        self._files.make_directory(self.root)
        self.id = self._read_id() or self._write_id(self._new_id())
        self._device = self._files.device(self.root)
        for folder in (self.base, f"{self.base}/tmp"):
            self._files.make_directory(folder)
        with self.usage.locked():
            pass  # `seen` is known from here on

    def _new_id(self) -> bytes:
        return f"{self._runtime.random_bits(8 * ID_BYTES):0{2 * ID_BYTES}x}".encode()

    def _read_id(self) -> bytes:
        """The id in the directory, b"" where there is none. Raises: OSError."""
        try:
            data = self._files.open(f"{self.root}/{ID_FILE}").read(256, 0)
        except FileNotFoundError:
            return b""
        found = data.removeprefix(ID_MAGIC).strip()
        return found if data.startswith(ID_MAGIC) and len(found) == 2 * ID_BYTES else b""

    def _write_id(self, made: bytes) -> bytes:
        """Write an id where there is none; the one that is there then. Raises: OSError."""
        with self._files.locked(f"{self.root}/.{ID_FILE}.lock"):  # others may begin as well
            found = self._read_id()
            if not found:
                tmp = f"{self.root}/.{ID_FILE}.{self._mark}.{next(self._numbers)}"
                self._files.create(tmp, (ID_MAGIC, made, b"\n"))
                self._files.rename(tmp, f"{self.root}/{ID_FILE}")
            return found or self._read_id() or made

    def is_present(self) -> bool:
        """Whether the directory is that of this disk, with the volume's part. Raises: OSError."""
        return self._read_id() == self.id and self._device_of(f"{self.base}/tmp") != 0

    def restore(self) -> None:
        """Have what `prepare` made, after the disk was away. Raises: OSError.

        A directory that was emptied or removed is made again, but only on the file system where it
        was: the naked mount point of a disk that is gone must not be filled. Another disk
        of a cache in its place is as good.
        """
        if self.id and not self._read_id():
            parent = self.root.rpartition("/")[0] or "/"
            if self._device_of(self.root) != self._device:
                if self._device_of(self.root) or self._device_of(parent) != self._device:
                    raise FileNotFoundError(errno.ENOENT, "its disk is not mounted", self.root)
                self._files.make_directory(self.root)
            self._write_id(self.id)
        self.prepare()

    def _device_of(self, path: str) -> int:
        """The file system that a directory is on; 0 where there is no such directory."""
        try:
            return self._files.device(path)
        except FileNotFoundError:
            return 0

    def probe(self) -> None:
        """Write, read and remove a file. Raises: OSError, BadFile."""
        self.restore()
        data = f"{self._runtime.random_bits(64):016x}".encode() * 256
        path = self.tmp()
        self._files.create(path, (data,))
        try:
            if self._files.open(path).read(len(data), 0) != data:
                raise BadFile("a test file was read back with other bytes")
        finally:
            self._files.unlink(path)

    def sweep_tmp(self) -> None:
        """Remove what a crash left half-written. Raises: OSError."""
        old = self._runtime.now_ns() - TMP_AGE_NS
        for listed in self._files.list(f"{self.base}/tmp"):
            if listed.mtime_ns < old:
                self.remove(f"{self.base}/tmp/{listed.name}")

    def folder(self, shard: int) -> str:
        """Where the files of a shard are."""
        return f"{self.base}/{shard:03x}"

    def path(self, name: str, shard: int) -> str:
        """Where a file of the cache is, or would be."""
        return f"{self.base}/{shard:03x}/{name}"

    def remove(self, path: str) -> None:
        """Remove a file; another mount may have been faster. Raises: OSError."""
        try:
            self._files.unlink(path)
        except FileNotFoundError:
            pass

    def tmp(self) -> str:
        """A path for a file that will be renamed."""
        return f"{self.base}/tmp/{self._mark}.{next(self._numbers)}"

"""An object store in memory: the reference for tests and what `mem://` volumes use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from fsdata.objects.contract import Buffer, ObjectInfo, ObjectStore, Range, fill
from fsmeta.errors import ObjectMissing
from fsmeta.runtime import Runtime


class MemObjects:
    """A dict of objects; every operation is atomic."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = runtime.lock()
        self._objects: dict[str, tuple[bytes, int]] = {}  # guarded by _lock: data, mtime_ns

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        data = b"".join(pieces)
        with self._lock:
            self._objects[key] = data, self._runtime.now_ns()

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        return self._find(key)[begin:end]

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        return [self.get(key, begin, end) for begin, end in ranges]

    def get_into(self, key: str, pieces: Sequence[memoryview]) -> int:
        return fill(pieces, self._find(key))

    def _find(self, key: str) -> bytes:
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise ObjectMissing(key)
        return found[0]

    def peek(self, key: str) -> bytes:
        """What is there now, for a test that looks from outside. Raises: KeyError."""
        return self._objects[key][0]

    def delete(self, *keys: str) -> None:
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    def head(self, key: str) -> ObjectInfo | None:
        with self._lock:
            found = self._objects.get(key)
        return None if found is None else ObjectInfo(key, len(found[0]), found[1])

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        with self._lock:
            keys = sorted(key for key in self._objects if key.startswith(prefix) and key > after)
        for key in keys:
            info = self.head(key)
            if info is not None:
                yield info

    def sync(self, keys: Iterable[str]) -> None:
        """Memory has no power to lose."""

    def close(self) -> None:
        """Nothing is held."""


_CONFORMS: Callable[[Runtime], ObjectStore] = MemObjects

"""One store out of several: an object's place follows from its key's CRC-32.

That spreads a volume over buckets (`format --shards`), and over prefixes of one bucket (`format
--hash-prefix`), because S3 gives each prefix a share of requests of its own. The number of parts
can never change, or objects would be looked for in the wrong one.

Threading: as the contract says; there is no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from typing import Final
from zlib import crc32

from fsdata.objects.contract import Buffer, ObjectInfo, ObjectStore, Range
from fsdata.objects.wrappers import Prefixed

# S3 takes 3,500 puts and 5,500 gets a second for a prefix; 16 of them are more than a cluster of
# training hosts asks for, and a listing has to begin in each.
HASH_PREFIXES: Final = 16
_HASH_SHIFT: Final = 16


def number_of(key: str, count: int, shift: int = 0) -> int:
    """Which of `count` stores has an object; see `Sharded`."""
    return (crc32(key.encode()) >> shift) % count


class Sharded:
    """The objects of `stores`, each in the one that its key's CRC points to.

    `shift`: how many low bits of it don't count, because they have decided something else.
    """

    def __init__(self, stores: Sequence[ObjectStore], shift: int = 0) -> None:
        assert stores, "a place for the first object"
        self._stores = stores
        self._shift = shift

    def _number(self, key: str) -> int:
        return number_of(key, len(self._stores), self._shift)

    def _of(self, key: str) -> ObjectStore:
        return self._stores[self._number(key)]

    def _parts(self, keys: Iterable[str]) -> Iterable[tuple[int, Sequence[str]]]:
        """The numbers of stores, and which of the keys are there."""
        parts: dict[int, list[str]] = {}
        for key in keys:
            parts.setdefault(self._number(key), []).append(key)
        return parts.items()

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        self._of(key).put(key, pieces)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        return self._of(key).get(key, begin, end)

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        return self._of(key).get_ranges(key, ranges)

    def get_into(self, key: str, pieces: Sequence[memoryview]) -> int:
        return self._of(key).get_into(key, pieces)

    def delete(self, *keys: str) -> None:
        for number, part in self._parts(keys):
            self._stores[number].delete(*part)

    def head(self, key: str) -> ObjectInfo | None:
        return self._of(key).head(key)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return merge(*(store.list(prefix, after) for store in self._stores), key=_key)

    def sync(self, keys: Iterable[str]) -> None:
        for number, part in self._parts(keys):
            self._stores[number].sync(part)

    def close(self) -> None:
        for store in self._stores:
            store.close()


def hashed(store: ObjectStore) -> ObjectStore:
    """`store` with keys spread over prefixes `0/` to `f/`."""
    parts = [Prefixed(store, f"{number:x}/") for number in range(HASH_PREFIXES)]
    return Sharded(parts, _HASH_SHIFT)


def hashed_key(key: str) -> str:
    """The key that an object of `hashed(store)` has in `store`."""
    return f"{number_of(key, HASH_PREFIXES, _HASH_SHIFT):x}/{key}"


def _key(info: ObjectInfo) -> str:
    return info.key


_CONFORMS: Callable[[Sequence[ObjectStore]], ObjectStore] = Sharded

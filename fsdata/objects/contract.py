"""The contract of an object store: whole objects by key, nothing else.

`BlockStore` calls it; `objects/mem` and `objects/file` implement it, `wrap` adds retry, counting
and a key prefix. An object is written once under a key that is never used for other bytes, so
stores need no versions and readers no locks.

Errors: `ObjectMissing` where an object is not there; an `OSError` with ENOSPC or EDQUOT where the
store is full; everything else that went wrong outside is `Unavailable`, and repeating is safe; it
is `Throttled` where the store asks for fewer requests at a time, `NoPlace` where too many requests
were before it, `Unreached` where S3 is silent, and `Refused` where repeating is in vain,
`KeysRefused` for the keys' sake where the caller does not wait for newer ones. A
bucket that is not there is `NoSuchBucket` (s3/errors.py).
Threading: every method may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from fsmeta.errors import ConfigError, ObjectMissing, Refused, StoreError, Unavailable

CHECK_KEY = "check/usable"  # an object that is there only while a store is tested
CHECK_BYTES = 128 << 10  # of it: more than what gateways answer in one piece
Buffer: TypeAlias = bytes | bytearray | memoryview
Range: TypeAlias = tuple[int, int]
"""Begin and end in an object."""


class Throttled(Unavailable):
    """The store is asked too much at a time."""


class KeysRefused(Refused):
    """The store does not take the keys, and there are no others."""


class NoPlace(Unavailable):
    """The request has waited for its turn for as long as it is repeated, and was not sent."""


class Unreached(Unavailable):
    """No store has answered."""


class NeverReached(Unreached):
    """Nor did one when it was opened; the text says what to check."""


class ObjectInfo(NamedTuple):
    """What a listing says of one object."""

    key: str
    size: int
    mtime_ns: int
    etag: str = ""  # without quotes; empty where the store has none


class ObjectStore(Protocol):
    """Objects by key: `/`-separated words of `[A-Za-z0-9_.-]`, none beginning with a dot.

    No key goes on with `/` where another ends, and no object has more than 64 MiB.
    """

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        """Store the concatenated pieces: afterwards the whole object is visible, or nothing."""

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes `begin..end` of an object, fewer past its end. Raises: ObjectMissing."""

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        """As `get` of each, in the time of one where the store can. Raises: ObjectMissing."""

    def get_into(self, key: str, pieces: Sequence[memoryview]) -> int:
        """Fill `pieces` in order from the object's start; how many bytes. Raises: ObjectMissing."""

    def delete(self, *keys: str) -> None:
        """Remove objects, with few requests where the store can; those not there are fine.

        Where it raises, some of them may be gone.
        """

    def head(self, key: str) -> ObjectInfo | None:
        """What is known of an object, or None."""

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """The objects whose keys begin with `prefix` and come behind `after`, in key order."""

    def sync(self, keys: Iterable[str]) -> None:
        """Make earlier puts of `keys` survive a loss of power."""

    def close(self) -> None:
        """Let go of connections and descriptors."""


def fill(pieces: Sequence[memoryview], data: Buffer) -> int:
    """`get_into` for stores that have the object in memory: copy `data` over `pieces`."""
    view, at = memoryview(data), 0
    for piece in pieces:
        part = view[at : at + len(piece)]
        piece[: len(part)] = part
        at += len(part)
    return at


def check_usable(store: ObjectStore, key: str = CHECK_KEY) -> None:
    """Write, read, list and delete a test object before a store is trusted (`slicefs format`).

    `key`: one of its own for each of several that try the same store.
    Raises: ConfigError with what failed and what to do.
    """
    data = bytes(range(256)) * (CHECK_BYTES // 256)
    parts = (100, 300), (5000, CHECK_BYTES - 7)

    def put() -> bool:
        store.put(key, (data[:1000], data[1000:]))
        return True

    def delete() -> bool:
        store.delete(key)
        return _is_missing(store, key)

    def is_filled() -> bool:
        room = bytearray(CHECK_BYTES)
        return store.get_into(key, [memoryview(room)]) == CHECK_BYTES and room == data

    def has_ranges() -> bool:
        return store.get_ranges(key, parts) == [data[begin:end] for begin, end in parts]

    steps: list[tuple[str, Callable[[], bool]]] = [
        ("be written", put),
        ("be read back", lambda: store.get(key) == data),
        ("be read in ranges", lambda: store.get(key, 100, 300) == data[100:300]),
        ("be read in several ranges", has_ranges),
        ("be read as blocks are", is_filled),
        ("end where they end", lambda: store.get(key, 4000, 2 * CHECK_BYTES) == data[4000:]),
        ("be listed", lambda: [info.size for info in store.list(key)] == [len(data)]),
        ("be deleted", delete),
    ]
    for what, step in steps:
        try:
            right, why = step(), "wrong answer"
        except (OSError, StoreError) as error:
            right, why = False, str(error) or type(error).__name__
        if not right:
            raise ConfigError(
                f"object store is not usable: objects can't {what} ({why}); "
                "check the address, the credentials' permissions and the free space"
            )


def _is_missing(store: ObjectStore, key: str) -> bool:
    """Whether the store agrees that an object is gone."""
    try:
        store.get(key)
    except ObjectMissing:
        return store.head(key) is None
    return False

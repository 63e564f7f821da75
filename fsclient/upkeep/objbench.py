"""What an object store can do, and how fast: the matrix and the table of `slicefs objbench`.

Everything happens in a place of its own in the bucket, which is removed at the end.
Threading: `measure` uses threads of its own; it returns when they have ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from fsdata.objects.contract import ObjectStore
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import ObjectMissing, StoreError
from fsmeta.runtime import Runtime

LARGEST_BYTES: Final = 64 << 20  # the largest object that a volume makes
LISTED: Final = 1100  # more than any store lists in one answer
_TEXT: Final = bytes(range(256)) * 16

Check = Callable[[ObjectStore], bool]


class BenchOutcome(NamedTuple):
    """One row of the matrix."""

    what: str
    right: bool
    why: str  # "" where it is right


class Speed(NamedTuple):
    """One row of the table."""

    what: str
    objects: int
    bytes: int
    seconds: float
    latency_seconds: float  # of one request, in the median

    @property
    def bytes_s(self) -> float:
        """Throughput of all threads together."""
        return self.bytes / self.seconds

    @property
    def per_s(self) -> float:
        """Requests a second of all threads together."""
        return self.objects / self.seconds

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        speeds = {"per_second": self.per_s, "bytes_per_second": self.bytes_s}
        return {**self._asdict(), **speeds}


class Sizes(NamedTuple):
    """How much is measured."""

    block_bytes: int = 4 << 20
    blocks: int = 64
    small_bytes: int = 128 << 10
    smalls: int = 100
    threads: int = 4


# --- the matrix ----------------------------------------------------------------------------------


def _raises_missing(store: ObjectStore, key: str) -> bool:
    try:
        store.get(key)
    except ObjectMissing:
        return store.head(key) is None
    return False


def _put_and_get(store: ObjectStore) -> bool:
    store.put("f/one", (_TEXT[:1000], memoryview(_TEXT)[1000:]))
    return store.get("f/one") == _TEXT


def _get_ranges(store: ObjectStore) -> bool:
    ranges = ((0, 1), (1, 4096), (100, 300), (4095, 4096))
    return all(store.get("f/one", *each) == _TEXT[slice(*each)] for each in ranges)


def _get_past_the_end(store: ObjectStore) -> bool:
    return store.get("f/one", 4000, 9999) == _TEXT[4000:]


def _get_into(store: ObjectStore) -> bool:
    first, second = bytearray(1000), bytearray(8000)
    count = store.get_into("f/one", (memoryview(first), memoryview(second)))
    return count == len(_TEXT) and first + second[: count - 1000] == _TEXT


def _put_again(store: ObjectStore) -> bool:
    store.put("f/one", (_TEXT,))
    return store.get("f/one") == _TEXT


def _head(store: ObjectStore) -> bool:
    info = store.head("f/one")
    return info is not None and (info.key, info.size) == ("f/one", len(_TEXT))


def _missing(store: ObjectStore) -> bool:
    return _raises_missing(store, "f/none")


def _delete(store: ObjectStore) -> bool:
    store.put("f/gone", (_TEXT,))
    store.delete("f/gone")
    return _raises_missing(store, "f/gone")


def _delete_nothing(store: ObjectStore) -> bool:
    store.delete("f/none")
    return True


def _odd_names(store: ObjectStore) -> bool:
    keys = ["f/odd/A-b_c.d", "f/odd/" + "x" * 200, "f/odd/0/1/2/3/4"]
    for key in keys:
        store.put(key, (key.encode(),))
    listed = [info.key for info in store.list("f/odd/")]
    return listed == sorted(keys) and all(store.get(key) == key.encode() for key in keys)


def _list_pages(store: ObjectStore) -> bool:
    keys = [f"f/many/{number:05d}" for number in range(LISTED)]
    for key in keys:
        store.put(key, (b"x",))
    whole = [info.key for info in store.list("f/many/")]
    rest = [info.key for info in store.list("f/many/", keys[700])]
    return whole == keys and rest == keys[701:]


def _largest(store: ObjectStore) -> bool:
    data = os.urandom(1 << 20) * (LARGEST_BYTES >> 20)
    store.put("f/largest", (data,))
    try:
        return store.get("f/largest") == data
    finally:
        store.delete("f/largest")


def _durable(store: ObjectStore) -> bool:
    store.sync(["f/one"])
    return True


_CHECKS: Final[Sequence[tuple[str, Check]]] = (
    ("put an object and get it", _put_and_get),
    ("get ranges", _get_ranges),
    ("get past the end", _get_past_the_end),
    ("get into buffers", _get_into),
    ("put the same object again", _put_again),
    ("head", _head),
    ("get and head what is not there", _missing),
    ("delete", _delete),
    ("delete what is not there", _delete_nothing),
    ("keys with all characters, long and deep", _odd_names),
    (f"list {LISTED} objects in order, and from one on", _list_pages),
    (f"an object of {LARGEST_BYTES >> 20} MiB", _largest),
    ("make objects durable", _durable),
)


def functional(store: ObjectStore) -> Iterator[BenchOutcome]:
    """Try each thing that a volume asks of its store."""
    for what, check in _CHECKS:
        try:
            right = check(store)
            why = "" if right else "wrong answer"
        except (OSError, StoreError) as error:
            right, why = False, str(error) or type(error).__name__
        yield BenchOutcome(what, right, why)


# --- the table -----------------------------------------------------------------------------------


def measure(store: ObjectStore, runtime: Runtime, sizes: Sizes) -> Iterator[Speed]:
    """Put, get, head, list and delete, large objects and small ones.

    Raises: OSError, StoreError.
    """
    kinds = (("block", sizes.blocks, sizes.block_bytes), ("small", sizes.smalls, sizes.small_bytes))
    for kind, count, size in kinds:
        data = os.urandom(size)
        keys = [f"p/{kind}/{number:06d}" for number in range(count)]

        def put(key: str, data: bytes = data) -> None:
            store.put(key, (data,))

        yield _timed(runtime, f"put {kind}", keys, put, size, sizes.threads)
        yield _timed(runtime, f"get {kind}", keys, store.get, size, sizes.threads)
    yield _timed(runtime, "head", keys, store.head, 0, sizes.threads)
    begin = runtime.monotonic()
    listed = sum(1 for _ in store.list("p/"))
    took = runtime.monotonic() - begin
    yield Speed("list", listed, 0, took, took)
    yield _timed(runtime, "delete", keys, store.delete, 0, sizes.threads)


def _timed(
    runtime: Runtime,
    what: str,
    keys: Sequence[str],
    request: Callable[[str], object],
    size: int,
    threads: int,
) -> Speed:
    """One request for each key, by several threads."""
    latencies: list[float] = []
    failures: list[BaseException] = []

    def one(key: str) -> None:
        begin = runtime.monotonic()
        try:
            request(key)
        except (OSError, StoreError) as error:
            failures.append(error)
        latencies.append(runtime.monotonic() - begin)

    begin = runtime.monotonic()
    pool = WorkerPool(runtime, "objbench", threads)
    for key in keys:
        pool.submit(lambda key=key: one(key))  # type: ignore[misc]
    pool.close()
    took = runtime.monotonic() - begin
    if failures:
        raise failures[0]
    median = sorted(latencies)[len(latencies) // 2]
    return Speed(what, len(keys), size * len(keys), took, median)


@contextmanager
def tidied(store: ObjectStore) -> Iterator[None]:
    """Remove what was put, whatever happens."""
    try:
        yield
    finally:
        for prefix in ("f/", "p/"):
            for info in list(store.list(prefix)):
                store.delete(info.key)

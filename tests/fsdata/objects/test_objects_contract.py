"""O1: the contract of object stores, kept by all of them and by what is put around them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from fsdata.objects.contract import ObjectStore, check_usable
from fsdata.objects.file import FileObjects
from fsdata.objects.mem import MemObjects
from fsdata.objects.rados.rados import RadosObjects
from fsdata.objects.rate_limit import Adaptive, Limited
from fsdata.objects.s3.s3 import S3Objects
from fsdata.objects.shards import Sharded, hashed
from fsdata.objects.wrappers import Metered, Prefixed, Retrying
from fsmeta.errors import ObjectMissing, StoreError
from fsmeta.runtime import SystemRuntime
from tests.fsdata.faults import FaultyObjects
from tests.fsdata.stores import rados_namespace, rados_settings, s3_bucket
from tests.support.ceph_cluster import CephCluster

RUNTIME = SystemRuntime()
WRAPPED = ("prefixed", "metered", "retrying", "faulty", "adaptive", "limited", "sharded", "hashed")


def open_wrapped(kind: str) -> ObjectStore:
    """Memory, with something around it."""
    mem = MemObjects(RUNTIME)
    made: dict[str, ObjectStore] = {
        "prefixed": Prefixed(mem, "volume/"),
        "metered": Metered(RUNTIME, mem),
        "retrying": Retrying(RUNTIME, mem),
        "faulty": FaultyObjects(RUNTIME, mem),
        "adaptive": Adaptive(RUNTIME, mem, 3),
        "limited": Limited(RUNTIME, mem, 1e9, 1e9),
        "sharded": Sharded([MemObjects(RUNTIME) for _ in range(3)]),
        "hashed": hashed(mem),
    }
    return made[kind]


@pytest.fixture(params=["mem", "file", "s3", "rados", *WRAPPED])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    def ceph() -> CephCluster:
        cluster = request.getfixturevalue("ceph")
        assert isinstance(cluster, CephCluster)
        return cluster

    kinds: dict[str, Callable[[], ObjectStore]] = {
        "mem": lambda: MemObjects(RUNTIME),
        "file": lambda: FileObjects(RUNTIME, str(tmp_path / "made" / "here")),
        "s3": lambda: s3_bucket(ceph(), tmp_path),
        "rados": lambda: rados_namespace(ceph()),
    }
    make = kinds.get(request.param, lambda: open_wrapped(request.param))
    made = make()
    yield made
    made.close()


def test_put_get_delete(store: ObjectStore) -> None:
    store.put("a/b/one", (b"he", bytearray(b"ll"), memoryview(b"o")))
    assert store.get("a/b/one") == b"hello"
    assert store.get("a/b/one", 1, 3) == b"el"
    assert store.get("a/b/one", 3) == b"lo"
    assert store.get("a/b/one", 3, 99) == b"lo"
    assert store.get("a/b/one", 9, 99) == b""
    store.put("a/b/one", (b"again",))
    assert store.get("a/b/one") == b"again"
    store.delete("a/b/one")
    store.delete("a/b/one")
    with pytest.raises(ObjectMissing):
        store.get("a/b/one")
    with pytest.raises(ObjectMissing):
        store.get_into("a/b/one", (memoryview(bytearray(9)),))
    assert store.head("a/b/one") is None


def test_delete_many(store: ObjectStore) -> None:
    keys = [f"a/{number}" for number in range(1100)]
    for key in keys[::25]:
        store.put(key, (b"data",))
    store.put("b/0", (b"stays",))
    store.delete(*keys)
    assert [info.key for info in store.list("")] == ["b/0"]
    store.delete(*keys[:3], "b/0", "b/1")
    assert list(store.list("")) == []
    store.delete()


def test_get_into(store: ObjectStore) -> None:
    store.put("k", (b"0123456789",))
    front, rest = bytearray(4), bytearray(9)
    assert store.get_into("k", (memoryview(front), memoryview(rest))) == 10
    assert front + rest == b"0123456789\0\0\0"
    assert store.get_into("k", (memoryview(front),)) == 4


def test_head_and_list(store: ObjectStore) -> None:
    keys = ["a.b", "a/b", "a/c/d", "a0", "b/1", "b/10", "b/2"]
    for key in reversed(keys):
        store.put(key, (key.encode(),))
    assert [info.key for info in store.list("")] == keys
    assert [info.key for info in store.list("a")] == ["a.b", "a/b", "a/c/d", "a0"]
    assert [info.key for info in store.list("a/c")] == ["a/c/d"]
    assert [info.key for info in store.list("b/1")] == ["b/1", "b/10"]
    assert list(store.list("z")) == []
    for after in ("", "a", "a.b", "a/b", "a/c", "a/c/d", "a/c/z", "a0", "b", "b/1", "b/10", "z"):
        assert [info.key for info in store.list("", after)] == [key for key in keys if key > after]
    assert [info.key for info in store.list("a/", "a/b")] == ["a/c/d"]
    assert [info.key for info in store.list("b/", "a/b")] == ["b/1", "b/10", "b/2"]
    head = store.head("a/c/d")
    assert head == next(store.list("a/c"))
    assert head is not None
    assert (head.key, head.size) == ("a/c/d", 5)
    assert abs(head.mtime_ns - RUNTIME.now_ns()) < 60 * 10**9
    store.sync(["a/c/d", "b/1"])
    store.sync(["gone/since"])


def test_a_good_store_is_usable(store: ObjectStore) -> None:
    check_usable(store)
    assert list(store.list("")) == []


def test_ranges(store: ObjectStore) -> None:
    data = os.urandom(300_000)
    store.put("chunks/0/1/5_0_300000", (data[:7], data[7:200_000], b"", data[200_000:]))
    for begin, end in ((0, 1), (0, 300_000), (1, 300_000), (65_536, 131_072), (299_999, 300_000)):
        assert store.get("chunks/0/1/5_0_300000", begin, end) == data[begin:end]
    assert store.get("chunks/0/1/5_0_300000", 299_000, 400_000) == data[299_000:]
    assert store.get("chunks/0/1/5_0_300000", 300_000, 300_001) == b""
    assert store.get("chunks/0/1/5_0_300000", 5, 5) == b""
    with pytest.raises(ObjectMissing):
        store.get("chunks/0/1/5_0_300001", 1, 9)


def test_ranges_together(store: ObjectStore) -> None:
    data = os.urandom(300_000)
    key = "chunks/0/1/5_0_300000"
    store.put(key, (data,))
    asked = [(0, 84), (200_000, 265_536), (1, 2), (299_000, 400_000), (300_000, 300_001)]
    assert store.get_ranges(key, asked) == [data[begin:end] for begin, end in asked]
    assert store.get_ranges(key, asked[:1]) == [data[:84]]
    run_together(*[partial(store.get_ranges, key, asked[:2])] * 8)
    with pytest.raises(ObjectMissing):
        store.get_ranges("chunks/0/1/5_0_300001", asked[:2])


def test_empty_objects(store: ObjectStore) -> None:
    store.put("empty", ())
    assert store.get("empty") == b""
    assert store.get("empty", 0, 10) == b""
    assert store.get_into("empty", (memoryview(bytearray(3)),)) == 0
    head = store.head("empty")
    assert head is not None
    assert head.size == 0
    store.put("empty", (b"", b""))
    assert [info.size for info in store.list("empty")] == [0]


def test_large_objects(store: ObjectStore) -> None:
    data = os.urandom(1 << 20) * 21  # larger than any block, and no multiple of one
    store.put("large", (data,))
    assert store.get("large") == data
    room = bytearray(len(data))
    assert store.get_into("large", (memoryview(room),)) == len(data)
    assert room == data
    assert store.get("large", 20 << 20, (20 << 20) + 9) == data[20 << 20 :][:9]


def test_keys_with_every_character(store: ObjectStore) -> None:
    keys = ["A-Z_a.z/0..9", "a-b", "a.b/c_d-e", "a/b", "a/b-", "a/b.c/d", "a0", "x" * 200]
    for key in keys:
        store.put(key, (key.encode(),))
    assert [info.key for info in store.list("")] == sorted(keys)
    for key in keys:
        assert store.get(key) == key.encode()
        store.delete(key)
    assert list(store.list("")) == []


def test_listings_of_many_pages(store: ObjectStore) -> None:
    keys = sorted(f"chunks/0/{n // 7}/{n}_0_1" for n in range(1100))
    work = [keys[n::8] for n in range(8)]

    def put_all(mine: list[str]) -> None:
        for key in mine:
            store.put(key, (b"x",))

    run_together(*(partial(put_all, mine) for mine in work))
    listing = store.list("chunks/")
    assert next(listing).key == keys[0]
    assert [info.key for info in listing] == keys[1:]
    assert [info.key for info in store.list("chunks/0/15")] == [
        key for key in keys if key.startswith("chunks/0/15")
    ]


@pytest.fixture(params=["file", "s3", "rados"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[ObjectStore]]:
    """Two clients of one store that know nothing of each other."""
    made: list[ObjectStore]
    if request.param == "file":
        made = [FileObjects(RUNTIME, str(tmp_path)) for _ in range(2)]
    elif request.param == "s3":
        first = s3_bucket(request.getfixturevalue("ceph"), tmp_path)
        made = [first, S3Objects(RUNTIME, first._settings)]
    else:
        settings = rados_settings(request.getfixturevalue("ceph"))
        made = [RadosObjects(RUNTIME, settings) for _ in range(2)]
    yield made
    for each in made:
        each.close()


def test_two_clients_see_each_other_at_once(pair: list[ObjectStore]) -> None:
    one, two = pair
    for turn in range(20):
        key = f"k/{turn}"
        one.put(key, (b"by one",))
        assert two.get(key) == b"by one"
        assert [info.key for info in two.list("k/")] == [key]
        two.put(key, (b"by two, and longer",))
        assert one.get(key) == b"by two, and longer"
        one.delete(key)
        assert two.head(key) is None


def test_two_clients_never_see_half_of_an_object(pair: list[ObjectStore]) -> None:
    """One overwrites, with other lengths, what the other reads."""
    one, two = pair
    values = [bytes([n]) * (150_000 + 10_000 * n) for n in range(5)]
    one.put("k", (values[0],))
    ending = threading.Event()

    def write() -> None:
        try:
            for turn in range(60):
                one.put("k", (values[turn % 5],))
        finally:
            ending.set()

    def read() -> None:
        while not ending.is_set():
            assert two.get("k") in values

    run_together(write, read)


def test_many_threads(store: ObjectStore) -> None:
    """Writers, readers and deleters at once see whole objects of their own."""

    def work(number: int) -> None:
        for turn in range(10):
            key, data = f"t/{number}", bytes([number, turn]) * 5000
            store.put(key, (data,))
            assert store.get(key) == data
            assert store.get(key, 10, 20) == data[10:20]
            store.delete(key)
            with pytest.raises(ObjectMissing):
                store.get(key)

    run_together(*(partial(work, number) for number in range(8)))


def run_together(*jobs: Callable[[], object]) -> None:
    """Run jobs in threads; the first failure fails the test."""
    errors: list[Exception] = []

    def guarded(job: Callable[[], object]) -> None:
        try:
            job()
        except (AssertionError, OSError, StoreError) as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]

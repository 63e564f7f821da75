"""O2: over a bad network and from a bad server: what clients of the store see, and what they don't.

The network is `HttpProxy`, the server behind it a real radosgw; the store is wrapped as a mount has
it. A hasty client notices within a second what is stuck, and what is only slow.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fsclient.volume.object_stores import Pacing, Stack, stacked
from fsdata.blocks.blocks import BlockStore
from fsdata.blocks.layout import BlockLayout
from fsdata.format.block_v1 import head_bytes
from fsdata.objects.contract import Throttled, check_usable
from fsdata.objects.s3.http import Timeouts
from fsdata.objects.s3.s3 import S3Objects
from fsdata.resources.block_cache import BlockCache
from fsdata.resources.memory_budget import MemoryBudget
from fsmeta.errors import ConfigError, ObjectDamaged, Unavailable
from fsmeta.runtime import SystemRuntime
from fsmeta.types import FRAME_BYTES, SliceId
from tests.fsdata.objects.test_objects_contract import run_together
from tests.fsdata.reads import read_block
from tests.fsdata.stores import PATIENT, QUICK, s3_bucket, s3_settings
from tests.support.ceph_cluster import CephCluster
from tests.support.http_proxy import Fault, HttpProxy, Kind, Request
from tests.support.waiting import wait_until

RUNTIME = SystemRuntime()
BLOCK = 1 << 20
TWO = [(1000, 2000), (150_000, 150_009)]
DOWN_S, DOWN_SOAK_S = 4.0, 60.0


class World(NamedTuple):
    """A bucket behind a proxy, bare and wrapped."""

    proxy: HttpProxy
    raw: S3Objects
    stack: Stack
    direct: S3Objects  # without the proxy


@contextmanager
def behind_a_proxy(ceph: CephCluster, directory: Path, timeouts: Timeouts) -> Iterator[World]:
    direct = s3_bucket(ceph, directory)
    bucket = direct._settings.bucket
    with HttpProxy(ceph.s3_port) as proxy:
        raw = S3Objects(RUNTIME, s3_settings(proxy.endpoint, directory, bucket, timeouts))
        yield World(proxy, raw, stacked(raw, "s3", RUNTIME, Pacing(timeout_s=90)), direct)
        raw.close()
        direct.close()


@pytest.fixture
def world(ceph: CephCluster, tmp_path: Path) -> Iterator[World]:
    with behind_a_proxy(ceph, tmp_path, PATIENT) as made:
        yield made


@pytest.fixture
def hasty(ceph: CephCluster, tmp_path: Path) -> Iterator[World]:
    """One that gives up soon what is not answered."""
    with behind_a_proxy(ceph, tmp_path, QUICK) as made:
        yield made


BREAKING = [
    Kind.STATUS,
    Kind.RESET,
    Kind.STUCK,
    Kind.CUT_REQUEST,
    Kind.LOSE_ANSWER,
    Kind.CUT_ANSWER,
    Kind.DELAY,
]


@pytest.mark.parametrize("kind", BREAKING)
def test_everything_is_repeated_until_it_works(hasty: World, kind: Kind) -> None:
    """Each verb meets the fault, quick ones twice in a row."""
    store, data = hasty.stack.store, os.urandom(200_000)
    count = 1 if kind in (Kind.STUCK, Kind.DELAY) else 2

    def provoke(method: str) -> Fault:
        fault = Fault(kind, count, method, status=500, code="InternalError", seconds=2)
        return hasty.proxy.add(fault)

    verbs: list[tuple[str, Callable[[], object], object]] = [
        ("PUT", lambda: store.put("a/k", (data[:9], data[9:])), None),
        ("GET", lambda: store.get("a/k"), data),
        ("GET", lambda: store.get("a/k", 1000, 2000), data[1000:2000]),
        ("GET", lambda: store.get_ranges("a/k", TWO), [data[begin:end] for begin, end in TWO]),
        ("GET", lambda: _get_into(store.get_into, len(data)), data),
        ("GET", lambda: [info.size for info in store.list("a/")], [len(data)]),
        ("DELETE", lambda: store.delete("a/k"), None),
    ]
    for method, verb, expected in verbs:
        fault = provoke(method)
        assert verb() == expected
        if kind is not Kind.CUT_ANSWER or method == "GET":  # other answers have no half
            assert fault.hits == count
        hasty.proxy.heal()
    assert hasty.direct.head("a/k") is None


def _get_into(get_into: Callable[[str, list[memoryview]], int], size: int) -> bytes:
    room = bytearray(size)
    assert get_into("a/k", [memoryview(room)[:100], memoryview(room)[100:]]) == size
    return bytes(room)


def test_o1_a_gateway_that_answers_in_chunks_is_read(world: World) -> None:
    """Whole blocks of every size, ranges and listings, on a connection that is used again."""
    world.proxy.add(Fault(Kind.CHUNK, float("inf")))
    check_usable(world.raw)
    store, data = world.raw, os.urandom(9 << 20)
    store.put("a/k", (data,))
    assert store.get("a/k") == data
    assert _get_into(store.get_into, len(data)) == data
    assert store.get_ranges("a/k", TWO) == [data[begin:end] for begin, end in TWO]
    before = world.proxy.connections()
    assert store.get("a/k", 3, 10) == data[3:10]
    short = bytearray(20_000)
    assert store.get_into("a/k", [memoryview(short)]) == 20_000  # the rest is not read
    assert short == data[:20_000]
    assert world.proxy.connections() == before
    assert [info.size for info in store.list("a/")] == [len(data)]
    budget = MemoryBudget(RUNTIME)
    blocks = BlockStore(RUNTIME, store, BlockCache(RUNTIME, budget), BlockLayout(block_bytes=BLOCK))
    blocks.put_block(SliceId(7), 0, bytearray(data[:BLOCK]))
    assert read_block(blocks, SliceId(7), BLOCK, 0, 0, BLOCK) == data[:BLOCK]


def test_o1_format_notices_a_store_that_blocks_can_not_be_read_from(world: World) -> None:
    """Small texts may come right where blocks do not."""
    large = Fault(Kind.SHORTEN, float("inf"), "GET", when=lambda r: not _is_ranged(r))
    world.proxy.add(large)
    with pytest.raises(ConfigError, match="objects can't be read back"):
        check_usable(world.raw)


def _is_ranged(request: Request) -> bool:
    return any(name.lower() == "range" for name, _ in request.headers) or "?" in request.target


def test_o1_a_put_that_somebody_else_answers_has_not_happened(world: World) -> None:
    world.proxy.add(Fault(Kind.PORTAL, 1, "PUT"))
    with pytest.raises(Unavailable, match="not by an S3 store"):
        world.raw.put("a/k", (b"v",))
    assert world.direct.head("a/k") is None


def test_a_cold_range_takes_one_round_trip(world: World) -> None:
    """The head of its block is asked for at the same time, on another connection."""
    budget = MemoryBudget(RUNTIME)
    blocks = BlockStore(
        RUNTIME, world.stack.store, BlockCache(RUNTIME, budget), BlockLayout(block_bytes=BLOCK)
    )
    data = os.urandom(BLOCK)
    for number in (7, 8):
        blocks.put_block(SliceId(number), 0, bytearray(data))
    at = 600_000
    assert (
        read_block(blocks, SliceId(7), BLOCK, 0, at, at + 9) == data[at : at + 9]
    )  # connections are made
    before = world.stack.metered.snapshot()
    held = world.proxy.add(Fault(Kind.HOLD, 1e9, "GET"))
    connections = world.proxy.connections()
    found: list[memoryview] = []
    reader = threading.Thread(
        target=lambda: found.append(read_block(blocks, SliceId(8), BLOCK, 0, at, at + 9))
    )
    reader.start()
    wait_until(lambda: held.hits == 2)  # neither is answered yet
    world.proxy.heal()
    reader.join()
    assert found == [data[at : at + 9]]
    after = world.stack.metered.snapshot()
    assert after["get_count"] - before["get_count"] == 2
    assert after["get_bytes"] - before["get_bytes"] == head_bytes(BLOCK, FRAME_BYTES) + FRAME_BYTES
    assert world.proxy.connections() == connections


def test_ranges_together_need_the_right_keys(world: World) -> None:
    """What is refused for the clock or the keys is mended as for single requests."""
    world.raw.put("k", (b"0123456789",))
    world.proxy.add(Fault(Kind.STATUS, 1e9, "GET", status=403, code="RequestTimeTooSkewed"))
    with pytest.raises(Unavailable, match="RequestTimeTooSkewed"):
        world.raw.get_ranges("k", [(1, 3), (5, 9)])
    world.proxy.heal()
    world.proxy.add(Fault(Kind.STATUS, 1, "GET", status=403, code="RequestTimeTooSkewed"))
    assert world.raw.get_ranges("k", [(1, 3), (5, 9)]) == [b"12", b"5678"]
    world.proxy.add(Fault(Kind.STATUS, 1, "GET", status=503, code="SlowDown"))
    with pytest.raises(Throttled):
        world.raw.get_ranges("k", [(1, 3), (5, 9)])


def test_a_cut_answer_is_no_short_object(world: World) -> None:
    world.raw.put("k", (os.urandom(300_000),))
    for begin, end in ((0, None), (5, 250_000)):
        fault = world.proxy.add(Fault(Kind.CUT_ANSWER, 1, "GET"))
        with pytest.raises(Unavailable, match=r"ended after \d+ of \d+ bytes|connection failed"):
            world.raw.get("k", begin, end)
        assert fault.hits == 1


def test_requests_that_hang_are_cancelled(hasty: World) -> None:
    """A silent server, and one that sends a byte now and then, cost a bounded time."""
    hasty.direct.put("k", (b"x" * 1000,))
    for kind in (Kind.STUCK, Kind.DRIP):  # the one for ever, the other for 100 s
        fault = hasty.proxy.add(Fault(kind, 1, "GET"))
        with pytest.raises(Unavailable, match="no answer in time"):
            hasty.raw.get("k")
        assert fault.hits == 1
        hasty.proxy.heal()
    assert hasty.stack.store.get("k") == b"x" * 1000


def test_connections_that_the_server_closed_cost_no_error(world: World) -> None:
    """What was idle when the server restarted is replaced without a word to the caller."""
    world.raw.put("k", (b"v",))
    for _ in range(3):
        world.proxy.go_away()
        world.proxy.heal()
        assert world.raw.get("k") == b"v"
        world.proxy.go_away()
        world.proxy.heal()
        world.raw.put("k", (b"v" * 300_000,))
        world.raw.put("k", (b"v",))


@pytest.mark.parametrize("kind", [Kind.FLIP_ANSWER, Kind.SHORTEN])
def test_wrong_bytes_are_never_data(world: World, kind: Kind) -> None:
    """Whole blocks, short ones, and ranges: each is asked for once more, then refused.

    A range that is too short contradicts its own headers, and is repeated at once.
    """
    budget = MemoryBudget(RUNTIME)
    cache = BlockCache(RUNTIME, budget)
    blocks = BlockStore(RUNTIME, world.stack.store, cache, BlockLayout(block_bytes=BLOCK))
    data = os.urandom(BLOCK)
    blocks.put_block(SliceId(7), 0, bytearray(data))
    blocks.put_block(SliceId(8), 0, bytearray(data[:5000]))
    reads = [
        (SliceId(7), BLOCK, 300_000, 310_000, False),
        (SliceId(7), BLOCK, 0, BLOCK, True),
        (SliceId(8), 5000, 0, 5000, True),
    ]
    for slice_id, size, begin, end, whole in reads:
        fault = world.proxy.add(Fault(kind, 1, "GET"))
        assert read_block(blocks, slice_id, size, 0, begin, end, whole) == data[begin:end]
        assert fault.hits == 1
        if whole or kind is Kind.FLIP_ANSWER:
            cache.drop((slice_id, 0))  # what was around the range
            fault = world.proxy.add(Fault(kind, 2, "GET"))
            with pytest.raises(ObjectDamaged):
                read_block(blocks, slice_id, size, 0, begin, end, whole)
            assert fault.hits == 2
    wrong = 3 if kind is Kind.FLIP_ANSWER else 2
    assert (blocks.stats().damaged, blocks.stats().repeated) == (wrong, 2 * wrong)


def test_a_listing_goes_on_where_it_broke_off(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other page fails, and yet no page is asked for twice in vain."""
    monkeypatch.setattr("fsdata.objects.s3.s3.PAGE_KEYS", 5)
    keys = [f"k{n:02}" for n in range(33)]
    for key in keys:
        world.direct.put(key, (b"v",))
    asked = 0

    def every_other(_: Request) -> bool:
        nonlocal asked
        asked += 1
        return asked % 2 == 0

    fault = Fault(Kind.STATUS, 1e9, "GET", status=500, code="InternalError", when=every_other)
    world.proxy.add(fault)
    assert [info.key for info in world.stack.store.list("")] == keys
    assert fault.hits >= 6
    assert asked <= 2 * 7 + 1


def test_a_server_of_another_kind(world: World) -> None:
    world.proxy.add(Fault(Kind.STATUS, 1e9, status=404, code="PageNotFound"))
    with pytest.raises(Unavailable, match="PageNotFound"):
        world.raw.get("k")
    world.proxy.heal()
    world.proxy.add(Fault(Kind.STATUS, 1e9, status=200))
    with pytest.raises(Unavailable, match="Error is no listing"):
        next(world.raw.list(""))


def test_a_storm_of_503_narrows_the_window_and_passes(world: World) -> None:
    """Sixteen threads; a hundred requests are turned away; nobody sees an error."""
    store = world.stack.store
    world.proxy.add(Fault(Kind.STATUS, 1))
    with pytest.raises(Throttled):
        world.raw.put("k", (b"v",))
    storm = world.proxy.add(Fault(Kind.STATUS, 100))
    narrowest = [256.0]

    def work(number: int) -> None:
        for turn in range(5):
            key, data = f"{number}/{turn}", bytes([number, turn]) * 1000
            store.put(key, (data,))
            adaptive = world.stack.adaptive
            assert adaptive is not None
            narrowest.append(adaptive.window().size)
            assert store.get(key) == data

    run_together(*(partial(work, n) for n in range(16)))
    assert storm.hits == 100
    assert min(narrowest) < 8
    numbers = world.stack.numbers()
    assert numbers["object_throttled_total"] == 100
    assert numbers["object_repeats_total"] == 100
    assert numbers["object_requests_now"] == 0
    assert numbers["object_put_errors_total"] == numbers["object_get_errors_total"] == 0


def down(world: World, ceph: CephCluster, seconds: float) -> None:
    """A store that is down under load and back: nothing fails, nothing is lost."""
    store = world.stack.store
    ending = threading.Event()
    stored: list[list[str]] = [[] for _ in range(6)]

    def work(number: int) -> None:
        turn = 0
        while not ending.is_set():
            key, data = f"{number}/{turn}", f"{number} {turn} ".encode() * 3000
            store.put(key, (data,))
            stored[number].append(key)
            assert store.get(key, 0, len(data)) == data
            turn += 1

    def trouble() -> None:
        time.sleep(0.5)
        world.proxy.go_away()
        time.sleep(seconds / 2)
        world.proxy.heal()
        os.kill(ceph.pid("rgw"), signal.SIGSTOP)  # accepts connections and says nothing
        time.sleep(seconds / 2)
        os.kill(ceph.pid("rgw"), signal.SIGCONT)
        time.sleep(2.5)
        ending.set()

    run_together(trouble, *(partial(work, n) for n in range(6)))
    keys = sorted(key for mine in stored for key in mine)
    assert [info.key for info in world.direct.list("")] == keys
    for key in keys[:: max(1, len(keys) // 50)]:
        number, _, turn = key.partition("/")
        assert world.direct.get(key) == f"{number} {turn} ".encode() * 3000


def test_a_store_that_is_down_for_a_while(hasty: World, ceph: CephCluster) -> None:
    down(hasty, ceph, DOWN_S)


@pytest.mark.soak
def test_a_store_that_is_down_for_a_minute(hasty: World, ceph: CephCluster) -> None:
    down(hasty, ceph, DOWN_SOAK_S)


def test_a_store_that_stays_away_is_reported(world: World) -> None:
    stack = stacked(world.raw, "s3", RUNTIME, Pacing(timeout_s=1))
    world.proxy.go_away()
    begun = time.monotonic()
    with pytest.raises(Unavailable, match=r"http://127.0.0.1:\d+/t\d+-\d+: "):
        stack.store.put("k", (b"v",))
    assert time.monotonic() - begun < 100, "not for the usual 120 s"

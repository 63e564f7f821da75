"""O1: RADOS by itself: what is wrong with the settings, an OSD that hangs, is full, is killed."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from fsclient.volume.object_stores import Pacing, stacked
from fsdata.blocks.blocks import BlockStore
from fsdata.format.block_v1 import head_bytes
from fsdata.objects.contract import ObjectStore
from fsdata.objects.rados.rados import PUT_BYTES_MAX, READ_BYTES, RadosObjects, RadosSettings
from fsdata.resources.block_cache import BlockCache
from fsdata.resources.memory_budget import MemoryBudget
from fsmeta.errors import ConfigError, ObjectMissing, Unavailable
from fsmeta.runtime import SystemRuntime
from fsmeta.types import BLOCK_BYTES_MAX, FRAME_BYTES, SliceId
from tests.fsdata.objects.test_objects_contract import run_together
from tests.fsdata.reads import read_block
from tests.fsdata.stores import POOL, rados_namespace, rados_settings
from tests.support.ceph_cluster import CephCluster, short_directory
from tests.support.waiting import wait_until

RUNTIME = SystemRuntime()


@pytest.fixture(scope="module")
def disk_ceph() -> Iterator[CephCluster]:
    """A Ceph on disk without radosgw, whose OSD may be killed."""
    missing = CephCluster.missing(gateway=False)
    if missing:
        pytest.skip(f"needs {missing}")
    with short_directory() as directory, CephCluster(directory, "bluestore", False) as cluster:
        cluster.make_pool(POOL)
        yield cluster


def test_settings_that_are_wrong_are_named(ceph: CephCluster, tmp_path: Path) -> None:
    right = rados_settings(ceph)
    keyring = tmp_path / "keyring"
    keyring.write_text(f"[client.admin]\n\tkey = {'A' * 38}==\n")
    wrong: list[tuple[RadosSettings, str]] = [
        (right._replace(pool="absent"), "there is no pool 'absent': ceph osd pool create absent"),
        (right._replace(conf="/nowhere/ceph.conf"), "can't use /nowhere/ceph.conf"),
        (right._replace(user="client.nobody"), "does not know client.nobody"),
        (right._replace(keyring=str(keyring)), "does not know client.admin, or not with this"),
    ]
    for settings, message in wrong:
        with pytest.raises(ConfigError, match=message):
            RadosObjects(RUNTIME, settings)
    absent = tmp_path / "ceph.conf"
    absent.write_text("[global]\nmon_host = 127.0.0.1:1\nauth_client_required = none\n")
    with pytest.raises(Unavailable, match="timed out"):
        RadosObjects(RUNTIME, right._replace(conf=str(absent), connect_s=1))


def test_without_librados_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rados", None)
    monkeypatch.setattr("fsdata.objects.rados.binding._PLACES", ())
    with pytest.raises(ConfigError, match="apt-get install python3-rados"):
        RadosObjects(RUNTIME, RadosSettings("pool", "name"))


def test_users_are_written_either_way(ceph: CephCluster) -> None:
    for user in ("admin", "client.admin"):
        store = RadosObjects(RUNTIME, rados_settings(ceph, user=user))
        store.put("k", (b"v",))
        store.close()
        store.close()


def test_namespaces_keep_apart(ceph: CephCluster) -> None:
    one, two = rados_namespace(ceph), rados_namespace(ceph)
    one.put("k", (b"one",))
    two.put("k", (b"two",))
    assert one.get("k") == b"one"
    assert [info.key for info in two.list("")] == ["k"]
    two.delete("k")
    with pytest.raises(ObjectMissing):
        two.get("k")
    assert one.get("k") == b"one"
    one.close()
    two.close()


def test_a_reader_may_not_write(ceph: CephCluster) -> None:
    settings = rados_settings(ceph)
    writer = RadosObjects(RUNTIME, settings)
    writer.put("k", (b"v",))
    reader = RadosObjects(RUNTIME, settings._replace(user="reader"))
    assert reader.get("k") == b"v"
    with pytest.raises(Unavailable, match="pool data: k: "):
        reader.put("k", (b"w",))
    assert writer.get("k") == b"v"
    reader.close()
    writer.close()


def test_the_largest_objects(ceph: CephCluster) -> None:
    store = rados_namespace(ceph)
    for size in (READ_BYTES - 1, READ_BYTES, READ_BYTES + 1, 2 * READ_BYTES, PUT_BYTES_MAX):
        data = os.urandom(1 << 16) * (size // (1 << 16) + 1)
        store.put("k", (data[:size],))
        assert store.get("k") == data[:size]
        assert store.get("k", 70_000) == data[70_000:size]
    with pytest.raises(ValueError, match="too many for one operation"):
        store.put("k", (bytes(PUT_BYTES_MAX), b"x"))
    store.close()


def test_a_read_is_one_operation(disk_ceph: CephCluster) -> None:
    """Counted by the OSD itself, of which nobody else asks anything."""
    store = rados_namespace(disk_ceph)
    store.put("k", (bytes(1 << 20),))
    before = disk_ceph.osd_counters()["op_r"]
    for _ in range(10):
        store.get("k")
        store.get("k", 100, 200)
        store.get_into("k", (memoryview(bytearray(1 << 20)),))
    assert disk_ceph.osd_counters()["op_r"] - before == 30
    store.close()


def test_a_cold_range_is_two_operations_and_few_bytes(disk_ceph: CephCluster) -> None:
    """The head and the range, which are under way together; then the range alone."""
    store = rados_namespace(disk_ceph)
    blocks = BlockStore(RUNTIME, store, BlockCache(RUNTIME, MemoryBudget(RUNTIME)))
    data = os.urandom(BLOCK_BYTES_MAX)
    blocks.put_block(SliceId(7), 0, bytearray(data))
    at = 3_000_000
    seen = [disk_ceph.osd_counters()]
    for begin in (at, at + 500_000):
        assert (
            read_block(blocks, SliceId(7), len(data), 0, begin, begin + 9)
            == data[begin : begin + 9]
        )
        seen.append(disk_ceph.osd_counters())
    assert [after["op_r"] - before["op_r"] for before, after in pairwise(seen)] == [2, 1]
    moved = [after["op_r_out_bytes"] - before["op_r_out_bytes"] for before, after in pairwise(seen)]
    assert moved == [head_bytes(len(data), FRAME_BYTES) + FRAME_BYTES, FRAME_BYTES]
    with pytest.raises(ObjectMissing):
        read_block(blocks, SliceId(8), len(data), 0, at, at + 9)
    store.close()


def _is_stopped(pid: int) -> bool:
    """Whether all threads are: on a busy machine some go on for a moment."""
    stats = [task.joinpath("stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def test_an_osd_that_hangs_is_waited_for(disk_ceph: CephCluster) -> None:
    settings = rados_settings(disk_ceph)
    patient, raw = (RadosObjects(RUNTIME, settings._replace(operation_s=each)) for each in (60, 1))
    patient.put("k", (b"v",))
    patient.close()
    store = stacked(raw, "rados", RUNTIME, Pacing(timeout_s=60)).store
    os.kill(disk_ceph.pid("osd"), signal.SIGSTOP)
    wait_until(lambda: _is_stopped(disk_ceph.pid("osd")))
    try:
        for request in (
            lambda: raw.get("k"),
            lambda: raw.put("k", (b"v",)),
            lambda: raw.head("k"),
            lambda: next(raw.list("")),
        ):
            with pytest.raises(Unavailable, match="pool data: "):
                request()
        answers: list[bytes] = []
        reader = threading.Thread(target=lambda: answers.append(store.get("k")))
        reader.start()
        time.sleep(1.5)
        assert answers == []
    finally:
        os.kill(disk_ceph.pid("osd"), signal.SIGCONT)
    reader.join(60)
    assert answers == [b"v"]
    store.close()


def test_a_full_pool_says_so_and_lets_delete(disk_ceph: CephCluster) -> None:
    store = RadosObjects(RUNTIME, rados_settings(disk_ceph))
    store.put("k", (b"v",))
    numbers = itertools.count()
    _set_ratios(disk_ceph, 1e-6)
    try:
        error = _wait_for(lambda: store.put(f"more/{next(numbers)}", (bytes(1000),)))
        assert error.errno == 28
        assert store.get("k") == b"v"
        store.delete("k")
        assert store.head("k") is None
    finally:
        _set_ratios(disk_ceph, 0.95)
    _until_it_works(lambda: store.put(f"more/{next(numbers)}", (b"v",)))
    store.close()


def _set_ratios(ceph: CephCluster, full: float) -> None:
    """From which use on a disk counts as full; the lower thresholds go with it."""
    for what, factor in (("nearfull", 0.8), ("backfillfull", 0.9), ("full", 1.0)):
        ceph.command(prefix=f"osd set-{what}-ratio", ratio=full * factor)


def _wait_for(request: Callable[[], object]) -> OSError:
    """The OSError that `request` begins to raise."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            request()
        except OSError as error:
            return error
        time.sleep(0.1)
    raise AssertionError("no error came")


def _until_it_works(request: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            request()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            return


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_a_killed_osd_loses_nothing_acknowledged(disk_ceph: CephCluster, rounds: int) -> None:
    """SIGKILL while six threads write; each object whose put returned is whole afterwards."""
    raw = RadosObjects(RUNTIME, rados_settings(disk_ceph, operation_s=5))
    store = stacked(raw, "rados", RUNTIME, Pacing(timeout_s=90)).store
    ending = threading.Event()
    stored: list[list[str]] = [[] for _ in range(6)]

    def work(number: int) -> None:
        turn = 0
        while not ending.is_set():
            key = f"chunks/{number}/{turn}"
            store.put(key, (_content(key),))
            stored[number].append(key)
            turn += 1

    def go_on() -> None:
        time.sleep(1.0)
        before = sum(map(len, stored))
        wait_until(lambda: sum(map(len, stored)) >= before + 6, 60)

    def trouble() -> None:
        try:
            for _ in range(rounds):
                go_on()
                disk_ceph.kill_osd()
                time.sleep(0.3)
                disk_ceph.start_osd()
            go_on()
        finally:
            ending.set()

    run_together(trouble, *(partial(work, n) for n in range(6)))
    keys = sorted(key for mine in stored for key in mine)
    assert len(keys) > 6 * rounds
    verify(store, keys)
    disk_ceph.kill_osd()
    disk_ceph.start_osd()
    verify(store, keys)
    store.close()


def _content(key: str) -> bytes:
    return key.encode() * 10_000


def verify(store: ObjectStore, keys: list[str]) -> None:
    """What was stored is listed and right; nothing else is there."""
    assert [info.key for info in store.list("")] == keys
    for key in keys:
        assert store.get(key) == _content(key)

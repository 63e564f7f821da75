"""C1, A2: processes of one host share a cache directory and fetch each object once.

Each world has its own open of the file of locks, as processes have; where a process has to die,
a real one does.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from fsdata.disk_cache.directory import fetch_claims
from fsdata.disk_cache.directory.eviction import DiskLimits
from fsdata.disk_cache.directory.fetch_claims import NO_CLAIM, FetchClaim, FetchClaims
from fsdata.disk_cache.directory.file_io import CacheFile, OsFiles
from fsdata.disk_cache.directory.location import CacheLocation
from fsdata.format.object_keys import object_key
from fsmeta.errors import Unavailable
from fsmeta.types import SliceId
from tests.fsdata.disk_world import BLOCK, MIB, RUNTIME, CacheWorld, fails, wait_for

SMALL = 50_000
LONG_S = 60.0


def _worlds(root: Path, count: int, sizes: tuple[int, ...] = (BLOCK, SMALL)) -> list[CacheWorld]:
    """Clients of one store with one cache directory; slice 1 and so on have those sizes."""
    first = CacheWorld([root])
    worlds = [first, *(CacheWorld([root], objects=first.objects) for _ in range(count - 1))]
    for number, size in enumerate(sizes, 1):
        first.put(number, size)
    return worlds


def _together(*jobs: Callable[[], object]) -> list[object]:
    """What jobs return that run at once."""
    found: list[object] = [None] * len(jobs)

    def run(at: int) -> None:
        found[at] = jobs[at]()

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(jobs))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(LONG_S)
        assert not each.is_alive()
    return found


def _forget(worlds: list[CacheWorld], slice_id: int, size: int) -> None:
    """No copy, and none on its way."""
    for world in worlds:
        world.settle()
    worlds[0].cache.evict(object_key(SliceId(slice_id), 0, size))


def _close(worlds: list[CacheWorld]) -> None:
    for world in worlds:
        world.settle()
        world.close()


@pytest.mark.parametrize(("number", "size"), [(1, BLOCK), (2, SMALL)])
def test_c1_four_clients_miss_at_once_and_fetch_once(
    tmp_path: Path, number: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_claims, "WAIT_S_MIN", LONG_S)
    worlds = _worlds(tmp_path / "cache", 4)
    for _ in range(20):
        before = worlds[0].fetched()
        assert all(_together(*(partial(world.right, number, size) for world in worlds)))
        assert worlds[0].fetched() == before + 1
        _forget(worlds, number, size)
    assert sum(world.number("misses_total") for world in worlds) == 20
    _close(worlds)


def test_c1_ranges_wait_for_no_other_process(tmp_path: Path) -> None:
    """A reader of a range does not want to wait for a whole block."""
    one, two = worlds = _worlds(tmp_path / "cache", 2)
    gate = one.objects.gate = RUNTIME.event()
    reading = threading.Thread(target=one.right, args=(1,))
    reading.start()
    one.objects.arrived.wait(LONG_S)
    one.objects.gate = None
    assert len(two.read(1, begin=1000, end=3000)) == 2000
    gate.set()
    reading.join()
    assert two.number("waits_total") == 0
    _close(worlds)


def test_c1_a_fetch_that_fails_is_done_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_claims, "WAIT_S_MIN", LONG_S)
    one, two = worlds = _worlds(tmp_path / "cache", 2)
    gate = one.objects.gate = RUNTIME.event()
    failed: list[bool] = []
    first = threading.Thread(target=lambda: failed.append(fails(partial(one.read, 1))))
    first.start()
    one.objects.arrived.wait(LONG_S)
    right: list[bool] = []
    second = threading.Thread(target=lambda: right.append(two.right(1)))
    second.start()
    wait_for(lambda: two.number("waits_total") == 1)
    one.objects.fail("get", 1, lambda: Unavailable("injected"))
    gate.set()
    first.join(LONG_S)
    second.join(LONG_S)
    assert (failed, right) == ([True], [True])
    _close(worlds)


def test_c1_a_fetch_that_hangs_delays_others_and_does_not_stop_them(tmp_path: Path) -> None:
    one, two = worlds = _worlds(tmp_path / "cache", 2)
    gate = one.objects.gate = RUNTIME.event()
    hanging = threading.Thread(target=one.right, args=(1,))
    hanging.start()
    one.objects.arrived.wait(LONG_S)
    one.objects.gate = None
    assert two.right(1)
    assert two.number("waits_total") == 1
    gate.set()
    hanging.join()
    _close(worlds)


def test_c1_a_copy_that_has_no_room_in_the_queue_gives_its_claim_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = worlds = _worlds(tmp_path / "cache", 2)
    monkeypatch.setattr(one.cache._queue, "_max", 0)
    assert one.right(1)
    assert one.number("drops_total") == 1
    assert two.right(1)
    assert two.number("waits_total") == 0
    _close(worlds)


def test_c1_a_disk_that_keeps_nothing_has_no_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = CacheWorld([tmp_path / "cache"], DiskLimits(8 * MIB, free_ratio=0))
    world.put(1)
    monkeypatch.setattr(world.disks[0].eviction, "full", True)

    def claimed(*_: object) -> None:
        raise AssertionError("nothing will be kept")

    monkeypatch.setattr(FetchClaims, "claim", claimed)
    assert world.right(1)
    world.close()


def _claim(path: str, name: str, found: int | None = None) -> tuple[int | None, FetchClaim]:
    """As another process would do it, where `found` is what it finds when it looks again."""
    claims = FetchClaims(RUNTIME, OsFiles(), path)
    return claims.claim(partial(claims.lock, name), lambda: found, 0.3)


def _hold(path: str, name: str, told: int) -> None:
    """A process that fetches and never ends."""
    found, claim = _claim(path, name)
    assert found is None
    assert claim is not NO_CLAIM
    os.write(told, b"x")
    time.sleep(LONG_S)


def test_c1_the_claim_of_a_killed_process_is_free(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = f"{tmp_path}/fetching"
    told, their_end = os.pipe()
    process = multiprocessing.get_context("fork").Process(
        target=_hold, args=(path, "chunks-1", their_end)
    )
    process.start()
    os.close(their_end)
    assert os.read(told, 1) == b"x"
    os.close(told)
    assert _claim(path, "chunks-2")[1] is not NO_CLAIM, "another object"
    assert _claim(path, "chunks-1") == (None, NO_CLAIM), "it waits, and fetches"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    found, claim = _claim(path, "chunks-1")
    assert found is None
    assert claim is not NO_CLAIM
    claim.give_up()


def test_c1_a_file_system_without_such_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(_: OsFiles, path: str) -> CacheFile:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), path)

    monkeypatch.setattr(OsFiles, "open_locks", without)
    worlds = _worlds(tmp_path / "cache", 2)
    assert all(_together(*(partial(world.right, 1) for world in worlds)))
    assert [world.state() for world in worlds] == ["HEALTHY", "HEALTHY"]
    _close(worlds)


def test_c1_what_came_between_look_and_claim_is_found(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = f"{tmp_path}/fetching"
    assert _claim(path, "chunks-1", 7)[0] == 7
    found, claim = _claim(path, "chunks-1")
    assert (found, claim is NO_CLAIM) == (None, False), "the claim was given up"
    claim.give_up()


def test_c1_a_process_has_a_bounded_number_of_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a descriptor until its copy is written."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(fetch_claims, "CLAIMS_MAX", 3)
    claims = FetchClaims(RUNTIME, OsFiles(), f"{tmp_path}/fetching")
    other = FetchClaims(RUNTIME, OsFiles(), f"{tmp_path}/fetching")
    held = [claims.lock(f"chunks-{number}") for number in range(5)]
    assert [each is NO_CLAIM for each in held] == [False, False, False, True, True]
    assert other.lock("chunks-0") is None
    for each in held:
        assert each is not None
        each.give_up()
        each.give_up()
    assert [claims.lock(f"chunks-{number}") is NO_CLAIM for number in range(3)] == [False] * 3
    assert claims.lock("chunks-3") is NO_CLAIM


def test_c1_a_wait_that_brings_nothing_is_not_repeated_at_once(tmp_path: Path) -> None:
    """A disk whose writes hang slows a reader once a second, and not at each miss."""
    tmp_path.chmod(0o700)
    path = f"{tmp_path}/fetching"
    both = [FetchClaims(RUNTIME, OsFiles(), path) for _ in range(2)]
    held = [both[0].lock(f"chunks-{number}") for number in range(10)]
    begun = time.monotonic()
    for number in range(10):
        lock = partial(both[1].lock, f"chunks-{number}")
        assert both[1].claim(lock, lambda: None, 0.3) == (None, NO_CLAIM)
    assert both[1].waits == 1
    assert time.monotonic() - begun > 0.3
    assert None not in held


def test_c1_too_many_open_files_are_no_fault_of_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = CacheWorld([tmp_path / "cache"])
    world.put(1)
    world.put(2)

    def too_many(*_: object) -> CacheFile:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    for name in ("create", "open", "open_locks"):
        monkeypatch.setattr(OsFiles, name, too_many)
    assert world.right(1)
    assert world.right(2)
    world.settle()
    monkeypatch.undo()
    assert world.state() == "HEALTHY"
    assert world.right(1)
    world.settle()
    world.close()


def test_c1_clients_that_begin_at_once_know_one_disk(tmp_path: Path) -> None:
    for turn in range(50):
        root = tmp_path / f"cache-{turn}"
        start = threading.Barrier(4)

        def begin(root: Path = root, start: threading.Barrier = start) -> bytes:
            place = CacheLocation(RUNTIME, OsFiles(), str(root), "volume")
            start.wait()
            place.prepare()
            return place.id

        found = _together(*[begin] * 4)
        assert len(set(found)) == 1, found


def test_c1_the_file_of_claims_is_not_kept_open(tmp_path: Path) -> None:
    world = CacheWorld([tmp_path / "cache"])
    world.put(1)
    assert world.right(1)
    world.settle()
    place: CacheLocation = world.disks[0].place
    assert os.path.exists(f"{place.base}/fetching")
    assert f"{place.base}/fetching" not in _open_files()
    world.close()


def _open_files() -> set[str]:
    """The paths of this process's descriptors."""
    found: set[str] = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the directory itself
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found

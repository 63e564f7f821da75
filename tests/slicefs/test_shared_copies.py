"""A2, A3: worker processes that share copies of blocks in memory, and how the copies end."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fsclient.volume.metadata_url import open_store
from fsdata.disk_cache.directory import fetch_claims
from fsmeta.meta.meta import Meta
from slicefs.client import connection, shared_copies
from slicefs.client.client import Client
from slicefs.client.parallel import RUNTIME
from slicefs.client.shared_copies import SharedCopies, capacity_bytes, directory
from slicefs.data.source import SampleSource
from tests.posix.volumes import PATIENCE_S, Volume
from tests.support.waiting import wait_until

COUNT = 150
SIZE = 40_000
JOIN_S = 120

pytestmark = pytest.mark.skipif(not capacity_bytes(), reason="needs room in /dev/shm")


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place of this test's own for shared copies; children that are forked have it, too."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(shared_copies, "MEMORY", str(tmp_path))
    monkeypatch.setattr(connection, "FREE_RATIO", 0.0)  # it is a disk that is nearly full, perhaps
    yield tmp_path
    connection.COPIES.leave()
    assert list(tmp_path.glob("slicefs-*")) == []


@pytest.fixture
def filled(volume: Volume) -> Volume:
    """A volume with COUNT small files."""
    with Client(volume.meta, meta_timeout=PATIENCE_S) as fs:
        for number in range(COUNT):
            with fs.open(f"{number:03}", "wb") as file:
                file.write(_content(number))
    return volume


def _content(number: int) -> bytes:
    return b"%d," % number * (SIZE // 4)


@contextmanager
def _source(volume: Volume, **options: Any) -> Iterator[SampleSource]:
    with Client(volume.meta, meta_timeout=PATIENCE_S, **options) as fs:
        yield SampleSource.from_prefix("", client=fs)


def _read(source: SampleSource, seed: int, start: Any, out: Any) -> None:
    """A worker: read everything, in an order of its own."""
    source.share_copies()
    numbers = [(seed * 37 + number * 7) % COUNT for number in range(COUNT)]
    start.wait()
    for at in range(0, COUNT, 10):
        for sample in source.read(numbers[at : at + 10]):
            assert bytes(sample.data) == _content(int(sample.path))
    cache = source.tree.client.connection().client.disk_cache  # type: ignore[attr-defined]
    out.put(None if cache is None else cache.numbers())


def _epoch(source: SampleSource, workers: int = 4) -> list[dict[str, float] | None]:
    """The numbers of each worker's cache, None where it has none."""
    context = multiprocessing.get_context("fork")
    out, start = context.Queue(), context.Barrier(workers)
    running = [
        context.Process(target=_read, args=(source, seed, start, out)) for seed in range(workers)
    ]
    for each in running:
        each.start()
    found = [out.get(timeout=JOIN_S) for _ in running]
    for each in running:
        each.join(JOIN_S)
    assert [each.exitcode for each in running] == [0] * workers
    return found


def _misses(found: list[dict[str, float] | None]) -> float:
    assert None not in found
    return sum(numbers["disk_cache_misses_total"] for numbers in found if numbers)


def test_a3_workers_fetch_each_block_once(
    memory: Path, filled: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_claims, "WAIT_S_MIN", JOIN_S)  # the machine may hold up the one
    with _source(filled) as source:
        source.hold_copies()
        found = _epoch(source)
        objects = [path for path in (filled.folder / "data").rglob("chunks/**/*") if path.is_file()]
        assert _misses(found) == len(objects) > 0
        assert (memory / f"slicefs-{os.geteuid()}").is_dir(), "the main process holds it"
        assert _misses(_epoch(source)) == 0, "the workers of the next epoch find them"


def test_a3_copies_go_with_their_last_user(memory: Path, filled: Volume) -> None:
    with _source(filled) as source:
        assert _misses(_epoch(source)) > 0
    wait_until(lambda: not list(memory.glob("slicefs-*")))


@pytest.mark.parametrize("cache_dir", ["none", "{base}/own"])
def test_a3_a_client_with_a_cache_of_its_own_shares_nothing(
    cache_dir: str, memory: Path, filled: Volume, tmp_path: Path
) -> None:
    with _source(filled, cache_dir=cache_dir.format(base=tmp_path)) as source:
        source.hold_copies()
        found = _epoch(source, 2)
    assert list(memory.glob("slicefs-*")) == []
    assert [numbers is None for numbers in found] == [cache_dir == "none"] * 2


def test_a3_no_room_in_memory_is_no_error(
    memory: Path, filled: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_copies, "MEMORY_SHARE", 1 << 40)
    with _source(filled) as source:
        found = _epoch(source, 2)
    assert found == [None, None]
    assert list(memory.glob("slicefs-*")) == []


def test_a3_a_directory_of_another_user_is_left_alone(memory: Path, filled: Volume) -> None:
    place = memory / f"slicefs-{os.geteuid()}"
    place.mkdir()
    os.chown(place, 12345, 12345)
    with _source(filled) as source:
        found = _epoch(source, 2)
    assert found == [None, None]
    assert list(place.iterdir()) == []
    place.rmdir()


def _use(told: int) -> None:
    copies = SharedCopies()
    assert copies.join()
    Path(directory(), "VOLUME").mkdir(exist_ok=True)
    os.write(told, b"x")
    time.sleep(JOIN_S)


def test_a3_what_a_killed_process_leaves_goes_with_the_next_one(memory: Path) -> None:
    told, their_end = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=_use, args=(their_end,))
    process.start()
    assert os.read(told, 1) == b"x"
    os.close(told)
    os.close(their_end)
    copies = SharedCopies()
    assert copies.join()
    copies.leave()
    assert (memory / f"slicefs-{os.geteuid()}" / "VOLUME").is_dir(), "it is used"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert copies.join()
    copies.leave()
    assert list(memory.iterdir()) == []


def test_a3_users_come_and_go_at_once(memory: Path) -> None:
    """No one removes what another one uses."""

    def come_and_go() -> None:
        copies = SharedCopies()
        for _ in range(200):
            assert copies.join()
            place = Path(directory(), f"{os.getpid()}")
            place.mkdir()
            place.rmdir()
            copies.leave()

    context = multiprocessing.get_context("fork")
    running = [context.Process(target=come_and_go) for _ in range(3)]
    for each in running:
        each.start()
    for each in running:
        each.join(JOIN_S)
    assert [each.exitcode for each in running] == [0, 0, 0]
    assert list(memory.iterdir()) == []


def test_a3_a_forked_child_does_not_end_the_use_of_its_parent(memory: Path) -> None:
    assert connection.COPIES.join()
    pid = os.fork()
    if not pid:
        connection.close_all()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (memory / f"slicefs-{os.geteuid()}").is_dir()


ENDS = """
import multiprocessing, os, signal, sys, time
from slicefs.client import connection, shared_copies
shared_copies.MEMORY = {memory!r}
connection.FREE_RATIO = 0.0
from slicefs.client.client import Client
from slicefs.data.source import SampleSource

def work(source, ready):
    source.share_copies()
    source.read([0, 1])
    ready.put(os.path.isdir(shared_copies.directory()))
    time.sleep(100)

if __name__ == "__main__":
    source = SampleSource.from_prefix("", client=Client({meta!r}, meta_timeout=60))
    source.hold_copies()
    ready = multiprocessing.Queue()
    workers = [
        multiprocessing.Process(target=work, args=(source, ready), daemon=True) for _ in range(2)
    ]
    for each in workers:
        each.start()
    assert all(ready.get(timeout=60) for _ in workers)
    if {how!r} == "killed":
        os.kill(workers[0].pid, signal.SIGKILL)
    if {how!r} != "normally":
        raise SystemExit(3) if {how!r} == "exit" else RuntimeError("as a DataLoader does")
"""


@pytest.mark.parametrize(
    ("how", "code"), [("normally", 0), ("exit", 3), ("error", 1), ("killed", 1)]
)
def test_a3_no_copies_stay_where_workers_are_left_running(
    memory: Path, filled: Volume, how: str, code: int
) -> None:
    """A loop over a DataLoader that is left before its end: its workers end by a signal."""
    script = ENDS.format(memory=str(memory), meta=filled.meta, how=how)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=JOIN_S, check=False
    )
    assert done.returncode == code, done
    assert list(memory.glob("slicefs-*")) == []
    end_sessions(filled)


def end_sessions(volume: Volume) -> None:
    """What the leader does after a minute with those of workers that were killed."""
    store = open_store(volume.meta, RUNTIME)
    meta = Meta(store, RUNTIME)
    for each in meta.sessions.all():
        meta.sessions.end(each.id)
    store.close()


def test_a2_memory_is_a_cache_directory_by_name(filled: Volume) -> None:
    """In a process of its own, which ends as programs do."""
    script = f"""
import os, slicefs
from slicefs.client.shared_copies import directory
fs = slicefs.Client({filled.meta!r}, cache_dir="memory")
assert len(fs.read_many(["{0:03}", "{1:03}"])) == 2
assert os.path.isdir(directory())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=JOIN_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a3_another_directory_in_its_place_is_left_alone(memory: Path) -> None:
    """It is removed at logout, and then made by another process, or by an attacker as a link."""
    place = memory / f"slicefs-{os.geteuid()}"
    for plant in ("link", "directory"):
        copies = SharedCopies()
        assert copies.join()
        shutil.rmtree(place)
        home = memory / "home" if plant == "link" else place
        (home / "kept").mkdir(parents=True)
        (home / "users").write_bytes(b"")
        if plant == "link":
            place.symlink_to(home)
        copies.leave()
        assert (home / "kept").is_dir()
        if plant == "link":
            place.unlink()
    shutil.rmtree(place)


def test_a3_threads_that_begin_at_once_use_it_once(memory: Path) -> None:
    for _ in range(30):
        copies = SharedCopies()
        threads = [threading.Thread(target=copies.join) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        copies.leave()
        assert not (memory / f"slicefs-{os.geteuid()}").exists()


def test_a3_a_small_file_system_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_copies, "SHM_MIN", 1 << 60)
    assert capacity_bytes() == 0


def test_a3_the_limit_of_a_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(shared_copies, "_LIMITS", (str(tmp_path / "none"), str(limit)))
    limit.write_text("max\n")
    before = capacity_bytes()
    limit.write_text(f"{256 << 20}\n")
    assert capacity_bytes() == 32 << 20 <= before
    limit.write_text("1000\n")
    assert capacity_bytes() == 0


def test_a3_a_machine_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_copies, "MEMORY", "/nowhere")
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        os.statvfs(shared_copies.MEMORY)
    assert not SharedCopies().join()

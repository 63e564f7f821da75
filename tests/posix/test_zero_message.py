"""P5: a read-only mount never asks twice, hears of changes, and says what that means for locks."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from fsclient.cli.watch.source import read_numbers
from tests.posix.volumes import Volume, run
from tests.support.outcome import errno_of
from tests.support.waiting import wait_until

Volumes = Callable[[str, str], AbstractContextManager[Volume]]

READERS: Final = 4
DATA: Final = {f"{at}": random.Random(at).randbytes(at * 4000) for at in range(12)}
LARGE: Final = random.Random(1).randbytes(1 << 20)
# neither the Python of open(), which asks whether a file is a terminal, nor of shutil
_EPOCH: Final = """
import os, sys
for top, _, names in os.walk(sys.argv[1]):
    for name in names:
        path = os.path.join(top, name)
        fd = os.open(path, os.O_RDONLY)
        size = os.stat(path).st_size
        got = 0
        while piece := os.read(fd, 1 << 20):
            got += len(piece)
        assert os.fstat(fd).st_size == size == got
        os.close(fd)
"""


class Pair(NamedTuple):
    """A volume that is written on one mount and read on another."""

    volume: Volume
    writer: Path
    reader: Path


@pytest.fixture(scope="module")
def pair(volumes: Volumes) -> Iterator[Pair]:
    with volumes("redis", "zero") as volume:
        yield Pair(volume, volume.mount("writer"), volume.mount("reader", "--read-only"))


def _plant(root: Path) -> Path:
    root.mkdir()
    for at, (name, data) in enumerate(DATA.items()):
        folder = root / f"d{at % 3}"
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    (root / "d0" / "large").write_bytes(LARGE)
    (root / "link").symlink_to("d0/large")
    return root


def _requests(mount: Path) -> dict[str, float]:
    """Requests of the kernel, and those to the metadata and the object store."""
    counted = ("operations_total", "meta_round_trips_total", "object_requests_total")
    return {
        name: value
        for name, value in read_numbers(str(mount / ".stats")).items()
        if name.startswith(counted)
    }


def _cost(mount: Path, work: Callable[[], object]) -> dict[str, float]:
    """What `work` has made the mount ask for, and be asked; reading `.stats` left out."""
    _requests(mount)
    first = _requests(mount)
    second = _requests(mount)
    work()
    third = _requests(mount)
    costs = {
        name: value - 2 * second.get(name, 0) + first.get(name, 0) for name, value in third.items()
    }
    costs.pop("meta_round_trips_total")  # heartbeats are among them
    return {name: cost for name, cost in costs.items() if cost}


def _reads(cost: dict[str, float]) -> list[str]:
    """Requests for contents and listings among them."""
    kinds = ("read", "readdir", "readdirplus")
    return [name for name in cost if any(f'op="{kind}"' in name for kind in kinds)]


def _epoch(root: Path) -> None:
    """All files, by several processes at a time."""
    readers = [subprocess.Popen([sys.executable, "-c", _EPOCH, root]) for _ in range(READERS)]
    assert [reader.wait() for reader in readers] == [0] * READERS


def _becomes_free(mount: Path, work: Callable[[], object]) -> None:
    """Done again and again, `work` costs nothing soon: the kernel may drop a page where it needs
    memory, and news of the last change may come late."""
    wait_until(lambda: _cost(mount, work) == {})


def test_p5_a_warm_epoch_makes_no_request(pair: Pair) -> None:
    """Also the one after a change elsewhere, but for what has changed."""
    there, here = _plant(pair.writer / "epoch"), pair.reader / "epoch"
    wait_until((here / "link").exists)
    _epoch(here)
    _becomes_free(pair.reader, lambda: _epoch(here))
    (there / "d1" / "1").write_bytes(b"changed")
    wait_until(lambda: (here / "d1" / "1").read_bytes() == b"changed")
    _epoch(here)
    _becomes_free(pair.reader, lambda: _epoch(here))


def test_p5_what_is_warm_asks_nothing_of_the_metadata(pair: Pair) -> None:
    """Round trips to Redis are its heartbeat's alone: some a second, and an epoch is thousands."""
    (pair.writer / "many").mkdir()
    for at in range(100):
        (pair.writer / "many" / f"{at}").write_bytes(b"x")
    here = pair.reader / "many"
    wait_until(lambda: len(os.listdir(here)) == 100)
    script = f"import sys\nfor _ in range(50):\n    exec({_EPOCH!r})"

    def epochs() -> None:
        subprocess.run([sys.executable, "-c", script, here], check=True)

    epochs()
    name = "meta_round_trips_total"
    before = read_numbers(str(pair.reader / ".stats"))[name]
    epochs()
    assert read_numbers(str(pair.reader / ".stats"))[name] - before < 1000  # of 15,000 calls


@pytest.mark.parametrize("engine", ["sqlite", "redis"])
def test_p5_a_mounted_snapshot_is_read_without_a_request(volumes: Volumes, engine: str) -> None:
    """On an engine that tells nothing of changes, too; long after names would be asked for anew."""
    with volumes(engine, "zero-snapshot") as volume:
        writer = volume.mount("writer")
        top = _plant(writer / "top")
        run("snapshot", "create", top, "one")
        (top / "d0" / "large").unlink()
        reader = volume.mount("reader", "--subdir", "/top", "--snapshot", "one")
        _epoch(reader)
        assert (reader / "d0" / "large").read_bytes() == LARGE
        assert not (reader / "absent").exists()
        subprocess.run(["sleep", "1.1"], check=True)  # SHORT_S: what is not leased has lapsed
        _becomes_free(reader, lambda: _epoch(reader))
        _becomes_free(reader, lambda: (reader / "absent").exists())
        shown = top / ".snapshots" / "one"
        _epoch(shown)
        subprocess.run(["sleep", "1.1"], check=True)
        wait_until(lambda: not _reads(_cost(writer, lambda: _epoch(shown / "d1"))))
        os.rmdir(shown)


def test_p5_changes_elsewhere_are_seen(pair: Pair) -> None:
    """Contents, sizes, names, absence: by path, and through descriptors that are open."""
    there, here = pair.writer / "changes", pair.reader / "changes"
    there.mkdir()
    (there / "file").write_bytes(b"one")
    wait_until((here / "file").exists)
    fd = os.open(here / "file", os.O_RDONLY)
    assert os.pread(fd, 10, 0) == b"one"
    assert os.listdir(here) == ["file"]
    assert not (here / "new").exists()
    with (there / "file").open("r+b") as file:
        file.write(b"two")  # of the same length
    wait_until(lambda: (here / "file").read_bytes() == b"two")
    wait_until(lambda: os.pread(fd, 10, 0) == b"two")
    with (there / "file").open("ab") as file:
        file.write(b"!")
    wait_until(lambda: os.pread(fd, 10, 0) == b"two!")
    os.truncate(there / "file", 1)
    wait_until(lambda: os.pread(fd, 10, 0) == b"t")
    os.close(fd)
    (there / "new").write_bytes(b"new")
    wait_until((here / "new").exists)
    assert (here / "new").read_bytes() == b"new"
    wait_until(lambda: sorted(os.listdir(here)) == ["file", "new"])
    os.replace(there / "new", there / "file")
    wait_until(lambda: (here / "file").read_bytes() == b"new")
    wait_until(lambda: os.listdir(here) == ["file"])
    os.chmod(there / "file", 0o600)
    wait_until(lambda: (here / "file").stat().st_mode & 0o777 == 0o600)
    (there / "file").unlink()
    wait_until(lambda: not (here / "file").exists())
    assert errno_of(lambda: os.open(here / "file", os.O_RDONLY)) == errno.ENOENT


def test_p5_what_is_being_read_outlives_its_name(pair: Pair) -> None:
    """Of a file that is deleted elsewhere the rest is read, too; its bytes go when nobody reads."""
    there, here = pair.writer / "deleted", pair.reader / "deleted"
    there.write_bytes(LARGE)
    wait_until(here.exists)
    fd = os.open(here, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    assert os.pread(fd, 4096, 0) == LARGE[:4096]
    there.unlink()
    wait_until(lambda: not here.exists())
    other = pair.writer / "other"
    other.write_bytes(LARGE)  # two rounds of deletion: this one is gone, the other is not
    other.unlink()
    name = "inodes_purged_total"
    wait_until(lambda: _numbers(pair, name) > 0)
    assert os.pread(fd, 4096, len(LARGE) - 4096) == LARGE[-4096:]
    os.close(fd)


def _numbers(pair: Pair, name: str) -> float:
    """Summed over both mounts: one of them leads."""
    roots = (pair.writer, pair.reader)
    return sum(read_numbers(str(root / ".stats"))[name] for root in roots)


def test_p5_locks_are_the_hosts_own(pair: Pair) -> None:
    """They hold among programs of this mount, and end with their descriptor; elsewhere not."""
    there, here = pair.writer / "locked", pair.reader / "locked"
    there.write_bytes(b"x")
    wait_until(here.exists)
    with there.open("rb") as elsewhere, here.open("rb") as first, here.open("rb") as second:
        fcntl.flock(elsewhere, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = errno_of(lambda: fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB))
        assert taken == errno.EAGAIN
        first.close()
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(second, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_p5_always_asking_locks_are_everybodys(pair: Pair) -> None:
    """`--open-requests always`: as on every other mount."""
    asking = pair.volume.mount("asking", "--read-only", "--open-requests", "always")
    there, here = pair.writer / "asked", asking / "asked"
    there.write_bytes(b"x")
    wait_until(here.exists)
    with there.open("rb") as elsewhere, here.open("rb") as first:
        fcntl.flock(elsewhere, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = errno_of(lambda: fcntl.flock(first, fcntl.LOCK_SH | fcntl.LOCK_NB))
        assert taken == errno.EAGAIN
    assert (asking / ".accesslog").exists()


def test_p5_nothing_is_written_after_a_remount(pair: Pair) -> None:
    """No handle says who writes: the kernel's flag alone does not make such a mount writable."""
    (pair.writer / "kept").write_bytes(b"kept")
    here = pair.reader / "kept"
    wait_until(here.exists)
    subprocess.run(["mount", "-i", "-o", "remount,rw", pair.reader], check=True)
    try:
        fd = os.open(here, os.O_WRONLY)
        assert errno_of(lambda: os.write(fd, b"lost")) == errno.EROFS
        assert errno_of(lambda: os.fsync(fd)) == 0
        os.close(fd)
        for change in (
            lambda: os.truncate(here, 0),
            lambda: os.unlink(here),
            lambda: os.mkdir(pair.reader / "made"),
            lambda: os.rename(here, pair.reader / "renamed"),
            lambda: (pair.reader / "made").write_bytes(b""),
        ):
            assert errno_of(change) == errno.EROFS
    finally:
        subprocess.run(["mount", "-i", "-o", "remount,ro", pair.reader], check=True)
    assert (pair.writer / "kept").read_bytes() == b"kept"


def test_p5_reading_moves_no_atime(pair: Pair) -> None:
    there, here = pair.writer / "read", pair.reader / "read"
    there.write_bytes(b"x")
    wait_until(here.exists)
    before = there.stat().st_atime_ns
    assert here.read_bytes() == b"x"
    assert here.stat().st_atime_ns == there.stat().st_atime_ns == before


def test_p5_virtual_files_have_a_size_and_are_new_at_each_open(pair: Pair) -> None:
    first = (pair.reader / ".stats").read_text()
    second = (pair.reader / ".stats").read_text()
    assert first.endswith("\n")
    assert second.endswith("\n")
    assert first != second
    assert '"volume"' in (pair.reader / ".config").read_text()
    assert not (pair.reader / ".accesslog").exists()


def test_p5_holes_are_found(pair: Pair) -> None:
    with (pair.writer / "sparse").open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"data")
    here = pair.reader / "sparse"
    wait_until(lambda: here.exists() and here.stat().st_size == 1 << 20)
    fd = os.open(here, os.O_RDONLY)
    assert os.lseek(fd, 0, os.SEEK_DATA) <= 1 << 19
    assert os.lseek(fd, 0, os.SEEK_HOLE) == 0
    os.close(fd)

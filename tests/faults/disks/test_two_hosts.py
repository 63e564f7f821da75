"""C1, W1: hosts that have one cache directory and one staging directory between them.

A host is a UTS, a pid and an IPC namespace: another name, and pids that mean nothing elsewhere. The
disk is one and its locks are seen by both, as in two containers. Where locks are not seen, a file
system in memory is mounted twice, which grants each lock to everybody.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from fsclient.volume.flock_scope import locks_may_be_unseen
from tests.faults.load import content
from tests.faults.program import SLICEFS, Mount, Volume, needs_mounts, slicefs, wait_until
from tests.faults.redis_server import DurableRedis
from tests.fsclient.fuse.mounting import serving
from tests.fsclient.fuse.ramfs import RamFS

pytestmark = [
    needs_mounts,
    pytest.mark.skipif(shutil.which("nsenter") is None, reason="needs unshare and nsenter"),
]

KIB = 1 << 10
FILES = 30
SMALL = 100 * KIB
UNSEEN = "cache disk .* is on fuse.*: where other hosts use it, too"


class Host(NamedTuple):
    """Namespaces that stay while their init does."""

    init: int  # its pid here

    @property
    def program(self) -> tuple[str, ...]:
        """`slicefs`, there."""
        return ("nsenter", f"--target={self.init}", "--uts", "--pid", "--ipc", "--", SLICEFS)

    def mount(self, volume: Volume, name: str, *options: str) -> Mount:
        """Mount a volume there; the pid is the one that its client has here."""
        mount = volume.mount(*options, name=name, program=self.program)
        mount.pid = next(self._outer(mount))
        return mount

    def _outer(self, mount: Mount) -> Iterator[int]:
        for status in Path("/proc").glob("[0-9]*/status"):
            try:
                pids = re.search(r"^NSpid:\t(\d+)\t(\d+)$", status.read_text(), re.MULTILINE)
                words = status.with_name("cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if pids and int(pids[2]) == mount.pid and os.fsencode(mount.path) in words:
                yield int(pids[1])


@contextmanager
def host(name: str) -> Iterator[Host]:
    script = f"hostname {name}; echo up; exec sleep infinity"
    words = ["unshare", "--uts", "--pid", "--ipc", "--fork", "--kill-child", "sh", "-c", script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            yield Host(int(children.split()[0]))
        finally:
            process.kill()


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with host("alpha") as one, host("beta") as two:
        yield one, two


def shared(base: Path, *more: str) -> tuple[str, ...]:
    """Options of every mount: the same directories, and a cache in which not all fits."""
    return (
        "--cache-dir",
        f"{base}/cache",
        "--cache-size",
        "16MiB",
        "--cache-writes",
        "--free-space-ratio",
        "0",
        "--writeback",
        "--staging-dir",
        f"{base}/staging",
        *more,
    )


def write_files(root: Path, name: str, seed: int) -> dict[str, bytes]:
    (root / name).mkdir()
    files = {f"{name}/{each}": content(seed + each, SMALL) for each in range(FILES)}
    files[f"{name}/big"] = content(seed + FILES, 9 << 20)
    for path, data in files.items():
        (root / path).write_bytes(data)
    return files


def read_right(root: Path, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        assert (root / path).read_bytes() == data, path


def settled(*mounts: Mount) -> None:
    for mount in mounts:
        wait_until("all is published", 100, partial(is_published, mount))


def is_published(mount: Mount) -> bool:
    return mount.numbers()["staging_changes"] == 0


def is_copied(mount: Mount) -> bool:
    return mount.numbers()["disk_cache_queue_bytes"] == 0


def works_at_once(mounts: dict[str, Mount], seed: int) -> dict[str, dict[str, bytes]]:
    """All write, each in a directory of its own; what they wrote."""
    written: dict[str, dict[str, bytes]] = {}

    def work(name: str, number: int) -> None:
        written[name] = write_files(mounts[name].path, f"{name}{seed}", seed + 1000 * number)

    threads = [
        threading.Thread(target=work, args=(name, number)) for number, name in enumerate(mounts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == len(mounts)
    return written


def test_two_hosts_share_disks(served: Volume, base: Path, hosts: tuple[Host, Host]) -> None:
    """Neither has the other's journal, and both read what is in one cache."""
    served.format()
    one, two = (each.mount(served, f"{each.init}", *shared(base)) for each in hosts)
    written = works_at_once({"a": one, "b": two}, 1)
    settled(one, two)
    for mount in (one, two, one):
        for files in written.values():
            read_right(mount.path, files)
    for mount in (one, two):
        wait_until("copies are written", 100, partial(is_copied, mount))
        assert mount.numbers()["disk_cache_errors_total"] == 0
    used = sum(each.stat().st_blocks * 512 for each in (base / "cache").rglob("*-*_*"))
    assert 0 < used <= 20 << 20
    served.end()


def test_a_journal_that_another_host_holds_is_left_alone(
    served: Volume, base: Path, hosts: tuple[Host, Host]
) -> None:
    """One host's client is killed; who mounts next, on the other, takes up that journal alone."""
    served.format()
    slow = shared(base, "--upload-limit", "64KiB", "--no-supervisor")
    one, two = hosts[0].mount(served, "one", *slow), hosts[1].mount(served, "two", *slow)
    written = works_at_once({"a": one, "b": two}, 1)
    assert one.numbers()["staging_changes"]
    assert two.numbers()["staging_changes"]
    left = sorted((base / "staging").glob("*/*/log-*"))
    assert len({each.parent for each in left}) == 2
    one.kill()
    wait_until("its journal is nobody's", 60, one.has_ended)
    third = hosts[1].mount(served, "three", *shared(base))
    read_right(third.path, written["a"])
    settled(third)
    assert not (third.path / "b1/big").exists(), "its mount has yet to publish it"
    read_right(two.path, written["b"])
    two.kill()  # most of it is in its journal still
    wait_until("its journal is nobody's", 60, two.has_ended)
    last = hosts[0].mount(served, "four", *shared(base))
    settled(last)
    for files in written.values():
        read_right(third.path, files)
    served.end()


def test_two_volumes_of_two_hosts(
    base: Path, durable_redis: DurableRedis, hosts: tuple[Host, Host]
) -> None:
    """Two volumes whose slices have the same numbers."""
    volumes = []
    for number in range(2):
        (base / f"{number}").mkdir()
        volumes.append(Volume(base / f"{number}", durable_redis.url(number)))
        volumes[-1].format()
    try:
        mounts = {
            f"v{number}": each.mount(volume, "mnt", *shared(base))
            for number, (volume, each) in enumerate(zip(volumes, hosts, strict=True))
        }
        written = works_at_once(mounts, 1)
        settled(*mounts.values())
        for name, mount in mounts.items():
            for _ in range(2):
                read_right(mount.path, written[name])
            assert mount.numbers()["disk_cache_errors_total"] == 0
        for volume in volumes:
            volume.end()
    finally:
        for volume in volumes:
            volume.clean_up()


def test_where_locks_may_be_unseen_nothing_is_staged(embedded: Volume, base: Path) -> None:
    """The second host would write over the first one's journal. A cache is only warned of."""
    embedded.format()
    server = RamFS()
    with serving(server, base / "a"), serving(server, base / "b"):
        for name in "ab":
            assert locks_may_be_unseen(str(base / name)) == "fuse.slicefs"
            staging = ("--writeback", "--staging-dir", str(base / name / "staging"))
            mnt = base / "mnt"
            mnt.mkdir(exist_ok=True)
            done = slicefs("mount", "-d", "--log", base / "log", embedded.meta, mnt, *staging)
            assert done.code == 1, done
            assert "is on fuse.slicefs" in done.err
            assert "name a disk of this host" in done.err
        options = ("--cache-dir", f"{base}/a/cache", "--cache-size", "16MiB", "--cache-writes")
        one = embedded.mount(*options, "--free-space-ratio", "0", name="one")
        files = write_files(one.path, "d", 1)
        read_right(one.path, files)
        assert [line for line in embedded.complaints() if re.search(UNSEEN, line)]
        one.umount()
    embedded.end(f"{UNSEEN}|the mount has failed: staging directory")


def test_disks_of_this_host_are_known(base: Path) -> None:
    """Those without a device number of their own, too."""
    assert locks_may_be_unseen(str(base)) == ""
    assert locks_may_be_unseen("/dev/shm") == ""
    assert locks_may_be_unseen("/proc") == "proc"
    assert locks_may_be_unseen(str(base / "absent")) == ""

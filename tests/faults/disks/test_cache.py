"""C1–C4 on real mounts: what was read once is read from the disk, whatever happens in between."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.load import content
from tests.faults.places import s3_place
from tests.faults.program import Mount, Volume, needs_mounts, wait_until
from tests.support.ceph_cluster import CephCluster
from tests.support.http_proxy import Fault, HttpProxy, Kind

pytestmark = needs_mounts

MIB = 1 << 20
KIB = 1 << 10
FILES = 40
SMALL = 100 * KIB
READER = """
import mmap, random, sys
path, copy, seed = sys.argv[1:]
data = open(copy, "rb").read()
pages = list(range(0, len(data), 4096))
random.Random(int(seed)).shuffle(pages)
with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
    mapped.madvise(mmap.MADV_RANDOM)
    for at in pages:
        assert mapped[at : at + 4096] == data[at : at + 4096], at
"""


@pytest.fixture
def far(base: Path, ceph: CephCluster) -> Iterator[tuple[Volume, HttpProxy]]:
    """A volume whose bucket is 10 ms away."""
    with HttpProxy(ceph.s3_port) as proxy:
        proxy.add(Fault(Kind.DELAY, count=1e9, seconds=0.01))
        volume = Volume(base, place=s3_place(base, proxy.endpoint))
        yield volume, proxy
        volume.clean_up()


def gets(proxy: HttpProxy) -> int:
    """Requests for data so far."""
    return sum(
        request.method == "GET" and "/chunks/" in request.target for request in proxy.requests()
    )


def caching(base: Path, *more: str) -> tuple[str, ...]:
    """Mount options for two cache disks, and none for files that change hands meanwhile."""
    return (
        "--pack-below",
        "0",
        "--cache-dir",
        f"{base}/ssd0:{base}/ssd1",
        "--cache-size",
        "256MiB",
        "--free-space-ratio",
        "0",
        *more,
    )


def write_files(root: Path) -> dict[str, bytes]:
    files = {f"f{number}": content(number, SMALL) for number in range(FILES)}
    files["big"] = content(99, 9 * MIB)
    for name, data in files.items():
        (root / name).write_bytes(data)
    return files


def read_right(root: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        assert (root / name).read_bytes() == data, name


def settled(mount: Mount) -> None:
    wait_until("copies are written", 60, lambda: mount.numbers()["disk_cache_queue_bytes"] == 0)


def test_a_second_mount_reads_from_the_disks(far: tuple[Volume, HttpProxy], base: Path) -> None:
    volume, proxy = far
    volume.format()
    files = write_files(volume.mount(*caching(base)).path)
    volume.mounts[-1].umount()
    mount = volume.mount(*caching(base))
    read_right(mount.path, files)
    settled(mount)
    numbers = mount.numbers()
    assert numbers["disk_cache_drops_total"] == 0
    assert numbers["disk_cache_written_bytes_total"] >= FILES * SMALL + 9 * MIB
    mount.umount()
    before = gets(proxy)
    mount = volume.mount(*caching(base))
    read_right(mount.path, files)
    assert gets(proxy) == before
    assert mount.numbers()["disk_cache_misses_total"] == 0
    (mount.path / "f0").unlink()
    volume.end()


def test_pages_in_random_order_are_fetched_once(far: tuple[Volume, HttpProxy], base: Path) -> None:
    """As LMDB reads: a mapped file, madvise(MADV_RANDOM), every page once, then all again."""
    volume, _ = far
    volume.format()
    mount = volume.mount(*caching(base))
    data = content(5, 8 * MIB)
    for copy in (mount.path / "data.mdb", base / "copy"):
        copy.write_bytes(data)
    mount.umount()
    for seed in range(2):
        mount = volume.mount(*caching(base))
        # a page fault keeps the interpreter's lock, and the proxy needs it: another process
        files = (str(mount.path / "data.mdb"), str(base / "copy"))
        words = [sys.executable, "-c", READER, *files, str(seed)]
        subprocess.run(words, check=True, timeout=150)
        settled(mount)
        fetched = mount.numbers()["object_get_bytes_total"]
        assert fetched <= (1.2 * len(data) if seed == 0 else 0.0)
        assert mount.numbers()["disk_cache_drops_total"] == 0
        mount.umount()
    volume.end()


def test_two_mounts_share_what_they_fetch(far: tuple[Volume, HttpProxy], base: Path) -> None:
    volume, proxy = far
    volume.format()
    one = volume.mount(*caching(base), name="one")
    files = write_files(one.path)
    two = volume.mount(*caching(base), name="two")
    read_right(two.path, files)
    settled(two)
    one.umount()
    before = gets(proxy)
    one = volume.mount(*caching(base), name="one")
    read_right(one.path, files)
    assert gets(proxy) == before
    volume.end()


def test_killed_while_copies_are_written(embedded: Volume, base: Path) -> None:
    """SIGKILL, again and again; what is left on the disks never shows as wrong bytes."""
    embedded.format()
    options = caching(base)
    mount = embedded.mount("--cache-dir", "none")
    files = write_files(mount.path)
    mount.umount()
    for turn in range(6):
        mount = embedded.mount(*options, "--no-supervisor", name=f"mnt{turn}")
        stop = threading.Event()
        reader = threading.Thread(target=_read_until, args=(mount.path, files, stop))
        reader.start()
        wait_until(
            "some copies", 60, lambda m=mount: m.numbers()["disk_cache_written_bytes_total"] > 0
        ) if turn == 0 else stop.wait(0.02 * turn)
        mount.kill()
        stop.set()
        reader.join()
    mount = embedded.mount(*options, name="last")
    read_right(mount.path, files)
    numbers = mount.numbers()
    assert numbers["disk_cache_bad_total"] == numbers["disk_cache_errors_total"] == 0
    settled(mount)
    mount.umount()
    again = embedded.mount(*options, name="again")
    read_right(again.path, files)
    assert again.numbers()["disk_cache_misses_total"] == 0
    embedded.end()


def _read_until(root: Path, files: dict[str, bytes], stop: threading.Event) -> None:
    """Read files in turn, until the mount is gone."""
    while not stop.is_set():
        for name, data in files.items():
            try:
                found = (root / name).read_bytes()
            except OSError:
                return
            assert found == data, name


def test_a_cache_disk_is_lost_and_comes_back(embedded: Volume, base: Path) -> None:
    """Programs see nothing of it, the log one line each way."""
    disk = base / "ssd0"
    disk.mkdir()
    tmpfs = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=0700", "none", str(disk)]
    subprocess.run(tmpfs, check=True)
    try:
        embedded.format()
        mount = embedded.mount(*caching(base))
        files = write_files(mount.path)
        mount.umount()
        mount = embedded.mount(*caching(base))
        read_right(mount.path, files)
        settled(mount)
        subprocess.run(["umount", "-l", str(disk)], check=True)
        aside = "disk_cache_disks_aside"
        wait_until("it is noticed", 60, lambda: mount.numbers()[aside] == 1)
        read_right(mount.path, files)
        assert os.listdir(disk) == []
        subprocess.run(tmpfs, check=True)
        (disk / "disk-id").write_bytes((base / "ssd1/disk-id").read_bytes()[:-3] + b"00\n")
        wait_until("it is taken back", 120, lambda: mount.numbers()[aside] == 0)
        read_right(mount.path, files)
        embedded.end("cache disk .* is (quarantined|used again)")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False, capture_output=True)


def test_a_local_bucket_has_no_disk_cache_unless_asked(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount("--cache-dir", "auto")
    assert "disk_cache_disks" not in mount.numbers()
    embedded.end()


def test_options_of_a_live_mount(embedded: Volume, base: Path) -> None:
    """fstab's spelling, a size for each directory, a pattern."""
    (base / "nvme0").mkdir()
    (base / "nvme1").mkdir()
    embedded.format()
    sizes = f"{base}/nvme0=32MiB:{base}/nvme1=64MiB"
    mount = embedded.mount(
        "--cache-dir",
        f"{base}/nvme*",
        "--cache-size",
        sizes,
        "-o",
        "cache-writes,cache-eviction=lru,free-space-ratio=0",
    )
    (mount.path / "f").write_bytes(content(1, MIB))
    written = "disk_cache_written_bytes_total"
    wait_until("--cache-writes", 60, lambda: mount.numbers()[written] > MIB)
    assert mount.numbers()["disk_cache_limit_bytes"] == 96 * MIB
    embedded.end()


def test_random_gets_from_lmdb_fetch_what_they_ask_for(embedded: Volume, base: Path) -> None:
    """C3: pages of a tree and values that are near each other are not taken for a stream, and soon
    a value is a request: 1.2 bytes for a byte of values of 100 KiB, as volumes come.
    """
    embedded.format()
    mount = embedded.mount(*caching(base))
    count, size, gets = 640, 100 * KIB, 60
    lmdb("fill", base / "made", size, count)
    shutil.copyfile(base / "made", mount.path / "data.mdb")
    for options in (caching(base), ("--pack-below", "0")):
        mount.umount()
        mount = embedded.mount(*options)
        lmdb("get", mount.path / "data.mdb", size, gets, 3, 0)
        assert gets * size < fetched_bytes(mount) <= 1.2 * gets * size
        assert mount.numbers()["object_get_count_total"] < 20 * 9 + (gets - 20) * 2.5
    embedded.end()


@pytest.mark.parametrize("size", [KIB, 16 * KIB])
def test_pages_cost_what_they_are_where_frames_are_pages(
    embedded: Volume, base: Path, size: int
) -> None:
    """C3: with --frame-size 4KiB 1.2 bytes for a byte of the pages that small values are in."""
    embedded.format("--frame-size", "4KiB")
    mount = embedded.mount(*caching(base))
    lmdb("fill", base / "made", size, 32 * MIB // size)
    shutil.copyfile(base / "made", mount.path / "data.mdb")
    mount.umount()
    mount = embedded.mount(*caching(base))
    lmdb("get", mount.path / "data.mdb", size, 200, 3, 0)
    asked = 4 * KIB * mount.numbers()['operations_total{op="read"}']
    assert 200 * size < fetched_bytes(mount) <= 1.2 * asked
    embedded.end()


def fetched_bytes(mount: Mount) -> float:
    return mount.numbers()["object_get_bytes_total"]


def test_prefetch_fetches_the_blocks_that_are_touched(
    far: tuple[Volume, HttpProxy], base: Path
) -> None:
    """C3: each once; then other pages cost no request. Not where the download is limited."""
    volume, proxy = far
    volume.format()
    mount = volume.mount(*caching(base))
    data = content(7, 12 * MIB)
    (mount.path / "data").write_bytes(data)
    mount.umount()
    mount = volume.mount(*caching(base), "--prefetch", "2")
    read_pages(mount.path / "data", data, (5 * MIB, 1 * MIB, 11 * MIB))
    wait_until("they are whole", 60, lambda: mount.numbers()["prefetched_blocks_total"] == 3)
    settled(mount)
    fetched = mount.numbers()["object_get_bytes_total"]
    assert 12 * MIB < fetched < 12 * MIB + 5 * 64 * KIB
    before = gets(proxy)
    read_pages(mount.path / "data", data, (7 * MIB, 3 * MIB, 9 * MIB, 4 * MIB, 10 * MIB))
    assert gets(proxy) == before
    mount.umount()
    mount = volume.mount("--pack-below", "0", "--prefetch", "2", "--download-limit", "1GiB")
    read_pages(mount.path / "data", data, (5 * MIB, 1 * MIB, 11 * MIB))
    assert "prefetched_blocks_total" not in mount.numbers()
    mount.umount()
    assert gets(proxy) <= before + 6
    volume.end()


def read_pages(path: Path, data: bytes, places: tuple[int, ...]) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for at in places:
            assert os.pread(fd, 4096, at + 64 * KIB) == data[at + 64 * KIB :][:4096]
    finally:
        os.close(fd)


def lmdb(*words: str | int | Path) -> None:
    """A process of its own, as for `READER`."""
    command = [sys.executable, "-m", "tools.benchlib.lmdbloop", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr

"""C6 on real mounts: `slicefs warmup` fills, checks and empties caches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.load import content
from tests.faults.places import s3_place
from tests.faults.program import SLICEFS, Done, Mount, Volume, needs_mounts, slicefs, wait_until
from tests.support.ceph_cluster import CephCluster
from tests.support.http_proxy import Fault, HttpProxy, Kind, Request

pytestmark = needs_mounts

MIB = 1 << 20
FILES = 30
SMALL = 100 << 10
BIG = 9 * MIB
BLOCKS = FILES + 3  # of 4 MiB at most
SEGMENTS = 2  # that so many small files are packed into, at most
BYTES = FILES * SMALL + BIG
LATE_S = 1.0  # so that two threads take a quarter of a minute for all blocks
NOBODY = 65534


def caching(base: Path, *more: str) -> tuple[str, ...]:
    """Mount options for two cache disks, and none for files that change hands meanwhile."""
    sizes = () if "--cache-size" in more else ("--cache-size", "256MiB")
    disks = ("--cache-dir", f"{base}/ssd0:{base}/ssd1", "--free-space-ratio", "0")
    return ("--pack-below", "0", *disks, *sizes, *more)


def filled(volume: Volume, packed: str = "0") -> Volume:
    """A volume with files and nothing in any cache."""
    volume.format()
    mount = volume.mount("--pack-below", packed)
    (mount.path / "d/e").mkdir(parents=True)
    for number in range(FILES):
        (mount.path / f"d/f{number}").write_bytes(content(number, SMALL))
    (mount.path / "d/e/big.tar").write_bytes(content(99, BIG))
    (mount.path / "empty").touch()
    mount.umount()
    return volume


@pytest.fixture
def bucket(base: Path, ceph: CephCluster) -> Iterator[tuple[Volume, HttpProxy]]:
    """A volume in a bucket that counts requests."""
    with HttpProxy(ceph.s3_port) as proxy:
        volume = Volume(base, place=s3_place(base, proxy.endpoint))
        yield volume, proxy
        volume.clean_up()


@pytest.fixture
def far(bucket: tuple[Volume, HttpProxy]) -> tuple[Volume, HttpProxy]:
    """The same with files, and nothing in any cache."""
    filled(bucket[0])
    return bucket


@pytest.fixture
def near(embedded: Volume) -> Volume:
    """The same in a directory."""
    return filled(embedded)


def is_get(request: Request) -> bool:
    return request.method == "GET" and "/chunks/" in request.target


def gets(proxy: HttpProxy) -> int:
    return sum(map(is_get, proxy.requests()))


def warm(*words: str | Path, code: int = 0) -> Any:
    """The summary of a warmup."""
    done = slicefs("warmup", "--json", *words)
    assert done.code == code, done
    return json.loads(done.out.splitlines()[-1])


def check(path: Path) -> Any:
    """What is cached, whatever that is."""
    done = slicefs("warmup", "--check", "--json", path)
    assert done.code in (0, 3), done
    summary = json.loads(done.out.splitlines()[-1])
    assert (done.code == 3) == (summary["cached"] < summary["data"])
    return summary


def read_right(root: Path) -> None:
    for number in range(FILES):
        assert (root / f"d/f{number}").read_bytes() == content(number, SMALL)
    assert (root / "d/e/big.tar").read_bytes() == content(99, BIG)


AS_NOBODY = """
import os, sys
from fsclient.cli import main
from fsclient.cli.mount import warmup as warmup_cmd
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.exit(main.run(sys.argv[1:]))
"""


def as_nobody(*words: str | Path) -> Done:
    """`slicefs` by another user, who need not be able to read its installation."""
    return slicefs(*words, program=(sys.executable, "-c", AS_NOBODY))


def test_each_block_is_fetched_once(far: tuple[Volume, HttpProxy], base: Path) -> None:
    """By warmup, twice, and by readers, on this mount and on another that shares the disks."""
    volume, proxy = far
    mount = volume.mount(*caching(base))
    before = gets(proxy)
    found = warm(mount.path)
    assert (found["files"], found["fetched"], found["there"]) == (FILES + 2, BYTES, 0)
    assert gets(proxy) == before + BLOCKS
    found = warm(mount.path)
    assert (found["fetched"], found["there"], found["there_files"]) == (0, BYTES, FILES + 2)
    other = volume.mount(*caching(base), name="other")
    assert warm(other.path, "--threads", "3")["there"] == BYTES
    read_right(mount.path)
    read_right(other.path)
    shares = check(other.path)
    assert shares["cached"] == shares["data"] == sum(shares["disks"].values()) == BYTES
    assert set(shares["disks"]) == {f"{base}/ssd0", f"{base}/ssd1"}
    assert gets(proxy) == before + BLOCKS
    assert mount.numbers()["disk_cache_drops_total"] == 0
    volume.end()


def test_files_of_one_segment_are_fetched_with_it(
    bucket: tuple[Volume, HttpProxy], base: Path
) -> None:
    """Many threads want it at once, and one asks for it."""
    volume, proxy = bucket
    filled(volume, packed="512KiB")
    mount = volume.mount(*caching(base))
    before = gets(proxy)
    assert warm(mount.path)["files"] == FILES + 2
    assert gets(proxy) <= before + SEGMENTS + BLOCKS - FILES
    read_right(mount.path)
    assert check(mount.path)["cached"] == BYTES
    volume.end()


def test_two_at_once_share_the_work(far: tuple[Volume, HttpProxy], base: Path) -> None:
    """Two mounts, one cache, both warmed at the same time: all is there, little comes twice."""
    volume, proxy = far
    mounts = [volume.mount(*caching(base), name=name) for name in ("one", "two")]
    before = gets(proxy)
    words = [SLICEFS, "warmup", "--json"]
    both = [subprocess.Popen([*words, str(each.path)], stdout=subprocess.PIPE) for each in mounts]
    outs = [json.loads(each.communicate(timeout=100)[0]) for each in both]
    assert [out["fetched"] + out["there"] for out in outs] == [BYTES, BYTES]
    assert gets(proxy) <= before + 2 * BLOCKS
    assert all(check(each.path)["cached"] == BYTES for each in mounts)
    volume.end()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_it_goes_on(
    far: tuple[Volume, HttpProxy], base: Path, how: signal.Signals
) -> None:
    volume, proxy = far
    mount = volume.mount(*caching(base))
    before = gets(proxy)
    proxy.add(Fault(Kind.DELAY, count=1e9, seconds=LATE_S, when=is_get))
    words = [SLICEFS, "warmup", "--threads", "2", str(mount.path)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as first:
        wait_until("it has begun", 60, lambda: gets(proxy) > before + 3)
        first.send_signal(how)
        _, err = first.communicate(timeout=60)
    wait_until("nothing is under way", 60, lambda: mount.numbers()["warmup_now_bytes"] == 0)
    proxy.heal()
    if how is signal.SIGINT:
        assert first.returncode == 130
        assert err == b"slicefs: interrupted: run it again to go on\n"
    assert gets(proxy) < before + BLOCKS
    found = warm(mount.path)
    assert found["there"] >= SMALL
    assert found["fetched"] + found["there"] == BYTES
    assert gets(proxy) == before + BLOCKS
    volume.end()


def test_what_is_named(near: Volume, base: Path) -> None:
    """Files, directories, lists and patterns."""
    mount = near.mount(*caching(base))
    top = mount.path
    assert warm(top / "d/f1", top / "d/f2")["fetched"] == 2 * SMALL
    assert warm(top, "--glob", "f1*")["files"] == 11, "at any depth"
    assert warm(top, "--glob", "/d/f[3-4]", "--glob", "d/**/*.tar")["fetched"] == 2 * SMALL + BIG
    assert warm("--glob", f"{top}/d/f?")["files"] == 10
    (base / "list").write_text(f"{top}/d/f20\n\n{top}/absent\n/etc/passwd\n{top}/d/e\n")
    done = slicefs("warmup", "--file", base / "list")
    assert done.code == 1
    assert f"slicefs: {top}/absent: No such file or directory\n" in done.err
    assert "slicefs: /etc/passwd: is not on a SliceFS mount" in done.err
    assert "fetched     100.0 KiB of 1 files" in done.out
    done = slicefs("warmup", top, "--glob", "*.zip")
    assert (done.code, done.err) == (1, "slicefs: --glob: no file matches\n")
    near.end()


def test_check_and_evict(near: Volume, base: Path) -> None:
    mount = near.mount(*caching(base))
    warm(mount.path / "d/f3", mount.path / "d/e")
    out = slicefs("warmup", "--check", mount.path).out
    assert "\n100 %   100.0 KiB  " + f"{mount.path}/d/f3\n" in "\n" + out
    assert "\n  0 %   100.0 KiB  " + f"{mount.path}/d/f4\n" in "\n" + out
    assert check(mount.path)["cached"] == SMALL + BIG
    os.close(os.open(os.fsencode(mount.path) + b"/d/\xff", os.O_CREAT))
    words = f"{SLICEFS} warmup --check {mount.path} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", words], capture_output=True, check=False, timeout=60)
    assert done.stderr == b""
    assert "/d/\\xff\n" in slicefs("warmup", "--check", mount.path).out
    warm(mount.path / "d/f4", "--memory")
    shown = json.loads(slicefs("info", "--json", mount.path / "d/f4").out)["cached"]
    assert shown["memory"] == shown["cached"] == SMALL
    assert "cached      100 %: /" in slicefs("info", mount.path / "d/f3").out
    wait_until("copies are written", 60, lambda: not mount.numbers()["disk_cache_queue_bytes"])
    assert warm(mount.path / "d", "--evict")["evicted"] >= SMALL + BIG
    assert check(mount.path)["cached"] == 0
    assert list(base.glob("ssd?/*/[0-9a-f][0-9a-f][0-9a-f]/*")) == []
    read_right(mount.path)
    near.end()


def test_metadata_only_fetches_no_data(far: tuple[Volume, HttpProxy], base: Path) -> None:
    volume, proxy = far
    mount = volume.mount(*caching(base))
    before = gets(proxy)
    assert warm(mount.path, "--metadata-only")["files"] == FILES + 2
    assert gets(proxy) == before
    volume.end()


def reads(mount: Mount) -> float:
    """READ requests so far, with a few for `.stats`; each is counted after its answer."""
    name = 'operations_total{op="read"}'
    seen = [mount.numbers()[name] for _ in range(3)]
    while seen[-1] - seen[-2] != seen[-2] - seen[-3]:
        seen.append(mount.numbers()[name])
    return seen[-1]


def test_memory_and_page_cache(near: Volume) -> None:
    """Without cache disks one has to say what is to be filled."""
    mount = near.mount()
    done = slicefs("warmup", mount.path)
    assert done.code == 1
    assert "this mount has no disk cache: mount with --cache-dir" in done.err
    assert warm(mount.path, "--memory")["fetched"] == BYTES
    found = check(mount.path)
    assert (found["cached"], found["memory"], found["disks"]) == (BYTES, BYTES, {})
    assert warm(mount.path, "--page-cache")["pages"] == BYTES
    before = reads(mount)
    read_right(mount.path)
    assert reads(mount) < before + FILES, "more than those of .stats"
    warm(mount.path, "--evict", "--page-cache")
    before = reads(mount)
    read_right(mount.path)
    assert reads(mount) > before + FILES
    near.end()


def test_holes_are_not_read(near: Volume, base: Path) -> None:
    """It once read a sparse file of a terabyte into the page cache, zero by zero."""
    mount = near.mount(*caching(base))
    with (mount.path / "sparse").open("wb") as file:
        for at in (0, 3 << 30, (1 << 40) - MIB):
            file.seek(at)
            file.write(content(at % 97, MIB))
    for options in ((), ("--page-cache",)):
        found = warm(mount.path / "sparse", *options)
        assert found["fetched"] + found["there"] == 3 * MIB
    assert found["pages"] == 3 * MIB
    assert check(mount.path / "sparse")["cached"] == 3 * MIB
    near.end()


def test_who_may_warm_and_who_may_evict(near: Volume, base: Path) -> None:
    """Who may read a file may warm it; only its owner and root remove it from the caches."""
    mount = near.mount(*caching(base))
    secret, shared = mount.path / "d/f1", mount.path / "d/f2"
    secret.chmod(0o600)
    shared.chmod(0o644)
    done = as_nobody("warmup", mount.path)
    assert done.code == 1
    assert done.err == f"slicefs: {secret}: Permission denied\n"
    assert check(secret)["cached"] == 0
    assert check(shared)["cached"] == SMALL
    done = as_nobody("warmup", "--evict", shared)
    assert (done.code, done.err) == (1, f"slicefs: {shared}: Operation not permitted\n")
    assert check(shared)["cached"] == SMALL
    os.chown(shared, NOBODY, NOBODY)
    assert as_nobody("warmup", "--evict", shared).code == 0
    assert check(shared)["cached"] == 0
    near.end()


def test_a_full_cache_says_so(far: tuple[Volume, HttpProxy], base: Path) -> None:
    """Where nothing may be evicted, what has no room is named, and not fetched in vain."""
    volume, proxy = far
    mount = volume.mount()
    for number in range(10):
        (mount.path / f"more{number}").write_bytes(content(number, 4 * MIB))
    mount.umount()
    full = ("--cache-dir", f"{base}/ssd0", "--cache-size", "16MiB", "--free-space-ratio", "0")
    mount = volume.mount(*full, "--cache-eviction", "none")
    before = gets(proxy)
    done = slicefs("warmup", mount.path)
    assert done.code == 1
    assert ": no room on the cache disk\n" in done.err
    cached = check(mount.path)["cached"]
    assert 8 * MIB <= cached <= 16 * MIB
    assert gets(proxy) <= before + cached // (4 * MIB) + FILES + 16
    slicefs("warmup", mount.path)
    fetched = gets(proxy)
    slicefs("warmup", mount.path)
    assert gets(proxy) == fetched, "nothing is fetched that has no room"
    mount.umount()
    mount = volume.mount(*full)
    done = slicefs("warmup", mount.path)
    assert done.code == 0
    assert "more than the cache holds (16.0 MiB)" in done.err
    read_right(mount.path)
    volume.end()


def test_a_small_memory_is_enough(near: Volume, base: Path) -> None:
    mount = near.mount(*caching(base), "--buffer-size", "16MiB", "--cache-writers", "1")
    assert warm(mount.path, "--memory")["fetched"] == BYTES
    found = check(mount.path)
    assert found["cached"] == BYTES
    assert 0 < found["memory"] < 16 * MIB
    near.end()


def test_objects_that_are_lost_or_damaged(near: Volume, base: Path) -> None:
    mount = near.mount(*caching(base))
    path = mount.path / "d/f7"
    slice_id = json.loads(slicefs("info", "--json", path).out)["chunks"][0]["slices"][0]["id"]
    (there,) = (each for each in near.objects() if each.name.startswith(f"{slice_id}_"))
    there.rename(base / "aside")
    done = slicefs("warmup", mount.path)
    assert done.code == 1
    assert done.err == f"slicefs: {path}: an object is missing: see `slicefs fsck`\n"
    data = (base / "aside").read_bytes()
    there.write_bytes(data[:-1] + bytes((data[-1] ^ 1,)))
    done = slicefs("warmup", mount.path)
    assert done.err == f"slicefs: {path}: an object is damaged: see `slicefs scrub`\n"
    assert check(mount.path)["cached"] == BYTES - SMALL
    there.write_bytes(data)
    assert warm(mount.path)["fetched"] == SMALL
    near.end("has arrived damaged")


def test_the_store_is_away(far: tuple[Volume, HttpProxy], base: Path) -> None:
    """It ends with one line, and not after a time-out for each file."""
    volume, proxy = far
    mount = volume.mount(*caching(base), "--object-timeout", "5")
    proxy.add(Fault(Kind.RESET, count=1e9, when=is_get))
    done = slicefs("warmup", mount.path)
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("slicefs: the object store does not answer: see")
    assert done.seconds < 60, "of the two and a half minutes that all files would take"
    proxy.heal()
    assert warm(mount.path)["fetched"] == BYTES
    volume.end()


def test_the_mount_dies(far: tuple[Volume, HttpProxy], base: Path) -> None:
    volume, proxy = far
    mount = volume.mount(*caching(base), "--no-supervisor")
    before = gets(proxy)
    proxy.add(Fault(Kind.DELAY, count=1e9, seconds=LATE_S, when=is_get))
    words = [SLICEFS, "warmup", "--threads", "2", str(mount.path)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as command:
        wait_until("it has begun", 60, lambda: gets(proxy) > before + 3)
        mount.kill()
        _, err = command.communicate(timeout=60)
    proxy.heal()
    assert command.returncode == 1
    assert b"is on a mount whose client has died" in err
    assert err.count(b"\n") == 1
    volume.end()


def test_in_the_background(near: Volume, base: Path) -> None:
    mount = near.mount(*caching(base))
    done = slicefs("warmup", "-b", "--log", base / "warmup.log", mount.path)
    assert done.code == 0
    assert "in the background, process " in done.out
    log = base / "warmup.log"
    wait_until("it is done", 60, lambda: "seconds" in log.read_text())
    assert f"fetched     {(BYTES) / MIB:.1f} MiB of {FILES + 1} files" in log.read_text()
    assert mount.numbers()["warmup_blocks_total"] == BLOCKS
    near.end()


def test_written_meanwhile(near: Volume, base: Path) -> None:
    """Files change, go and are compacted under it: whatever it does, readers read what is there."""
    mount = near.mount(*caching(base))
    words = [SLICEFS, "warmup", "--json", str(mount.path)]
    turns: list[Callable[[], object]] = [
        (mount.path / "d/f1").unlink,
        lambda: (mount.path / "d/f2").write_bytes(b"new"),
        lambda: os.truncate(mount.path / "d/e/big.tar", 5 * MIB),
        lambda: (mount.path / "d/f3").rename(mount.path / "moved"),
    ]
    for turn in turns:
        with subprocess.Popen(words, stdout=subprocess.DEVNULL) as command:
            turn()
            assert command.wait(timeout=60) == 0
        slicefs("warmup", "--evict", mount.path)
    warm(mount.path)
    assert (mount.path / "d/f2").read_bytes() == b"new"
    assert (mount.path / "d/e/big.tar").read_bytes() == content(99, BIG)[: 5 * MIB]
    assert (mount.path / "moved").read_bytes() == content(3, SMALL)
    near.end()


def test_options_that_contradict(near: Volume) -> None:
    mount: Mount = near.mount()
    for words, why in (
        ((), "name a PATH, --file or --glob"),
        (("--check", "--evict"), "choose one of --metadata-only, --check and --evict"),
        (("--check", "--memory"), "--page-cache are for filling caches and for --evict"),
        (("--log", "x"), "--log is for --background"),
        (("--threads", "0"), "Invalid value for '--threads'"),
    ):
        done = slicefs("warmup", *words, *((mount.path,) if words else ()))
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert why in done.err
    assert "is not on a SliceFS mount" in slicefs("warmup", "/etc").err
    near.end()

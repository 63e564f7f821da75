"""X2: what was read of attached files is on the cache disks, as blocks are."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fsdata.attached.directory import ALLOWED_ENV
from slicefs.client.client import Client
from slicefs.lifecycle.attach import attach
from slicefs.stores.tree import Tree
from tests.faults.program import slicefs
from tests.fsdata.disk_world import cache_files, used_bytes
from tests.posix.volumes import Volume, can_mount, run
from tests.slicefs.attached_objects import BIG, OBJECTS, code_of, found
from tests.support.ceph_cluster import CephCluster
from tests.support.http_proxy import HttpProxy
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not can_mount(), reason="mounting takes root and /dev/fuse")

KIB, MIB = 1 << 10, 1 << 20
LONG = os.urandom(40 * MIB)
TOTAL = sum(map(len, OBJECTS.values()))


class Cached:
    """Mounts of one host with one cache directory, and a bucket that counts requests."""

    def __init__(self, volume: Volume, proxy: HttpProxy, disk: Path) -> None:
        self.volume = volume
        self.disk = disk
        self._proxy = proxy

    def mount(self, name: str, size: str = "256MiB") -> Path:
        words = ("--cache-dir", str(self.disk), "--cache-size", size, "--free-space-ratio", "0")
        return self.volume.mount(name, *words)

    def gets(self) -> list[str]:
        """The ranges that were asked for so far."""
        return [
            value
            for request in self._proxy.requests()
            for name, value in request.headers
            if request.method == "GET" and name.lower() == "range"
        ]


@pytest.fixture
def cached(
    volume: Volume, ceph: CephCluster, monkeypatch: pytest.MonkeyPatch, source: Tree
) -> Iterator[Cached]:
    assert source.url.startswith("s3://")  # which is open past the proxy
    volume.expected = re.compile("cache disk")  # that answers late beside other load
    with HttpProxy(ceph.s3_port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield Cached(volume, proxy, volume.folder / "ssd")


def number(root: Path, name: str) -> float:
    """One of `.stats`."""
    for line in (root / ".stats").read_text().splitlines():
        if line.startswith(name):
            return float(line.split()[-1])
    raise KeyError(name)


def settle(root: Path) -> None:
    """Until what was fetched is on its disk."""
    wait_until(lambda: number(root, "slicefs_disk_cache_queue_bytes") == 0)


def is_settled(client: Client) -> bool:
    """The same of a client."""
    disks = client.connection().client.disk_cache
    return disks is not None and disks.numbers()["disk_cache_queue_bytes"] == 0


def pread(path: Path, size: int, *places: int) -> list[bytes]:
    """Reads of one handle that are far from each other: the kernel does not read ahead."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        return [os.pread(file.fileno(), size, place) for place in places]


def forget_pages(path: Path) -> None:
    """Of one file: the next read asks the mount."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(*words: str | Path) -> Any:
    """The summary of a warmup."""
    return json.loads(run("warmup", "--json", *words).splitlines()[-1])


def run_badly(*words: str | Path) -> str:
    """What a command says that fails."""
    done = slicefs(*words)
    assert done.code == 1, done
    return done.out + done.err


def test_the_second_epoch_asks_the_bucket_for_nothing(cached: Cached, source: Tree) -> None:
    one = cached.mount("one")
    attach(source.url, str(one / "data"))
    assert found(one / "data") == OBJECTS
    settle(one)
    asked = len(cached.gets())
    assert asked >= 3 + len(OBJECTS) - 2  # blocks of `big`, and small files but the empty one
    forget_pages(one / "data/big")
    assert (one / "data/big").read_bytes() == BIG
    two = cached.mount("two")  # another process, with nothing in memory
    assert found(two / "data") == OBJECTS
    assert pread(two / "data/big", 4 * KIB, 8_900_000) == [BIG[8_900_000:8_904_096]]
    assert len(cached.gets()) == asked
    assert number(two, "slicefs_disk_cache_hits_total") > 0


def test_reads_somewhere_fetch_little_once(cached: Cached, source: Tree) -> None:
    source.write_atomic("long", (LONG,))
    one = cached.mount("one")
    attach(source.url, str(one / "data"))
    places = [35 * MIB, 12 * MIB + 77, 24 * MIB - 100]
    wanted = [LONG[place : place + 4 * KIB] for place in places]
    assert pread(one / "data/long", 4 * KIB, *places) == wanted
    settle(one)
    asked = cached.gets()
    assert len(set(asked)) == 4  # the last one lies in two parts
    for line in asked:
        begin, end = map(int, re.findall(r"\d+", line))
        assert end + 1 - begin <= 256 * KIB
    two = cached.mount("two")
    assert pread(two / "data/long", 4 * KIB, *places) == wanted
    assert cached.gets() == asked


def test_the_end_of_a_large_file_is_fetched_once(cached: Cached, source: Tree) -> None:
    """Its last block is hardly larger than a part: archives have their tables there."""
    data = LONG[: 4 * MIB + 500 * KIB]
    source.write_atomic("archive", (data,))
    one = cached.mount("one")
    attach(source.url, str(one / "data"))
    places = [4 * MIB + each * KIB for each in (480, 12, 290, 100, 404)]
    wanted = [data[place : place + 4 * KIB] for place in places]
    assert pread(one / "data/archive", 4 * KIB, *places) == wanted
    assert len(cached.gets()) == 1


def test_damage_on_the_disk_is_noticed_and_fetched_again(cached: Cached, source: Tree) -> None:
    one = cached.mount("one")
    attach(source.url, str(one / "data"))
    assert (one / "data/big").read_bytes() == BIG
    settle(one)
    asked = len(cached.gets())
    flipped = cache_files(cached.disk)
    assert len(flipped) == 3
    for path in flipped:
        data = bytearray(path.read_bytes())
        data[-1000] ^= 1
        path.write_bytes(data)
    two = cached.mount("two")
    assert (two / "data/big").read_bytes() == BIG
    assert len(cached.gets()) > asked
    assert number(two, "slicefs_disk_cache_bad_total") >= 1


def test_a_changed_object_is_shown_as_it_was_while_it_is_cached(
    cached: Cached, source: Tree
) -> None:
    one, two = cached.mount("one"), cached.mount("two")
    attach(source.url, str(one / "data"))
    assert (one / "data/big").read_bytes() == BIG
    settle(one)
    source.write_atomic("big", (BIG[::-1],))  # as long as it was
    asked = len(cached.gets())
    assert (two / "data/big").read_bytes() == BIG
    assert len(cached.gets()) == asked
    with (two / "data/big").open("rb", buffering=0) as held:
        assert held.read(10) == BIG[:10]
        warm("--evict", "--memory", "--page-cache", two / "data/big")
        assert code_of(lambda: os.pread(held.fileno(), 10, 5 * MIB)) == errno.ESTALE
    assert code_of((two / "data/big").read_bytes) == errno.ESTALE
    attach(source.url, str(two / "data"))
    for root in (one, two):
        assert (root / "data/big").read_bytes() == BIG[::-1]


def test_the_cache_keeps_its_size(cached: Cached, source: Tree) -> None:
    source.write_atomic("long", (LONG,))
    one = cached.mount("one", "16MiB")
    attach(source.url, str(one / "data"))
    for _ in range(2):
        assert (one / "data/long").read_bytes() == LONG
        forget_pages(one / "data/long")
        settle(one)
        assert used_bytes(cached.disk) <= 16 * MIB
    assert number(one, "slicefs_disk_cache_evictions_total") > 0


def test_warmup_fills_attached_files(cached: Cached, source: Tree) -> None:
    source.write_atomic("long", (LONG + LONG[: 30 * MIB],))  # two parts of the command
    one = cached.mount("one")
    attach(source.url, str(one / "data"))
    summary = warm(one / "data")
    total = TOTAL + 70 * MIB
    assert (summary["fetched"], summary["failed"]) == (total, 0)
    asked = len(cached.gets())
    assert asked >= 18 + 3 + len(OBJECTS) - 2
    assert warm(one / "data")["there"] == total
    shown = warm("--check", one / "data")
    assert (shown["data"], shown["cached"]) == (total, total)
    assert (one / "data/long").read_bytes() == LONG + LONG[: 30 * MIB]
    assert found(cached.mount("two") / "data")["big"] == BIG
    assert len(cached.gets()) == asked
    source.write_atomic("a-b", (b"y",))
    assert warm("--evict", one / "data")["evicted"] > total
    assert cache_files(cached.disk) == []
    text = run_badly("warmup", one / "data/a-b")
    assert "its object has changed: run `slicefs attach` again" in text


def test_what_is_not_on_cache_disks(
    cached: Cached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = tmp_path / "host"
    host.mkdir()
    (host / "file").write_bytes(BIG)
    monkeypatch.setenv(ALLOWED_ENV, str(host))
    one = cached.mount("one")
    attach(f"file://{host}", str(one / "data"))
    assert (one / "data/file").read_bytes() == BIG
    settle(one)
    assert cache_files(cached.disk) == []
    assert warm(one / "data").get("fetched", 0) == 0


def test_warmup_goes_on_behind_what_it_can_not_read(
    cached: Cached, tmp_path: Path, source: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = tmp_path / "host"
    host.mkdir()
    (host / "file").write_bytes(BIG)
    both = cached.mount("both")
    attach(source.url, str(both / "b"))
    with monkeypatch.context() as allowed:
        allowed.setenv(ALLOWED_ENV, str(host))
        attach(f"file://{host}", f"{cached.volume.meta}#a")
    (both / "c").write_bytes(BIG[: 1 * MIB])
    with monkeypatch.context() as strange:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            strange.delenv(name)
        strange.setenv("AWS_EC2_METADATA_DISABLED", "true")
        strange.setenv("HOME", str(tmp_path))
        one = cached.mount("one")
        for counted, words in (
            ("fetched", (one,)),
            ("cached", ("--check", one)),
            ("evicted", ("--evict", one)),
        ):
            text = run_badly("warmup", "--json", *words)
            assert "b/big: this mount can't read its bucket" in text
            assert "a/file: " not in text
            summary = json.loads([line for line in text.splitlines() if line[0] == "{"][-1])
            assert summary["failed"] == sum(map(bool, OBJECTS.values()))
            assert 1 * MIB <= summary[counted] < 1 * MIB + KIB  # a head is evicted, too


def test_a_bucket_that_refuses_is_told_from_the_store(
    source: Tree, volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdata.attached.bucket.TIMEOUT_S", 0.1)
    attach(source.url, f"{volume.meta}#set")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with Client(volume.meta, uid=0, gid=0, cache_dir=str(tmp_path / "ssd")) as client:
        answer = json.loads(client.getxattr("set/big", f"user.slicefs.warm.disk.0.{len(BIG)}"))
    assert answer == {"next": None, "failed": len(BIG), "why": "bucket"}


def test_an_encrypted_volume_has_none_on_disks(
    source: Tree, volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLICEFS_PASSPHRASE", "a phrase that is long enough")
    sealed = f"sqlite://{tmp_path}/sealed.db"
    run("format", sealed, "sealed", "--bucket", tmp_path / "objects", "--encrypt-passphrase")
    for url, kept in ((volume.meta, 3), (sealed, 0)):
        disk = tmp_path / f"ssd{kept}"
        attach(source.url, f"{url}#set")
        with Client(url, uid=0, gid=0, cache_dir=str(disk)) as client:
            with client.open("set/big") as file:
                assert file.read() == BIG
            wait_until(partial(is_settled, client))
        assert len(cache_files(disk)) == kept

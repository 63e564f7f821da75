"""A1 and X2: batches of attached files open none of them."""

from __future__ import annotations

import errno

import pytest

from slicefs.client.client import Client
from slicefs.lifecycle.attach import attach
from slicefs.stores.tree import Tree
from tests.posix.volumes import Volume
from tests.slicefs.attached_objects import BIG, OBJECTS, code_of
from tests.slicefs.test_bulk import counted, on_redis
from tests.support.ceph_cluster import CephCluster
from tests.support.http_proxy import HttpProxy

__all__ = ["on_redis"]

SMALL = {f"n/{number:03}": b"%d" % number * 50 for number in range(100)}


def test_a_batch_asks_for_what_is_shown_once(
    source: Tree, on_redis: Volume, ceph: CephCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, data in SMALL.items():
        source.write_atomic(path, (data,))
    with HttpProxy(ceph.s3_port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        attach(source.url, f"{on_redis.meta}#set")
        names = [f"set/{path}" for path in SMALL]
        with Client(on_redis.meta, uid=0, gid=0) as fs:
            for _ in range(2):  # what a first look-up brings is not vouched for
                fs.listdir("set/n")
                fs.stat("set/n")
            calls = counted(fs, monkeypatch)
            assert [bytes(each) for each in fs.read_many(names)] == list(SMALL.values())
            assert calls == ["read_many"] * 2  # inodes, and what they show
            asked = len(proxy.requests())
            assert [bytes(each) for each in fs.read_many(names)] == list(SMALL.values())
            assert calls == ["read_many"] * 2
            assert len(proxy.requests()) == asked  # all is in memory


def test_batches_are_as_one_by_one(source: Tree, volume: Volume, fs: Client) -> None:
    attach(source.url, f"{volume.meta}#set")
    with fs.open("own", "wb") as file:
        file.write(b"own")
    fs.chmod("set/a-b", 0o644)
    with fs.open("set/a-b", "r+b") as file:
        file.write(b"written")
    expected = {f"set/{path}": data for path, data in OBJECTS.items()}
    expected |= {"own": b"own", "set/a-b": b"written"}
    with Client(volume.meta, uid=0, gid=0) as other:
        found = other.read_many(list(expected))
        assert [bytes(each) for each in found] == list(expected.values())
        ranges = [
            ("set/big", at, at + size) for at in (0, 4_194_300, 8_900_000) for size in (9, 70_000)
        ]
        assert [bytes(each) for each in other.read_many(ranges)] == [
            BIG[begin:end] for _, begin, end in ranges
        ]
    source.write_atomic("a/one", (b"2" * 1000,))
    with Client(volume.meta, uid=0, gid=0) as third:
        assert code_of(lambda: third.read_many(list(expected))) == errno.ESTALE
    with Client(volume.meta, uid=1000, gid=1000) as stranger:
        fs.chmod("set/big", 0o400)
        assert code_of(lambda: stranger.read_many(["set/big"])) == errno.EACCES

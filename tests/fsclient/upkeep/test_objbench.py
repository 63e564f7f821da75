"""O5: what `slicefs objbench` says of stores that are right, and of some that are not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from fsclient.upkeep.objbench import Sizes, functional, measure, tidied
from fsdata.objects.contract import Buffer, ObjectStore
from fsdata.objects.mem import MemObjects
from fsmeta.errors import Unavailable
from fsmeta.runtime import SystemRuntime
from tests.faults.program import SLICEFS, slicefs
from tests.fsdata.stores import fresh_name, rados_namespace, s3_bucket
from tests.support.ceph_cluster import ACCESS_KEY, SECRET_KEY, CephCluster

RUNTIME = SystemRuntime()
SMALL = Sizes(blocks=3, smalls=5)


def _require_right(store: ObjectStore) -> None:
    with tidied(store):
        outcomes = list(functional(store))
        assert [each.what for each in outcomes if not each.right] == []
        assert len(outcomes) >= 12
        rows = [speed.what for speed in measure(store, RUNTIME, SMALL)]
    wanted = ["put block", "get block", "put small", "get small", "head", "list", "delete"]
    assert rows == wanted
    assert list(store.list("")) == []


def test_memory() -> None:
    _require_right(MemObjects(RUNTIME))


def test_radosgw(ceph: CephCluster, tmp_path: Path) -> None:
    store = s3_bucket(ceph, tmp_path)
    _require_right(store)
    store.close()


def test_rados(ceph: CephCluster) -> None:
    store = rados_namespace(ceph)
    _require_right(store)
    store.close()


class Short(MemObjects):
    """Ranges end one byte early."""

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        found = super().get(key, begin, end)
        return found[:-1] if end is not None else found


class Small(MemObjects):
    """Refuses what is larger than 32 MiB."""

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        if sum(map(len, pieces)) > 32 << 20:
            raise Unavailable("EntityTooLarge")
        super().put(key, pieces)


@pytest.mark.parametrize(
    ("store", "wrong"),
    [
        (Short(RUNTIME), {"get ranges", "get past the end"}),
        (Small(RUNTIME), {"an object of 64 MiB"}),
    ],
    ids=["short", "small"],
)
def test_what_is_wrong_is_named(store: ObjectStore, wrong: set[str]) -> None:
    outcomes = list(functional(store))
    assert {each.what for each in outcomes if not each.right} == wrong
    assert all(bool(each.why) != each.right for each in outcomes)


def test_the_command(tmp_path: Path) -> None:
    few = ("--blocks", "2", "--small-objects", "3", "--block-size", "64KiB")
    done = slicefs("objbench", "--bucket", tmp_path, *few)
    assert (done.code, done.err) == (0, "")
    assert "ok    delete" in done.out
    assert "put block" in done.out
    report = json.loads(slicefs("objbench", "--bucket", tmp_path, *few, "--json").out)
    assert all(each["right"] for each in report["functional"])
    assert {each["what"] for each in report["speed"]} >= {"put block", "list"}
    assert slicefs("objbench", "--bucket", tmp_path / "made" / "for it", *few).code == 0
    assert list(tmp_path.iterdir()) == []
    for words, why in (
        ((), "name the directory"),
        (("--bucket", "http://127.0.0.1:1/bucket"), "name a directory"),
        (("--bucket", str(tmp_path), "--threads", "0"), "0"),
    ):
        done = slicefs("objbench", *words)
        assert done.code != 0
        assert why in done.err
        assert len(done.err.splitlines()) == 1


def test_the_command_on_s3(ceph: CephCluster) -> None:
    """A bucket that was not there is not there afterwards, and keys are not shown."""
    bucket = f"{ceph.endpoint}/{fresh_name()}"
    program = ("env", f"ACCESS_KEY={ACCESS_KEY}", f"SECRET_KEY={SECRET_KEY}", SLICEFS)
    words = ("objbench", "--storage", "s3", "--bucket", bucket, "--blocks", "2")
    done = slicefs(*words, program=program)
    assert (done.code, done.err) == (0, "")
    assert "get small" in done.out
    assert SECRET_KEY not in done.out

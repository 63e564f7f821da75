"""R1: `slicefs destroy` removes one volume, all of it, and nothing of any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from fsmeta.admin.erase import is_own_row
from fsmeta.schema import keys
from tests.faults.places import s3_place
from tests.faults.program import Volume, needs_mounts, slicefs, succeed
from tests.faults.redis_server import DurableRedis
from tests.fsclient.cli.trees import snapshot
from tests.support.ceph_cluster import CephCluster


def _refused(volume: Volume, *words: str | Path) -> str:
    """What a run that changes nothing says."""
    before = snapshot(volume.base / "bucket")
    done = slicefs("destroy", "--yes", *words)
    assert done.code == 1, done
    assert len(done.err.splitlines()) == 1
    assert snapshot(volume.base / "bucket") == before
    return done.err


@needs_mounts
def test_a_volume_goes_with_its_objects_and_nothing_else(embedded: Volume) -> None:
    embedded.format()
    mount = embedded.mount()
    (mount.path / "file").write_bytes(b"x" * 100_000)
    assert "1 clients have the volume in use" in _refused(embedded, embedded.meta, "testvol")
    embedded.end()
    beside = embedded.bucket / "testvol2" / "chunks" / "0" / "0" / "1_0_4"
    beside.parent.mkdir(parents=True)
    beside.write_bytes(b"look")
    strange = embedded.bucket / "testvol" / "chunks" / "notes.txt"
    strange.write_bytes(b"mine")
    assert "is named 'testvol', not 'other'" in _refused(embedded, embedded.meta, "other")
    wrong = _refused(embedded, embedded.meta, "testvol", "--uuid", "0")
    assert "correct the uuid" in wrong
    told = json.loads(succeed("destroy", "-n", embedded.meta, "testvol", "--json"))
    assert (told["objects"], told["kept"], told["dry_run"]) == (1, 1, True)
    assert slicefs("destroy", embedded.meta, "testvol").err == (
        "slicefs: there is no terminal to ask at: add --yes\n"
    )
    said = succeed("destroy", "--yes", embedded.meta, "testvol")
    assert "1 objects that SliceFS did not write are left there" in said
    assert beside.read_bytes() == b"look"
    assert strange.read_bytes() == b"mine"
    assert embedded.objects() == [strange]
    assert not list(embedded.base.glob("meta.db*"))
    assert "there is no metadata file" in slicefs("status", embedded.meta).err


def test_a_copy_of_metadata_leaves_the_originals_objects(embedded: Volume, tmp_path: Path) -> None:
    """Neither a loaded dump, nor an old copy of the file, nor one whose place changed hands."""
    embedded.format()
    old = tmp_path / "old.db"
    succeed("dump", embedded.meta, tmp_path / "dump")
    succeed("load", f"sqlite://{tmp_path}/loaded.db", tmp_path / "dump")
    shutil.copy(embedded.base / "meta.db", old)
    block = embedded.bucket / "testvol" / "chunks" / "0" / "0" / "7_0_4"
    block.parent.mkdir(parents=True)
    block.write_bytes(b"live")
    said = _refused(embedded, f"sqlite://{tmp_path}/loaded.db", "testvol")
    assert "loaded from a dump or a backup" in said
    assert "--keep-objects" in said
    assert "old copy of a volume that lives on" in _refused(embedded, f"sqlite://{old}", "testvol")
    owner = embedded.bucket / "testvol" / "volume"
    uuid = owner.read_bytes()
    owner.write_bytes(b"11111111-1111-1111-1111-111111111111")
    assert "belongs to volume 11111111" in _refused(embedded, embedded.meta, "testvol", "--sole")
    owner.write_bytes(uuid)
    succeed("destroy", "--yes", "--keep-objects", f"sqlite://{tmp_path}/loaded.db", "testvol")
    assert block.read_bytes() == b"live"
    assert owner.read_bytes() == uuid
    succeed("destroy", "--yes", "--sole", embedded.meta, "testvol")
    assert not (embedded.bucket / "testvol").exists()


def test_keys_of_other_programs_stay_in_redis(served: Volume, durable_redis: DurableRedis) -> None:
    served.format()
    durable_redis.ask("HSET", "idle-user", "a", "1")
    durable_redis.ask("SET", "other:9", "1")
    succeed("destroy", "--yes", served.meta, "testvol")
    assert sorted(durable_redis.ask("KEYS", "*")) == [b"idle-user", b"other:9"]
    served.format()


def test_an_s3_prefix_that_looks_alike_stays(base: Path, ceph: CephCluster) -> None:
    place = s3_place(base, ceph.endpoint)
    first, second = (f"sqlite://{base}/{name}.db" for name in ("first", "second"))
    succeed("format", first, "vol", *place)
    succeed("format", second, "vol-2", *place)
    succeed("destroy", "--yes", first, "vol")
    succeed("fsck", second)
    succeed("format", first, "vol", *place)


def test_only_rows_of_a_volume_are_its_own() -> None:
    for row in (keys.inode_row(1), keys.dir_row((1 << 61) + 5), keys.session_row(1 << 30), b"F"):
        assert is_own_row(row)
    for row in (b"idle-user", b"i", b"session:9", b"directory", b"x", b"A1234", b"l00000000"):
        assert not is_own_row(row)

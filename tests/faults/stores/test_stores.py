"""The real program on S3 and on RADOS: mounts, secrets, places that are wrong, limits."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fsdata.objects.s3.s3 import S3Objects
from fsmeta.runtime import SystemRuntime
from tests.faults.places import rados_place, s3_place
from tests.faults.program import Volume, needs_mounts, slicefs, succeed
from tests.fsdata.stores import credentials_file, fresh_name, s3_settings
from tests.support.ceph_cluster import ACCESS_KEY, SECRET_KEY, CephCluster

pytestmark = needs_mounts

_AT_FORK = """
import os, sys
from contextlib import suppress
from pathlib import Path
def note():
    found = []
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{{each}}"))
    sockets = sum(each.startswith(("socket:", "anon_inode:")) for each in found)
    with open({file!r}, "a") as file:
        print(len(os.listdir("/proc/self/task")), sockets, file=file)
os.register_at_fork(before=note)
from fsclient.cli.main import main
sys.argv[0] = "slicefs"
main()
"""


@pytest.fixture(params=["s3", "s3 spread", "rados", "rados hashed"])
def volume(request: pytest.FixtureRequest, base: Path, ceph: CephCluster) -> Iterator[Volume]:
    """A formatted volume on each kind of store."""
    places: dict[str, tuple[Sequence[str], Sequence[str]]] = {
        "s3": (s3_place(base, ceph.endpoint), ()),
        "s3 spread": (
            s3_place(base, ceph.endpoint, f"{fresh_name()}-%d"),
            ("--shards", "3", "--hash-prefix", "--compress", "lz4"),
        ),
        "rados": (rados_place(ceph), ("--compress", "zstd", "--block-size", "256KiB")),
        "rados hashed": (rados_place(ceph), ("--hash-prefix",)),
    }
    place, options = places[request.param]
    made = Volume(base, place=place)
    made.format(*options)
    yield made
    made.clean_up()


def fill(path: Path) -> dict[str, bytes]:
    """Small, large, sparse and overwritten files; what they hold."""
    content = {f"small/{n}": os.urandom(n * 100) for n in range(30)}
    content["large"] = os.urandom(1 << 20) * 9 + b"end"
    content["text"] = b"the same again and again " * 100_000
    (path / "small").mkdir()
    for name, data in content.items():
        (path / name).write_bytes(data)
    with (path / "large").open("r+b") as file:
        file.seek(5_000_000)
        file.write(b"overwritten")
    changed = bytearray(content["large"])
    changed[5_000_000:5_000_011] = b"overwritten"
    content["large"] = bytes(changed)
    return content


def test_real_work(volume: Volume) -> None:
    mount = volume.mount()
    content = fill(mount.path)
    for name, data in content.items():
        assert (mount.path / name).read_bytes() == data
    mount.umount()
    mount = volume.mount()
    for name, data in content.items():
        assert (mount.path / name).read_bytes() == data
    with (mount.path / "large").open("rb") as file:
        assert os.pread(file.fileno(), 100, 7_000_000) == content["large"][7_000_000:][:100]
    assert mount.numbers()["object_get_errors_total"] == 0
    (mount.path / "large").unlink()
    mount.umount()
    report = volume.fsck("--data")
    assert report["leaked_objects"] == 0
    volume.end()


@pytest.mark.parametrize("volume", ["s3", "rados"], indirect=True)
def test_o1_connections_are_made_after_the_fork(volume: Volume) -> None:
    """`mount -d` forks, which neither librados nor any thread survives: there are none by then."""
    noted = volume.base / "noted"
    program = (sys.executable, "-c", _AT_FORK.format(file=str(noted)))
    mount = volume.mount(program=program)
    assert noted.read_text() == "1 0\n", "threads, and sockets"
    (mount.path / "file").write_bytes(b"data")
    assert (mount.path / "file").read_bytes() == b"data"
    volume.end()


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("storage-class=NOPE", "InvalidArgument (see storage-class, sse and sse-kms-key of"),
        ("sse=aws:kms", "InvalidRequest (see storage-class, sse and sse-kms-key of"),
        ("sse=", "--store-option sse: it is empty: give a value"),
    ],
)
def test_o1_what_the_store_does_not_take_is_named(
    base: Path, ceph: CephCluster, option: str, expected: str
) -> None:
    """It said: check the address, the permissions and the free space."""
    volume = Volume(base, place=s3_place(base, ceph.endpoint))
    done = slicefs("format", volume.meta, "testvol", *volume.place, "--store-option", option)
    assert (done.code, done.out) == (1, ""), done
    assert expected in done.err
    assert not (base / "meta.db").exists()


def test_secrets_stay_secret(base: Path, ceph: CephCluster) -> None:
    """Neither the metadata, nor the log, nor what anybody can look at has the key."""
    volume = Volume(base, place=s3_place(base, ceph.endpoint))
    try:
        volume.format()
        mount = volume.mount("--debug")
        (mount.path / "file").write_bytes(b"data")
        shown = [
            Path(f"/proc/{mount.pid}/cmdline").read_text(),
            (mount.path / ".config").read_text(),
            (mount.path / ".stats").read_text(),
            json.dumps(volume.status()),
            succeed("info", mount.path / "file"),
        ]
        mount.umount()
        shown.append(volume.log.read_text())
        shown += [path.read_text("latin-1") for path in base.glob("meta.db*")]
        assert len(shown) > 6
        assert not [text for text in shown if SECRET_KEY in text]
        volume.end()
    finally:
        volume.clean_up()


def test_keys_in_the_environment(
    base: Path, ceph: CephCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCESS_KEY", ACCESS_KEY)
    monkeypatch.setenv("SECRET_KEY", SECRET_KEY)
    place = ("--storage", "s3", "--bucket", f"{ceph.endpoint}/{fresh_name()}")
    volume = Volume(base, place=place)
    try:
        volume.format()
        mount = volume.mount()
        (mount.path / "file").write_bytes(b"data")
        mount.umount()
        monkeypatch.delenv("SECRET_KEY")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HOME", str(base))
        done = slicefs("mount", volume.meta, base / "mnt")
        assert done.code == 1
        assert "there are no S3 credentials" in done.err
        # a mount may have keys of its own
        keys = credentials_file(base)
        mount = volume.mount("-o", f"store-option=credentials={keys}")
        assert (mount.path / "file").read_bytes() == b"data"
        mount.umount()
    finally:
        volume.clean_up()


def test_bad_places_are_one_line_and_leave_nothing(base: Path, ceph: CephCluster) -> None:
    good = s3_place(base, ceph.endpoint)
    url = good[3]
    wrong_keys = base / "wrong"
    wrong_keys.mkdir()
    credentials_file(wrong_keys, secret="wrong-secret")
    wrong = ["--store-option", f"credentials={wrong_keys}/credentials"]
    cases: list[tuple[list[str], str]] = [
        ([*good[:4], *wrong], "SignatureDoesNotMatch (the secret key is wrong)"),
        ([*good[:3], "http://127.0.0.1:1/bucket", *good[4:]], "Connection refused"),
        ([*good[:3], f"{ceph.endpoint}/UPPER_case!", *good[4:]], "name it, as http(s)://HOST/BUCK"),
        ([*good[:3], f"http://a:{SECRET_KEY}@h/bucket", *good[4:]], "keys don't belong here"),
        ([*good, "--secret-key", SECRET_KEY], "is seen in `ps`"),
        ([*good, "--store-option", "regoin=x"], "storage s3 does not know it: use one of region"),
        ([*good, "--store-option", "checksum=md4"], "use one of crc32c, sha256, none"),
        ([*good, "--shards", "2"], "write %d where the number of the shard goes"),
        (["--storage", "minio", "--bucket", url], "use one of file, s3, rados, mem"),
        (["--bucket", url], "name a directory, or add --storage s3"),
        ([*rados_place(ceph)[:3], "absent/x", *rados_place(ceph)[4:]], "there is no pool 'absent'"),
        ([*rados_place(ceph)[:4], "--store-option", "conf=/nowhere"], "can't use /nowhere"),
        ([*rados_place(ceph), "--store-option", "user=nobody"], "does not know client.nobody"),
    ]
    for words, message in cases:
        done = slicefs("format", f"sqlite://{base}/new.db", "testvol", *words)
        assert done.code in (1, 2), done
        assert message in done.err, done
        assert done.err.count("\n") == 1, done
        assert SECRET_KEY not in done.err
        assert not (base / "new.db").exists()
    store = S3Objects(SystemRuntime(), s3_settings(ceph.endpoint, base, url.rpartition("/")[2]))
    assert not store.has_bucket()
    store.close()


def test_format_undoes_what_it_did(base: Path, ceph: CephCluster) -> None:
    """The second of two buckets is taken: the first, just made, goes; the second stays."""
    name = fresh_name()
    taken = S3Objects(SystemRuntime(), s3_settings(ceph.endpoint, base, f"{name}-1"))
    taken.make_bucket()
    taken.put("testvol/something", (b"v",))
    place = s3_place(base, ceph.endpoint, f"{name}-%d")
    meta = f"sqlite://{base}/new.db"
    done = slicefs("format", meta, "testvol", *place, "--shards", "2")
    assert done.code == 1
    assert "holds data of another volume" in done.err
    first = S3Objects(SystemRuntime(), s3_settings(ceph.endpoint, base, f"{name}-0"))
    assert not first.has_bucket()
    assert taken.get("testvol/something") == b"v"
    taken.delete("testvol/something")
    out = succeed("format", "--dry-run", meta, "testvol", *place, "--shards", "2")
    assert "would make volume testvol" in out
    assert not first.has_bucket()
    succeed("format", meta, "testvol", *place, "--shards", "2")
    assert first.has_bucket()
    again = slicefs("format", f"sqlite://{base}/other.db", "testvol", *place, "--shards", "2")
    assert "holds data of another volume" in again.err
    first.close()
    taken.close()


def test_limits_of_a_mount(base: Path, ceph: CephCluster) -> None:
    """8 MiB at 4 MiB a second: the first block goes at once, the next a second later."""
    volume = Volume(base, place=s3_place(base, ceph.endpoint))
    try:
        volume.format()
        mount = volume.mount("-o", "upload-limit=4MiB,download-limit=4MiB")
        begun = time.monotonic()
        (mount.path / "file").write_bytes(os.urandom(12 << 20))
        assert time.monotonic() - begun > 1.8
        mount.umount()
        mount = volume.mount("--download-limit", "4MiB")
        begun = time.monotonic()
        assert len((mount.path / "file").read_bytes()) == 12 << 20
        assert time.monotonic() - begun > 1.8
        volume.end()
    finally:
        volume.clean_up()


def test_another_volume_s_bucket_is_refused(base: Path, ceph: CephCluster) -> None:
    """The metadata of one volume with the objects of another: nothing is mixed up."""
    volume = Volume(base, place=s3_place(base, ceph.endpoint))
    try:
        volume.format()
        bucket = volume.place[3].rpartition("/")[2]
        store = S3Objects(SystemRuntime(), s3_settings(ceph.endpoint, base, bucket))
        store.put("testvol/volume", (b"somebody else's",))
        store.close()
        (base / "mnt").mkdir()
        done = slicefs("mount", volume.meta, base / "mnt")
        assert done.code == 1
        assert "belongs to volume somebody else's" in done.err
    finally:
        volume.clean_up()

"""R2: `slicefs sync` is interrupted and goes on, keeps to a bandwidth, and copies RADOS to S3."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsclient.sync import bucket as bucket_module
from fsclient.sync.engine import Sync, SyncRequest
from fsclient.sync.items import Content, Item, PathFilter
from fsclient.sync.local import LocalPlace
from fsclient.sync.places import Opener, parse
from fsclient.volume.object_options import parse_options
from fsdata.objects.s3 import multipart
from fsdata.objects.s3.multipart import Multipart
from fsdata.objects.s3.s3 import S3Objects
from fsmeta.errors import Unavailable
from fsmeta.runtime import SystemRuntime
from tests.faults.places import rados_place
from tests.faults.program import Volume, slicefs, succeed
from tests.fsclient.cli.trees import snapshot
from tests.fsdata.stores import credentials_file, fresh_name, s3_settings
from tests.support.ceph_cluster import CephCluster
from tests.support.http_proxy import Fault, HttpProxy, Kind as FaultKind, Request
from tests.support.waiting import wait_until

SMALL_PARTS = """
import sys
from fsclient.cli import main
from fsclient.sync import bucket, engine
from fsdata.objects.s3 import multipart
bucket.LARGE_BYTES, multipart.PART_BYTES, engine.STOP_S = 6 << 20, 5 << 20, 1.0
sys.exit(main.run(["sync", *sys.argv[1:]]))
"""
LARGE_BYTES = (29 << 20) + 5  # four parts, because a part is made of pieces of 4 MiB


def _begin(*words: str | Path) -> subprocess.Popen[str]:
    """A run with small parts, which Ctrl-C reaches as from a terminal."""
    return subprocess.Popen(
        [sys.executable, "-c", SMALL_PARTS, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def _parts(requests: list[Request]) -> list[str]:
    """The numbers of the parts that were sent."""
    sent = [each.target for each in requests if each.method == "PUT"]
    return sorted(each.split("partNumber=")[1][0] for each in sent if "partNumber=" in each)


def test_ctrl_c_in_the_middle_of_an_upload(ceph: CephCluster, tmp_path: Path) -> None:
    """One line, exit code 130, no object; the next run sends the parts that are missing."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "first").write_bytes(b"first")
    (source / "large").write_bytes(os.urandom(LARGE_BYTES))
    bucket = fresh_name()
    ceph.make_bucket(bucket)
    option = ("--store-option", f"credentials={credentials_file(tmp_path)}")
    objects = S3Objects(SystemRuntime(), s3_settings(ceph.endpoint, tmp_path, bucket))
    uploads = Multipart(objects, lambda request: request())

    def stored() -> list[int]:
        found = uploads.find("t/large")
        return [] if found is None else sorted(found.parts)

    def is_late(asked: Request) -> bool:
        return "partNumber=3" in asked.target or "partNumber=4" in asked.target

    with HttpProxy(ceph.s3_port) as proxy:
        proxy.add(Fault(FaultKind.STUCK, 100, "PUT", when=is_late))
        words = (f"{source}/", f"{proxy.endpoint}/{bucket}/t/", *option)
        run = _begin(*words)
        wait_until(lambda: stored() == [1, 2] and objects.head("t/first") is not None)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
        assert (run.returncode, out) == (130, ""), err
        assert err == "\nslicefs: interrupted: 1 copied; the same command goes on from there\n"
        assert objects.head("t/large") is None
        proxy.heal()
        before = len(proxy.requests())
        run = _begin(*words, "--json")
        out, err = run.communicate(timeout=60)
        told = json.loads(out)
        assert (run.returncode, told["copied"], told["same"], err) == (0, 1, 1, "")
        assert _parts(proxy.requests()[before:]) == ["3", "4"]
        assert objects.get("t/large") == (source / "large").read_bytes()
        assert uploads.find("t/large") is None
    objects.close()


def test_parts_of_other_bytes_are_sent_again(
    ceph: CephCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload broke off; then the file has other bytes in its second part, and fewer of them."""
    monkeypatch.setattr(bucket_module, "LARGE_BYTES", 6 << 20)
    monkeypatch.setattr(multipart, "PART_BYTES", 5 << 20)
    source = tmp_path / "source"
    source.mkdir()
    data = os.urandom(LARGE_BYTES)
    (source / "large +é").write_bytes(data)
    bucket = fresh_name()
    ceph.make_bucket(bucket)
    options = parse_options("s3", (f"credentials={credentials_file(tmp_path)}",))

    class Breaking(LocalPlace):
        """Its last piece does not come."""

        def read(self, item: Item) -> Content:
            content = super().read(item)
            return content._replace(pieces=self._some(content.pieces))

        def _some(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
            for _ in range(7):
                yield next(pieces)
            raise Unavailable("the source is away")

    runtime = SystemRuntime()
    with HttpProxy(ceph.s3_port) as proxy:
        url = f"{proxy.endpoint}/{bucket}/t/"
        for side, sent, failed in ((Breaking, ["1", "2", "3"], 1), (LocalPlace, ["2", "3"], 0)):
            pair = Opener(options, runtime, 60.0).open(parse(str(source)), parse(url), False)
            before, ours = len(proxy.requests()), side(str(source), runtime)
            done = Sync(ours, pair.target, SyncRequest(PathFilter()), runtime).run()
            assert done.failed == failed, done
            assert _parts(proxy.requests()[before:]) == sent
            if failed:
                assert list(pair.target.list()) == []
                data = data[: 9 << 20] + b"other" + data[(9 << 20) + 5 : 20 << 20]
                (source / "large +é").write_bytes(data)
            for each in (ours, *pair):
                each.close()
        objects = S3Objects(runtime, s3_settings(ceph.endpoint, tmp_path, bucket))
        assert objects.get("t/source/large +é") == data
        objects.close()


def test_bwlimit_is_kept(tmp_path: Path) -> None:
    """24 MiB at 16 MiB/s: the last 4 MiB are let through after the time of 20 MiB."""
    source, size, limit = tmp_path / "source", 24 << 20, 16 << 20
    source.mkdir()
    for number in range(3):
        (source / str(number)).write_bytes(bytes(size // 3))
    begin = time.monotonic()
    succeed("sync", f"{source}/", f"{tmp_path}/target/", "--bwlimit", "16MiB")
    assert time.monotonic() - begin >= (size - (4 << 20)) / limit
    assert [*snapshot(tmp_path / "target").values()] == [*snapshot(source).values()]


def test_ctrl_c_while_the_limit_holds_a_copy_back(tmp_path: Path) -> None:
    """No temporary file stays, and the wait for bandwidth ends."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "large").write_bytes(bytes(20 << 20))
    run = _begin(f"{source}/", target, "--bwlimit", "64KiB")  # 64 s for a piece
    wait_until(lambda: target.is_dir() and any(each.stat().st_size for each in target.iterdir()))
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert err == "\nslicefs: interrupted: 0 copied; the same command goes on from there\n"
    assert list(target.iterdir()) == []


def test_a_volume_on_rados_to_s3_and_back(ceph: CephCluster, base: Path, tmp_path: Path) -> None:
    """Without a mount; what was copied already is passed over, both ways."""
    volume = Volume(base, place=rados_place(ceph))
    volume.format()
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    (source / "d" / "large").write_bytes(os.urandom((9 << 20) + 1))
    (source / "small").write_bytes(b"small")
    (source / "link").symlink_to("small")
    bucket = fresh_name()
    ceph.make_bucket(bucket)
    url = f"{ceph.endpoint}/{bucket}/t/"
    s3 = ("--links", "--store-option", f"credentials={credentials_file(tmp_path)}")

    def copied(*words: str | Path) -> int:
        told = json.loads(succeed("sync", *words, "--json"))
        assert told["failed"] == 0
        return int(told["copied"])

    assert copied(f"{source}/", f"{volume.meta}#a") == 3
    for expected in (3, 0):
        assert copied(f"{volume.meta}#a/", url, *s3) == expected
        assert copied(url, f"{volume.meta}#b", *s3) == expected
    assert copied(f"{volume.meta}#b/", tmp_path / "back") == 3
    assert [*snapshot(source).values()] == [*snapshot(tmp_path / "back").values()]
    done = slicefs("sync", f"{volume.meta}#a/", url, "--check", "checksum", *s3)
    assert "0 copied" in done.out
    volume.end()

"""R2: `slicefs sync` between directories, a mount and a real S3, and what it refuses to touch."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest

from fsclient.cli import main
from fsclient.sync import bucket as bucket_module
from fsclient.sync.engine import Sync, SyncRequest
from fsclient.sync.items import Content, Item, ItemKind, PathFilter
from fsclient.sync.local import LocalPlace
from fsclient.sync.places import Opener, parse
from fsclient.volume.object_options import parse_options
from fsdata.objects.s3 import multipart
from fsmeta.errors import Unavailable
from fsmeta.runtime import SystemRuntime
from tests.faults.program import Volume, needs_mounts, slicefs, succeed
from tests.fsclient.cli.trees import snapshot
from tests.fsdata.stores import credentials_file, fresh_name
from tests.support.ceph_cluster import CephCluster
from tests.support.http_proxy import Fault, HttpProxy, Kind as FaultKind

Capture = pytest.CaptureFixture[str]


def _sync(capsys: Capture, *words: str | Path) -> Any:
    """What a run in this process tells scripts; it must succeed."""
    code = main.run(["sync", *map(str, words), "--json"])
    said = capsys.readouterr()
    assert code == 0, said
    return json.loads(said.out)


def _failed(capsys: Capture, *words: str | Path) -> str:
    """What a run in this process complains of; its exit code must be 1."""
    code = main.run(["sync", *map(str, words)])
    said = capsys.readouterr()
    assert code == 1, said
    return said.err


def _fill(top: Path) -> None:
    (top / "a" / "empty").mkdir(parents=True)
    (top / "a" / "data").write_bytes(os.urandom(5 << 20))
    (top / "a-b").write_bytes(b"between a and a/")
    (top / "name with é").write_bytes(b"text")
    os.link(top / "a-b", top / "a" / "second")
    (top / "link").symlink_to("/nowhere")
    (top / "a" / "data").chmod(0o640)
    os.setxattr(top / "a" / "data", "user.kind", b"random")
    os.utime(top / "a" / "data", ns=(1_600_000_000_123_456_789, 1_600_000_000_123_456_789))
    (top / "a").chmod(0o750)
    os.utime(top / "a", ns=(1_500_000_000 * 10**9, 1_500_000_000 * 10**9))


@needs_mounts
def test_a_tree_comes_whole_to_a_mount(embedded: Volume, tmp_path: Path) -> None:
    """Modes, times, xattrs, hard links and symlinks; the second run has nothing to do."""
    embedded.format()
    mount = embedded.mount()
    source = tmp_path / "source"
    _fill(source)
    said = succeed("sync", source, mount.path)  # no slash: the directory itself
    assert "0 failed" in said
    target = mount.path / "source"
    assert snapshot(source).keys() == {
        path.replace(str(target), str(source)) for path in snapshot(target)
    }
    data, like = (target / "a" / "data").stat(), (source / "a" / "data").stat()
    assert (data.st_mode, data.st_mtime_ns) == (like.st_mode, like.st_mtime_ns)
    assert (target / "a" / "data").read_bytes() == (source / "a" / "data").read_bytes()
    assert os.getxattr(target / "a" / "data", "user.kind") == b"random"
    assert (target / "a" / "second").samefile(target / "a-b")
    assert os.readlink(target / "link") == "/nowhere"
    folder = (target / "a").stat()
    assert (folder.st_mode & 0o777, folder.st_mtime_ns) == (0o750, 1_500_000_000 * 10**9)
    told = json.loads(succeed("sync", f"{source}/", f"file://{target}/", "--json"))
    assert (told["copied"], told["deleted"], told["failed"]) == (0, 0, 0)
    embedded.end()


def test_slashes_filters_and_deletion(tmp_path: Path, capsys: Capture) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "d").mkdir(parents=True)
    for name in ("keep.bin", "drop.tmp", "d/x.bin", "d/y.tmp"):
        (source / name).write_bytes(name.encode())
    target.mkdir()
    (target / "old").write_bytes(b"")
    (target / "mine.tmp").write_bytes(b"")
    words = (f"{source}/", target, "--delete", "--exclude", "*.tmp")
    assert main.run(["sync", "-n", *map(str, words)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert sorted(said[:-1]) == ["copy d/x.bin", "copy keep.bin", "delete old", "make d/"]
    assert sorted(os.listdir(target)) == ["mine.tmp", "old"]
    told = _sync(capsys, *words)
    assert (told["copied"], told["deleted"]) == (2, 1)
    assert sorted(os.listdir(target)) == ["d", "keep.bin", "mine.tmp"]
    (target / "keep.bin").write_bytes(b"KEEP.bin")
    like = (source / "keep.bin").stat().st_mtime_ns
    os.utime(target / "keep.bin", ns=(like, like))
    assert _sync(capsys, *words)["copied"] == 0
    assert _sync(capsys, *words, "--check", "checksum")["copied"] == 1
    assert (target / "keep.bin").read_bytes() == b"keep.bin"
    assert _sync(capsys, source / "drop.tmp", f"{tmp_path}/new/")["copied"] == 1
    rules = PathFilter(include=("d/**",), exclude=("*", "cache/"))
    assert [rules.allow(key) for key in ("a", "d/deep/a", "cache/a")] == [False, True, False]


def test_what_would_lose_data_is_refused(tmp_path: Path, capsys: Capture) -> None:
    source, target, empty = tmp_path / "source", tmp_path / "target", tmp_path / "empty"
    for each in (source / "in", target, empty):
        each.mkdir(parents=True)
    (source / "file").write_bytes(b"source")
    (target / "kept").write_bytes(b"target")
    before = snapshot(tmp_path)
    inside = "are inside one another"
    assert inside in _failed(capsys, f"{source}/", source / "in")
    assert inside in _failed(capsys, f"{source}/in/", f"{source}/", "--delete")
    assert inside in _failed(capsys, f"{source}/", tmp_path / "target" / ".." / "source" / "new")
    assert "does not exist" in _failed(capsys, tmp_path / "none/", target, "--delete")
    assert "nothing is deleted: check SRC" in _failed(capsys, f"{empty}/", target, "--delete")
    said = _failed(capsys, source / "file", f"{target}/", "--delete")
    assert "--delete is for directories" in said
    assert snapshot(tmp_path) == before
    meta = f"sqlite://{tmp_path}/meta.db"
    succeed("format", meta, "vol", "--bucket", tmp_path / "bucket")
    for place in ("bucket", "bucket/vol", "bucket/vol/chunks"):
        assert "holds the objects of a SliceFS volume" in _failed(
            capsys, f"{source}/", tmp_path / place
        )


def test_places_of_other_programs_are_no_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """`s3:/x` and rclone's `remote:bucket` once made a directory of that name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source").mkdir()
    (tmp_path / "source/file").write_bytes(b"data")
    for place in ("s3:/bucket/x", "remote:bucket", "host:/srv/x"):
        assert f"for a directory write ./{place}" in _failed(capsys, "source/", place)
    assert os.listdir(tmp_path) == ["source"]
    assert _sync(capsys, "source/", "./a:b/")["copied"] == 1
    assert _sync(capsys, "source/", "a:b")["same"] == 1


class _Bad(LocalPlace):
    """A source whose listing is what a test says."""

    items: tuple[Item, ...] = ()
    fails = False

    def list(self) -> Iterator[Item]:
        yield from self.items
        if self.fails:
            raise Unavailable("the listing broke off")

    def read(self, item: Item) -> Content:
        return Content(iter((b"evil"[: item.size],)), {})


def test_keys_and_links_never_lead_out_of_the_destination(tmp_path: Path) -> None:
    """`..`, absolute keys, and a symlink in DST; and a listing that fails deletes nothing."""
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    target.mkdir()
    (target / "link").symlink_to(outside)
    (target / "kept").write_bytes(b"kept")
    (target / "name").symlink_to(outside / "victim")
    runtime = SystemRuntime()
    source = _Bad(str(tmp_path), runtime)
    keys = ("../up", "/absolute", "a/../../up", "good", "link/new", "name", "nul\0", "x//y")
    source.items = tuple(Item(key, ItemKind.FILE, 4, 0) for key in keys)
    source.fails = True
    place = LocalPlace(str(target), runtime)
    done = Sync(source, place, SyncRequest(PathFilter(), delete=True, threads=2), runtime).run()
    assert {each.path for each in done.failures} == {*keys, "listing"} - {"good", "name"}
    assert done.deleted == 0
    assert (target / "kept").exists()
    assert (target / "good").read_bytes() == b"evil"
    assert not (target / "name").is_symlink()  # replaced, not followed
    assert os.listdir(outside) == []
    assert sorted(os.listdir(tmp_path)) == ["outside", "target"]
    assert sorted(os.listdir(target)) == ["good", "kept", "link", "name"]
    source.close()
    place.close()


def test_to_s3_and_back_through_a_storm_of_503(
    ceph: CephCluster, tmp_path: Path, capsys: Capture
) -> None:
    """More than a page of keys; both ways; only what differs the second time."""
    source, back = tmp_path / "source", tmp_path / "back"
    (source / "many").mkdir(parents=True)
    for number in range(1100):
        (source / "many" / f"{number:04}").write_bytes(b"%d" % number)
    (source / "large").write_bytes(os.urandom(9 << 20))
    bucket = fresh_name()
    ceph.make_bucket(bucket)
    option = ("--store-option", f"credentials={credentials_file(tmp_path)}")
    with HttpProxy(ceph.s3_port) as proxy:
        proxy.add(Fault(FaultKind.STATUS, 40, "PUT"))
        proxy.add(Fault(FaultKind.STATUS, 2, "GET"))
        url = f"{proxy.endpoint}/{bucket}"
        told = _sync(capsys, f"{source}/", f"{url}/run/", "-p", "16", *option)
        assert (told["copied"], told["failed"]) == (1101, 0)
        told = _sync(capsys, f"{source}/", f"{url}/run/", *option)
        assert (told["copied"], told["same"]) == (0, 1101)
        (source / "many" / "0007").unlink()
        told = _sync(capsys, f"{source}/", f"{url}/run", "--delete", *option)
        assert told["deleted"] == 1
        told = _sync(capsys, f"{url}/run/", back, "-p", "16", "--bwlimit", "1GiB", *option)
        assert told["copied"] == 1100
        assert {*snapshot(back).values()} == {*snapshot(source).values()}
        assert "are inside one another" in _failed(capsys, f"{url}/run/", f"{url}/run/x", *option)
        meta = f"sqlite://{tmp_path}/meta.db"
        succeed("format", meta, "vol", "--storage", "s3", "--bucket", url, *option)
        for place in ("vol", "vol/chunks/1", ""):
            said = _failed(capsys, f"{source}/", f"{url}/{place}", *option)
            assert "holds the objects of a SliceFS volume (vol/volume)" in said


def test_links_and_empty_directories_go_through_s3(
    ceph: CephCluster, tmp_path: Path, capsys: Capture
) -> None:
    """As objects that rclone knows, too; in the order of keys, and gone again with `--delete`."""
    source, back = tmp_path / "source", tmp_path / "back"
    (source / "empty" / "below").mkdir(parents=True)
    (source / "a").symlink_to("no/where é")
    (source / "a-b").write_bytes(b"between a and a.rclonelink")
    (source / "empty" / "up").symlink_to("../a-b")
    bucket = fresh_name()
    ceph.make_bucket(bucket)
    option = ("--store-option", f"credentials={credentials_file(tmp_path)}", "--links", "--dirs")
    url = f"http://127.0.0.1:{ceph.s3_port}/{bucket}"
    assert _sync(capsys, f"{source}/", f"{url}/t/", *option)["copied"] == 3
    again = _sync(capsys, f"{source}/", f"{url}/t/", "--delete", *option)
    assert (again["copied"], again["same"], again["deleted"]) == (0, 3, 0)
    assert _sync(capsys, f"{url}/t/", back, *option)["copied"] == 3
    assert snapshot(back).keys() == {each.replace("source", "back") for each in snapshot(source)}
    assert os.readlink(back / "a") == "no/where é"
    assert os.readlink(back / "empty" / "up") == "../a-b"
    assert _sync(capsys, f"{url}/t/", back, *option)["copied"] == 0
    (source / "a").unlink()
    (source / "empty" / "below").rmdir()
    assert _sync(capsys, f"{source}/", f"{url}/t/", "--delete", *option)["deleted"] == 2
    assert _sync(capsys, f"{url}/t/", back, "--delete", *option)["deleted"] == 2
    assert sorted(os.listdir(back)) == ["a-b", "empty"]


def test_large_objects_go_in_parts(
    ceph: CephCluster, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that are turned away, a lost answer to the last request, and a file that changes."""
    monkeypatch.setattr(bucket_module, "LARGE_BYTES", 6 << 20)
    monkeypatch.setattr(multipart, "PART_BYTES", 5 << 20)
    (tmp_path / "source").mkdir()
    large = tmp_path / "source" / "large"
    large.write_bytes(os.urandom((21 << 20) + 5))
    bucket = fresh_name()
    ceph.make_bucket(bucket)
    option = ("--store-option", f"credentials={credentials_file(tmp_path)}")
    with HttpProxy(ceph.s3_port) as proxy:
        proxy.add(Fault(FaultKind.STATUS, 3, "PUT"))
        proxy.add(Fault(FaultKind.LOSE_ANSWER, 1, "POST", when=lambda asked: "Id=" in asked.target))
        url = f"{proxy.endpoint}/{bucket}"
        assert _sync(capsys, large, f"{url}/t/", *option)["copied"] == 1
        assert sum(request.method == "PUT" for request in proxy.requests()) == 3 + 3  # 8 MiB a part
        assert _sync(capsys, large, f"{url}/t/", "--check", "checksum", *option)["same"] == 1
        assert _sync(capsys, f"{url}/t/", tmp_path / "back", *option)["copied"] == 1
        assert (tmp_path / "back" / "large").read_bytes() == large.read_bytes()

        class Growing(LocalPlace):
            def read(self, item: Item) -> Content:
                content = super().read(item)
                os.utime(large, ns=(1, 1))
                return content

        opened = Opener(parse_options("s3", option[1:]), SystemRuntime(), 60.0)
        pair = opened.open(parse(str(tmp_path / "source")), parse(f"{url}/other/"), False)
        growing = Growing(str(tmp_path / "source"), SystemRuntime())
        done = Sync(growing, pair.target, SyncRequest(PathFilter()), SystemRuntime()).run()
        assert [each.why for each in done.failures] == [
            "it was changed while it was copied: run the command again"
        ]
        assert "DELETE" in [each.method for each in proxy.requests()]  # the parts
        assert list(pair.target.list()) == []
        for each in (growing, *pair):
            each.close()


def test_volumes_need_no_mount(tmp_path: Path, capsys: Capture) -> None:
    """A tree comes whole into a volume and out of it; what leads out of it is refused."""
    source, back = tmp_path / "source", tmp_path / "back"
    _fill(source)
    meta = f"sqlite://{tmp_path}/meta.db"
    succeed("format", meta, "vol", "--bucket", tmp_path / "bucket", "--trash-days", "0")
    told = _sync(capsys, f"{source}/", f"{meta}#home/me")
    assert (told["failed"], told["target"]) == (0, f"{meta}#home/me")
    told = _sync(capsys, f"{source}/", f"{meta}#home/me", "--delete", "--ordered")
    assert (told["copied"], told["deleted"]) == (0, 0)
    assert _sync(capsys, f"{meta}#home/me/", back)["failed"] == 0
    assert snapshot(back) == {
        path.replace(str(source), str(back)): what for path, what in snapshot(source).items()
    }
    for name in ("a/data", "a", "a-b"):
        one, two = (source / name).stat(), (back / name).stat()
        assert (one.st_mode, one.st_mtime_ns) == (two.st_mode, two.st_mtime_ns), name
    assert os.getxattr(back / "a" / "data", "user.kind") == b"random"
    assert (back / "a" / "second").samefile(back / "a-b")
    assert _sync(capsys, f"{meta}#home/me/a-b", f"{tmp_path}/one/")["copied"] == 1
    assert "would be: 4 copied" in succeed("sync", "-n", f"{meta}#home/me", f"{meta}#copy")
    assert "are inside one another" in _failed(capsys, f"{meta}#home", f"{meta}#home/me/a")
    assert "does not exist" in _failed(capsys, f"{meta}#nothing", tmp_path / "new")
    assert "is no directory" in _failed(capsys, f"{source}/", f"{meta}#home/me/a-b")
    (tmp_path / "evil" / "link").mkdir(parents=True)
    (tmp_path / "evil" / "link" / "new").write_bytes(b"")
    assert "on the way to it is no directory" in _failed(
        capsys, f"{tmp_path}/evil/", f"{meta}#home/me", "--exclude", "*.tmp"
    )
    succeed("fsck", meta, "--data")


@pytest.mark.soak
def test_six_thousand_files_through_every_fifth_refusal(
    ceph: CephCluster, tmp_path: Path, capsys: Capture
) -> None:
    """Sizes from nothing to 3 MiB, there and back, each fifth request is answered 503."""
    chance = random.Random(6000)
    source, back = tmp_path / "source", tmp_path / "back"
    for number in range(6000):
        folder = source / f"d{number % 60}"
        folder.mkdir(parents=True, exist_ok=True)
        size = chance.choice((0, 1, 1000, 4096, 20_000)) if number % 100 else 3 << 20
        (folder / f"{number}").write_bytes(chance.randbytes(size))
    bucket = fresh_name()
    ceph.make_bucket(bucket)
    option = ("-p", "16", "--store-option", f"credentials={credentials_file(tmp_path)}")
    with HttpProxy(ceph.s3_port) as proxy:
        fault = proxy.add(
            Fault(FaultKind.STATUS, inf, when=lambda _: chance.random() < 0.2),
        )
        told = _sync(capsys, f"{source}/", f"{proxy.endpoint}/{bucket}/t/", *option)
        assert (told["copied"], told["failed"]) == (6000, 0)
        told = _sync(capsys, f"{proxy.endpoint}/{bucket}/t/", back, *option)
        assert (told["copied"], told["failed"]) == (6000, 0)
        assert fault.hits > 2000
    assert [*snapshot(source).values()] == [*snapshot(back).values()]


def test_the_program_lists_failures(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "name").write_bytes(b"")
    (target / "name" / "full").mkdir(parents=True)
    done = slicefs("sync", f"{source}/", target)
    assert done.code == 1
    assert done.err == "slicefs: name: Is a directory\n"
    assert "1 failed" in done.out
    assert slicefs("sync", "ftp://x/y", target).code == 1

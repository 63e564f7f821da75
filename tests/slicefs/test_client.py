"""A1: a volume without a mount: verbs as `os` has them, judged for the caller."""

from __future__ import annotations

import errno
import io
import os
import pickle
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fsmeta.errors import ConfigError
from slicefs.client.client import Client
from slicefs.client.files import RawFile
from slicefs.stores.opening import open_tree
from tests.faults.program import succeed
from tests.posix.volumes import PATIENCE_S, Volume


def put(fs: Client, path: str, data: bytes = b"x") -> None:
    with fs.open(path, "wb") as file:
        file.write(data)


def get(fs: Client, path: str) -> bytes:
    with fs.open(path, "rb") as file:
        found = file.read()
    assert isinstance(found, bytes)
    return found


def test_modes_are_those_of_open(fs: Client) -> None:
    put(fs, "f", b"0123456789")
    with fs.open("f", "r+b") as file:
        file.seek(4)
        file.write(b"XY")
        file.seek(0)
        assert file.read() == b"0123XY6789"
    with fs.open("f", "ab") as file:
        assert file.tell() == 10
        file.write(b"end")
    with fs.open("f", "w+", encoding="utf-8") as text:
        text.write("äöü\n" * 3)
        text.seek(0)
        assert text.readlines() == ["äöü\n"] * 3
    with pytest.raises(FileExistsError) as caught:
        fs.open("f", "x")
    assert caught.value.filename == "f"
    with pytest.raises(IsADirectoryError):
        fs.open("/", "wb")
    with pytest.raises(FileNotFoundError):
        fs.open("missing/f", "wb")
    for mode in ("", "rw", "b", "rbt", "rr", "z"):
        with pytest.raises(ValueError, match="invalid mode"):
            fs.open("f", mode)
    with fs.open("f", "rb") as file:
        with pytest.raises(io.UnsupportedOperation):
            file.write(b"x")
        file.close()
        with pytest.raises(ValueError, match="closed"):
            file.read()


def test_a_whole_file_is_one_read(fs: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """`io` reads 8 KiB at a time where a file has no `readall`."""
    data = os.urandom(3_000_000)
    put(fs, "f", data)
    asked: list[int] = []
    pread_into = RawFile.pread_into

    def counted(raw: RawFile, target: memoryview, offset: int) -> int:
        asked.append(len(target))
        return pread_into(raw, target, offset)

    monkeypatch.setattr(RawFile, "pread_into", counted)
    assert get(fs, "f") == data
    assert len(asked) <= 3
    with fs.open("f", "rb", buffering=0) as file:
        file.seek(len(data) + 1)
        assert file.read() == b""


def test_truncation_and_sparse_files(fs: Client) -> None:
    with fs.open("f", "wb") as file:
        file.seek(10 << 20)
        file.write(b"end")
    assert fs.stat("f").st_size == (10 << 20) + 3
    assert [bytes(v) for v in fs.read_many([("f", 0, 4), ("f", 10 << 20, -1)])] == [
        b"\0" * 4,
        b"end",
    ]
    fs.truncate("f", 5)
    assert get(fs, "f") == bytes(5)
    with fs.open("f", "r+b") as file:
        file.truncate(2)
    assert fs.stat("f").st_size == 2


def test_an_atomic_file_is_whole_or_not_there(fs: Client) -> None:
    with fs.open("f", "wb", atomic=True) as file:
        file.write(b"one")
        file.flush()
        assert fs.listdir("/") == []
    fs.chmod("f", 0o640)
    for mode, data in (("w", "two"), ("wb", b"two")):
        with suppress(KeyError), fs.open("f", mode, atomic=True) as file:
            file.write(data)
            raise KeyError
    assert get(fs, "f") == b"one"
    with fs.open("f", "wb", atomic=True) as file:
        file.write(b"three")
    assert get(fs, "f") == b"three"
    assert stat.S_IMODE(fs.stat("f").st_mode) == 0o640
    forgotten = fs.open("f", "wb", atomic=True)
    forgotten.write(b"four")
    del forgotten
    assert get(fs, "f") == b"three"
    assert fs.listdir("/") == ["f"]
    with pytest.raises(ValueError, match="atomic"):
        fs.open("f", "ab", atomic=True)


def test_names_links_and_attributes(fs: Client) -> None:
    fs.makedirs("a/b/c")
    fs.makedirs("a/b/c", exist_ok=True)
    with pytest.raises(FileExistsError):
        fs.makedirs("a/b")
    put(fs, "a/b/f", b"data")
    fs.link("a/b/f", "hard")
    fs.symlink("a/b", "soft")
    fs.symlink("/a/../soft/f", "far")
    fs.symlink("loop", "loop")
    assert fs.stat("far").st_ino == fs.stat("soft/f").st_ino == fs.stat("hard").st_ino
    assert fs.stat("hard").st_nlink == 2
    assert stat.S_ISLNK(fs.lstat("soft").st_mode)
    assert fs.readlink("soft") == "a/b"
    with pytest.raises(OSError, match="loop") as caught:
        fs.stat("loop")
    assert caught.value.errno == errno.ELOOP
    with pytest.raises(NotADirectoryError):
        fs.stat("hard/x")
    fs.chmod("hard", 0o600)
    fs.chown("hard", 7, 8)
    fs.utime("hard", ns=(1, 2))
    found = fs.stat("hard")
    assert (found.st_uid, found.st_gid, found.st_atime_ns, found.st_mtime_ns) == (7, 8, 1, 2)
    assert found.st_mode & 0o7777 == 0o600
    fs.setxattr("hard", "user.k", b"v")
    assert fs.getxattr("a/b/f", "user.k") == b"v"
    assert fs.listxattr("hard") == ["user.k"]
    fs.removexattr("hard", "user.k")
    with pytest.raises(OSError, match="hard"):
        fs.getxattr("hard", "user.k")
    fs.rename("hard", "a/moved")
    fs.replace("a/moved", "a/b/f")
    assert sorted(fs.listdir("a")) == ["b", "moved"]  # two names of one file: rename(2)
    assert fs.statvfs().f_bsize == 4096
    assert fs.access("a", os.R_OK)
    entries = {entry.name: entry for entry in fs.scandir("/")}
    assert entries["soft"].is_dir()
    assert not entries["soft"].is_dir(follow_symlinks=False)
    assert entries["far"].stat().st_size == 4
    assert not entries["loop"].is_file(follow_symlinks=False)
    walked = [(top, sorted(dirs), sorted(names)) for top, dirs, names in fs.walk("a")]
    assert walked == [
        ("a", ["b"], ["moved"]),
        ("a/b", ["c"], ["f"]),
        ("a/b/c", [], []),
    ]


def test_rmtree_removes_links_and_not_what_they_lead_to(fs: Client) -> None:
    fs.makedirs("keep/sub")
    put(fs, "keep/sub/f")
    fs.makedirs("tree/deep/er")
    put(fs, "tree/deep/f")
    fs.symlink("/keep", "tree/link")
    fs.symlink("/keep", "tree/deep/link")
    assert fs.rmtree("tree") == 6
    assert fs.listdir("/") == ["keep"]
    assert fs.listdir("keep/sub") == ["f"]
    fs.symlink("keep", "link")
    with pytest.raises(NotADirectoryError):
        fs.rmtree("link")
    with pytest.raises(OSError, match="busy") as caught:
        fs.rmtree("/")
    assert caught.value.errno == errno.EBUSY


def test_permissions_are_the_callers(fs: Client, as_user: Callable[[int], Client]) -> None:
    fs.mkdir("private", 0o700)
    put(fs, "private/f")
    put(fs, "shown")
    fs.chmod("shown", 0o604)
    fs.mkdir("open")
    fs.chmod("open", 0o1777)
    put(fs, "open/roots")
    user = as_user(1000)
    for verb in (user.listdir, user.rmtree):
        with pytest.raises(PermissionError):
            verb("private")
    with pytest.raises(PermissionError):
        user.read_many(["private/f"])
    assert get(user, "shown") == b"x"
    with pytest.raises(PermissionError):
        user.open("shown", "ab")
    with pytest.raises(PermissionError):
        user.chmod("shown", 0o777)
    put(user, "open/mine")
    assert user.stat("open/mine").st_uid == 1000
    assert stat.S_IMODE(user.stat("open/mine").st_mode) == 0o644
    with pytest.raises(PermissionError):  # the sticky bit
        user.remove("open/roots")
    fs.chmod("open/mine", 0o6777)
    with user.open("open/mine", "ab") as file:
        file.write(b"more")
    assert stat.S_IMODE(fs.stat("open/mine").st_mode) == 0o777


def test_read_many_gives_each_item(fs: Client) -> None:
    fs.mkdir("many")
    for number in range(80):
        put(fs, f"many/{number}", b"%d" % number * 50)
    items = [f"many/{number}" for number in reversed(range(80))]
    found = fs.read_many(items)
    assert [bytes(each) for each in found] == [b"%d" % n * 50 for n in reversed(range(80))]
    assert fs.prefetch(items).result(60) == sum(map(len, found))
    with pytest.raises(FileNotFoundError) as caught:
        fs.read_many([*items, "many/missing"])
    assert caught.value.filename == "many/missing"
    with pytest.raises(ValueError, match="range"):
        fs.read_many([("many/1", 5, 3)])


def test_a_range_that_is_a_limit_takes_no_more_memory_than_the_file(fs: Client) -> None:
    """Each manifest of a step was read into 1.5 GiB of zeros."""
    put(fs, "f", b"0123456789")
    assert [bytes(each) for each in fs.read_many([("f", 2, 1 << 50)])] == [b"23456789"]
    assert [bytes(each) for each in fs.read_many([("f", 20, 1 << 50)])] == [b""]
    (shown,) = fs.read_many([(".config", 0, 1 << 50)])  # a virtual file has no size
    assert bytes(shown).startswith(b"{")


def test_two_clients_see_each_other(fs: Client, volume: Volume) -> None:
    put(fs, "f", b"one")
    with Client(volume.meta + "#", uid=0, gid=0) as other:
        assert get(other, "f") == b"one"
        put(other, "g", b"two")
        assert fs.wait_durable("f")
        assert fs.drain(60).durable
    assert get(fs, "g") == b"two"


def test_a_mount_and_a_client_are_one_volume(fs: Client, volume: Volume) -> None:
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and /dev/fuse")
    root: Path = volume.mount()
    put(fs, "from-client", b"data" * 1000)
    assert (root / "from-client").read_bytes() == b"data" * 1000
    (root / "from-mount").write_bytes(b"more")
    assert get(fs, "from-mount") == b"more"


def test_a_client_starts_no_thread_before_its_first_use(volume: Volume) -> None:
    before = threading.active_count()
    client = Client(volume.meta + "#sub/dir", cache_dir=None)
    again = pickle.loads(pickle.dumps(client))
    assert again.url == client.url == volume.meta + "#sub/dir"
    assert threading.active_count() == before
    client.close()
    with pytest.raises(ValueError, match="closed"):
        client.listdir("/")


def test_files_that_are_open_at_close_are_stored(volume: Volume) -> None:
    client = Client(volume.meta)
    file = client.open("f", "wb", buffering=0)
    file.write(b"data")
    client.close()
    file.close()
    with Client(volume.meta) as again:
        assert get(again, "f") == b"data"


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("ftp://x", {}, "names no volume"),
        ("sqlite:////nowhere/x.db", {}, "not there"),
        ("redis://localhost/1", {"colour": 1}, "unknown option 'colour'"),
        ("redis://localhost/1", {"buffer_size": "much"}, "is no size"),
    ],
)
def test_bad_input_is_one_line(url: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Client(url, **options).listdir("/")  # type: ignore[arg-type]
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed here")
def test_a_missing_package_is_named() -> None:
    with pytest.raises(ImportError, match=r"slicefs\.torch\.MapDataset needs torch: pip install"):
        import_module("slicefs.torch").MapDataset  # noqa: B018


def test_status_shows_its_session(fs: Client, volume: Volume) -> None:
    put(fs, "f")
    *_, session = succeed("status", volume.meta).splitlines()
    assert f"pid {os.getpid()}  a program" in session


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"buffer_size": "1M"}, "buffer_size: '1M': at least"),
        ({"buffer_size": -1}, "buffer_size: -1 is no size"),
        ({"write_buffer_size": 4096}, "write_buffer_size: 4096: at least"),
        ({"heartbeat": 0}, "heartbeat: 0: use a number of seconds"),
        ({"heartbeat": float("nan")}, "heartbeat: nan: use"),
        ({"heartbeat": "5s"}, "heartbeat: '5s': use"),
        ({"meta_timeout": -1}, "meta_timeout: -1: use"),
        ({"upload_limit": -5}, "upload_limit: -5 is no size"),
        ({"uid": "root", "gid": 5}, "uid: 'root' is no id"),
        ({"uid": 1 << 40, "gid": 5}, "uid: 1099511627776 is no id"),
        ({"uid": 5, "gid": -5}, "gid: -5 is no id"),
        ({"groups": "adm"}, "groups: 'a' is no id"),
        ({"cache_dir": "Memory"}, "cache_dir: 'Memory': use an absolute path"),
        ({"cache_dir": Path("cache")}, "cache_dir: 'cache': use"),
    ],
)
def test_a_wrong_option_is_one_line(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Client("sqlite:////nowhere/meta.db", **options)
    assert str(caught.value).startswith(why)
    assert "\n" not in str(caught.value)


def test_paths_of_pathlib(volume: Volume, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    cache = tmp_path / "cache"
    with Client(volume.meta, cache_dir=cache, meta_timeout=PATIENCE_S) as fs:
        fs.listdir("/")
        assert cache.is_dir()


def test_a_tree_of_a_client_begins_where_the_client_does(volume: Volume) -> None:
    with (
        Client(volume.meta, meta_timeout=PATIENCE_S) as top,
        Client(f"{volume.meta}#set", meta_timeout=PATIENCE_S) as fs,
    ):
        top.makedirs("/set/in")
        for name in ("/beside", "/set/one", "/set/in/two"):
            with top.open(name, "wb") as file:
                file.write(name.encode())

        def paths(url: str, client: Client = fs) -> list[str]:
            return [info.path for info in open_tree(url, client=client).list()]

        assert paths("") == ["in/two", "one"]
        assert paths("in") == ["two"]
        assert paths("/") == ["beside", "set/in/two", "set/one"]
        assert paths(f"{volume.meta}#set/in") == ["two"]
        assert paths("set", top) == ["in/two", "one"]
        for url in ("file:///tmp", "sqlite:////other.db#set", "s3://bucket"):
            with pytest.raises(ConfigError, match="another place than the client"):
                open_tree(url, client=fs)

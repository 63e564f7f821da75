"""A bucket that lies: the right bytes or an error that says why."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fsmeta.errors import ConfigError
from slicefs.checkpoint.manager import StepManager
from slicefs.client.client import Client
from slicefs.client.ranges import Item
from slicefs.data.source import SampleSource
from slicefs.stores.opening import open_tree
from slicefs.stores.s3 import S3Tree
from slicefs.stores.tree import Tree
from tests.posix.volumes import Volume
from tests.support.ceph_cluster import ACCESS_KEY, SECRET_KEY, CephCluster
from tests.support.http_proxy import Fault, HttpProxy, Kind


@pytest.fixture
def proxy(ceph: CephCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpProxy]:
    """A proxy before radosgw, and the environment that leads there."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    with HttpProxy(ceph.s3_port) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        yield made


@pytest.fixture
def far(bucket: str, proxy: HttpProxy, tmp_path: Path) -> Iterator[Tree]:
    """A tree behind it."""
    tree = open_tree(f"s3://{bucket}/{tmp_path.name}")
    yield tree
    proxy.heal()
    tree.remove_tree("")
    tree.close()


def test_a_bit_that_flips_on_the_way_is_no_step(far: Tree, proxy: HttpProxy) -> None:
    manager = StepManager(far)
    with manager.save(1) as saving:
        saving.put("model.bin", bytes(100_000))
    step = manager.latest()
    assert step is not None
    proxy.add(Fault(Kind.FLIP_ANSWER, 1e9, method="GET"))
    with pytest.raises(OSError, match="not what was saved"):
        step.read("model.bin")
    proxy.heal()
    assert step.read("model.bin") == bytes(100_000)


def hasty(tree: Tree, timeout_s: float) -> S3Tree:
    """The same tree with less patience."""
    assert isinstance(tree, S3Tree)
    return S3Tree(tree.bucket._replace(timeout_s=timeout_s))


def test_a_storm_of_503_is_weathered(far: Tree, proxy: HttpProxy) -> None:
    far.write_atomic("file", (b"data",))
    proxy.add(Fault(Kind.STATUS, 6))
    assert far.read("file") == b"data"
    proxy.add(Fault(Kind.STATUS, 6))
    assert [info.path for info in far.list()] == ["file"]
    proxy.add(Fault(Kind.STATUS, 6))
    far.write_atomic("other", (b"more",))
    assert far.read("other") == b"more"


def test_a_storm_that_does_not_end_is_an_error_that_says_so(far: Tree, proxy: HttpProxy) -> None:
    far.write_atomic("file", (b"data",))
    proxy.add(Fault(Kind.STATUS, 1e9))
    with closing(hasty(far, 0.5)) as tree:
        with pytest.raises(OSError, match="too busy for as long as requests are repeated"):
            tree.read("file")
        before = len(proxy.requests())
        with pytest.raises(OSError, match="SlowDown"):
            tree.read_ranges([("file", 0, 1), ("file", 2, 3)], max_gap=-1)
        assert len(proxy.requests()) - before < 100  # pauses grow
        proxy.heal()
        assert tree.read("file") == b"data"


@pytest.mark.parametrize(("status", "code"), [(400, "ExpiredToken"), (403, "InvalidAccessKeyId")])
@pytest.mark.parametrize("verb", ["read", "stat", "list", "list_dir", "write", "remove"])
def test_keys_that_are_refused_are_named_at_once(
    far: Tree, proxy: HttpProxy, status: int, code: str, verb: str
) -> None:
    far.write_atomic("file", (b"data",))
    proxy.add(Fault(Kind.STATUS, 1e9, status=status, code=code))
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: far.read("file"),
        "stat": lambda: far.stat("file"),
        "list": lambda: list(far.list()),
        "list_dir": lambda: list(far.list_dir()),
        "write": lambda: far.write_atomic("file", (b"new",)),
        "remove": lambda: far.remove("file"),
    }
    before = len(proxy.requests())
    with pytest.raises(PermissionError, match=code) as caught:
        calls[verb]()
    assert "\n" not in str(caught.value)
    if verb != "list_dir":
        assert "AWS_ACCESS_KEY_ID in the environment" in str(caught.value)
    assert SECRET_KEY not in str(caught.value)
    assert len(proxy.requests()) - before <= 4


def test_a_data_set_that_changes_is_no_wrong_sample(far: Tree) -> None:
    for name in "abc":
        far.write_atomic(name, (name.encode() * 100,))
    source = SampleSource.from_prefix(far.url)
    far.write_atomic("b", (b"longer" * 100,))
    far.remove("c")
    assert bytes(source.read([0])[0].data) == b"a" * 100
    with pytest.raises(OSError, match="list the data set again") as caught:
        source.read([0, 1])
    assert caught.value.errno == errno.ESTALE
    with pytest.raises(FileNotFoundError):
        source.read([2])
    source.tree.close()


def test_empty_and_huge_files_and_odd_names(fs: Client) -> None:
    fs.mkdir("set")
    with fs.open("set/empty", "wb"):
        pass
    with fs.open("set/huge", "wb") as file:
        file.truncate(5 << 40)
        file.seek((5 << 40) - 3)
        file.write(b"end")
    odd = os.fsdecode(b"set/\xff\xfe name")
    with fs.open(odd, "wb") as file:
        file.write(b"odd")
    end = 5 << 40
    hole = ("set/huge", 3 << 40, (3 << 40) + 2)
    items: list[Item] = ["set/empty", ("set/huge", end - 3, end + 10), odd, hole]
    found = [bytes(each) for each in fs.read_many(items)]
    assert found == [b"", b"end", b"odd", b"\0\0"]
    source = SampleSource.from_objects(["set/empty", odd], client=fs)
    assert [(each.path, bytes(each.data)) for each in source.read([1, 0])] == [
        (odd, b"odd"),
        ("set/empty", b""),
    ]


def test_a_worker_that_is_killed_takes_nothing_with_it(fs: Client, volume: Volume) -> None:
    """As the kernel does where memory is short: in the middle of a read or a write."""
    with fs.open("file", "wb") as file:
        file.write(b"x" * 1_000_000)
    assert fs.wait_durable()
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        fs.read_many(["file"])
        half = fs.open("half", "wb", atomic=True)
        half.write(b"y" * 1_000_000)
        os.write(told, b".")
        while True:
            fs.read_many(["file"])
    assert os.read(ready, 1) == b"."
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(ready)
    os.close(told)
    assert fs.listdir("/") == ["file"]
    assert bytes(fs.read_many(["file"])[0]) == b"x" * 1_000_000
    with Client(volume.meta, uid=0, gid=0) as other:
        assert bytes(other.read_many(["file"])[0]) == b"x" * 1_000_000


@pytest.mark.parametrize(
    ("absent", "program", "said"),
    [
        ("boto3", "slicefs.open_tree('s3://bucket').read('x')", r"pip install 'slicefs\[s3\]'"),
        ("torch", "import slicefs.torch; slicefs.torch.MapDataset", "pip install torch"),
        ("fsspec", "import slicefs.fsspec", r"pip install 'slicefs\[train\]'"),
        ("torch", "import slicefs.lightning", "pip install torch lightning"),
    ],
)
def test_what_is_not_installed_is_named_in_one_line(absent: str, program: str, said: str) -> None:
    """In a process of its own, in which the package can't be found."""
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import slicefs
{program}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert re.search(said, done.stderr.splitlines()[-1]), done.stderr


@pytest.mark.parametrize(
    "url",
    ["", "s3://", "s3://UPPER/x", "s4://bucket", "file://host/x", "slicefs://unknown/x",
     "http://bucket/x", "slicefs:///x", "://x"],
)  # fmt: skip
def test_a_wrong_url_is_said_in_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLICEFS_META_UNKNOWN", raising=False)
    with pytest.raises(ConfigError) as caught:
        open_tree(url)
    assert "\n" not in str(caught.value)
    assert ":" in str(caught.value)

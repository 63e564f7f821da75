"""The pages do what they say: the commands of each run in one shell, and every one succeeds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.demo import pages
from tests.demo.pages import Page
from tests.faults.program import REPOSITORY, needs_mounts
from tests.support.ceph_cluster import ACCESS_KEY, SECRET_KEY, CephCluster
from tests.support.redis_server import RedisServer, free_port
from tests.support.tikv_server import TikvServer

INDEX = "installs from a package index"
KEYS = {"ACCESS_KEY=… SECRET_KEY=…": f"ACCESS_KEY={ACCESS_KEY} SECRET_KEY={SECRET_KEY}"}
CLUSTER = {"redis://10.0.0.1/1": "{redis}", "/mnt/": "{base}/mnt/"}
SSD = {"/ssd": "{base}/ssd"}
# the Redis of the tests is such a one, and pages fill their quotas
EXPECTED = "Redis keeps nothing on disk|quota of (/team|group 2000)|4318/v1/traces takes no traces"
FORMATTED = "slicefs format redis://10.0.0.1/1 vol --bucket $SANDBOX/vol"

README = Page(
    "README.md",
    {
        "/tmp/demo": "{base}",
        "http://127.0.0.1:8333/": "{s3}/pages-readme-",
        "6390": "{port}",
        "=demo ": f"={ACCESS_KEY} ",
        "demo-secret": SECRET_KEY,
        **KEYS,
        "redis://HOST/1": "{redis}",
        "redis://HOST/2": "{redis2}",
        "https://HOST/": "{s3}/pages-hosts-",
        "POOL": "{pool}",
    },
    skipped={
        "make ": "`make run` is tests/demo/test_demo.py, `make test` runs this",
        "apt-get ": INDEX,
        "python3 -m venv": "tests/tools/test_wheel.py makes one",
        ". /tmp/demo/venv": "the same",
        "pip ": INDEX,
        "weed ": "comes from a package index; S3 is radosgw here",
        "until ": "waits for it",
        "kill ": "ends it",
    },
)
TUTORIAL = Page(
    "docs/TUTORIAL.md",
    {"/tmp/tutorial": "{base}/tutorial", "6391": "{port}"},
    skipped={"export PATH": "the shell has the path of these tests"},
)
UPGRADING = Page(
    "docs/UPGRADING.md", {"redis://10.0.0.1/1": "{redis}"}, skipped={"pip ": INDEX}, start=FORMATTED
)
HOWTO_S3 = Page(
    "docs/howto/s3.md",
    {
        **CLUSTER,
        **SSD,
        **KEYS,
        "https://s3.example.com/": "{s3}/pages-s3-",
        "slicefs bench": "slicefs bench --big-file-size 1MiB --small-file-count 2",
        "slicefs objbench": "slicefs objbench --blocks 2 --small-objects 2 --skip-functional-tests",
        "s3://datasets": "{s3}/datasets",
        "/etc/slicefs": "{base}",
    },
    skipped={"pip ": INDEX},
    start=r"""
mkdir -p /mnt/vol /ssd tree
echo 1 > tree/1
export ACCESS_KEY=… SECRET_KEY=…
printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' \
    $ACCESS_KEY $SECRET_KEY > /etc/slicefs/keys
slicefs sync tree/ s3://datasets/imagenet/
""",
)
CEPH = Page(
    "docs/howto/redis-ceph.md",
    {**CLUSTER, **SSD, "POOL": "pages", "/etc/ceph": "{base}"},
    skipped={"apt-get ": INDEX},
    start=r"""
mkdir -p /mnt/vol /ssd
cp $CEPH_CONF /etc/ceph/ceph.conf
printf '[client.vol]\nkeyring = %s\n' /etc/ceph/ceph.client.vol.keyring >> /etc/ceph/ceph.conf
export CEPH_CONF=/etc/ceph/ceph.conf
""",
)
TIKV = Page(
    "docs/howto/tikv.md",
    {
        **CLUSTER,
        **SSD,
        **KEYS,
        "https://s3.example.com/": "{s3}/pages-tikv-",
        "tikv://10.0.0.1:2379/vol": "{tikv}",
    },
    skipped={"pip ": INDEX},
    start="mkdir -p /mnt/vol /ssd",
)
CHECKPOINTS = Page(
    "docs/howto/checkpoints.md",
    {**CLUSTER, "/nvme": "{base}/nvme", "500GiB": "64MiB"},
    start=f"mkdir -p /mnt/vol /nvme; echo weights > model.bin\n{FORMATTED}",
)
QUOTAS = Page(
    "docs/howto/quotas.md",
    CLUSTER,
    start=f"mkdir -p /mnt/vol; {FORMATTED}; slicefs mount -d redis://10.0.0.1/1 /mnt/vol",
)
JUICEFS = Page(
    "docs/howto/juicefs.md",
    {
        **KEYS,
        "redis://10.0.0.1/2": "{redis}",
        "https://s3.example.com/": "{s3}/pages-juicefs-",
        "/mnt/": "{base}/mnt/",
        "/jfs": "{base}/jfs",
    },
    before={"slicefs sync -n": "test $(ls -A /mnt/new/) = a"},
    start="mkdir -p /mnt/new /jfs/a; echo 1 | tee /jfs/a/1 > /jfs/.accesslog",
)
OPERATING = Page(
    "docs/OPERATING.md",
    {
        "SLICEFS_RSA_PASSPHRASE=…": "SLICEFS_RSA_PASSPHRASE=secret",
        "volume.pem 4096": "volume.pem 2048",
        "META": "{redis}",
        "redis://10.0.0.5:6379/1": "{redis}",
        "redis://10.0.0.5:6379/2": "{redis2}",
        "/data": "{base}/data",
        " /secret": " {base}/secret",
        "/ssd": "{base}/ssd",
        "/srv": "{base}/srv",
        "/var/log": "{base}",
        "--cursor F ": "--cursor {base}/cursor ",
        "0.0.0.0:9567": "0.0.0.0:{port}",
        "9567": "{port}",
        "9568": "{port2}",
        "--syslog local": "--syslog 127.0.0.1:{port}",
        "/data                                   # a line": "{base}/data --count 1 # a line",
        "--interval 10 --count 6": "--interval 0.1 --count 2",
        "--by file": "--by file --interval 0.1 --count 1",
        "--seconds 30": "--seconds 0.2",
        "2026-11-21-19": "$HOUR",
    },
    skipped={
        "cat /data/.accesslog": "ends with Ctrl-C only",
        "apt-get ": INDEX,
        "pip ": INDEX,
        "slicefs mount -d --transport": "tests/faults/test_pyfuse3.py, where it is there",
    },
    before={
        "slicefs mount -d --encrypt": "mkdir -p /secret",
        "slicefs mount -d": "! mountpoint -q /data || slicefs umount /data",
        "slicefs restore META  ": (
            "rm -r /data/team; "
            "HOUR=$(slicefs restore --json META | grep -oE '[0-9]{4}(-[0-9]{2}){3}' | head -1)"
        ),
        "slicefs restore META --path": "rm -r /data/team/run7",
        "slicefs fsck META": "slicefs umount /data",
        "slicefs --log-format json fsck": "slicefs umount /data",
    },
    start="""
mkdir -p /data /srv /ssd1/cache
slicefs format redis://10.0.0.5:6379/1 vol --bucket /srv/vol
slicefs mount -d redis://10.0.0.5:6379/1 /data
mkdir -p /data/train /data/val /data/a /data/team/run7
echo 1 | tee /data/train/1.tar /data/val/2 /data/a/3 /data/team/run7/4
echo /data/val/2 > list.txt
""",
)
PAGES = (
    README, TUTORIAL, UPGRADING, HOWTO_S3, CEPH, TIKV, CHECKPOINTS, QUOTAS, JUICEFS, OPERATING,
)  # fmt: skip

NOT_RUN = {  # pages with commands of ours that are parsed only → why
    "docs/CSI.md": "beside kubectl and helm, on a node; tests/csi has its own Kubernetes",
    "docs/REDIS.md": "beside Sentinels of three hosts; tests/faults/redis has them",
    "docs/train/datasets.md": "on buckets of others; tests/slicefs/test_attach.py",
    "docs/train/lifecycle.md": "on checkpoints that are large; tests/slicefs/checkpoint",
}


def _redis(request: pytest.FixtureRequest) -> RedisServer:
    server = request.getfixturevalue("redis_server")
    assert isinstance(server, RedisServer)
    return server


def _ceph(request: pytest.FixtureRequest) -> CephCluster:
    cluster = request.getfixturevalue("ceph")
    assert isinstance(cluster, CephCluster)
    return cluster


def _tikv(request: pytest.FixtureRequest) -> TikvServer:
    cluster = request.getfixturevalue("tikv_server")
    assert isinstance(cluster, TikvServer)
    return cluster


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """The sandbox of a page."""
    yield tmp_path
    pages.clean_up(tmp_path)


@needs_mounts
@pytest.mark.timeout(pages.LAST_S + 60)
@pytest.mark.parametrize("page", PAGES, ids=[page.path for page in PAGES])
def test_every_command_succeeds(page: Page, base: Path, request: pytest.FixtureRequest) -> None:
    makers: dict[str, Callable[[], str]] = {
        "base": lambda: str(base),
        "redis": lambda: _redis(request).empty_url(),
        "redis2": lambda: _redis(request).empty_url(),
        "port": lambda: str(free_port()),
        "port2": lambda: str(free_port()),
        "s3": lambda: _ceph(request).endpoint,
        "pool": lambda: "data",
        "tikv": lambda: _tikv(request).empty_url(),
    }
    parts = {name: makers[name]() for name in page.parts()}
    environment = {}
    if page is CEPH or {"s3", "pool"} & parts.keys():
        environment["CEPH_CONF"] = str(_ceph(request).conf)
        _ceph(request).make_bucket("datasets")
    pages.run(page.script(parts), base, environment)
    assert pages.complaints(base, EXPECTED) == []


@pytest.mark.parametrize("page", PAGES, ids=[page.path for page in PAGES])
def test_the_tables_name_what_is_on_the_page(page: Page) -> None:
    assert page.unused() == []


def test_every_page_with_commands_is_run() -> None:
    """Or the table says why not."""
    paths = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    ours = {
        str(path.relative_to(REPOSITORY))
        for path in paths
        if any(
            re.search(r"(^|[ ;])slicefs [a-z]", text)
            for _, text in pages.commands(path.read_text(encoding="utf-8"))
        )
    }
    assert ours == {page.path for page in PAGES} | {*NOT_RUN}

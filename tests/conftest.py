"""What all tests share: a real Redis and Ceph, a watch on the log, `--soak`, `assert_clean`."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

from fsmeta.check.check import check
from fsmeta.store.contract import Store
from tests.faults.program import Volume
from tests.soaks import is_more_of_the_same
from tests.support.ceph_cluster import CephCluster, short_directory
from tests.support.redis_server import RedisServer
from tests.support.redis_sets import Cluster
from tests.support.tikv_server import TikvServer, failure, is_built, serving, why_not
from tests.support.waiting import STOOD_STILL

# How long an example takes says nothing on a machine that has other work to do.
settings.register_profile("slicefs", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slicefs")

# Files of tests that take longest, those that calculate and those that wait in turn. Each goes to
# one process, so what comes last may leave it alone at work; `-n` keeps this order (Makefile).
LONG_FILES: Final = (
    "sim/test_writeback.py",
    "demo/test_pages.py",
    "demo/test_demo.py",
    "faults/writeback/test_writeback.py",
    "sim/test_client.py",
    "faults/test_kill.py",
    "fsclient/cli/upkeep/test_gc.py",
    "posix/test_corners.py",
    "posix/test_data.py",
    "fsclient/cli/volume/test_encryption.py",
    "posix/test_model.py",
    "faults/redis/test_redis_away.py",
    "posix/test_listing.py",
    "fsclient/cli/upkeep/test_scrub.py",
    "faults/test_quota.py",
    "faults/test_pyfuse3.py",
    "sim/test_packing.py",
    "posix/test_kernel.py",
    "faults/stores/test_stores_away.py",
    "fsclient/cli/volume/test_tikv.py",
    "sim/test_quota.py",
    "faults/disks/test_cache.py",
    "csi/test_driver.py",
    "sim/test_collect.py",
    "fsdata/disk_cache/test_disk_cache_size.py",
    "slicefs/test_fsspec.py",
)

# How much longer than its `timeout` a test may take. The signal that ends it does not reach a
# thread that waits in the kernel, or in C.
HANG_S: Final = 90.0
stderr_key: Final = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the tests that take minutes too")
    parser.addoption("--redis-server", metavar="FILE", help="the redis-server to test with")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what is in background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # so are not those whom we start
    RedisServer.program = config.getoption("--redis-server") or RedisServer.program

    if config.getoption("--soak"):
        Volume.supervisor = ()
    config.stash[stderr_key] = os.dup(2)  # the one of the terminal: tests have another


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[stderr_key])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End a process whose test hangs and show its stacks; pytest-xdist starts one more process."""
    config, marker = item.config, item.get_closest_marker("timeout")
    wanted = config.getoption("timeout")
    if wanted is None:
        wanted = marker.args[0] if marker else config.getini("timeout")
    if float(wanted) > 0 and not config.getoption("usepdb"):
        end = float(wanted) + HANG_S
        faulthandler.dump_traceback_later(end, exit=True, file=config.stash[stderr_key])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes; else tests share set-ups
        _longest_first(items)
    if config.getoption("--soak"):
        return
    for item in items:
        if item.get_closest_marker("soak") or is_more_of_the_same(item.path, item.name):
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with --soak"))


def _longest_first(items: list[pytest.Item]) -> None:
    """Sort files by `LONG_FILES`, and then by how many tests they have; tests in a file stay."""
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONG_FILES)}
    counts = Counter(item.path for item in items)
    last = len(places)
    items.sort(key=lambda item: (places.get(item.path, last), -counts[item.path], item.path))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what tests on TiKV need now: it may take longer than a test may take."""
    wanted = any("tikv" in item.nodeid for item in session.items)
    if wanted and not session.config.option.collectonly and not why_not() and not is_built():
        print("building tests/tikvsim; it takes some minutes the first time", flush=True)
        failure()


def assert_clean(store: Store) -> None:
    """Nothing in the metadata contradicts anything else."""
    assert check(store).problems == []


class LogWatch(logging.Handler):
    """Remembers records worth a warning; a test says beforehand which ones it provokes."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[logging.LogRecord] = []
        self._expected: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record)

    def expect(self, pattern: str) -> None:
        """Records whose message matches the regular expression may appear in this test."""
        self._expected.append(pattern)

    def unexpected(self) -> list[str]:
        texts = [f"{each.levelname} {each.name}: {each.getMessage()}" for each in self.seen]
        expected = [STOOD_STILL, *self._expected]
        return [text for text in texts if not any(re.search(p, text) for p in expected)]


@pytest.fixture(autouse=True)
def log_watch() -> Iterator[LogWatch]:
    """Fails the test on a record of WARNING or worse, unless it said `log_watch.expect(…)`."""
    watch = LogWatch()
    logging.getLogger().addHandler(watch)
    try:
        yield watch
    finally:
        logging.getLogger().removeHandler(watch)
    unexpected = watch.unexpected()
    assert not unexpected, "logged:\n" + "\n".join(unexpected)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis on a free loopback port, without persistence; see `redis_url`."""
    if not RedisServer.is_installed():
        pytest.skip("needs redis-server")
    directory: Path = tmp_path_factory.mktemp("redis")
    with RedisServer(directory) as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes, which tests share and leave as they are."""
    if not RedisServer.is_installed():
        pytest.skip("needs redis-server")
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def tikv_cluster() -> Iterator[TikvServer]:
    """A TiKV for all tests; see `tikv_server`."""
    yield from serving()


@pytest.fixture
def tikv_server(tikv_cluster: TikvServer) -> Iterator[TikvServer]:
    """The same, without faults before and after the test."""
    yield tikv_cluster
    tikv_cluster.heal()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The URL of an empty database of `redis_server`, for this test alone."""
    return redis_server.empty_url()


@pytest.fixture(scope="session")
def ceph() -> Iterator[CephCluster]:
    """A Ceph in memory with radosgw, which starts in a second; nobody may end its OSD."""
    missing = CephCluster.missing()
    if missing:
        pytest.skip(f"needs {missing}")
    with short_directory() as directory, CephCluster(directory) as cluster:
        cluster.make_pool("data")
        yield cluster


@pytest.fixture(scope="session")
def token_ceph(ceph: CephCluster) -> Iterator[CephCluster]:
    """A Ceph that knows session tokens."""
    del ceph  # what it needs is installed
    with short_directory() as directory, CephCluster(directory, tokens=True) as cluster:
        yield cluster

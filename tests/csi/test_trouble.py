"""K1, K2: stores that are down, clients that die with them, and secrets of S3."""

from __future__ import annotations

import errno
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from csi.errors import Code
from tests.csi.driver import SECRET, Driver, code_of
from tests.faults.program import needs_mounts
from tests.support.ceph_cluster import SECRET_KEY, CephCluster
from tests.support.http_proxy import Fault, HttpProxy, Kind
from tests.support.outcome import errno_of
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until

pytestmark = needs_mounts
DEAD = (errno.ENOTCONN, errno.ECONNABORTED)


def test_metadata_that_are_away(driver: Driver, closed_redis: RedisServer) -> None:
    """The condition of the volume says so until they are back, and a new stage is repeated."""
    pid = int(closed_redis.ask("INFO", "server")["process_id"])
    options = {"mountOptions": "meta-timeout=1,no-supervisor"}
    volume = driver.create("pvc-1", parameters=options)
    waiting = driver.create("pvc-2", parameters=options)
    target = driver.base / "pods/1"
    driver.stage(volume)
    driver.publish(volume, target)
    (target / "file").write_text("kept")
    os.kill(pid, signal.SIGSTOP)
    try:
        os.kill(driver.client_pid(volume), signal.SIGKILL)
        wait_until(lambda: errno_of(lambda: os.listdir(target)) in DEAD)
        condition = driver.stats(volume, target).volume_condition
        assert condition.abnormal
        assert "can't be mounted" in condition.message
        assert SECRET not in condition.message
        assert code_of(driver.publish, volume, target) in (Code.UNAVAILABLE, Code.INTERNAL)
        assert code_of(driver.stage, waiting) in (Code.UNAVAILABLE, Code.INTERNAL)
    finally:
        os.kill(pid, signal.SIGCONT)
    driver.stage(waiting)
    driver.unstage(waiting)
    driver.delete(waiting.volume_id)
    assert not driver.stats(volume, target).volume_condition.abnormal
    assert (target / "file").read_text() == "kept"
    driver.unpublish(volume, target)
    driver.unstage(volume)
    driver.delete(volume.volume_id)
    driver.finish()


@pytest.fixture
def proxy(ceph: CephCluster) -> Iterator[HttpProxy]:
    with HttpProxy(ceph.s3_port) as found:
        yield found


@pytest.fixture
def proxied(
    secrets: dict[str, str], s3_secrets: dict[str, str], proxy: HttpProxy
) -> Iterator[Driver]:
    """A driver on S3, behind a proxy."""
    bucket = f"{proxy.endpoint}/{s3_secrets['bucket'].rpartition('/')[2]}"
    found = Driver(Path(secrets["bucket"]).parent, {**s3_secrets, "bucket": bucket})
    found.start()
    yield found
    found.clean_up()


def test_writeback_outlives_its_client(proxied: Driver, proxy: HttpProxy) -> None:
    """What is in the journal of a dead client is stored before NodeUnstage answers OK."""
    driver = proxied
    options = f"writeback,no-supervisor,cache-dir={driver.base}/cache"
    volume = driver.create("pvc-1", parameters={"mountOptions": options})
    target = driver.base / "pods/1"
    driver.stage(volume)
    driver.publish(volume, target)
    proxy.add(Fault(Kind.STATUS, math.inf, "PUT"))
    data = os.urandom(1 << 20)
    (target / "file").write_bytes(data)
    os.kill(driver.client_pid(volume), signal.SIGKILL)
    wait_until(lambda: errno_of(lambda: os.listdir(target)) in DEAD)
    driver.unpublish(volume, target)
    proxy.heal()
    driver.unstage(volume)
    root = next((driver.state / "stores").iterdir()) / "mnt"
    assert (root / "pvc-1/file").read_bytes() == data  # of another client
    shows_nothing(driver, SECRET, SECRET_KEY)
    driver.delete(volume.volume_id)
    driver.finish()


def test_wrong_keys_of_s3(s3_driver: Driver) -> None:
    """The reason is the store's, without the keys; the right ones work afterwards."""
    driver = s3_driver
    wrong = {**driver.secrets, "secret-key": SECRET[::-1]}
    with pytest.raises(grpc.RpcError) as caught:
        driver.create("pvc-1", secrets=wrong)
    assert caught.value.code() is Code.INTERNAL
    assert "can't be formatted" in caught.value.details()
    assert SECRET[::-1] not in caught.value.details()
    driver.create("pvc-1")
    driver.delete("pvc-1")
    shows_nothing(driver, SECRET, SECRET[::-1], SECRET_KEY)
    driver.finish()


def shows_nothing(driver: Driver, *secrets: str) -> None:
    """No argument of any process and no log has a secret."""
    texts = [path.read_bytes() for path in [driver.log, *driver.state.glob("*/*/log")]]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            texts.append(path.read_bytes())
        except OSError:
            continue
    assert not [text for text in texts for secret in secrets if secret.encode() in text]

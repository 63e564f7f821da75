"""K1: secrets that name files of the node are refused, unless the driver is told otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from csi.errors import Code
from csi.proto import csi_pb2 as pb
from tests.csi.driver import Driver
from tests.csi.services.test_killed_steps import killed_at
from tests.faults.program import needs_mounts

pytestmark = needs_mounts
MOMENTS_MAX = 16


@pytest.fixture
def strict(secrets: dict[str, str]) -> Iterator[Driver]:
    """A driver as it comes, without `--allow-local-stores`."""
    found = Driver(Path(secrets["bucket"]).parent, secrets)
    found.allows_local = False
    found.start()
    yield found
    found.clean_up()


def refusals(driver: Driver, secrets: dict[str, str]) -> Iterator[str]:
    """What the controller and the node say of such secrets, which they refuse."""
    volume = pb.Volume(volume_id="pvc-1")
    for call in (partial(driver.create, "pvc-1"), partial(driver.stage, volume)):
        with pytest.raises(grpc.RpcError) as caught:
            call(secrets=secrets)
        assert caught.value.code() is Code.INVALID_ARGUMENT
        yield caught.value.details()


def test_files_of_the_node(strict: Driver) -> None:
    """In the secret, and in the settings of a volume that is formatted already."""
    driver = strict
    place = f"sqlite://{driver.base}/meta.db"
    for secrets in (driver.secrets, {"name": "csivol", "metaurl": place}):
        for text in refusals(driver, secrets):
            assert "--allow-local-stores" in text
    driver.slicefs("format", "csivol", "--bucket", driver.secrets["bucket"])
    known = {key: driver.secrets[key] for key in ("name", "metaurl")}
    for text in refusals(driver, known):
        assert "the storage of the volume is file" in text
    assert os.listdir(driver.state / "volumes") == []
    assert driver.client_pids() == driver.supervisor_pids() == []
    assert driver.mounts() == []


def test_killed_before_it_has_looked(strict: Driver) -> None:
    """A client that a driver has started before it was killed has opened no store of the node."""
    driver = strict
    driver.slicefs("format", "csivol", "--bucket", driver.secrets["bucket"])
    known = {key: driver.secrets[key] for key in ("name", "metaurl")}
    volume = pb.Volume(volume_id="pvc-1")
    driver.end()
    driver.program = (sys.executable, "-m", "tests.csi.services.stopping_driver")
    driver.environment["STOP_AT"] = str(driver.base / "stop-at")
    driver.start()

    def stage() -> None:
        try:
            driver.stage(volume, secrets=known)
        except grpc.RpcError as error:
            if error.code() is not Code.INVALID_ARGUMENT:
                raise
        else:
            raise AssertionError("it is staged")

    moments = [moment for moment in range(1, MOMENTS_MAX) if killed_at(driver, moment, stage)]
    assert len(moments) > 3
    driver.end()
    driver.start()
    stage()
    assert os.listdir(driver.state / "volumes") == []
    assert driver.client_pids() == driver.supervisor_pids() == []
    assert driver.mounts() == []

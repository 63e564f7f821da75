"""K1: root of a pod is not root of the SliceFS volume, and a volume is what its secret says."""

from __future__ import annotations

import errno
import os
import subprocess
from functools import partial

import pytest

from csi.clients.backend import parse_secrets
from csi.errors import Code, CsiError
from tests.csi.driver import SECRET, Driver, code_of
from tests.faults.program import SLICEFS, needs_mounts
from tests.support.outcome import errno_of

pytestmark = needs_mounts
MIB = 1 << 20


def test_root_of_a_pod_takes_no_snapshots(driver: Driver) -> None:
    """They would be counted by no quota, and stay when the volume is deleted."""
    volume = driver.create("pvc-1", capacity_range={"required_bytes": 4 * MIB})
    target = driver.base / "pods/1"
    driver.stage(volume)
    driver.publish(volume, target)
    (target / "file").write_bytes(os.urandom(MIB))
    words = [SLICEFS, "snapshot", "create", str(target), "mine"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert not (target / ".snapshots").exists()
    driver.snapshot("snap-1", volume.volume_id)
    kept = target / ".snapshots/snap-1"
    assert (kept / "file").stat().st_size == MIB
    assert errno_of(lambda: os.rmdir(kept)) == errno.EPERM  # it is not root's of a pod
    wish = (
        b'{"endpoint":"http://127.0.0.1:1","region":"r","bucket":"b","files":[["n","k","e",1,0]]}'
    )
    attach = partial(os.setxattr, target, "user.slicefs.attach", wish)
    assert errno_of(attach) == errno.EPERM
    driver.delete_snapshot("snap-1")
    driver.unpublish(volume, target)
    driver.unstage(volume)
    driver.delete(volume.volume_id)
    driver.finish()


def test_one_handle_for_two_stores(driver: Driver) -> None:
    """A handle that is staged from one volume is not answered for another."""
    volume = driver.create("pvc-1")
    driver.stage(volume)
    other = {**driver.secrets, "name": "another"}
    assert code_of(driver.stage, volume, secrets=other) is Code.ALREADY_EXISTS
    head, _, number = driver.secrets["metaurl"].rpartition("/")
    elsewhere = {**driver.secrets, "metaurl": f"{head}/{int(number) + 1}"}
    assert code_of(driver.stage, volume, secrets=elsewhere) is Code.ALREADY_EXISTS
    driver.stage(volume)
    driver.unstage(volume)
    driver.delete(volume.volume_id)
    driver.finish()


@pytest.mark.parametrize("key", ["name", "metaurl", "access-key", "bucket", "format-options"])
def test_a_secret_that_no_command_takes(key: str) -> None:
    """It is the request's fault, and its text is not shown."""
    secrets = {"name": "vol", "metaurl": "redis://h/1", "access-key": "a", "secret-key": "s"}
    with pytest.raises(CsiError, match="NUL byte") as caught:
        parse_secrets({**secrets, key: f"redis://{SECRET}\0"}, allow_local=False)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert SECRET not in caught.value.text

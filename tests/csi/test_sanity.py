"""K1: the conformance suite of Kubernetes, csi-sanity, against the driver."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.csi.driver import Driver
from tests.faults.program import needs_mounts

VERSION: Final = "v5.6.0"
MODULE: Final = f"github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity@{VERSION}"
BUILD_S: Final = 1200
RUN_S: Final = 600
SECRETS: Final = (
    "CreateVolumeSecret",
    "DeleteVolumeSecret",
    "ControllerValidateVolumeCapabilitiesSecret",
    "NodeStageVolumeSecret",
    "NodePublishVolumeSecret",
    "CreateSnapshotSecret",
    "DeleteSnapshotSecret",
    "ControllerExpandVolumeSecret",
    "ListSnapshotsSecret",
)


def csi_sanity() -> Path:
    """The program, built once and kept by version; skips the test where it can't be."""
    cache = Path.home() / ".cache/slicefs"
    program = cache / f"csi-sanity-{VERSION}"
    if program.exists():
        return program
    if shutil.which("go") is None:
        pytest.skip("csi-sanity is a Go program, and there is no Go here")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "csi-sanity.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            place = cache / "csi-sanity.build"
            words = ["go", "install", MODULE]
            environment = {**os.environ, "GOBIN": str(place)}
            done = subprocess.run(
                words, env=environment, cwd="/", capture_output=True, text=True, timeout=BUILD_S
            )  # `cwd`: away from any go.mod
            if done.returncode:
                pytest.skip(f"csi-sanity can't be built here: {done.stderr.strip()[-300:]}")
            (place / "csi-sanity").rename(program)
    return program


@needs_mounts
@pytest.mark.soak
@pytest.mark.timeout(BUILD_S + RUN_S)
def test_csi_sanity(driver: Driver) -> None:
    sanity(driver)


@needs_mounts
@pytest.mark.timeout(BUILD_S + RUN_S)
def test_csi_sanity_refuses_and_expands(driver: Driver) -> None:
    """The part that is quick: what is refused, and one volume's way to a node and back."""
    sanity(driver, "--ginkgo.focus", "Identity Service|should fail when no|node-expand is called")


def sanity(driver: Driver, *options: str) -> None:
    program = csi_sanity()
    secrets = driver.base / "secrets.yaml"
    secrets.write_text(json.dumps(dict.fromkeys(SECRETS, driver.secrets)))  # JSON is YAML
    words: list[str | Path] = [
        program,
        "--csi.endpoint",
        f"unix://{driver.socket}",
        "--csi.secrets",
        secrets,
    ]
    words += ["--csi.mountdir", driver.base / "target", "--csi.stagingdir", driver.base / "stage"]
    words += ["--csi.testvolumeaccesstype", "mount", "--ginkgo.no-color", *options]
    done = subprocess.run(
        words, cwd=driver.base, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + driver.log.read_text()[-4000:]
    assert " 0 Failed" in done.stdout
    driver.finish()

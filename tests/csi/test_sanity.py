"""K1: the conformance suite of Kubernetes, csi-sanity, against the driver."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.csi.driver import Driver
from tests.csi.go_programs import BUILD_S, go_program
from tests.faults.program import needs_mounts

SANITY: Final = ("github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity", "v5.6.0")
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


@needs_mounts
@pytest.mark.timeout(BUILD_S + RUN_S)
@pytest.mark.parametrize("kind", [pytest.param("driver", marks=pytest.mark.soak), "s3_driver"])
def test_csi_sanity(kind: str, request: pytest.FixtureRequest) -> None:
    driver: Driver = request.getfixturevalue(kind)
    said = sanity(driver)
    skipped = re.search(r"(\d+) Skipped", said)
    assert skipped is not None
    advertised = "ListVolumes|GetCapacity|ListSnapshots|Snapshot|ExpandVolume|GetVolumeStats"
    assert not re.findall(rf"(?:{advertised})[^\n]*not supported", said)


def sanity(driver: Driver) -> str:
    """What csi-sanity prints; it must pass."""
    program = go_program(*SANITY)
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
    words += ["--csi.testvolumeaccesstype", "mount", "--ginkgo.no-color"]
    done = subprocess.run(
        words, cwd=driver.base, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + driver.log.read_text()[-4000:]
    assert " 0 Failed" in done.stdout
    driver.finish()
    return done.stdout

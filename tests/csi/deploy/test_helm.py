"""K3: the chart as Helm itself renders it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.csi.deploy.test_manifests import DEPLOY, by_kind, documents, readable
from tests.csi.go_programs import BUILD_S, cached, go_program

HELM: Final = ("helm.sh/helm/v3/cmd/helm", "v3.22.0")
CHART: Final = DEPLOY / "chart"

pytestmark = pytest.mark.timeout(BUILD_S)


@pytest.fixture(scope="module")
def helm(request: pytest.FixtureRequest) -> Path:
    """Helm, of this host or of the cache; it is built, for minutes, with `--soak` only."""
    found = shutil.which("helm")
    if found is not None:
        return Path(found)
    if not cached(*HELM).exists() and not request.config.getoption("--soak"):
        pytest.skip("there is no helm here; --soak builds one")
    return go_program(*HELM)


def rendered(helm: Path, *options: str) -> list[Any]:
    """What `helm install` as in docs/CSI.md sends to the API server."""
    words = [
        str(helm),
        "template",
        "slicefs-csi",
        str(CHART),
        "--namespace",
        "kube-system",
        *options,
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def test_chart_is_the_plain_manifest(helm: Path) -> None:
    plain = documents((DEPLOY / "slicefs-csi.yaml").read_text())
    assert readable(by_kind(rendered(helm))) == readable(by_kind(plain))


def test_lint(helm: Path) -> None:
    done = subprocess.run([helm, "lint", "--strict", CHART], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_values_reach_the_manifests(helm: Path) -> None:
    """Each value, where it is another than the default."""
    wanted = {
        "image": "registry.example/slicefs:9",
        "kubeletDir": "/data/kubelet",
        "cacheDir": "/ssd/cache",
        "stagingDir": "/ssd/staging",
        "metricsPort": "9123",
        "resources.limits.memory": "5Gi",
        "mountPodResources.limits.memory": "77Gi",
        "controller.nodeSelector.role": "control",
        "node.nodeSelector.gpu": "h200",
        "sidecars.provisioner": "mirror.example/provisioner:1",
        "sidecars.resizer": "mirror.example/resizer:2",
        "sidecars.snapshotter": "mirror.example/snapshotter:3",
        "sidecars.registrar": "mirror.example/registrar:4",
    }
    options = [word for name, value in wanted.items() for word in ("--set", f"{name}={value}")]
    found = str(by_kind(rendered(helm, *options, "--set", "upgradeClients=true")))
    assert "--upgrade-clients=true" in found
    for value in wanted.values():
        assert value in found
    for default in ("slicefs-csi:0.1.0", "/var/lib/kubelet", "9909", "registry.k8s.io"):
        assert default not in found

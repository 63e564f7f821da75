"""K3: manifests: they parse, have what the driver needs, and name options that it has."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from csi.clients.backend import parse_secrets
from csi.services.table import DRIVER_NAME
from csi.volumes.parameters import parse_parameters
from tests.csi.driver import PROGRAM
from tests.faults.program import REPOSITORY

DEPLOY = REPOSITORY / "csi/deploy"
VALUES = yaml.safe_load((DEPLOY / "chart/values.yaml").read_text())
MANIFESTS = sorted([*DEPLOY.glob("*.yaml"), *DEPLOY.glob("examples/*.yaml")])


def documents(text: str) -> list[Any]:
    return list(yaml.safe_load_all(text))


def rendered() -> list[Any]:
    """The chart, with what Helm would put in from `values.yaml`."""

    def value(found: re.Match[str]) -> str:
        found_value = VALUES[found[2]]
        return yaml.safe_dump(found_value, default_flow_style=True).removesuffix("\n...\n").strip()

    texts = [path.read_text() for path in sorted(DEPLOY.glob("chart/templates/*.yaml"))]
    pattern = re.compile(r"\{\{ (toJson )?\.Values\.(\w+) \}\}")
    return [each for text in texts for each in documents(pattern.sub(value, text))]


def by_kind(found: list[Any]) -> dict[tuple[str, str], Any]:
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_parse(path: Path) -> None:
    for each in documents(path.read_text()):
        assert {"apiVersion", "kind", "metadata"} <= each.keys()


def test_chart_and_manifest_say_the_same() -> None:
    plain = documents((DEPLOY / "slicefs-csi.yaml").read_text())
    assert by_kind(rendered()) == by_kind(plain)


def test_options_and_mounts() -> None:
    known = subprocess.run([PROGRAM, "--help"], capture_output=True, text=True, check=True).stdout
    found = by_kind(rendered())
    assert found["CSIDriver", DRIVER_NAME]["spec"]["attachRequired"] is False
    for kind, name in (("DaemonSet", "slicefs-csi-node"), ("Deployment", "slicefs-csi-controller")):
        pod = found[kind, name]["spec"]["template"]["spec"]
        driver = pod["containers"][0]
        assert driver["image"] == VALUES["image"]
        assert driver["livenessProbe"]["httpGet"]["path"] == "/healthz"
        for option in driver["args"]:
            assert option.split("=")[0] in known
        volumes = {each["name"] for each in pod["volumes"]}
        for container in pod["containers"]:
            assert {each["name"] for each in container["volumeMounts"]} <= volumes
    node = found["DaemonSet", "slicefs-csi-node"]["spec"]["template"]["spec"]["containers"][0]
    places = {each["mountPath"]: each.get("mountPropagation") for each in node["volumeMounts"]}
    assert places[VALUES["kubeletDir"]] == "Bidirectional"


def test_class_and_secret_are_what_the_driver_takes() -> None:
    found = by_kind(documents((DEPLOY / "examples/class.yaml").read_text()))
    assert parse_secrets(found["Secret", "slicefs-secret"]["stringData"]).can_format
    storage_class = found["StorageClass", "slicefs"]
    assert storage_class["provisioner"] == DRIVER_NAME
    claim = {"csi.storage.k8s.io/pvc/name": "p", "csi.storage.k8s.io/pvc/namespace": "n"}
    wish = parse_parameters("pvc-1", {**storage_class["parameters"], **claim})
    assert (wish.path, wish.on_delete) == ("n/p", "archive")

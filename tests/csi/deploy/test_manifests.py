"""K3: manifests: they parse, have what the driver needs, and name options that it has."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from csi.clients.backend import parse_secrets
from csi.services.table import DRIVER_NAME
from csi.volumes.parameters import parse_parameters
from fsdata.attached.directory import ALLOWED_ENV
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
        wanted = VALUES
        for name in found[2].split("."):
            wanted = wanted[name]
        return json.dumps(wanted) if found[1] else str(wanted)

    texts = [path.read_text() for path in sorted(DEPLOY.glob("chart/templates/*.yaml"))]
    pattern = re.compile(r"\{\{ (toJson )?\.Values\.([\w.]+) \}\}")
    return [each for text in texts for each in documents(pattern.sub(value, text))]


def by_kind(found: list[Any]) -> dict[tuple[str, str], Any]:
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def readable(found: dict[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    """Manifests whose texts in JSON are compared by content, not by spaces."""
    template = found["ConfigMap", "slicefs-csi-mount-pod"]
    data = {name: json.loads(text) for name, text in template["data"].items()}
    return {**found, ("ConfigMap", "slicefs-csi-mount-pod"): {**template, "data": data}}


def pod_template() -> dict[str, Any]:
    """What the node plugin makes mount pods from."""
    found = readable(by_kind(rendered()))["ConfigMap", "slicefs-csi-mount-pod"]
    template: dict[str, Any] = found["data"]["pod.json"]
    return template


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


def test_mount_pod_and_driver_share_the_state() -> None:
    """The pod mounts where the driver and kubelet see it; the driver takes the template."""
    found = by_kind(rendered())
    node = found["DaemonSet", "slicefs-csi-node"]["spec"]["template"]["spec"]["containers"][0]
    options = dict(option.split("=", 1) for option in node["args"])
    [pod] = pod_template()["spec"]["containers"]
    places = {each["mountPath"]: each.get("mountPropagation") for each in pod["volumeMounts"]}
    assert places[options["--state-dir"]] == "Bidirectional"
    assert Path(options["--mount-pod"]).parent.as_posix() in {
        each["mountPath"] for each in node["volumeMounts"]
    }
    assert pod["image"] == VALUES["image"]


def test_mount_pods_read_attached_directories_of_the_node() -> None:
    """X2: what `slicefs attach file://` names is there, at the same path, and not to be written."""
    spec = pod_template()["spec"]
    [pod] = spec["containers"]
    allowed = {each["name"]: each["value"] for each in pod["env"]}[ALLOWED_ENV]
    assert allowed == VALUES["attachDir"]
    [mount] = [each for each in pod["volumeMounts"] if each["mountPath"] == allowed]
    assert (mount["readOnly"], mount["mountPropagation"]) == (True, "HostToContainer")
    places = {each["name"]: each["hostPath"]["path"] for each in spec["volumes"]}
    assert places[mount["name"]] == allowed


def test_class_and_secret_are_what_the_driver_takes() -> None:
    found = by_kind(documents((DEPLOY / "examples/class.yaml").read_text()))
    assert parse_secrets(
        found["Secret", "slicefs-secret"]["stringData"], allow_local=False
    ).can_format
    storage_class = found["StorageClass", "slicefs"]
    assert storage_class["provisioner"] == DRIVER_NAME
    claim = {"csi.storage.k8s.io/pvc/name": "p", "csi.storage.k8s.io/pvc/namespace": "n"}
    wish = parse_parameters("pvc-1", {**storage_class["parameters"], **claim})
    assert (wish.path, wish.on_delete) == ("n/p", "archive")


def test_accounts_are_small() -> None:
    """None lists the secrets of the cluster, or writes what other controllers elect a leader by."""
    rules = {
        (resource, verb)
        for each in rendered()
        if each["kind"] in ("ClusterRole", "Role")
        for rule in each["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {verb for resource, verb in rules if resource == "secrets"} == {"get"}
    assert not [each for each in rules if "*" in each or each[0] == "leases"]
    assert {verb for resource, verb in rules if resource == "nodes"} <= {"get", "list", "watch"}

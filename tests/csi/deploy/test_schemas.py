"""K3: every manifest is what the schemas of Kubernetes, of its snapshots and of Fluid allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.csi.deploy.schemas import is_custom, schema_of
from tests.csi.deploy.test_manifests import MANIFESTS, documents, pod_template

kubernetes_validate = pytest.importorskip("kubernetes_validate")
jsonschema = pytest.importorskip("jsonschema")
VERSIONS = ("1.26", "1.37")  # the oldest that the driver is for, and the latest known


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
@pytest.mark.parametrize("version", VERSIONS)
def test_kinds_of_kubernetes(path: Path, version: str) -> None:
    for each in documents(path.read_text()):
        if not is_custom(each):
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_mount_pod(version: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "slicefs-mount"}}
    kubernetes_validate.validate({**pod, **pod_template()}, version, strict=True)


@pytest.mark.parametrize("name", ["snapshot-class", "snapshot", "fluid"])
def test_custom_kinds(name: str) -> None:
    [path] = [path for path in MANIFESTS if path.stem == name]
    found: list[Any] = [each for each in documents(path.read_text()) if is_custom(each)]
    assert found
    for each in found:
        schema = schema_of(each)
        jsonschema.validate(each, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**each, "unknown": "field"}, schema)

"""Schemas of custom resources, as the Go modules that define them have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.csi.go_programs import run_go

_CRDS: Final = {
    "snapshot.storage.k8s.io": (
        "github.com/kubernetes-csi/external-snapshotter/client/v8@v8.4.0",
        "config/crd",
    ),
    "data.fluid.io": ("github.com/fluid-cloudnative/fluid@v1.0.8", "config/crd/bases"),
}


def is_custom(document: Any) -> bool:
    """Whether a manifest is of a kind that Kubernetes itself does not have."""
    return document["apiVersion"].partition("/")[0] in _CRDS


def definition_files(group: str) -> list[Path]:
    """The files that define the kinds of a group; skips the test where they can't be had."""
    module, folder = _CRDS[group]
    if shutil.which("go") is None:
        pytest.skip("schemas of custom resources come from Go modules, and there is no Go here")
    found = json.loads(run_go(["mod", "download", "-json", module], "/"))
    return sorted(Path(found["Dir"], folder).glob(f"{group}_*.yaml"))


def schema_of(document: Any) -> dict[str, Any]:
    """The schema of a custom resource; fields that it does not have are errors, as for kubectl."""
    group, _, version = document["apiVersion"].partition("/")
    for path in definition_files(group):
        if document["kind"].lower() not in path.stem:  # they are large
            continue
        found = yaml.load(path.read_bytes(), yaml.CSafeLoader)["spec"]
        if found["names"]["kind"] == document["kind"]:
            [served] = [each for each in found["versions"] if each["name"] == version]
            schema: dict[str, Any] = served["schema"]["openAPIV3Schema"]
            schema["properties"]["metadata"] = {"type": "object", "additionalProperties": True}
            closed: dict[str, Any] = _closed(schema)
            return closed
    raise AssertionError(f"{group} has no {document['kind']}")


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(value) for key, value in schema.items()}
    if isinstance(found.get("properties"), dict) and "additionalProperties" not in found:
        found["additionalProperties"] = False
    return found

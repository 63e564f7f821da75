"""K2: mount pods, an API server that answers oddly, and a pod that does not start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from csi.cluster import pods
from csi.cluster.api import KubeApi
from csi.cluster.pods import MountPods
from csi.errors import CsiError
from tests.csi.kube_standin import NODE, ApiStandIn

COMMAND = ("slicefs-csi-client", "/home")


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiStandIn]:
    found = ApiStandIn(tmp_path)
    yield found
    found.stop()


def mount_pods(api: ApiStandIn, image: str) -> MountPods:
    """Those of a driver whose template has that image."""
    template = {"spec": {"containers": [{"name": "client", "image": image}]}}
    return MountPods(KubeApi("127.0.0.1", api.port, str(api.account)), template, NODE)


def test_a_pod_that_does_not_start(api: ApiStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is deleted after a while, and not made again at once: other volumes have their turn."""
    old, new = mount_pods(api, "old"), mount_pods(api, "new")
    asyncio.run(old._create("serving", "pvc-1", COMMAND))
    api.pods["serving"]["status"]["phase"] = "Running"
    assert asyncio.run(new.renew("pvc-1", COMMAND))
    assert asyncio.run(new.renew("pvc-1", COMMAND))
    [name] = set(api.pods) - {"serving"}
    monkeypatch.setattr(pods, "MOVE_S", -1.0)
    with pytest.raises(CsiError, match="does not start"):
        asyncio.run(new.renew("pvc-1", COMMAND))
    assert "deletionTimestamp" in api.pods.pop(name)["metadata"]
    for _ in range(2):
        assert not asyncio.run(new.renew("pvc-1", COMMAND))
    assert list(api.pods) == ["serving"]


@pytest.mark.parametrize(
    "odd", [(404, {}), (409, {}), (410, {}), (429, {}), (500, None), (200, [1]), (503, "text")]
)
def test_odd_answers(api: ApiStandIn, monkeypatch: pytest.MonkeyPatch, odd: Any) -> None:
    """Each is an error of the driver's own, after which the call is repeated."""
    monkeypatch.setattr(api, "answer", lambda *_: odd)
    for call in (mount_pods(api, "new").renew, mount_pods(api, "new").start):
        with pytest.raises(CsiError):
            asyncio.run(call("pvc-1", COMMAND, *((bool,) if call.__name__ == "start" else ())))

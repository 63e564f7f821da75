"""Mount pods: a client in a pod of its own, which ends when its volume is unmounted.

A pod has a name by node, volume and template, so there is one of a template at most, whatever
becomes of the driver. Where the template has changed, a client that runs moves to a pod of the new
one: its program takes the mount over. What is secret is not in the pod: the program in it reads
that from a file of the node.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from csi.cluster.api import KubeApi
from csi.errors import Code, CsiError
from csi.host.commands import CommandResult
from csi.names import file_name

log = logging.getLogger(__name__)

START_S: Final = 90.0  # kubelet repeats NodeStage after two minutes
_POD_LOOK_S: Final = 0.5
_MOUNT_LOOK_S: Final = 0.02
_ENDED: Final = ("Succeeded", "Failed")
_LABEL: Final = "csi.slicefs/client"  # the same for all pods of a volume on a node
_REVISION_CHARS: Final = 8
RENEW_AGAIN_S: Final = 600.0  # after a move that failed
MOVE_S: Final = 300.0  # then other volumes wait no longer for this one
_SHOWN_MAX: Final = 600


class MountPods:
    """Pods on `node`, made from `template`. Calls for one name do not overlap."""

    def __init__(self, api: KubeApi, template: Mapping[str, Any], node: str) -> None:
        self._api = api
        self._template = template
        self._node = node
        self._node_uid = ""
        text = json.dumps(template, sort_keys=True).encode()
        self._revision = hashlib.sha256(text).hexdigest()[:_REVISION_CHARS]
        self._failed: dict[str, float] = {}  # by title: when a client could not move
        self._moving: dict[str, float] = {}  # by title: when it was first seen to be under way

    @staticmethod
    def read_template(path: str) -> dict[str, Any]:
        """A pod in JSON, with one container. Raises: OSError, RuntimeError."""
        with open(path, encoding="utf-8") as file:
            try:
                found = json.load(file)
                [_] = found["spec"]["containers"]
            except (ValueError, KeyError, TypeError) as error:
                raise RuntimeError(f"{path} is no pod with one container: {error}") from error
        return dict(found)

    async def start(
        self, title: str, command: Sequence[str], is_up: Callable[[], bool]
    ) -> CommandResult:
        """Run `command` in the pod of `title` and wait until `is_up()`.

        Where the pod ends before that, its exit code and the end of what it printed; code None
        where it takes too long. A pod that was made before is waited for; pods of other templates,
        which hold no mount, are deleted. Raises: CsiError.
        """
        clock = asyncio.get_running_loop().time
        give_up = clock() + START_S
        name = self._name(title)
        made = False
        for other in await self._pods_of(title):
            if other != name:
                await asyncio.to_thread(self._api.delete_pod, other)
        while clock() < give_up:
            pod = await asyncio.to_thread(self._api.pod, name)
            if pod is None:
                await self._create(name, title, command)
                made = True
            elif pod["status"].get("phase") in _ENDED:
                await asyncio.to_thread(self._api.delete_pod, name)
                if made:
                    return _end(pod)
            if await _comes_true(is_up, _POD_LOOK_S):
                return CommandResult(0, "", "")
        why = "there is none" if pod is None else _reason(pod)
        return CommandResult(
            None, "", f"the mount pod {name} does not mount in {START_S:.0f} s: {why}"
        )

    async def renew(self, title: str, command: Sequence[str]) -> bool:
        """Have a client that runs move to a pod of this template, one step at a time.

        Whether it is still under way; `command` takes the mount over. The pod that it leaves ends,
        and is deleted. Raises: CsiError where it could not move: it goes on as it is.
        """
        clock = asyncio.get_running_loop().time
        name, pods = self._name(title), await self._pods_of(title)
        new = pods.pop(name, None)
        serving = [pod for pod in pods.values() if _serves(pod)]
        for old, pod in pods.items():
            if pod["status"].get("phase") in _ENDED:
                await asyncio.to_thread(self._api.delete_pod, old)
                log.info("volume %r: its client has moved to the pod %s", title, name)
        if not serving or new is None:
            self._moving.pop(title, None)
        if not serving:
            return False
        if new is None and clock() >= self._failed.get(title, 0.0) + RENEW_AGAIN_S:
            log.info("volume %r: its client moves to the pod %s", title, name)
            await self._create(name, title, command)
            return True
        if new is not None and new["status"].get("phase") in _ENDED:
            self._failed[title] = clock()
            await asyncio.to_thread(self._api.delete_pod, name)
            why = _end(new).err or "it ended at once"
            raise CsiError(Code.INTERNAL, f"the client can't move to the pod {name}: {why}")
        if new is None:
            return False
        late = clock() - self._moving.setdefault(title, clock()) > MOVE_S
        if late and new["status"].get("phase") == "Pending":  # its image is not there, most likely
            self._failed[title] = clock()
            await asyncio.to_thread(self._api.delete_pod, name)
            text = f"the pod {name} does not start in {MOVE_S:.0f} s: {_reason(new)}"
            raise CsiError(Code.INTERNAL, text)
        return not late

    async def stop(self, title: str) -> None:
        """Let the pods end, if there are any. Raises: CsiError."""
        self._failed.pop(title, None)
        for name in await self._pods_of(title):
            await asyncio.to_thread(self._api.delete_pod, name)

    async def _pods_of(self, title: str) -> dict[str, dict[str, Any]]:
        """All pods of a volume on this node, by name. Raises: CsiError."""
        label = f"{_LABEL}={self._client(title)}"
        found = await asyncio.to_thread(self._api.pods, label)
        return {pod["metadata"]["name"]: pod for pod in found}

    def _client(self, title: str) -> str:
        return file_name(f"{self._node}/{title}")

    def _name(self, title: str) -> str:
        return f"slicefs-mount-{self._client(title)}-{self._revision}"

    async def _create(self, name: str, title: str, command: Sequence[str]) -> None:
        if not self._node_uid:
            self._node_uid = await asyncio.to_thread(self._api.node_uid, self._node)
            if not self._node_uid:
                raise CsiError(Code.INTERNAL, f"there is no node {self._node}: see --node-id")
        await asyncio.to_thread(self._api.create_pod, self._pod(name, title, command))

    def _pod(self, name: str, title: str, command: Sequence[str]) -> dict[str, Any]:
        pod: dict[str, Any] = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(self._template)}
        metadata = pod.setdefault("metadata", {})
        metadata["name"] = name
        metadata.setdefault("labels", {}).update(
            {"app": "slicefs-mount", _LABEL: self._client(title)}
        )
        metadata.setdefault("annotations", {})["csi.slicefs/volume"] = title
        owner = {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": self._node_uid}
        metadata["ownerReferences"] = [{**owner, "controller": True}]  # so `drain` evicts it
        pod["spec"] |= {"nodeName": self._node, "restartPolicy": "Never"}
        [container] = pod["spec"]["containers"]
        container["command"] = list(command)
        container["terminationMessagePolicy"] = "FallbackToLogsOnError"
        return pod


def _serves(pod: Mapping[str, Any]) -> bool:
    """Whether it runs, and is not to end."""
    return pod["status"].get("phase") not in _ENDED and ("deletionTimestamp" not in pod["metadata"])


async def _comes_true(condition: Callable[[], bool], seconds: float) -> bool:
    clock = asyncio.get_running_loop().time
    give_up = clock() + seconds
    while not condition():
        if clock() > give_up:
            return False
        await asyncio.sleep(_MOUNT_LOOK_S)
    return True


def _state(pod: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """What the container's status says of a state, if it is in that."""
    for status in pod["status"].get("containerStatuses", []):
        if kind in status.get("state", {}):
            return dict(status["state"][kind])
    return {}


def _end(pod: Mapping[str, Any]) -> CommandResult:
    found = _state(pod, "terminated")
    text = " ".join(str(found.get("message") or _reason(pod)).split())
    return CommandResult(
        int(found.get("exitCode") or 1), "", text.removeprefix("slicefs: ")[-_SHOWN_MAX:]
    )


def _reason(pod: Mapping[str, Any]) -> str:
    """Why the pod does not run, as kubelet says."""
    status = pod["status"]
    waiting = _state(pod, "waiting")
    parts = [status.get("phase"), status.get("reason"), status.get("message")]
    parts += [waiting.get("reason"), waiting.get("message")]
    return " ".join(str(part) for part in parts if part)[:_SHOWN_MAX]

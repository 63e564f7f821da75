"""The few calls of the Kubernetes API that mount pods need, with the pod's service account.

Calls block, and belong into a thread. Each opens a connection of its own and reads the token anew,
because kubelet replaces it every hour.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.parse
from collections.abc import Mapping
from typing import Any, Final

from csi.errors import Code, CsiError

ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
_CALL_S: Final = 15.0
_SHOWN_MAX: Final = 300


class KubeApi:
    """The API server of this cluster, as the service account in `directory` may use it."""

    def __init__(self, host: str, port: int, directory: str) -> None:
        """Raises: OSError where the service account is not there."""
        self._host = host
        self._port = port
        self._token = os.path.join(directory, "token")
        self._context = ssl.create_default_context(cafile=os.path.join(directory, "ca.crt"))
        with open(os.path.join(directory, "namespace"), encoding="utf-8") as file:
            self._pods = f"/api/v1/namespaces/{file.read().strip()}/pods"

    @classmethod
    def of_this_pod(cls, environment: Mapping[str, str], directory: str) -> KubeApi:
        """As kubelet tells every pod. Raises: OSError, RuntimeError outside of a cluster."""
        host = environment.get("KUBERNETES_SERVICE_HOST", "")
        port = environment.get("KUBERNETES_SERVICE_PORT", "")
        if not host or not port.isdigit():
            raise RuntimeError("mount pods need a cluster: KUBERNETES_SERVICE_HOST is not set")
        return cls(host, int(port), directory)

    def pod(self, name: str) -> dict[str, Any] | None:
        """The pod; None where there is none. Raises: CsiError."""
        code, found = self._ask("GET", f"{self._pods}/{name}", fine=http.client.NOT_FOUND)
        return None if code == http.client.NOT_FOUND else found

    def pods(self, label: str) -> list[dict[str, Any]]:
        """The pods with a label, `key=value`. Raises: CsiError."""
        selector = urllib.parse.quote(label)
        _, found = self._ask("GET", f"{self._pods}?labelSelector={selector}")
        return list(found.get("items") or [])

    def create_pod(self, pod: Mapping[str, Any]) -> None:
        """Make it, unless there is one with its name. Raises: CsiError."""
        self._ask("POST", self._pods, pod, http.client.CONFLICT)

    def delete_pod(self, name: str) -> None:
        """Let it end; it may be gone already. Raises: CsiError."""
        self._ask("DELETE", f"{self._pods}/{name}", fine=http.client.NOT_FOUND)

    def node_uid(self, name: str) -> str:
        """The UID of a node; "" where there is no such node. Raises: CsiError."""
        code, found = self._ask("GET", f"/api/v1/nodes/{name}", fine=http.client.NOT_FOUND)
        return "" if code == http.client.NOT_FOUND else str(found["metadata"]["uid"])

    def _ask(
        self, method: str, path: str, content: Mapping[str, Any] | None = None, fine: int = 0
    ) -> tuple[int, dict[str, Any]]:
        """Status and answer. Raises: CsiError unless the status is OK or `fine`."""
        what = f"the Kubernetes API, {method} {path}"
        try:
            with open(self._token, encoding="utf-8") as file:
                headers = {"Authorization": f"Bearer {file.read().strip()}"}
            body = None if content is None else json.dumps(content)
            headers["Content-Type"] = "application/json"
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=_CALL_S, context=self._context
            )
            try:
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                found = json.loads(response.read() or b"{}")
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise CsiError(Code.UNAVAILABLE, f"{what}: {error}: try again") from error
        code = response.status
        if not isinstance(found, dict):
            raise CsiError(Code.UNAVAILABLE, f"{what}: {code} without an object: try again")
        if code < 300 or code == fine:
            return code, found
        why = str(found.get("message", ""))[:_SHOWN_MAX]
        kind = Code.INTERNAL if code < 500 and code != 429 else Code.UNAVAILABLE
        raise CsiError(kind, f"{what}: {code} {why}")

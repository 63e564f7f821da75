"""Stand-ins for what a cluster does with mount pods, where there is no cluster.

`ApiStandIn` keeps pods as an API server does: over TLS, with a token, one pod for a name, and a pod
that is deleted stays until its kubelet lets it go. `KubeletStandIn` runs their commands as
processes of this host, each with process ids of its own, and reports what became of them; it works
against a real API server as well.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

NODE: Final = "node-1"
PODS: Final = "/api/v1/namespaces/kube-system/pods"
TOKEN: Final = "token-of-the-service-account"
_LOOK_S: Final = 0.02


def make_certificate(directory: Path) -> None:
    """`ca.crt` and `tls.key` for 127.0.0.1, signed by itself."""
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += ["-nodes", "-days", "2", "-subj", "/CN=kube", "-addext", "subjectAltName=IP:127.0.0.1"]
    words += ["-keyout", str(directory / "tls.key"), "-out", str(directory / "ca.crt")]
    subprocess.run(words, check=True, capture_output=True)


class ApiStandIn:
    """Serves pods of one namespace and one node; `account` is the directory of the account."""

    def __init__(self, base: Path) -> None:
        self.account = base / "account"
        self.account.mkdir()
        make_certificate(self.account)
        (self.account / "token").write_text(TOKEN)
        (self.account / "namespace").write_text("kube-system")
        self.pods: dict[str, dict[str, Any]] = {}
        self.bodies: list[str] = []  # all that was ever sent
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.account / "ca.crt", self.account / "tls.key")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, url: str, body: str) -> tuple[int, Any]:
        """Status and content, as the API server has them."""
        path, query = urlsplit(url).path, parse_qs(urlsplit(url).query)
        name = path.removeprefix(PODS).strip("/").removesuffix("/status")
        with self._lock:
            self.bodies.append(body)
            if path == f"/api/v1/nodes/{NODE}":
                return 200, {"metadata": {"name": NODE, "uid": "uid-of-the-node"}}
            if method == "GET" and path == PODS:
                label, _, value = query.get("labelSelector", ["="])[0].partition("=")
                found = [
                    pod
                    for pod in self.pods.values()
                    if not label or pod["metadata"].get("labels", {}).get(label) == value
                ]
                return 200, {"items": found}
            if method == "POST" and path == PODS:
                return self._create(json.loads(body))
            if name not in self.pods:
                return 404, {"message": f"pods {name} not found"}
            if method == "PATCH":
                self.pods[name]["status"] |= json.loads(body)["status"]
            elif method == "DELETE":
                self._delete(name, "0" in query.get("gracePeriodSeconds", []))
            return 200, self.pods.get(name, {})

    def _create(self, pod: dict[str, Any]) -> tuple[int, Any]:
        name = pod["metadata"]["name"]
        if name in self.pods:
            return 409, {"message": f"pods {name} already exists"}
        assert pod["spec"]["nodeName"] == NODE
        self.pods[name] = {**pod, "status": {"phase": "Pending"}}
        return 201, self.pods[name]

    def _delete(self, name: str, at_once: bool) -> None:
        pod = self.pods[name]
        if at_once or pod["status"]["phase"] in ("Succeeded", "Failed"):
            del self.pods[name]
        else:
            pod["metadata"]["deletionTimestamp"] = "now"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65537)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                if self.headers["Authorization"] != f"Bearer {TOKEN}":
                    code, content = 401, {"message": "Unauthorized"}
                else:
                    code, content = api.answer(self.command, self.path, body)
                text = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *words: Any) -> None:
                del words

        return Handler


class KubeletStandIn:
    """Runs the pods of `NODE` that an API server at `port` has, each as a process group."""

    def __init__(self, port: int, account: Path) -> None:
        self._port = port
        self._account = account
        self._context = ssl.create_default_context(cafile=str(account / "ca.crt"))
        self._token = (account / "token").read_text()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.programs: dict[str, tuple[str, ...]] = {}  # of images that have another than ours
        self._ending: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        for process in self.running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def ask(self, method: str, path: str, content: Mapping[str, Any] | None = None) -> Any:
        """What the API server answers."""
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self._port, timeout=60, context=self._context
        )
        headers = {"Authorization": f"Bearer {self._token}"}
        headers["Content-Type"] = "application/strategic-merge-patch+json"
        body = None if content is None else json.dumps(content)
        connection.request(method, path, body, headers)
        found = json.loads(connection.getresponse().read())
        connection.close()
        return found

    def pods(self) -> list[Any]:
        """All pods of this node."""
        found = self.ask("GET", PODS)["items"]
        return [pod for pod in found if pod["spec"].get("nodeName") == NODE]

    def _work(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            for pod in self.pods():
                self._look(pod["metadata"]["name"], pod)

    def _look(self, name: str, pod: Mapping[str, Any]) -> None:
        phase = pod["status"].get("phase")
        process = self.running.get(name)
        if "deletionTimestamp" in pod["metadata"]:
            if process is None:
                self.ask("DELETE", f"{PODS}/{name}?gracePeriodSeconds=0")
                return
            if name not in self._ending:
                self._ending.add(name)
                _terminate(process.pid)
        elif process is None and phase == "Pending":
            self.running[name] = self._start(pod)
            self._report(name, "Running", {"running": {}})
            return
        if process is not None and process.poll() is not None:
            del self.running[name]
            self._ending.discard(name)
            message, code = self._output(name).read_text()[-2048:], process.returncode
            ended = {"exitCode": code if code >= 0 else 128 - code, "message": message}
            self._report(name, "Failed" if code else "Succeeded", {"terminated": ended})

    def _start(self, pod: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        [container] = pod["spec"]["containers"]
        command = self.programs.get(container["image"], container["command"])
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with self._output(pod["metadata"]["name"]).open("w") as output:
            return subprocess.Popen(
                ["unshare", "--pid", "--fork", "--kill-child", *command],
                env={"PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _output(self, name: str) -> Path:
        return self._account / f"{name}.out"

    def _report(self, name: str, phase: str, state: Mapping[str, Any]) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        status: dict[str, Any] = {"name": "client", "state": state, "image": "", "imageID": ""}
        status |= {"ready": phase == "Running", "restartCount": 0}
        content = {"phase": phase, "startTime": stamp, "containerStatuses": [status]}
        self.ask("PATCH", f"{PODS}/{name}/status", {"status": content})


def _terminate(pid: int) -> None:
    """Ask the first process of a pod to end, as kubelet does."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        os.kill(int(child), signal.SIGTERM)

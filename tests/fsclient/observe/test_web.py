"""`mount --web`: the page stands alone, and its JSON says what the mount does."""

from __future__ import annotations

import http.client
import json
import re
import socket
from typing import Any

import pytest

from fsclient.observe.http import is_own_host
from tests.faults.program import Volume, needs_mounts, succeed, wait_until
from tests.fsclient.observe.ports import free_port
from tests.fsclient.observe.test_endpoint import ask

MIB = 1 << 20


@needs_mounts
def test_page_and_json(embedded: Volume) -> None:
    embedded.format()
    port = free_port()
    address = f"127.0.0.1:{port}"
    mount = embedded.mount("--web", address, "--metrics", address)
    (mount.path / "dir").mkdir()
    succeed("quota", "set", embedded.meta, "--path", "/dir", "--capacity", "1MiB")
    (mount.path / "dir" / "file").write_bytes(b"x" * (MIB - 100_000))
    code, kind, page = ask(port, "/")
    assert (code, kind) == (200, "text/html; charset=utf-8")
    assert re.search(r"(src|href|url|@import|import)\s*[=(]", page) is None, "it loads nothing"
    assert not re.search(r"https?:|//[a-z]", page)
    assert 'name="viewport"' in page
    assert "default-src 'none'" in page

    def told() -> Any:
        code, kind, text = ask(port, "/api/stats")
        assert (code, kind) == (200, "application/json")
        return json.loads(text)

    wait_until("sessions and quotas are read", 60, lambda: told()["quotas"])
    found = told()
    assert (found["volume"], found["mountpoint"]) == ("testvol", str(mount.path))
    assert (found["session_count"], found["sessions"][0]["pid"]) == (1, mount.pid)
    assert found["quotas"][0]["path"] == "/dir"
    assert found["quota_count"] == 1
    assert found["numbers"]['operation_bytes_total{op="write"}'] == MIB - 100_000
    (created,) = (
        each
        for each in found["latencies"]
        if (each["name"], each["labels"]) == ("operation_duration_seconds", 'op="create"')
    )
    assert created["count"] == sum(created["buckets"].values()) == 1
    assert ask(port, "/metrics")[0] == 200
    for path in ("/", "/api/stats", "/metrics"):
        assert _code_by_host(port, path, f"rebound.example:{port}") == 403
        assert _code_by_host(port, path, f"localhost:{port}") == 200
    assert mount.numbers()["sessions"] == 1
    embedded.end("quota of /dir: 91% full")


def _code_by_host(port: int, path: str, host: str) -> int:
    """What a browser is answered that believes to be at `host`."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        link.request("GET", path, headers={"Host": host})
        return link.getresponse().status
    finally:
        link.close()


@needs_mounts
def test_names_of_the_host_are_answered(embedded: Volume) -> None:
    """On an address that others reach Prometheus may ask by any name, and browsers may not."""
    embedded.format()
    web, metrics = free_port(), free_port()
    embedded.mount("--web", f"0.0.0.0:{web}", "--metrics", f"0.0.0.0:{metrics}")
    assert _code_by_host(web, "/", socket.gethostname()) == 200
    assert _code_by_host(web, "/", "rebound.example") == 403
    assert _code_by_host(metrics, "/metrics", "node.monitoring.example") == 200
    embedded.end()


@pytest.mark.parametrize(
    ("host", "own"),
    [
        (None, True),
        ("127.0.0.1:9568", True),
        ("[::1]:9568", True),
        ("::1", True),
        ("LOCALHOST.:1", True),
        ("localhost.example", False),
        ("127.0.0.1.example", False),
        ("", False),
        ("[::1", True),
    ],
)
def test_hosts(host: str | None, own: bool) -> None:
    assert is_own_host(host, {"localhost"}) is own

"""`mount --web`: the page stands alone, and its JSON says what the mount does."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.faults.program import Volume, needs_mounts, succeed, wait_until
from tests.observe.ports import free_port
from tests.observe.test_endpoint import ask

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
    assert mount.numbers()["sessions"] == 1
    embedded.end("quota of /dir: 91% full")

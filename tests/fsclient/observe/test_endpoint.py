"""`mount --metrics`: Prometheus text of a real mount, its health, and the Grafana dashboard."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest

from fsclient.observe import http
from fsclient.observe.catalog import is_known
from fsclient.observe.routes import Address, Reply, parse_address
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime
from tests.faults.program import REPOSITORY, Volume, is_mounted, needs_mounts, slicefs, wait_until
from tests.faults.redis_server import DurableRedis
from tests.fsclient.observe import prometheus
from tests.fsclient.observe.ports import free_port

DASHBOARD = REPOSITORY / "deploy" / "grafana" / "slicefs.json"


def ask(port: int, path: str) -> tuple[int, str, str]:
    """Code, content type and body."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def _series_of(dashboard: Any) -> set[str]:
    """Every series that a panel or a variable asks for."""
    asked = json.dumps([dashboard["panels"], dashboard["templating"]])
    return set(re.findall(r"slicefs_[a-z0-9_]+", asked))


@needs_mounts
def test_metrics_and_dashboard(served: Volume) -> None:
    served.format()
    port = free_port()
    staging, cache = str(served.base / "staging"), str(served.base / "cache")
    mount = served.mount(
        *("--metrics", str(port), "--writeback", "--staging-dir", staging, "--cache-dir", cache)
    )
    (mount.path / "file").write_bytes(os.urandom(200_000))
    assert (mount.path / "file").stat().st_size == 200_000
    wait_until("published", 60, lambda: not mount.numbers()["staging_changes"])
    code, kind, page = ask(port, "/metrics")
    assert (code, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families = prometheus.parse(page)
    assert all(name.startswith("slicefs_") for name in families)
    assert {name for name in families if not is_known(name.removeprefix("slicefs_"))} == set()
    assert (
        families["slicefs_operations_total"].samples['slicefs_operations_total{op="create"}'] == 1
    )
    numbers = mount.numbers()  # the same registry: what both have has one name
    plain = {
        sample.removeprefix("slicefs_")
        for family in families.values()
        if family.kind != "histogram"
        for sample in family.samples
    }
    assert plain <= set(numbers)
    shown = {sample.partition("{")[0] for family in families.values() for sample in family.samples}
    wanted = _series_of(json.loads(DASHBOARD.read_text()))
    assert len(wanted) > 20
    assert wanted <= shown, "the dashboard asks for series that a mount does not have"
    assert ask(port, "/healthz") == (200, "text/plain; charset=utf-8", "ok\n")
    assert ask(port, "/metrics?x=1")[0] == 200
    assert ask(port, "/nothing")[0] == 404
    served.end()


@needs_mounts
def test_port_in_use(embedded: Volume) -> None:
    """A clear error, and no mount."""
    embedded.format()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = embedded.base / "mnt"
        path.mkdir()
        words = ("--cache-dir", "none", "--log", embedded.log, "--metrics", f"127.0.0.1:{port}")
        refused = slicefs("mount", "-d", embedded.meta, path, *words)
    assert refused.code == 1
    assert len(refused.err.splitlines()) == 1
    assert f"--metrics can't listen on 127.0.0.1:{port}" in refused.err
    assert "choose another" in refused.err
    assert not is_mounted(path)
    embedded.end(expected="can't listen on")


@needs_mounts
def test_health_says_that_the_metadata_store_is_away(
    served: Volume, durable_redis: DurableRedis
) -> None:
    served.format()
    port = free_port()
    mount = served.mount("--metrics", f"localhost:{port}", "--heartbeat", "0.2")
    assert ask(port, "/healthz")[0] == 200
    os.kill(durable_redis.pid, signal.SIGSTOP)
    try:
        wait_until("unhealthy", 60, lambda: ask(port, "/healthz")[0] == 503)
        assert "metadata store has not answered" in ask(port, "/healthz")[2]
        assert ask(port, "/metrics")[0] == 200, "the numbers are there when they are needed"
    finally:
        os.kill(durable_redis.pid, signal.SIGCONT)
    wait_until("healthy", 60, lambda: ask(port, "/healthz")[0] == 200)
    assert os.listdir(mount.path) == []
    served.end(expected="heartbeat|beat|redis|metadata")


def test_a_client_that_sends_byte_by_byte_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each byte began the time anew: one such client kept /healthz from answering for ever."""
    monkeypatch.setattr(http, "SILENT_S", 0.5)
    listener = http.Listener(Address("127.0.0.1", free_port()), "--metrics")
    listener.start({"/healthz": lambda: Reply("text/plain", b"ok")}, SystemRuntime())
    done = threading.Event()

    def dribble() -> None:
        with socket.create_connection(("127.0.0.1", listener.address.port)) as slow:
            while not done.wait(0.1):
                try:
                    slow.sendall(b"G")
                except OSError:
                    return

    sender = threading.Thread(target=dribble)
    sender.start()
    try:
        assert ask(listener.address.port, "/healthz")[0] == 200
        sender.join(60)
        assert not sender.is_alive(), "it was not left"
    finally:
        done.set()
        sender.join()


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("9567", "127.0.0.1", 9567),
        (":9567", "127.0.0.1", 9567),
        ("0.0.0.0:1", "0.0.0.0", 1),
        ("[::1]:80", "::1", 80),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text, "--metrics") == Address(host, port)


@pytest.mark.parametrize("text", ["", "x", "host:", "host:0", "host:65536", "host:-1", "host:٣"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--metrics"):
        parse_address(text, "--metrics")


@needs_mounts
def test_health_says_that_the_object_store_is_away(embedded: Volume) -> None:
    """Also of a mount that does nothing at that time."""
    embedded.format()
    port = free_port()
    embedded.mount("--metrics", f"localhost:{port}")
    assert ask(port, "/healthz")[0] == 200
    hidden = embedded.bucket.with_name("hidden")
    embedded.bucket.rename(hidden)
    try:
        wait_until("unhealthy", 60, lambda: ask(port, "/healthz")[0] == 503)
        assert "object store has not answered" in ask(port, "/healthz")[2]
    finally:
        hidden.rename(embedded.bucket)
    wait_until("healthy", 60, lambda: ask(port, "/healthz")[0] == 200)
    embedded.end(expected="object|bucket|directory")

"""An S3 server of our own on loopback (SeaweedFS, which has no peer's bias), for one benchmark."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.benchlib import procs

START_S = 60.0
REGION = "us-east-1"
ACCESS_KEY = "bench"
SECRET_KEY = "benchbench"  # of a server that only this machine reaches
_PORTS = ("master", "volume", "filer", "s3")
_ABOVE = 10_000  # gRPC ports are so far above the others, unless told otherwise


@dataclass(frozen=True)
class S3:
    """A running server, or the proxy before it."""

    port: int
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    ceph: Path | None = None  # the ceph.conf of what is below it, for systems that use it
    count: Path | None = (
        None  # a proxy's: the number of requests, and the delay in µs; 8 bytes each
    )

    def requests(self) -> int | None:
        """How many there were so far; None where requests are not counted."""
        return None if self.count is None else int.from_bytes(self.count.read_bytes()[:8], "little")

    def set_delay_ms(self, delay_ms: float) -> None:
        """Let each request wait so long from now on; there is a proxy."""
        assert self.count is not None, "nothing delays requests"
        with self.count.open("r+b") as file:
            file.seek(8)
            file.write(round(delay_ms * 1000).to_bytes(8, "little"))

    def url(self, bucket: str) -> str:
        """Path-style address of a bucket."""
        return f"http://127.0.0.1:{self.port}/{bucket}"

    def client(self) -> Any:
        """boto3's, as a script makes it."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.url("").rstrip("/"),
            region_name=REGION,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
        )

    def environment(self) -> dict[str, str]:
        """The keys, as SliceFS, JuiceFS and rclone want to be told."""
        return {
            "ACCESS_KEY": self.access_key,
            "SECRET_KEY": self.secret_key,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
        }


@contextmanager
def running(workspace: Path) -> Iterator[S3]:
    """Start a server with its data below `workspace` and end it, whatever happens."""
    data = workspace / "s3"
    data.mkdir()
    identity = {
        "name": "bench",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    config = workspace / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    options = [f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-s3.config={config}"]
    options += [f"-{name}.port={port}" for name, port in ports.items()]
    options += [f"-{name}.port.grpc={port + _ABOVE}" for name, port in ports.items()]
    options += ["-volume.max=100", "-master.volumeSizeLimitMB=1024", "-master.telemetry=false"]
    options += [
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]  # else all servers of a host want the same
    command = [str(Path(sys.executable).parent / "weed"), "-logtostderr", "server", *options]
    with procs.serving(command, ports["s3"], workspace / "s3.log", START_S):
        yield S3(ports["s3"])


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, and whose neighbours _ABOVE are."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        port = 20_000 + port % 20_000
        if port not in found and not procs.listens(port) and not procs.listens(port + _ABOVE):
            found.append(port)
    return found

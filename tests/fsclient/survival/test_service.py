"""The unit of packaging/ as systemd starts it: which process it watches, and since when."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import string
import subprocess
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.faults.fixtures import base, embedded
from tests.faults.program import REPOSITORY, SLICEFS, Mount, Volume, is_mounted, needs_mounts

__all__ = ["base", "embedded"]

pytestmark = needs_mounts

UNIT = REPOSITORY / "packaging" / "slicefs@.service"
PATIENCE_S = 60.0


@pytest.fixture
def manager(base: Path) -> Iterator[socket.socket]:
    """Where a service says that it is ready."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(base / "notify"))
        end.settimeout(PATIENCE_S)
        yield end


def environment(volume: Volume, options: str) -> dict[str, str]:
    """What systemd gives to the commands of the unit."""
    return {
        **os.environ,
        "PATH": f"{os.path.dirname(SLICEFS)}:{os.environ['PATH']}",
        "NOTIFY_SOCKET": str(volume.base / "notify"),
        "META": volume.meta,
        "MOUNTPOINT": str(volume.base / "mnt"),
        "OPTIONS": options,
    }


def command(name: str, known: dict[str, str]) -> list[str]:
    """The words of a line of the unit."""
    unit = ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNIT)
    return shlex.split(string.Template(unit["Service"][name]).substitute(known))


def said(volume: Volume) -> dict[str, int]:
    found: dict[str, int] = json.loads((volume.base / "mnt" / ".config").read_text())["mount"]
    return found


@pytest.mark.parametrize("way", ["--supervisor", "--no-supervisor"])
def test_unit(embedded: Volume, manager: socket.socket, way: str) -> None:
    """Its process is the one that ends last, and is ready when the mount is served."""
    embedded.format()
    (embedded.base / "mnt").mkdir()
    known = environment(embedded, f"--cache-dir none {way}")
    with (embedded.base / "log").open("w") as log:
        service = subprocess.Popen(command("ExecStart", known), env=known, stderr=log)
    embedded.mounts.append(Mount(embedded.base / "mnt", service.pid))
    assert manager.recv(100) == b"READY=1"
    assert is_mounted(embedded.base / "mnt")
    if way == "--supervisor":
        assert said(embedded)["supervisor"] == service.pid
        os.kill(said(embedded)["pid"], signal.SIGKILL)
        assert manager.recv(100) == b"READY=1"  # the next client
        subprocess.run(command("ExecReload", known), env=known, check=True, capture_output=True)
    else:
        assert said(embedded)["pid"] == service.pid
    (embedded.base / "mnt" / "file").write_text("kept")
    subprocess.run(command("ExecStop", known), env=known, check=True)
    assert service.wait(PATIENCE_S) == 0
    embedded.end("ended with signal 9")

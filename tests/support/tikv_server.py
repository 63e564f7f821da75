"""tikvsim, our TiKV for tests: built from `tests/tikvsim`, started, asked for faults, and ended.

The program is real Percolator transactions of TiDB's unistore behind TiKV's own protocol. It is
compiled once for each state of its sources, which takes some minutes the first time, and kept in
the user's cache directory.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from urllib.request import Request, urlopen

import pytest

SOURCES = Path(__file__).parents[1] / "tikvsim"
BUILD_S = 1500.0
_GO_PLACES = ("/usr/local/go/bin", "/usr/lib/go/bin")


def why_not() -> str:
    """What is missing to run it; "" where nothing is."""
    if importlib.util.find_spec("tikv_client") is None:
        return "needs the package tikv-client, which exists for CPython 3.11 on x86-64 only"
    if not _binary().exists() and _go() is None:
        return "needs Go to build tests/tikvsim: install 1.23.6 or later"
    return ""


def is_built() -> bool:
    """Whether the program of these very sources is there."""
    return _binary().exists()


def _go() -> str | None:
    return shutil.which("go", path=os.pathsep.join((os.environ.get("PATH", ""), *_GO_PLACES)))


def _binary() -> Path:
    """Where the program of these very sources is kept."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".go", ".mod", ".sum"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "slicefs" / f"tikvsim-{digest.hexdigest()[:16]}"


@functools.cache
def failure() -> str:
    """Build the program if need be, once; what the compiler says if it does not work."""
    try:
        build()
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


def build() -> Path:
    """The program, compiled if need be; whoever comes at the same time waits for it."""
    binary = _binary()
    binary.parent.mkdir(parents=True, exist_ok=True)
    with (binary.parent / "tikvsim.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists():
            go = _go()
            assert go is not None
            made = binary.with_suffix(".new")
            command = [go, "build", "-p", "2", "-trimpath", "-o", str(made), "."]
            environment = {**os.environ, "GOFLAGS": "-mod=readonly -buildvcs=false"}
            done = subprocess.run(
                command, cwd=SOURCES, env=environment, capture_output=True, timeout=BUILD_S
            )
            assert done.returncode == 0, done.stderr.decode(errors="replace")
            made.rename(binary)
    return binary


class TikvServer:
    """A cluster of two stores and one placement driver; `with` starts and ends it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._process: subprocess.Popen[str] | None = None
        self.pd = ""
        self._control = ""

    def empty_url(self) -> str:
        """The URL of a prefix that nobody has used."""
        return f"tikv://{self.pd}/t{next(self._numbers)}"

    def fault(self, method: str, kind: str, count: int = 0, skip: int = 0, millis: int = 0) -> None:
        """Let something go wrong with `count` requests (0: with all) after the next `skip`.

        `method` is a request like "KvCommit", or "Tso" for timestamps; what kinds there are says
        `tikvsim/faults.go`.
        """
        body = {"Method": method, "Kind": kind, "Count": count, "Skip": skip, "Millis": millis}
        self._post("fault", json.dumps(body).encode())

    def heal(self) -> None:
        """No more faults."""
        self._post("clear")

    def split(self, key: bytes) -> None:
        """A new region begins with `key`."""
        self._post("split", key)

    def move_leaders(self) -> None:
        """Each region is led by the other store from now on."""
        self._post("move")

    def counts(self) -> dict[str, int]:
        """How often each kind of request has come."""
        with urlopen(f"http://{self._control}/counts") as answer:
            found: dict[str, int] = json.load(answer)
        return found

    def _post(self, what: str, body: bytes = b"") -> None:
        with urlopen(Request(f"http://{self._control}/{what}", data=body, method="POST")):
            pass

    def __enter__(self) -> TikvServer:
        assert not failure(), failure()
        self._process = subprocess.Popen(
            [str(_binary())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.pd, self._control = self._process.stdout.readline().split()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._process.communicate(timeout=60)  # it ends with its input


def serving() -> Iterator[TikvServer]:
    """The body of a fixture: a server, or tests are skipped."""
    if reason := why_not():
        pytest.skip(reason)
    with TikvServer() as server:
        yield server

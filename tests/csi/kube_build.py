"""`kubesim`, compiled from the modules of Kubernetes and kept in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

SOURCES: Final = Path(__file__).parent / "kubesim"
BUILD_S: Final = 3600
PROGRAMS: Final = ("etcd", "containerd", "runc", "kubectl", "openssl", "busybox", "tini")


def kubesim() -> Path:
    """The program, built once; skips the test where a cluster can't be."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slicefs"
    program = cache / f"kubesim-{digest.hexdigest()[:16]}"
    needed = PROGRAMS if program.exists() else (*PROGRAMS, "go")
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        pytest.skip(f"a cluster needs {missing[0]}")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "kubesim.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            _build(program)
    return program


def _build(program: Path) -> None:
    made = program.with_suffix(".new")
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod -buildvcs=false"}
    done = subprocess.run(
        ["nice", "go", "build", "-o", made, "."],
        cwd=SOURCES,
        env=environment,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made.rename(program)

"""Programs of Go modules that tests run: built once, and kept in the user's cache by version."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

BUILD_S: Final = 1200


def cached(module: str, version: str) -> Path:
    """Where the program of a module is kept, if it was built."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slicefs"
    return cache / f"{module.rpartition('/')[2]}-{version}"


def go_program(module: str, version: str, replaces: bool = False) -> Path:
    """The program; skips the test where it can't be built.

    `replaces`: its go.mod has replace directives, with which `go install` builds nothing.
    """
    program = cached(module, version)
    if program.exists():
        return program
    if shutil.which("go") is None:
        pytest.skip(f"{module} is a Go program, and there is no Go here")
    program.parent.mkdir(parents=True, exist_ok=True)
    with program.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            place = program.with_suffix(".build")
            if replaces:
                root, _, package = module.partition("/cmd/")
                copied = place / "source"
                found = json.loads(run_go(["mod", "download", "-json", f"{root}@{version}"], "/"))
                shutil.copytree(found["Dir"], copied, dirs_exist_ok=True)
                copied.chmod(0o755)
                run_go(["build", "-o", str(place) + "/", f"./cmd/{package}"], copied)
            else:
                run_go(["install", f"{module}@{version}"], "/", {"GOBIN": str(place)})
            (place / program.name.removesuffix(f"-{version}")).rename(program)
    return program


def run_go(words: list[str], directory: Path | str, more: Mapping[str, str] | None = None) -> str:
    """What go prints; skips the test where it fails. `/` as directory is away from any go.mod."""
    environment = {**os.environ, "GOFLAGS": "-mod=mod -buildvcs=false", **(more or {})}
    done = subprocess.run(
        ["nice", "go", *words],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"go {' '.join(words)} fails here: {done.stderr.strip()[-300:]}")
    return done.stdout

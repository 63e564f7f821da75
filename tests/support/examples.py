"""Runs the programs of `examples/` as a user does: in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
RUN_S = 240


def example_environment() -> dict[str, str]:
    """That of this process, with the packages of this tree."""
    # threads of OpenMP wait for each other without sleeping: slow beside other work
    more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **more}


def run_example(name: str, *words: str | int | Path) -> str:
    """What the program prints. Raises: AssertionError where it fails."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, words)],
        env=example_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}{done.stdout[-1000:]}"
    return done.stdout

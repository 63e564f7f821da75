"""A mount's log: an entry is one line, whatever names are in it; SIGUSR1 leaves stacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# `_start_log` is what a mount's process does first
LOGGING = """
import logging, os, signal, sys, threading
from fsclient.mount.logs import start_log
from fsclient.observe.options import ObserveOptions

start_log(sys.argv[1], ObserveOptions(), False)
log = logging.getLogger("fsclient.test")
name = b"/d\\n2026-01-01 1 ERROR x: forged\\x1b[2J\\x9b\\xff"
log.warning("quota of %s: full", os.fsdecode(name))
try:
    raise OSError(5, "broken", "/a\\n2026-01-01 1 ERROR x: forged\\r")
except OSError:
    log.exception("failed")
"""
STACKS = """
import os, signal, threading
asleep, over = threading.Event(), threading.Event()

def sleeper():
    asleep.set()
    over.wait()

threading.Thread(target=sleeper, daemon=True).start()
asleep.wait()
os.kill(os.getpid(), signal.SIGUSR1)
threading.Event().wait(0)
"""


def _lines(path: Path, code: str) -> list[str]:
    """What a process that runs `code` logs."""
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=60)
    return path.read_bytes().decode("utf-8", "surrogateescape").split("\n")


def test_a_name_forges_no_line(tmp_path: Path) -> None:
    """A newline began a line of its own, and an escape sequence reached the terminal."""
    lines = _lines(tmp_path / "log", LOGGING)
    assert [line for line in lines if line.startswith("2026-01-01")] == []
    assert lines[0].endswith(
        r"quota of /d\x0a2026-01-01 1 ERROR x: forged\x1b[2J\udc9b\udcff: full"
    )
    assert lines[1].endswith("ERROR fsclient.test: failed")
    assert all(line.startswith("    ") for line in lines[2:-1])
    assert not any(control in "\n".join(lines) for control in "\x1b\r")


def test_stacks_of_all_threads_on_sigusr1(tmp_path: Path) -> None:
    """faulthandler read frames that other threads changed meanwhile, which could crash a mount."""
    lines = _lines(tmp_path / "log", LOGGING + STACKS)
    assert sum(line.startswith("Thread 0x") for line in lines) == 2
    assert any(", in sleeper" in line for line in lines)

"""R1: what `check` needs does not grow with the volume."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fsmeta.runtime import SystemRuntime
from fsmeta.store.sqlite import SqliteStore
from tests.fsmeta.engines import make_volume
from tools.benchlib.fill import fill_path

FILES = (5_000, 30_000)
GROWTH_BYTES_MAX = 6 << 20  # a record of 1 kB for each inode would be 25
# the most that this program had in memory; `ru_maxrss` is at least what it was forked from had
MEASURED = """
import re, sys
from fsmeta.check.check import Examination
from fsmeta.runtime import SystemRuntime
from fsmeta.store.sqlite import SqliteStore

store = SqliteStore(sys.argv[1], SystemRuntime(), False)
with Examination(store, cache_bytes=1 << 20) as examination:
    found = examination.run()
with open("/proc/self/status") as status:
    print(found.problem_count, found.inodes, re.search(r"VmHWM:\\s+(\\d+)", status.read())[1])
"""


def test_r1_memory_of_a_check(tmp_path: Path) -> None:
    path = str(tmp_path / "meta.db")
    store = SqliteStore(path, SystemRuntime(), True)
    make_volume(store, SystemRuntime())
    store.close()
    used: list[int] = []
    first = 0
    for files in FILES:
        fill_path(f"sqlite://{path}", b"d%d" % files, 0, files - first)
        first = files
        command = [sys.executable, "-c", MEASURED, path]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        problems, inodes, kib = map(int, out.split())
        assert (problems, inodes) == (0, files + 1 + len(used) + 1)
        used.append(kib << 10)
    assert used[1] - used[0] < GROWTH_BYTES_MAX

"""M3 and others: several processes on one database: no update is lost."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fsmeta.counting import ROW
from tests.fsmeta.engines import Engine

PROCESSES = 2
TIMES = 400
END_S = 200  # only a failure takes that long


@pytest.mark.parametrize("engine", ["sqlite", "redis", "tikv"], indirect=True)
def test_processes_count_together(engine: Engine) -> None:
    command = [sys.executable, "-m", "tests.fsmeta.counting", engine.url, str(TIMES)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        lost = [int(process.communicate(timeout=END_S)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * PROCESSES
    assert sum(lost) > 0, "both have begun with the same number"
    total = PROCESSES * TIMES
    assert engine.first.read_rows([ROW])[0] == {
        b"checked": b"%d" % total,
        b"added": b"%d" % total,
        b"appended": b"x" * total,
    }

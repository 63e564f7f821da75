"""K1: records that several write at once, and what writers that were killed leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from csi.host.records import create_record, read_record, remove_leftovers, write_record
from tests.faults.program import REPOSITORY

KILLED = """
import os, signal, sys
from csi.host import records
os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
records.write_record(sys.argv[1], {"half": "written"})
"""


def test_writers_of_one_record_do_not_meet(tmp_path: Path) -> None:
    """Each writes all of it; of those who create it one does."""
    path = str(tmp_path / "record")

    def write(number: int) -> None:
        write_record(path, {"number": number, "more": "x" * 10_000})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(200)))
        found = read_record(path)
        assert found is not None
        assert len(found["more"]) == 10_000
        other = str(tmp_path / "other")
        made = list(threads.map(lambda number: create_record(other, {"n": number}), range(100)))
    assert sum(made) == 1
    found = read_record(other)
    assert found is not None
    assert made[found["n"]]
    assert sorted(os.listdir(tmp_path)) == ["other", "record"]
    assert (tmp_path / "record").stat().st_mode & 0o777 == 0o600


def test_what_a_killed_writer_leaves(tmp_path: Path) -> None:
    """The record is as before; the rest goes an hour later."""
    path = tmp_path / "record"
    write_record(str(path), {"whole": "record"})
    words = [sys.executable, "-c", KILLED, str(path)]
    assert subprocess.run(words, cwd=REPOSITORY, check=False).returncode < 0
    assert read_record(str(path)) == {"whole": "record"}
    [left] = [each for each in tmp_path.iterdir() if each != path]
    remove_leftovers(str(tmp_path))
    assert left.exists()  # its writer may be at work still
    hours_ago = left.stat().st_mtime - 2 * 3600
    os.utime(left, (hours_ago, hours_ago))
    remove_leftovers(str(tmp_path))
    assert list(tmp_path.iterdir()) == [path]

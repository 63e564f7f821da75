"""A process that counts in a file under a lock: `python -m tests.faults.counter FILE KIND TIMES`.

KIND is `flock` or `fcntl`, or `sqlite`: then FILE is a database that every process adds rows to.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import sys


def count(path: str, kind: str, times: int) -> None:
    """Add one to the number in the file, `times` times."""
    fd = os.open(path, os.O_RDWR)
    lock = fcntl.flock if kind == "flock" else fcntl.lockf
    for _ in range(times):
        lock(fd, fcntl.LOCK_EX)
        value = int(os.pread(fd, 100, 0) or b"0")
        os.pwrite(fd, b"%d" % (value + 1), 0)
        lock(fd, fcntl.LOCK_UN)


def insert(path: str, times: int) -> None:
    """Add rows, each in a transaction of its own that reads what there is."""
    db = sqlite3.connect(path, timeout=120, isolation_level=None)
    for _ in range(times):
        db.execute("BEGIN IMMEDIATE")
        (number,) = db.execute("SELECT count(*) FROM t").fetchone()
        db.execute("INSERT INTO t VALUES (?, ?)", (number, os.getpid()))
        db.execute("COMMIT")
    db.close()


def main() -> None:
    path, kind, times = sys.argv[1:]
    sys.stdin.readline()
    if kind == "sqlite":
        insert(path, int(times))
    else:
        count(path, kind, int(times))


if __name__ == "__main__":
    main()

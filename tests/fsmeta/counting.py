"""A process that counts: `python -m tests.fsmeta.counting URL TIMES`; see `test_processes`.

Each turn reads a counter, and commits the next number with a check of what it read. The turns it
lost to the other process are not counted. All have read before anybody writes: one of them loses.
"""

from __future__ import annotations

import sys

from fsclient.volume.metadata_url import open_store
from fsmeta.errors import Conflict, Unavailable
from fsmeta.runtime import SystemRuntime
from fsmeta.store.writes import Append, Put
from tests.fsmeta.engines import add, change

ROW = b"tcounter"


def main() -> None:
    url, times = sys.argv[1], int(sys.argv[2])
    store = open_store(url, SystemRuntime())
    value = store.read([(ROW, b"checked")])[0]
    print("ready", flush=True)
    sys.stdin.readline()
    done = lost = 0
    while done < times:
        try:
            following = b"%d" % (int(value or 0) + 1)
            put = Put(ROW, b"checked", following)
            merges = (add(ROW, b"added", 1), Append(ROW, b"appended", b"x"))
            store.commit(change(put, *merges, checks=[(ROW, b"checked", value)]))
            done += 1
        except Conflict:
            lost += 1
        except Unavailable:
            pass  # SQLite was busy for longer than it waits
        value = store.read([(ROW, b"checked")])[0]
    store.close()
    print(lost)


if __name__ == "__main__":
    main()

"""A process to be killed in the middle of a commit: `python -m tests.fsmeta.victim URL`.

It says "ready", waits for a line, and then commits one field in each of two rows.
"""

from __future__ import annotations

import sys

from fsclient.volume.metadata_url import open_store
from fsmeta.runtime import SystemRuntime
from fsmeta.store.writes import Put
from tests.fsmeta.engines import change

ONE, TWO = b"tone", b"ttwo"


def main() -> None:
    store = open_store(sys.argv[1], SystemRuntime())
    print("ready", flush=True)
    sys.stdin.readline()
    store.commit(change(Put(ONE, b"x", b"victim"), Put(TWO, b"x", b"victim")))


if __name__ == "__main__":
    main()

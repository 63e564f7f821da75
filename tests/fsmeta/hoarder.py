"""A client to be killed at any moment: `python -m tests.fsmeta.hoarder URL NAME MOST`.

It makes files of a page each in a directory of its own below `/d`, says `.` for each, and then
waits for its death. What it has taken ahead of that it leaves behind.
"""

from __future__ import annotations

import errno
import sys

from fsclient.volume.metadata_url import open_store
from fsmeta.meta.meta import Meta
from fsmeta.runtime import SystemRuntime
from fsmeta.types import ROOT_INO, Caller, Slice

USER = Caller(1000, 1000)
PAGE = 4096


def fill(meta: Meta, name: bytes, most: int = 1_000_000) -> int:
    """Make files until a limit is met, or so many; how many were made."""
    top = meta.lookup(USER, ROOT_INO, b"d").ino
    own = meta.create(USER, top, name, 0o40777).ino
    made = 0
    try:
        while made < most:
            ino = meta.create(USER, own, b"%d" % made, 0o100666).ino
            made += 1
            meta.write_slices(ino, [(0, Slice(0, meta.new_slice_id(), PAGE, 0, PAGE))], PAGE, 1)
            print(end=".", flush=True)
    except OSError as error:
        assert error.errno in (errno.EDQUOT, errno.ENOSPC), error
    return made


def main() -> None:
    meta = Meta(open_store(sys.argv[1], SystemRuntime()), SystemRuntime())
    meta.sessions.open({"host": "test"})
    fill(meta, sys.argv[2].encode(), int(sys.argv[3]))
    sys.stdin.read()


if __name__ == "__main__":
    main()

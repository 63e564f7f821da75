"""Fill a directory with empty files: `python -m tools.benchlib.fill URL PATH COUNT`.

A volume of a million files through a mount takes minutes, one of ten million an hour. This writes
the rows of a create straight into the store, hundreds of files a commit, as true to each other as
those that clients make; no other client may change the volume meanwhile. A directory
that exists gets more files.
"""

from __future__ import annotations

import stat
import sys
import time
from functools import partial
from typing import Final

from fsclient.volume.metadata_url import open_store
from fsmeta.meta.meta import Meta
from fsmeta.runtime import SystemRuntime
from fsmeta.schema import inode, keys
from fsmeta.txn.txn import Txn
from fsmeta.types import ROOT_CALLER, ROOT_INO, FileType, Ino

FILES_A_COMMIT: Final = 1000  # three writes each, and 4096 are what a commit takes


def fill(meta: Meta, parent: Ino, first: int, count: int) -> None:
    """Files number `first` and on in directory `parent`; see `name_of`. Needs a session."""
    run, row = meta.transactor.run, keys.COUNTERS

    def take_inos(txn: Txn) -> int:
        found = keys.unpack_count(row, keys.NEXT_INO, txn.get(row, keys.NEXT_INO))
        txn.add(row, keys.NEXT_INO, count)
        return found

    next_ino = run(take_inos)
    now_ns = time.time_ns()
    for begin in range(0, count, FILES_A_COMMIT):
        numbers = range(begin, min(begin + FILES_A_COMMIT, count))
        files = [(name_of(first + number), Ino(next_ino + number)) for number in numbers]
        run(partial(_create, parent=parent, files=files, now_ns=now_ns))


def _create(txn: Txn, parent: Ino, files: list[tuple[bytes, Ino]], now_ns: int) -> None:
    txn.add(keys.USAGE, keys.INODES, len(files))
    txn.merge(keys.inode_row(parent), keys.VOLATILE_FIELD, inode.touch_parts(now_ns))
    for name, ino in files:
        attr = inode.new_attr(ino, stat.S_IFREG | 0o644, (0, 0), parent, now_ns)
        txn.put(keys.inode_row(ino), keys.ATTR_FIELD, inode.pack_attr(attr))
        txn.put(keys.inode_row(ino), keys.VOLATILE_FIELD, inode.pack_volatile(attr))
        txn.put(keys.dir_row(parent), name, keys.pack_dentry(FileType.REG, ino))


def name_of(number: int) -> bytes:
    """The name of file `number`."""
    return b"f%09d" % number


def fill_path(url: str, path: bytes, first: int, count: int) -> None:
    """Files in directory `path`, which is made if it is not there."""
    runtime = SystemRuntime()
    store = open_store(url, runtime)
    meta = Meta(store, runtime)
    meta.sessions.open({"host": "fill"})
    try:
        parent = ROOT_INO
        for name in path.split(b"/"):
            try:
                parent = meta.lookup(ROOT_CALLER, parent, name).ino
            except FileNotFoundError:
                parent = meta.create(ROOT_CALLER, parent, name, stat.S_IFDIR | 0o755).ino
        fill(meta, parent, first, count)
    finally:
        meta.sessions.close()
        store.close()


def main(words: list[str]) -> int:
    """`URL PATH COUNT [FIRST]`."""
    url, path, count, *rest = words
    begin = time.monotonic()
    fill_path(url, path.encode(), int(rest[0]) if rest else 0, int(count))
    print(f"{int(count):,} files in {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""atime: when a file was last read, where a mount keeps that.

Clients report afterwards, and for many inodes at once, when something was open that may have been
read. A report counts only where the inode is still what it was then: if a program has set its times
meanwhile (tar puts back what it found), those stay until the next read. So atime never goes back;
ctime stays; and nothing is written to what is in a snapshot or in the trash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from fsmeta.rules.context import Env
from fsmeta.schema import inode
from fsmeta.schema.snapshot_inos import SEALED_INO
from fsmeta.schema.trash import TRASH_INO
from fsmeta.store.contract import COMMIT_OPS_MAX
from fsmeta.txn.txn import Txn
from fsmeta.types import FLAG_NOATIME, Attr, Ino

USES_MAX: Final = 64  # of a commit: with more than 128 rows a script of Redis 7.0 takes long
DAY_NS: Final = 24 * 3600 * 10**9  # relatime moves an atime that is older, whatever else
_STAMP_BYTES: Final = 8
_STAMPS_BYTES: Final = 3 * _STAMP_BYTES  # a `v` record ends with atime, mtime and ctime

assert 3 * USES_MAX < COMMIT_OPS_MAX, "two checks and a write each, and some to spare"


class Use(NamedTuple):
    """An inode that was open from `since_ns` to `at_ns`, and read in between."""

    ino: Ino
    since_ns: int
    at_ns: int


def is_due(attr: Attr, use: Use, strict: bool) -> bool:
    """Whether `use` moves atime: mount(8)'s strictatime, or its relatime, says so."""
    if attr.nlink == 0 or attr.flags & FLAG_NOATIME or attr.parent >= TRASH_INO:
        return False
    if attr.ino >= SEALED_INO or attr.ctime_ns > use.since_ns or use.at_ns <= attr.atime_ns:
        return False
    return (
        strict
        or attr.atime_ns <= max(attr.mtime_ns, attr.ctime_ns)
        or use.at_ns - attr.atime_ns >= DAY_NS
    )


def touch_atime(txn: Txn, env: Env, uses: Sequence[Use], strict: bool) -> list[Ino]:
    """Move the atime of those inodes whose `use` is due; which they are.

    Clients that make names in a directory are not disturbed: only atime is written, and the commit
    does not check the directory's times.
    """
    del env
    assert len(uses) <= USES_MAX, len(uses)
    moved: list[Ino] = []
    txn.get_many([key for use in uses for key in inode.attr_keys(use.ino)])
    for use in uses:
        stable, volatile = inode.attr_keys(use.ino)
        a, v = txn.reads[stable], txn.reads[volatile]
        attr = None if a is None or v is None else inode.unpack_inode(use.ino, a, v)
        if attr is None or not is_due(attr, use, strict):
            txn.drop_check(*stable)
            txn.drop_check(*volatile)
            continue
        if attr.is_dir:
            txn.drop_check(*volatile)
        record = inode.pack_volatile(attr._replace(atime_ns=use.at_ns))
        begin = len(record) - _STAMPS_BYTES
        txn.merge(*volatile, (begin, record[begin : begin + _STAMP_BYTES]))
        moved.append(use.ino)
    return moved

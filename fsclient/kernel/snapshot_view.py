"""Snapshots as a mount shows them: `.snapshots` in each directory that has some.

It is listed nowhere, and a file of that name hides it. In it each snapshot is a directory, and
rmdir(2) of one deletes the whole snapshot. Called by the VFS. Threading: any thread.
"""

from __future__ import annotations

import errno
import json
import os
from functools import partial
from typing import Any, Final

from fsclient.kernel.cache_leases import SHORT_S
from fsclient.kernel.contract import EntryOut
from fsmeta.admin.snapshots import snapshot_of
from fsmeta.meta.meta import Meta
from fsmeta.ops.trees.snapshot import has_snapshots
from fsmeta.schema.snapshot_inos import SEALED_INO, snapshot_dir_attr, snapshot_dir_of
from fsmeta.schema.snapshots import Snapshot
from fsmeta.types import Ino

SNAPSHOT_XATTR: Final = b"user.slicefs.snapshot"


def lookup_snapshot_dir(meta: Meta, parent: Ino) -> EntryOut:
    """What `.snapshots` leads to where there is no file of that name. Raises: ENOENT.

    The kernel may not keep that there is none: the first snapshot changes no name.
    """
    if parent < SEALED_INO and meta.transactor.view(partial(has_snapshots, directory=parent)):
        return EntryOut(snapshot_dir_attr(snapshot_dir_of(parent)), SHORT_S, SHORT_S)
    raise OSError(errno.ENOENT, "no snapshots")


def describe(meta: Meta, root: Ino) -> bytes:
    """What is known of the snapshot with this root, as JSON. Raises: ENODATA."""
    found = snapshot_of(meta, root)
    if found is None:
        raise OSError(errno.ENODATA, "no snapshot")
    return json.dumps(as_json(found)).encode()


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot as commands show it."""
    return {
        "name": os.fsdecode(snapshot.name),
        "created": snapshot.at_ns / 10**9,
        "inodes": snapshot.inodes,
        "space": snapshot.space,
        "changed": snapshot.changed,
        "inode": snapshot.root,
    }

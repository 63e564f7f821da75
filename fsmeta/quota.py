"""What counts against a limit, and where: the volume now; directories, users and groups here too.

The rule: an inode counts 1 while it has a name; a file counts the space its data covers, in 4 KiB
units, while it has a name. Directories, symlinks and holes take no space.
"""

from __future__ import annotations

from fsmeta import schema
from fsmeta.transact import Txn
from fsmeta.types import Usage


def charge(txn: Txn, limits: Usage, space: int, inodes: int) -> None:
    """Move the volume's usage by `space` bytes and `inodes`; past a limit the commit is ENOSPC."""
    txn.add(schema.USAGE, schema.SPACE, space, limits.space, "ENOSPC")
    txn.add(schema.USAGE, schema.INODES, inodes, limits.inodes, "ENOSPC")


def usage(txn: Txn) -> Usage:
    """What the volume takes up now."""
    space, inodes = txn.get_many(((schema.USAGE, schema.SPACE), (schema.USAGE, schema.INODES)))
    return Usage(
        schema.unpack_count(schema.USAGE, schema.SPACE, space),
        schema.unpack_count(schema.USAGE, schema.INODES, inodes),
    )

"""What the stores of a simulated world have of a directory, whatever its clients believe."""

from __future__ import annotations

from typing import TypeAlias

from fsdata.format.block_v1 import decode
from fsdata.format.geometry import block_count, block_length
from fsdata.format.object_keys import object_key
from fsmeta.schema import inode, keys, slices
from fsmeta.types import ROOT_INO, Ino
from tests.sim.world.cluster import BLOCK, Cluster

State: TypeAlias = dict[bytes, bytes]  # names and contents


def stored(cluster: Cluster, path: bytes) -> State:
    """What the stores have of a directory, without asking any client; takes no time."""
    rows, ino = cluster.backend.rows, ROOT_INO
    for part in path.strip(b"/").split(b"/"):
        dentry = rows.get(keys.dir_row(ino), {}).get(part)
        if dentry is None:
            return {}
        _, ino = keys.unpack_dentry(b"", part, dentry)
    found: State = {}
    for name, value in rows.get(keys.dir_row(ino), {}).items():
        found[name] = content_of(cluster, keys.unpack_dentry(b"", name, value)[1])
    return found


def content_of(cluster: Cluster, ino: Ino) -> bytes:
    """All bytes of a file."""
    fields = cluster.backend.rows[keys.inode_row(ino)]
    size = inode.unpack_inode(ino, fields[b"a"], fields[b"v"]).size
    data = bytearray(size)
    for each in slices.unpack_slices(ino, 0, fields.get(keys.chunk_field(0))):
        end = min(size, each.pos + each.length)
        if not each.stored:
            data[each.pos : end] = bytes(max(0, end - each.pos))
            continue
        blocks = [
            object_key(each.id, n, block_length(each.size, n, BLOCK))
            for n in range(block_count(each.size, BLOCK))
        ]
        whole = b"".join(decode(cluster.objects.peek(key)) for key in blocks)
        data[each.pos : end] = whole[each.off : each.off + end - each.pos]
    return bytes(data)

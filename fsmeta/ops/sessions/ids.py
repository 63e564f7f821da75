"""Batches of fresh inode and slice numbers, never handed out twice, even by a store that went back.

A batch is taken together with the store epoch (field `lineage`). If the epoch differs from that of
the last batch, numbers may have been handed out that the store has forgotten. Both counters then
leap by more than clients use between two backups. The leap has a random part, so that two stores
that forgot the same do not leap to the same place.

A batch survives a power loss before its first number is used: other disks, and the object store,
keep names made of these numbers. `raise_above` is for a journal whose numbers the store has lost.
"""

from __future__ import annotations

from typing import Final

from fsmeta.schema import keys as schema
from fsmeta.txn.txn import Txn

LEAP_BITS: Final = 40  # 10^12 numbers, and 2^23 leaps in 64 bits
_COUNTED: Final = (schema.NEXT_INO, schema.NEXT_SLICE)


def take_batch(txn: Txn, field: bytes, batch: int, store_epoch: bytes, chance: int) -> int:
    """The first of `batch` fresh numbers from the counter `field`; `chance` is LEAP_BITS long."""
    keys = [(schema.COUNTERS, name) for name in (*_COUNTED, schema.LINEAGE)]
    *values, known = txn.get_many(keys)
    counts = {
        name: schema.unpack_count(schema.COUNTERS, name, value)
        for name, value in zip(_COUNTED, values, strict=True)
    }
    if store_epoch and known != store_epoch:
        txn.put(schema.COUNTERS, schema.LINEAGE, store_epoch)
        leap = (1 << LEAP_BITS) + chance
        counts = {name: count + leap for name, count in counts.items()}
        for name, count in counts.items():
            if name != field:
                txn.put(schema.COUNTERS, name, b"%d" % count)
    first = counts[field]
    txn.put(schema.COUNTERS, field, b"%d" % (first + batch))
    txn.durable = True
    return first


def raise_above(txn: Txn, ino: int, slice_id: int) -> bool:
    """Never hand out numbers of inodes up to `ino`, nor of slices up to `slice_id`.

    True where the store had forgotten that it has handed them out.
    """
    used = dict(zip(_COUNTED, (ino, slice_id), strict=True))
    values = txn.get_many([(schema.COUNTERS, name) for name in used])
    forgotten = False
    for (name, last), value in zip(used.items(), values, strict=True):
        if schema.unpack_count(schema.COUNTERS, name, value) <= last:
            txn.put(schema.COUNTERS, name, b"%d" % (last + 1))
            txn.durable = forgotten = True
    return forgotten

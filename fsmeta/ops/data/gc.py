"""What `gc` and the clients agree on, so that it deletes nothing that is or will be in use.

`void` in row G: a session that joins again after another client had ended it must not commit slices
below it, since gc has taken their objects for garbage. gc raises it first and reads the sessions
then, so each session has either shown its floor or will see `void`.

`collecting` in row G: gc reads the chunks one after another, and misses a slice that moves from one
it has not read to one it has. So a verb that gives a slice to a further chunk calls `note_shared`
in its commit; gc keeps what is noted in row Y. Once that is read, what is neither marked nor noted
and lies below `void` is in no chunk, and no client can put it into one any more: the marks hold for
as long as the store does not go back. `collecting` is the name of the run that reads; one that
begins while another reads takes its place, and the other notices before it has deleted anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fsmeta.schema import keys
from fsmeta.txn.txn import Txn
from fsmeta.types import SliceId


def void_below(txn: Txn) -> int:
    """Slices below it that are in no chunk are garbage."""
    value = txn.get(keys.BACKGROUND, keys.VOID)
    return keys.unpack_count(keys.BACKGROUND, keys.VOID, value)


def raise_void(txn: Txn, floor: int) -> None:
    """Slices below `floor` that are in no chunk are garbage from here on."""
    if floor > void_below(txn):
        txn.put(keys.BACKGROUND, keys.VOID, b"%d" % floor)


def begin(txn: Txn, floor: int, run: bytes) -> None:
    """The gc called `run` is about to take slices below `floor` for garbage."""
    raise_void(txn, floor)
    txn.put(keys.BACKGROUND, keys.COLLECTING, run)


def collecting(txn: Txn) -> bytes | None:
    """The gc that reads the chunks, or was killed while it did."""
    return txn.get(keys.BACKGROUND, keys.COLLECTING)


def share(txn: Txn, uses: Mapping[SliceId, int]) -> None:
    """This commit gives slices that are in a chunk to so many further ones."""
    note_shared(txn, uses)
    for sid, more in uses.items():
        txn.add(keys.SHARED_SLICES, keys.pack_u64(sid), more)


def note_shared(txn: Txn, slices: Iterable[SliceId]) -> None:
    """This commit gives slices that are in a chunk to a further one."""
    if collecting(txn) is not None:
        for sid in slices:
            txn.put(keys.SHARED, keys.pack_u64(sid), b"1")


def end(txn: Txn, run: bytes, noted: Iterable[bytes], last: bool) -> bool:
    """gc has read all chunks, and the fields of Y that are `noted`, some of them or the `last`;
    False where it was replaced, so that shares may have gone unnoticed."""
    if collecting(txn) != run:
        return False
    if last:
        txn.delete(keys.BACKGROUND, keys.COLLECTING)
    for field in noted:
        txn.delete(keys.SHARED, field)
    return True

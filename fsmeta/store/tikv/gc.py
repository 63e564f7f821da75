"""Old values of a TiKV cluster: which component drops them, when, and which stay.

TiKV keeps every value that a key has had, until a client sets the moment from which on values are
kept. TiDB sets it where there is one; on a cluster without TiDB nothing would. So the leader sets
it now and then, unless there are TiDB's own tables: then that is left to TiDB. What is dropped is
older than KEEP_S, which is longer than any transaction lives; a dump reads one moment for as long
as it takes, and ends with an error before that moment is given up.

The mark is the whole cluster's, and does not go back: of two settings the later moment holds. The
package can't see what other programs reserve in PD (service safe points), so on such a cluster it
should be `off`.

Used by `tikv/engine`. Threading: the event loop's thread.
"""

from __future__ import annotations

import logging
from typing import Final

from fsmeta.store.tikv.client import TikvClient

log = logging.getLogger(__name__)

KEEP_S: Final = 3 * 3600.0  # a dump of some hundred million inodes
DUMP_MAX_S: Final = KEEP_S - 600.0  # clocks of placement drivers that follow each other differ
COLLECT_S: Final = 600.0  # each region is asked for old locks
_PHYSICAL_AT: Final = 18  # a timestamp is milliseconds, then so many bits that count
_TIDB: Final = (b"m", b"n")  # where TiDB's tables of tables lie


def moment_before(timestamp: int, seconds: float) -> int:
    """The timestamp so long before another."""
    return max(0, timestamp - (int(seconds * 1000) << _PHYSICAL_AT))


async def collect(link: TikvClient) -> bool:
    """Have values dropped that were replaced before KEEP_S; False where that is up to TiDB.

    Raises: StoreError.
    """
    snapshot = await link.snapshot()
    if await link.scan_keys(snapshot, *_TIDB, 1):
        log.debug("tikv: there is a TiDB, which collects old values")
        return False
    moment = moment_before(await link.now(), KEEP_S)
    await link.drop_before(moment, COLLECT_S)
    log.debug("tikv: values from before %d may be dropped", moment)
    return True

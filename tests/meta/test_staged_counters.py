"""Write-back: a counter is never read too low while what is laid over it is being published."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fsmeta.runtime import SystemRuntime
from fsmeta.schema import keys as schema
from fsmeta.store.contract import ADD, Key
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.txn.row_cache import RowCache
from fsmeta.writeback.overlay import Overlay
from fsmeta.writeback.overlay_reads import OverlaidReads

KEY = (schema.USAGE, schema.SPACE)


def test_w4_what_is_published_during_a_read_is_counted() -> None:
    runtime = SystemRuntime()
    overlay, cond, inner = Overlay(), runtime.condition(), MemStore(MemBackend(runtime))
    laid = overlay.lay(1, [(ADD, *KEY, b"4096", b"0", "ENOSPC")], [], {})
    asked = inner.read

    def publish_then(keys: Sequence[Key], busy: Collection[bytes] = ()) -> list[bytes | None]:
        found = asked(keys, busy)
        overlay.lift(1, laid)
        return found

    inner.read = publish_then  # type: ignore[method-assign]
    reads = OverlaidReads(inner, overlay, cond, RowCache(runtime))
    assert reads.read([KEY]) == [b"4096"]

"""Write-back: a counter is never read too low while what is laid over it is being published."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from fsmeta.runtime import SystemRuntime
from fsmeta.schema import keys as schema
from fsmeta.store.contract import Commit, Key
from fsmeta.store.mem import MemBackend, MemStore
from fsmeta.store.writes import Add
from fsmeta.txn.row_cache import RowCache
from fsmeta.types import ROOT_CALLER, Ino, SetAttr
from fsmeta.writeback.entries.intents import SetAttrIntent
from fsmeta.writeback.entries.log_entry import LogEntry
from fsmeta.writeback.overlay import overlay_reads
from fsmeta.writeback.overlay.overlay import Overlay
from fsmeta.writeback.overlay.overlay_reads import OverlaidReads
from fsmeta.writeback.staged_store import StagedStore
from tests.support.waiting import wait_until

KEY = (schema.USAGE, schema.SPACE)


def test_w4_what_is_published_during_a_read_is_counted() -> None:
    runtime = SystemRuntime()
    overlay, cond, inner = Overlay(), runtime.condition(), MemStore(MemBackend(runtime))
    laid = overlay.lay(1, [Add(*KEY, 4096, b"0")], [], {})
    asked = inner.read

    def publish_then(keys: Sequence[Key], busy: Collection[bytes] = ()) -> list[bytes | None]:
        found = asked(keys, busy)
        overlay.lift(1, laid)
        return found

    inner.read = publish_then  # type: ignore[method-assign]
    reads = OverlaidReads(inner, overlay, cond, RowCache(runtime), runtime)
    assert reads.read([KEY]) == [b"4096"]


def test_w4_what_is_being_published_is_counted_once() -> None:
    """The store has it already, the overlay has it still: df showed it twice, ENOSPC followed."""
    runtime = SystemRuntime()
    overlay, cond, inner = Overlay(), runtime.condition(), MemStore(MemBackend(runtime))
    add = Add(*KEY, 4096, b"0")
    laid = overlay.lay(1, [add], [], {})
    overlay.publishing(1, laid)
    inner.commit(Commit(None, b"", 0, (), (), (add,)))
    reads = OverlaidReads(inner, overlay, cond, RowCache(runtime), runtime)
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(reads.read, [KEY])
        wait_until(lambda: reads._counting == 1)
        with cond:
            overlay.lift(1, laid)
            cond.notify_all()
        assert found.result(60) == [b"4096"]
    assert reads._counting == 0


def _staged() -> tuple[StagedStore, LogEntry]:
    """A store, and an entry that waits to be published."""
    runtime = SystemRuntime()
    staged = StagedStore(MemStore(MemBackend(runtime)), runtime)
    entry = LogEntry("setattr", ROOT_CALLER, 0, SetAttrIntent(Ino(7), SetAttr(size=0)))
    staged.held.backlog.add(entry)
    return staged, entry


def _take(staged: StagedStore) -> list[LogEntry]:
    return staged.held.next_run(lambda _: True, lambda: False, 1)


def test_w4_nothing_is_published_while_counters_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlay_reads, "COUNTING_S", 60.0)
    staged, entry = _staged()
    with ThreadPoolExecutor(1) as threads:
        with staged.held._reads._pausing([KEY]):
            found = threads.submit(_take, staged)
            with pytest.raises(TimeoutError):
                found.result(0.2)
        assert found.result(60) == [entry]


def test_w4_reads_of_counters_without_end_do_not_end_publication() -> None:
    """Each began before the one before it ended, and nothing was published any more."""
    staged, entry = _staged()
    with staged.held._reads._pausing([KEY]):
        assert _take(staged) == [entry]


def test_w4_what_was_not_published_after_all_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a run some entries come to nothing, and are in the next one."""
    monkeypatch.setattr(overlay_reads, "COUNTING_S", 600.0)
    staged, entry = _staged()
    entry.laid = staged._overlay.lay(1, [Add(*KEY, 4096, b"0")], [], {})
    assert _take(staged) == [entry]
    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(staged.read, [KEY])
        wait_until(lambda: staged.held._reads._counting == 1)
        assert _take(staged) == [entry]
        assert read.result(60) == [b"4096"]

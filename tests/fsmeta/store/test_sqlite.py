"""SQLite's own: how often commits wait for the disk. Shows M3."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from fsmeta.errors import StoreError
from fsmeta.store.writes import DeleteRow, Put
from fsmeta.types import ROOT_CALLER, ROOT_INO
from tests.conftest import LogWatch
from tests.fsmeta.engines import Engine, change
from tests.fsmeta.store.failing_syncs import can_fail, in_thread_that_can_not_sync

FILES = 800


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_m3_many_names_wait_for_few_checkpoints(engine: Engine) -> None:
    """The database itself is written, and synced, by a checkpoint alone."""
    file = Path(urlsplit(engine.url).path)
    meta = engine.meta()
    before, checkpoints = file.stat().st_mtime_ns, 0
    for number in range(FILES):
        meta.create(ROOT_CALLER, ROOT_INO, b"f%d" % number, 0o100644)
        now = file.stat().st_mtime_ns
        checkpoints += now != before
        before = now
    assert checkpoints <= 1


@pytest.mark.skipif(not can_fail(), reason="system calls of this machine are not known")
@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_m3_a_sync_that_failed_is_not_forgotten(engine: Engine, log_watch: LogWatch) -> None:
    """The kernel says so once, and takes the pages that it lost for clean."""
    log_watch.expect("^ERROR fsmeta.store.sqlite: sqlite: .* could not be synced")
    store, other = engine.open(), engine.open()
    store.sync()
    with pytest.raises(StoreError, match="disk I/O error"):
        in_thread_that_can_not_sync(store.sync)
    for _ in range(2):
        with pytest.raises(StoreError, match="an earlier sync failed"):
            store.sync()
    store.commit(change(Put(b"trow", b"f", b"1")))  # what need not be durable goes on
    with pytest.raises(StoreError, match="an earlier sync failed"):
        store.commit(change(Put(b"trow", b"f", b"2"))._replace(durable=True))
    assert other.read([(b"trow", b"f")]) == [b"1"]
    store.commit(change(DeleteRow(b"trow")))

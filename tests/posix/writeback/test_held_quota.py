"""Q1, W2: what is held back counts for quotas, and what is being stored takes room."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fsmeta.admin import quota_admin
from fsmeta.admin.quota_admin import QuotaLimits
from fsmeta.rules import quota
from fsmeta.store.contract import Commit
from fsmeta.writeback.entries.intents import CreateIntent
from fsmeta.writeback.entries.log_entry import LogEntry
from fsmeta.writeback.overlay.validation import Base
from fsmeta.writeback.staged_store import StagedStore
from tests.posix.inproc import memory
from tests.posix.writeback.test_writeback import Pair, new_pair, pair, wait_until, write

__all__ = ["pair"]


def _limit(pair: Pair, path: bytes, inodes: int) -> None:
    node = quota.dir_node(pair.them.stat(path).ino)
    quota_admin.set_quota(pair.theirs.meta, node, QuotaLimits(None, inodes))


def _used(pair: Pair, path: bytes) -> int:
    found = quota_admin.get_quota(pair.theirs.meta, quota.dir_node(pair.them.stat(path).ino))
    return found.used.inodes


def test_q1_a_directory_that_moves_meets_the_quota_at_once(pair: Pair) -> None:
    """Held back, its rename passed every quota."""
    for path in (b"/d/small", b"/d/one", b"/d/two"):
        pair.me.mkdir(path)
    for number in range(3):
        write(pair.me, b"/d/one/%d" % number, b"one")
        write(pair.me, b"/d/two/%d" % number, b"two")
    pair.release()
    _limit(pair, b"/d/small", 5)
    pair.mine.meta.refresh_settings()
    pair.hold()
    pair.me.rename(b"/d/one", b"/d/small/one")
    with pytest.raises(OSError, match="full") as caught:
        pair.me.rename(b"/d/two", b"/d/small/two")
    assert caught.value.errno == errno.EDQUOT
    pair.release()
    assert _used(pair, b"/d/small") == 4
    pair.hold()
    with pytest.raises(OSError, match="full"):
        pair.me.rename(b"/d/two", b"/d/small/two")
    pair.me.rename(b"/d/small/one", b"/d/one")
    pair.me.rename(b"/d/two", b"/d/small/two")
    pair.release()
    assert _used(pair, b"/d/small") == 4


def test_q1_what_is_stored_between_two_looks_takes_room(tmp_path: Path) -> None:
    """It was neither staged any more nor on the disk yet, and more was accepted than fits."""
    with new_pair(memory(), tmp_path / "staging") as pair:
        pair.hold()
        back = pair.mine.writeback
        assert back is not None
        staged = back.objects.left()[1]
        assert staged
        free = 1 << 20

        def look() -> float:
            """The disk's room, as it was before it took what is staged."""
            pair.gate.open.set()
            wait_until(lambda: not back.objects.left()[1])
            return free

        assert pair.mine.layers.room_left(look)() == free - staged


def test_q1_what_is_being_published_is_not_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store had it and the overlay still had it: EDQUOT, though there was room."""
    with new_pair(memory(), tmp_path / "staging") as pair:
        _publish_slowly(pair, monkeypatch)


def _publish_slowly(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.me.mkdir(b"/d/small")
    pair.release()
    _limit(pair, b"/d/small", 2)
    pair.mine.meta.refresh_settings()
    staged = pair.mine.meta.store
    assert isinstance(staged, StagedStore)
    applied, judged, go = threading.Event(), threading.Event(), threading.Event()
    published, require = staged.held.published, staged._accept.require_limits

    def publish_slowly(outcomes: Iterable[tuple[LogEntry, bool]]) -> None:
        found = list(outcomes)
        made = [each.intent.name for each, _ in found if isinstance(each.intent, CreateIntent)]
        if b"one" in made:
            applied.set()
            go.wait(60)
        published(found)

    def require_limits(commit: Commit, base: Base) -> None:
        try:
            require(commit, base)
        finally:
            judged.set()

    pair.hold()
    write(pair.me, b"/d/small/one", b"held")
    monkeypatch.setattr(staged.held, "published", publish_slowly)
    pair.gate.open.set()
    assert applied.wait(60)
    monkeypatch.setattr(staged._accept, "require_limits", require_limits)
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(write, pair.me, b"/d/small/two", b"")
        try:
            assert judged.wait(60)
        finally:
            go.set()
        made.result(60)
    pair.release()
    assert _used(pair, b"/d/small") == 2

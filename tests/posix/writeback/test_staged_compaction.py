"""W2: compaction behind a journal, what it rewrites and what it leaves while writes are held."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsclient.background import tidy_queue
from tests.posix.inproc import RUNTIME, memory, sqlite
from tests.posix.writeback.test_writeback import SETTLE_S, Pair, new_pair, read, wait_until


@pytest.fixture(params=["mem", "sqlite"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    connect = memory() if request.param == "mem" else sqlite(tmp_path / "meta.db")
    with new_pair(connect, tmp_path / "staging") as made:
        yield made


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compacted but what the test itself compacts."""
    monkeypatch.setattr(tidy_queue, "COMMITS_BEFORE_LOOK", 1_000_000)


def test_w2_what_was_appended_is_compacted(pair: Pair) -> None:
    """An append has no chunk before it is published: the thread that compacts ended of it, and with
    it whoever deletes.
    """
    written: list[bytes] = []

    def append(count: int) -> None:
        for _ in range(count):
            written.append(b"%04d" % len(written))
            file = pair.me.open(b"/d/log", os.O_CREAT | os.O_RDWR)
            file.append(written[-1])
            file.close()

    def compacted() -> bool:
        append(16)  # what is held back keeps it from being compacted: it is looked at once more
        assert pair.mine.writeback is not None
        pair.mine.writeback.settle(None, SETTLE_S)
        return pair.mine.background.compacted > 0

    append(48)
    pair.release()
    wait_until(compacted)
    assert read(pair.me, b"/d/log") == b"".join(written)


@pytest.mark.usefixtures("alone")
def test_w2_what_could_not_be_compacted_holds_up_no_gc(pair: Pair) -> None:
    """A slice that compaction made in vain, as a write to the file was held back, counted as one
    that may yet be committed: gc deleted nothing above it until the mount ended.
    """
    file = pair.me.open(b"/d/f", os.O_CREAT | os.O_RDWR)
    for number in range(60):
        file.write(number * 5000, b"%04d" % number)
        file.fsync()
    pair.release()
    pair.gate.asked.clear()
    pair.hold()
    wait_until(lambda: bool(pair.gate.asked))
    first, pair.gate.open = pair.gate.open, RUNTIME.event()
    pair.gate.open.set()
    file.write(0, b"held")
    file.close()
    assert len(pair.theirs.meta.read_chunk(file.ino, 0)) == 60
    pair.mine.background.compact(file.ino, 0)
    assert pair.mine.background.compacted == 0
    first.set()
    pair.release()
    last = pair.mine.meta.new_slice_id()
    pair.mine.meta.give_up_slices((last,))
    wait_until(lambda: pair.mine.meta.sessions.round_and_floor()[1] > last)


@pytest.mark.usefixtures("alone")
def test_w2_rewritten_data_pass_the_journal(tmp_path: Path) -> None:
    """Compaction exchanged records before the store had the new block: others met EIO meanwhile, a
    killed client's file was lost.
    """
    pair = Pair(memory(), tmp_path)
    pair.me.mkdir(b"/d")
    file = pair.me.open(b"/d/f", os.O_CREAT | os.O_RDWR)
    for number in range(60):
        file.write(number * 5000, b"%04d" % number)
        file.fsync()
    file.close()
    pair.release()
    ino = file.ino
    old = pair.theirs.meta.read_chunk(ino, 0)
    assert len(old) == 60
    pair.gate.open.clear()
    compacting = RUNTIME.spawn("compacting", lambda: pair.mine.background.compact(ino, 0))
    RUNTIME.sleep(0.3)
    assert pair.theirs.meta.read_chunk(ino, 0) == old
    pair.gate.open.set()
    compacting.join()
    pair.theirs.meta.forget_chunks([ino])
    assert len(pair.theirs.meta.read_chunk(ino, 0)) == 1
    assert pair.mine.writeback is not None
    assert pair.mine.writeback.objects.left() == (0, 0)
    assert pair.them.open(b"/d/f").read(5000, 4) == b"0001"
    pair.end()

"""W4: more changes than may be held back at a time wait, and none of them fails."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from fsmeta.writeback.backlog import held_room
from tests.posix.inproc import RUNTIME, memory
from tests.posix.writeback.test_writeback import new_pair, wait_until, write

WRITERS = 6
FILES = 10
HELD_MAX = 4


def test_w4_changes_wait_for_room_as_often_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change waited once, and failed with EIO where others had taken the room by then."""
    monkeypatch.setattr(held_room, "ENTRIES_MAX", HELD_MAX)
    failed: list[Exception] = []
    with new_pair(memory(), tmp_path / "staging") as pair:
        assert pair.mine.writeback is not None
        staged = pair.mine.writeback._store

        def work(writer: int) -> None:
            try:
                for number in range(FILES):
                    write(pair.me, b"/d/%d-%d" % (writer, number), b"data")
            except Exception as error:  # noqa: BLE001  (the test says which)
                failed.append(error)

        pair.hold()
        threads = [RUNTIME.spawn(f"writer-{n}", partial(work, n)) for n in range(WRITERS)]
        wait_until(lambda: staged.held.tally()[0] >= HELD_MAX * held_room.SHARE)  # of one directory
        pair.gate.open.set()
        for thread in threads:
            thread.join()
        assert not failed
        pair.release()
        assert len(pair.them.listdir(b"/d")) == WRITERS * FILES + 1


def test_w4_a_directory_that_is_stuck_leaves_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers of one directory wait, and another directory takes changes meanwhile."""
    monkeypatch.setattr(held_room, "ENTRIES_MAX", HELD_MAX * 10)
    with new_pair(memory(), tmp_path / "staging") as pair:
        assert pair.mine.writeback is not None
        staged = pair.mine.writeback._store
        pair.me.mkdir(b"/other")

        def fill() -> None:
            for number in range(HELD_MAX * 10):
                write(pair.me, b"/d/%d" % number, b"data")

        pair.hold()
        filling = RUNTIME.spawn("filler", fill)
        wait_until(lambda: staged.held.tally()[0] >= HELD_MAX * 10 * held_room.SHARE)
        write(pair.me, b"/other/file", b"data")
        assert filling.is_alive()
        pair.gate.open.set()
        filling.join()
        pair.release()
        assert pair.them.listdir(b"/other")

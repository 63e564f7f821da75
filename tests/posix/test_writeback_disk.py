"""W1: two clients in one process, one of which holds back on a disk that fails."""

from __future__ import annotations

import errno
import os

import pytest

from fsdata import obj_staged
from tests.conftest import LogWatch
from tests.posix.test_writeback import Pair, pair, read, wait_until, write

__all__ = ["pair"]


def test_w1_what_the_disk_fails_to_read_is_not_given_up(
    pair: Pair, log_watch: LogWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for lost, and left out for ever with what came after it."""
    monkeypatch.setattr(obj_staged, "UNREAD_S_MAX", 0.5)
    log_watch.expect("^WARNING fsdata.obj_staged: staging disk: .*simulated; uploads .* wait")
    log_watch.expect("^ERROR fsclient.writeback: write .* disk can't be read: simulated; .*anew")
    back = pair.mine.writeback
    assert back is not None
    disk = back.objects._data._disk
    whole = disk.read

    def fail(*_: object) -> bytes:
        raise OSError(errno.EMFILE, "simulated")

    disk.read = fail  # type: ignore[method-assign, assignment]
    write(pair.me, b"/d/shard", b"shard")
    write(pair.me, b"/d/complete", b"complete")
    domain = pair.me.stat(b"/d").ino
    wait_until(lambda: domain in back._store.backlog.lost)
    with pytest.raises(OSError, match="written there before is lost"):  # nor does anybody hang
        write(pair.me, b"/d/more", b"more")
    pair.me.mkdir(b"/e")
    other = pair.me.open(b"/e/file", os.O_CREAT | os.O_RDWR)
    back.sync = lambda: False  # type: ignore[method-assign]
    other.fsync()  # waits for the store, and not for what may never come
    other.close()
    assert read(pair.them, b"/e/file") == b""
    assert pair.them.listdir(b"/d") == [b"shard"]
    assert pair.them.stat(b"/d/shard").size == 0
    disk.read = whole  # type: ignore[method-assign]
    pair.release()
    assert pair.them.listdir(b"/d") == [b"complete", b"shard"]
    assert read(pair.them, b"/d/shard") == b"shard"
    assert read(pair.them, b"/d/complete") == b"complete"

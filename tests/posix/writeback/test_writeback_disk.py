"""W1: two clients in one process, one of which holds back on a disk that fails."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from fsclient.client.client import MountClient
from fsclient.client.client_options import ClientOptions
from fsclient.client.given_parts import GivenParts
from fsclient.writeback.writeback import WriteBackOptions
from fsdata.staging import uploads
from fsmeta.errors import ConfigError
from fsmeta.schema import journal as schema_journal
from fsmeta.schema.journal import HOLDER_FIELD, JournalHolder, journal_row, pack_holder
from fsmeta.txn.retry import Transactor
from fsmeta.txn.row_cache import RowCache
from fsmeta.writeback import replay
from tests.conftest import LogWatch
from tests.posix.inproc import RUNTIME, Connect, memory
from tests.posix.volumes import PATIENCE_S
from tests.posix.writeback.test_writeback import Pair, new_pair, pair, read, wait_until, write

__all__ = ["pair"]


class Ghost:
    """A drained journal whose files are there again; others have changed what it had made."""

    def __init__(self, pair: Pair, staging: Path) -> None:
        pair.hold()
        write(pair.me, b"/d/file", b"mine")
        (self.slot,) = staging.glob("*/0")
        files = {each: each.read_bytes() for each in self.slot.iterdir() if each.name != "lock"}
        (log,) = [each for each in files if each.name.startswith("log-")]
        assert pair.mine.writeback is not None
        self.journal = pair.mine.writeback._left.journal
        pair.release()
        assert pair.mine.stop()
        assert not log.exists()
        write(pair.them, b"/d/file", b"theirs")
        for path, data in files.items():
            path.write_bytes(data)

    def mount(self, pair: Pair, connect: Connect) -> None:
        """As a mount of that host."""
        options = ClientOptions(heartbeat_s=0.5, meta_timeout_s=PATIENCE_S)
        back = WriteBackOptions()
        options = options._replace(staging_dir=str(self.slot.parents[1]), writeback=back)
        pair.mine = MountClient(connect(), RUNTIME, options, GivenParts(pair.gate))
        pair.mine.start()
        pair.release()


def test_w1_a_drained_journal_that_is_back_is_set_aside(
    tmp_path: Path, log_watch: LogWatch
) -> None:
    """It looked like one that waits, and was published over what others had written since."""
    log_watch.expect(
        "^WARNING fsclient.writeback.recovery: staging journal: the metadata know nothing of"
    )
    connect = memory()
    with new_pair(connect, tmp_path / "staging") as pair:
        ghost = Ghost(pair, tmp_path / "staging")
        ghost.mount(pair, connect)
        assert read(pair.them, b"/d/file") == b"theirs"
        left = sorted(each.name for each in ghost.slot.iterdir())
        assert all(each.startswith(f"aside-{ghost.journal:016x}-") for each in left[:-1]), left
        assert left[-1] == "lock"
        assert pair.mine.stop()
        ghost.mount(pair, connect)  # and nobody says so again


def test_w1_a_copy_of_a_journal_is_refused_while_its_mount_lives(
    tmp_path: Path, log_watch: LogWatch
) -> None:
    """Both would publish changes under the same numbers, and one's would be lost."""
    log_watch.expect("^WARNING fsclient.writeback.recovery: staging journal: it was in .*/staging/")
    connect = memory()
    with new_pair(connect, tmp_path / "staging") as pair:
        pair.hold()
        write(pair.me, b"/d/file", b"mine")
        shutil.copytree(tmp_path / "staging", tmp_path / "copy")
        options = ClientOptions(
            heartbeat_s=0.5,
            meta_timeout_s=PATIENCE_S,
            staging_dir=str(tmp_path / "copy"),
            writeback=WriteBackOptions(),
        )
        other = MountClient(connect(), RUNTIME, options, GivenParts(pair.gate))
        with pytest.raises(ConfigError, match=r"is a copy of the one in .*/staging/"):
            other.start()
        other.stop()
        pair.release()
        assert read(pair.them, b"/d/file") == b"mine"


def test_w1_what_is_there_already_is_not_tried_for_ever(
    tmp_path: Path, log_watch: LogWatch
) -> None:
    """`create …: ENOTEMPTY` was repeated without end, and nothing of its domain was published."""
    log_watch.expect(
        "^WARNING fsclient.writeback.publisher: create (first|file) is left out, another client was"
    )
    connect = memory()
    with new_pair(connect, tmp_path / "staging") as pair:
        ghost = Ghost(pair, tmp_path / "staging")
        row, holder = journal_row(ghost.journal), pack_holder(JournalHolder(1, "host", "place"))
        Transactor(pair.store, RUNTIME, RowCache(RUNTIME)).run(
            lambda txn: txn.put(row, HOLDER_FIELD, holder)
        )
        ghost.mount(pair, connect)  # and all of it is dealt with
        write(pair.them, b"/d/more", b"more")
        assert read(pair.them, b"/d/more") == b"more"


def test_w1_a_journal_that_was_given_up_is_not_taken_for_a_drained_one(tmp_path: Path) -> None:
    connect = memory()
    with new_pair(connect, tmp_path / "staging") as pair:
        assert pair.mine.writeback is not None
        journal = pair.mine.writeback._left.journal
        run = Transactor(pair.store, RUNTIME, RowCache(RUNTIME))
        assert run.view(lambda txn: txn.get_row(journal_row(journal))).keys() == {HOLDER_FIELD}
        run.run(lambda txn: replay.abandon(txn, journal))
        left = run.view(lambda txn: txn.get_row(journal_row(journal)))
        assert [schema_journal.is_mark(field) for field in left] == [True]
        run.run(lambda txn: replay.abandon(txn, journal))
        assert run.view(lambda txn: txn.get_row(journal_row(journal))) == left


def test_w1_what_the_disk_fails_to_read_is_not_given_up(
    pair: Pair, log_watch: LogWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for lost, and left out for ever with what came after it."""
    monkeypatch.setattr(uploads, "UNREAD_S_MAX", 0.5)
    log_watch.expect("^WARNING fsdata.staging.uploads: staging disk: .*simulated; uploads .* wait")
    log_watch.expect(
        "^ERROR fsclient.writeback.writeback: write .* disk can't be read: simulated; .*again"
    )
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
    wait_until(lambda: domain in back._store.held.backlog.lost)
    with pytest.raises(OSError, match="written there before is lost"):  # nor does anybody hang
        write(pair.me, b"/d/more", b"more")
    pair.me.mkdir(b"/e")
    other = pair.me.open(b"/e/file", os.O_CREAT | os.O_RDWR)
    back._log.sync = lambda: False  # type: ignore[method-assign]
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

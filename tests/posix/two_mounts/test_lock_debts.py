"""P3: a lock that its owner has given up is not lost when the session ends."""

from __future__ import annotations

import pytest

from fsclient.client.client import MountClient
from fsclient.kernel.contract import FileLock
from fsmeta.errors import Unavailable
from fsmeta.schema.locks import LOCK_END
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino
from tests.conftest import LogWatch
from tests.posix.inproc import client, memory

RW = 0o2


def _locked(made: MountClient, owner: int) -> tuple[Ino, int]:
    """A new file and a handle of it, which `owner` has locked with fcntl(2)."""
    entry, opened = made.vfs.create(ROOT_CALLER, ROOT_INO, b"%d" % owner, 0o644, RW)
    assert entry.attr is not None
    lock = FileLock(True, 0, LOCK_END, 1)
    assert made.vfs.locks.setlk(opened.fh, owner, lock, False, 0, False)
    return entry.attr.ino, opened.fh


def test_p3_a_release_that_waits_is_no_lost_lock(
    monkeypatch: pytest.MonkeyPatch, log_watch: LogWatch
) -> None:
    """The log warned of lost locks where all owners had closed their files."""
    with client(memory()) as made:
        ino, fh = _locked(made, 7)
        closing, closing_fh = _locked(made, 8)

        def away(*_: object) -> bool:
            raise Unavailable("away")

        with monkeypatch.context() as patch:
            patch.setattr(made.meta.locks, "unlock", away)
            made.vfs.flush(ROOT_CALLER, ino, fh, 7)
            made.vfs.release(ino, fh)
            made.vfs.flush(ROOT_CALLER, closing, closing_fh, 8)  # RELEASE comes later
            made.vfs.locks.lost()
        assert log_watch.seen == []
        made.vfs.release(closing, closing_fh)
        assert made.vfs.locks.numbers()["lock_owners"] == 0


def test_p3_a_lock_that_is_held_is_lost(log_watch: LogWatch) -> None:
    with client(memory()) as made:
        ino, fh = _locked(made, 7)
        log_watch.expect("1 owners have lost their locks")
        made.vfs.locks.lost()
        assert len(log_watch.seen) == 1
        with pytest.raises(OSError, match="its locks were lost"):
            made.vfs.flush(ROOT_CALLER, ino, fh, 7)
        made.vfs.release(ino, fh)

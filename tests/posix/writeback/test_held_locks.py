"""P3, W2: a lock that waits for what was written under it to be seen holds no serving thread."""

from __future__ import annotations

import errno
import os

import pytest

from fsclient.kernel.contract import FileLock
from fsclient.kernel.later import Later, Outcome
from fsclient.vfs.vfs import VFS
from fsmeta.schema.locks import LOCK_END
from fsmeta.types import ROOT_CALLER
from tests.posix.inproc import RUNTIME
from tests.posix.writeback.test_writeback import SETTLE_S, Pair, pair, read, wait_until
from tests.sim.world.posix import File

__all__ = ["pair"]
OWNER = 7
WRITE = FileLock(True, 0, LOCK_END, 1)
READ = FileLock(False, 0, LOCK_END, 1)


class Replies:
    """What was answered later."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}

    def answer(self, request: int, code: int) -> None:
        self.codes[request] = code

    def interrupted(self) -> bool:
        return False


class Answer:
    """A request whose answer comes later."""

    def __init__(self, later: Later[None] | None) -> None:
        assert later is not None, "it has an answer before others see what was written"
        self._come = RUNTIME.event()
        self._later = later
        self.code: int | None = None
        later.begin(self._take)

    def _take(self, outcome: Outcome[None]) -> None:
        try:
            outcome()
            self.code = 0
        except OSError as error:
            self.code = error.errno
        self._come.set()

    def interrupt(self) -> int | None:
        self._later.cancel()
        return self.wait()

    def wait(self) -> int | None:
        assert self._come.wait(SETTLE_S)
        return self.code


def _locked(pair: Pair) -> tuple[VFS, Replies, File]:
    """A file that is written under a lock, and held back."""
    replies = Replies()
    vfs = pair.mine.vfs
    vfs.locks.start(replies)
    pair.hold()
    file = pair.me.open(b"/d/first", os.O_RDWR)
    assert vfs.locks.setlk(file.fh, OWNER, WRITE, False, 1, False)
    file.write(0, b"under the lock")
    return vfs, replies, file


def _is_free(pair: Pair) -> bool:
    """Whether the other mount gets the lock."""
    other, theirs = pair.theirs.vfs, pair.them.open(b"/d/first", os.O_RDWR)
    try:
        if not other.locks.setlk(theirs.fh, OWNER, WRITE, False, 2, False):
            return False
        other.locks.unlock(theirs.fh, OWNER, WRITE, False)
    except OSError as error:
        assert error.errno == errno.EAGAIN
        return False
    finally:
        theirs.close()
    return True


def test_p3_unlocking_waits_without_a_thread(pair: Pair) -> None:
    """64 programs that unlocked behind a slow store stopped the mount."""
    vfs, _, file = _locked(pair)
    unlocking = Answer(vfs.locks.unlock(file.fh, OWNER, WRITE, False))
    assert not _is_free(pair)
    assert unlocking.interrupt() == errno.EINTR
    assert not _is_free(pair)
    again = Answer(vfs.locks.unlock(file.fh, OWNER, WRITE, False))
    pair.release()
    assert again.wait() == 0
    assert _is_free(pair)
    assert read(pair.them, b"/d/first") == b"under the lock"
    file.close()


@pytest.mark.parametrize("interrupted", [False, True])
def test_p3_closing_waits_without_a_thread(pair: Pair, interrupted: bool) -> None:
    """A close that is interrupted ends, and its lock goes when others see what was written."""
    vfs, _, file = _locked(pair)
    closing = Answer(vfs.flush(ROOT_CALLER, file.ino, file.fh, OWNER))
    assert not _is_free(pair)
    if interrupted:
        assert closing.interrupt() == 0
        assert not _is_free(pair)
    pair.release()
    assert closing.wait() == 0
    wait_until(lambda: _is_free(pair))
    assert read(pair.them, b"/d/first") == b"under the lock"
    vfs.release(file.ino, file.fh)


def test_p3_a_downgrade_waits_without_a_thread(pair: Pair) -> None:
    vfs, replies, file = _locked(pair)
    assert not vfs.locks.setlk(file.fh, OWNER, READ, False, 5, True)
    assert vfs.locks.cancel(5)
    wait_until(lambda: replies.codes.get(5) == errno.EINTR)
    assert not vfs.locks.setlk(file.fh, OWNER, READ, False, 6, True)
    assert 6 not in replies.codes
    pair.release()
    wait_until(lambda: replies.codes.get(6) == 0)
    vfs.locks.unlock(file.fh, OWNER, WRITE, False)
    file.close()

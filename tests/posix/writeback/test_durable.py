"""W4: who asks whether something is stored, however many do, holds up no other request."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsclient.control import durable_xattr
from fsclient.control.durable_xattr import DURABLE_XATTR, FLUSH_XATTR, WAIT_XATTR
from fsclient.fuse.session.session import SessionConfig
from fsclient.kernel.later import Later, Outcome
from fsmeta.types import ROOT_CALLER, Ino
from tests.fsclient.fuse.mounting import needs_root_and_fuse, serving
from tests.posix.inproc import memory
from tests.posix.writeback.test_writeback import Pair, new_pair
from tests.support.waiting import wait_until

MANY = 8
THREADS = 2  # that serve


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Nothing of /d is published before `release`, and who waits does so until then."""
    monkeypatch.setattr(durable_xattr, "WAIT_S", 3600.0)
    with new_pair(memory(), tmp_path / "staging") as made:
        yield made


def _ask(pair: Pair, name: bytes, ino: Ino) -> Later[bytes]:
    later = pair.mine.vfs.xattrs.question(ROOT_CALLER, ino, name)
    assert later is not None, "it was answered at once"
    return later


def test_w4_who_waits_holds_no_thread(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """All waits are begun by one thread, which goes on; each ends for its own reason."""
    pair.hold()
    directory = pair.me.stat(b"/d").ino
    outcomes: list[Outcome[bytes]] = []
    for _ in range(MANY):
        _ask(pair, WAIT_XATTR, directory).begin(outcomes.append)
    assert not outcomes
    late: list[Outcome[bytes]] = []
    with monkeypatch.context() as patch:
        patch.setattr(durable_xattr, "WAIT_S", 0.0)
        _ask(pair, WAIT_XATTR, directory).begin(late.append)
    wait_until(lambda: late)
    assert late[0]() == b"0", "it has waited long enough"
    gone: list[Outcome[bytes]] = []
    later = _ask(pair, WAIT_XATTR, directory)
    later.begin(gone.append)
    later.cancel()
    wait_until(lambda: gone)
    with pytest.raises(InterruptedError):
        gone[0]()
    assert not outcomes
    pair.release()
    wait_until(lambda: len(outcomes) == MANY)
    assert {outcome() for outcome in outcomes} == {b"1"}


def test_w4_flushes_are_done_a_few_at_a_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones hang: the others wait, are cancelled or refused, and hold nothing."""
    monkeypatch.setattr("fsclient.control.job_threads.QUEUE_MAX", MANY)
    unstored, held, begun = pair.mine.vfs.io.unstored, threading.Event(), []
    real = unstored.flush_open

    def flush(ino: Ino | None) -> None:
        begun.append(ino)
        held.wait()
        real(ino)

    monkeypatch.setattr(unstored, "flush_open", flush)
    root = pair.me.stat(b"/d").ino
    outcomes: list[Outcome[bytes]] = []
    laters = [_ask(pair, FLUSH_XATTR, root) for _ in range(MANY)]
    for later in laters:
        later.begin(outcomes.append)
    wait_until(lambda: len(begun) == durable_xattr.FLUSHES_AT_ONCE)
    for later in (laters[0], laters[-1]):  # one that runs, and one that waits
        later.cancel()
    assert len(outcomes) == 2
    for outcome in outcomes:
        with pytest.raises(InterruptedError):
            outcome()
    for _ in range(durable_xattr.FLUSHES_AT_ONCE):
        _ask(pair, FLUSH_XATTR, root).begin(outcomes.append)
    with pytest.raises(BlockingIOError) as refused:
        pair.mine.vfs.xattrs.question(ROOT_CALLER, root, FLUSH_XATTR)
    assert refused.value.errno == errno.EAGAIN
    held.set()
    expected = MANY + durable_xattr.FLUSHES_AT_ONCE
    wait_until(lambda: len(outcomes) == expected)
    assert {outcome() for outcome in outcomes[2:]} == {b"1"}


_PROGRAM = "import os, sys; os.write(1, b'.'); print(os.getxattr(sys.argv[1], sys.argv[2]))"


@needs_root_and_fuse
def test_w4_programs_that_wait_stall_no_mount(pair: Pair, tmp_path: Path) -> None:
    """More of them than there are threads; a signal ends one, and what it waits for the others."""
    pair.hold()
    root = tmp_path / "mnt"
    config = SessionConfig(threads=1, threads_max=THREADS)
    command = [sys.executable, "-c", _PROGRAM, str(root / "d"), os.fsdecode(WAIT_XATTR)]
    with serving(pair.mine.vfs, root, config):
        waiting = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            for _ in range(MANY)
        ]
        wait_until(lambda: len(pair.mine.vfs.questions.durable._waits) == MANY, 60)
        assert sorted(os.listdir(root / "d")) == ["first"]
        assert os.getxattr(root / "d", os.fsdecode(DURABLE_XATTR)) == b"0"
        waiting[0].send_signal(signal.SIGINT)
        assert waiting[0].wait(60) != 0
        assert len(pair.mine.vfs.questions.durable._waits) == MANY - 1
        pair.release()
        for process in waiting:
            out, _ = process.communicate(timeout=60)
            assert process is waiting[0] or out == b".b'1'\n"

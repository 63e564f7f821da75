"""A request that is answered later, and the INTERRUPT that comes while it is put aside."""

from __future__ import annotations

import errno
import os
from typing import Any

from fsclient.fuse.session.interrupt import Interrupts
from fsclient.fuse.session.stats import SlotStats
from fsclient.fuse.session.worker import Slot, Worker
from fsclient.fuse.wire import abi
from fsclient.kernel.copy_up_queue import CopyUpQueue
from fsclient.kernel.later import Later, Outcome, Take
from fsmeta.runtime import SystemRuntime
from fsmeta.types import Ino

UNIQUE = 42


def answer(outcome: Outcome[bytes]) -> bytes | int:
    try:
        return outcome()
    except OSError as error:
        return error.errno or errno.EIO


def test_an_interrupt_that_comes_before_the_request_waits_ends_it() -> None:
    given, answers = os.pipe()
    interrupts: Any = Interrupts(1)
    interrupts.enter(0)
    interrupts.serving[0] = UNIQUE
    unused: Any = None
    slot = Slot(0, SlotStats(), unused)
    worker = Worker(answers, slot, unused, unused, interrupts, lambda: 0.0)

    class Threadless(SystemRuntime):
        def spawn(self, name: str, body: Any) -> Any:
            del name, body

    queue = CopyUpQueue(Threadless(), lambda _ino, _stopped: None)
    opening = queue.later(Ino(1), lambda: b"", lambda: None).map(answer)

    def begin(take: Take[bytes | int]) -> None:
        assert interrupts.interrupt(UNIQUE)  # it is known as put aside, and does not wait yet
        opening.begin(take)

    worker._put_aside(UNIQUE, Later(begin, opening.cancel))
    assert os.read(given, 100) == abi.OUT_HEADER.pack(abi.OUT_BYTES, -errno.EINTR, UNIQUE)
    assert interrupts.aside == {}
    os.close(given)
    os.close(answers)

"""P3: numbers in files, each made one more under a lock, by clients that wait, die and are cut off.

Who has given its lock up again without an error has stored what it wrote. So each number is
acknowledged once; a lock that two had, or a read that saw less than the last holder's write, would
make one twice. flock and fcntl locks guard files of their own.
"""

from __future__ import annotations

import errno
import os
import random
from typing import Final

from fsclient.kernel.contract import FileLock
from fsmeta.errors import StoreError
from fsmeta.runtime import Runtime
from fsmeta.schema.locks import LOCK_END
from tests.sim.loads import Load
from tests.sim.world.cluster import Node
from tests.sim.world.posix import File, Posix, finish

FILES: Final = {b"/flock": True, b"/fcntl": False}
WIDTH: Final = 8
HOLD_S: Final = 0.2
LONG_S: Final = 30.0  # now and then, so that a lease can end meanwhile


class Replies:
    """The answers to requests that were put aside, of one node."""

    def __init__(self, runtime: Runtime) -> None:
        self._cond = runtime.condition()
        self._answers: dict[int, int] = {}  # guarded by _cond

    def answer(self, request: int, code: int) -> None:
        with self._cond:
            assert request not in self._answers, "answered twice"
            self._answers[request] = code
            self._cond.notify_all()

    def interrupted(self) -> bool:
        return False

    def wait(self, request: int, seconds: float | None) -> int | None:
        """The answer; None where it does not come in time."""
        with self._cond:
            if request not in self._answers:
                self._cond.wait(seconds)
            while seconds is None and request not in self._answers:
                self._cond.wait()
            return self._answers.get(request)


class Counters:
    """See the module."""

    def __init__(self) -> None:
        self._requests = 0
        self._replies: dict[Node, Replies] = {}
        self._acknowledged: dict[bytes, set[int]] = {path: set() for path in FILES}

    def prepare(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        for path in FILES:
            file = posix.open(path, os.O_CREAT | os.O_RDWR)
            file.write(0, b"%0*d" % (WIDTH, 0))
            file.close()

    def _replies_of(self, node: Node) -> Replies:
        if node not in self._replies:
            self._replies[node] = Replies(node.process)
            node.client.vfs.locks.start(self._replies[node])
        return self._replies[node]

    def act(self, node: Node, dice: random.Random, turns: int) -> None:
        replies = self._replies_of(node)
        for _ in range(turns // 2):
            path = dice.choice(list(FILES))
            try:
                self._count(node, replies, dice, path)
            except StoreError:
                pass  # nobody knows what became of it
            except OSError as error:
                assert node.shaken, f"{path!r}: {error}"
                assert error.errno in (errno.EIO, errno.ESTALE), error
            node.process.sleep(dice.random())

    def _count(self, node: Node, replies: Replies, dice: random.Random, path: bytes) -> None:
        file = Posix(node.client.vfs).open(path, os.O_RDWR)
        try:
            if self._lock(node, replies, dice, file, FILES[path]):
                number = int(file.read(0, WIDTH)) + 1
                node.process.sleep(dice.random() * (LONG_S if dice.random() < 0.05 else HOLD_S))
                file.write(0, b"%0*d" % (WIDTH, number))
                self._unlock(node, file, FILES[path])
                known = self._acknowledged[path]
                assert number not in known, f"{path!r}: {number} twice, there is {max(known)}"
                known.add(number)
        finally:
            try:
                file.close()
            except (OSError, StoreError):
                pass  # said by the lock already

    def _owner(self, file: File) -> int:
        return 1000 + file.fh

    def _lock(
        self, node: Node, replies: Replies, dice: random.Random, file: File, flock: bool
    ) -> bool:
        self._requests += 1
        request = self._requests
        lock = FileLock(True, 0, LOCK_END, 1)
        vfs = node.client.vfs
        wait = dice.random() < 0.8
        try:
            if vfs.locks.setlk(file.fh, self._owner(file), lock, flock, request, wait):
                return True
        except OSError as error:
            if error.errno == errno.EAGAIN:
                assert not wait
                return False
            raise
        code = replies.wait(request, None if dice.random() < 0.9 else dice.random())
        if code is None:
            vfs.locks.cancel(request)
            code = replies.wait(request, None)
        if code == errno.EINTR:
            return False
        assert code is not None
        if code:
            raise OSError(code, os.strerror(code))
        return True

    def _unlock(self, node: Node, file: File, flock: bool) -> None:
        lock = FileLock(False, 0, LOCK_END, 0)
        vfs = node.client.vfs
        finish(vfs, vfs.locks.unlock(file.fh, self._owner(file), lock, flock))

    def check(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        for path, known in self._acknowledged.items():
            file = posix.open(path)
            number = int(file.read(0, WIDTH))
            file.close()
            assert number >= max(known, default=0), f"{path!r}: {number}, {max(known)} was stored"


def _conforms(load: Counters) -> Load:
    return load

"""A client that makes random calls and notes what came of them."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf

from fsmeta.errors import StoreError
from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import EXCHANGE, NOREPLACE, DentryLocation
from fsmeta.types import ROOT_CALLER as ROOT, ROOT_INO, Ino
from tests.linear.history import OK, UNKNOWN, Answer, Call

NAMES = ("a", "b", "c")
REGISTER = b"user.register"
_FLAGS = {"rename": 0, "noreplace": NOREPLACE, "exchange": EXCHANGE}
_VERBS = ("create", "create", "unlink", "rename", "noreplace", "exchange", "lookup", "put", "get")


def prepare(meta: Meta, name: bytes) -> Ino:
    """A directory for all to work in; it carries the register."""
    directory = meta.create(ROOT, ROOT_INO, name, 0o40755).ino
    meta.setxattr(ROOT, directory, REGISTER, b"=")
    return directory


class LinearClient:
    """Calls of one client, one after the other.

    Reads are made without what the client remembers: what a cache may say, and for how long, is
    docs/SEMANTICS.md's to bound. Changes use it, and must be right all the same.
    """

    def __init__(
        self, number: int, meta: Meta, directory: Ino, clock: Callable[[], float], seed: int
    ) -> None:
        self.history: list[Call] = []
        self._number = number
        self._meta = meta
        self._directory = directory
        self._clock = clock
        self._chance = random.Random(seed)
        self._puts = 0
        self._made = 0
        self._supply = meta._inos.take
        meta._inos.take = self._take  # type: ignore[method-assign]

    def run(self, turns: int) -> None:
        """Calls one after the other."""
        for _ in range(turns):
            self.turn()

    def turn(self) -> None:
        """One call."""
        verb = self._chance.choice(_VERBS)
        arguments: tuple[str, ...] = ()
        if verb == "put":
            self._puts += 1
            arguments = (f"{self._number}.{self._puts}",)
        elif verb in _FLAGS:
            arguments = tuple(self._chance.sample(NAMES, 2))
        elif verb != "get":
            arguments = (self._chance.choice(NAMES),)
        self._made = -(1000 * self._number + len(self.history) + 1)  # no look-up shows this
        begun = Call(self._number, verb, arguments, self._clock(), inf, UNKNOWN)
        self.history.append(begun)  # who dies in the midst of it leaves it like this
        answer, end = self._answer(verb, arguments)
        self.history[-1] = replace(begun, end=end, answer=answer, made=self._made)

    def _take(self) -> int:
        """Ids are known before anything is sent, so also those of calls that nobody answers."""
        self._made = self._supply()
        self.history[-1] = replace(self.history[-1], made=self._made)
        return self._made

    def _answer(self, verb: str, arguments: tuple[str, ...]) -> tuple[Answer, float]:
        try:
            answer = self._call(verb, *(each.encode() for each in arguments))
        except OSError as error:
            assert error.errno in (errno.ENOENT, errno.EEXIST), error
            return errno.errorcode[error.errno], self._clock()
        except StoreError:
            return UNKNOWN, inf
        return answer, self._clock()

    def _call(self, verb: str, *names: bytes) -> Answer:
        meta, directory = self._meta, self._directory
        if verb == "create":
            return meta.create(ROOT, directory, names[0], 0o100644).ino
        if verb == "unlink":
            meta.unlink(ROOT, directory, names[0])
            return OK
        if verb in _FLAGS:
            places = DentryLocation(directory, names[0]), DentryLocation(directory, names[1])
            meta.rename(ROOT, *places, flags=_FLAGS[verb])
            return OK
        if verb == "put":
            meta.setxattr(ROOT, directory, REGISTER, b"=" + names[0])
            return OK
        meta.transactor.drop(None)
        if verb == "lookup":
            return meta.lookup(ROOT, directory, names[0]).ino
        return meta.getxattr(ROOT, directory, REGISTER)[1:].decode()


def parties(metas: Sequence[Meta], count: int) -> Iterator[tuple[Ino, list[LinearClient]]]:
    """So many directories, one after the other, each with a client for every one of `metas`."""
    supplies = [meta._inos.take for meta in metas]
    for number in range(count):
        directory = prepare(metas[0], b"d%d" % number)
        clients = []
        for each, meta in enumerate(metas):
            meta._inos.take = supplies[each]  # type: ignore[method-assign]
            seed = len(metas) * number + each
            clients.append(LinearClient(each, meta, directory, time.monotonic, seed))
        yield directory, clients


def run_at_once(clients: Sequence[LinearClient], turns: int) -> list[Call]:
    """Each in a thread of its own; all that they have called."""
    with ThreadPoolExecutor(len(clients)) as threads:
        for done in [threads.submit(client.run, turns) for client in clients]:
            done.result()
    return [call for client in clients for call in client.history]

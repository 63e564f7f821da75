"""Many clients change names in the same directories: who wins, and who holds what.

`Tokens`: a rename that succeeds takes a token from wherever it was; nobody else can have it then.
`Winners`: of all who make the same name with O_EXCL, mkdir, link or symlink, one succeeds.
`Loops`: directories are moved into each other; the volume must stay a tree.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable

from fsmeta.errors import StoreError
from tests.sim.loads import Load
from tests.sim.world.cluster import Node
from tests.sim.world.posix import Posix

TOKENS = 3
RACES = 12
DIRECTORIES = 5
PAUSE_S = 0.3
UNKNOWN = b"?"  # the fate of a rename is not known: the token may be in either place


class Tokens:
    """See the module."""

    def __init__(self) -> None:
        self._holders: dict[bytes, bytes | None] = {b"t%d" % n: None for n in range(TOKENS)}
        self._actors = 0

    def prepare(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        posix.mkdir(b"/pool")
        for token in self._holders:
            posix.open(b"/pool/" + token, os.O_CREAT | os.O_WRONLY).close()

    def act(self, node: Node, dice: random.Random, turns: int) -> None:
        posix = Posix(node.client.vfs)
        self._actors += 1
        mine = b"/hold%d" % self._actors
        held: list[bytes] = []
        try:
            posix.mkdir(mine)
        except StoreError:
            return
        for _ in range(turns):
            token = dice.choice(held) if held and dice.random() < 0.6 else None
            if token is not None:
                self._give(posix, mine, token)
                held.remove(token)
            else:
                self._take(posix, mine, dice.choice(list(self._holders)), held)
            node.process.sleep(dice.random() * PAUSE_S)

    def _give(self, posix: Posix, mine: bytes, token: bytes) -> None:
        if self._holders[token] != UNKNOWN:
            assert self._holders[token] == mine, f"{token!r} is held by {self._holders[token]!r}"
            self._holders[token] = None
        try:
            posix.rename(mine + b"/" + token, b"/pool/" + token)
        except StoreError:
            self._holders[token] = UNKNOWN

    def _take(self, posix: Posix, mine: bytes, token: bytes, held: list[bytes]) -> None:
        before, self._holders[token] = self._holders[token], UNKNOWN
        self._holders[token] = before
        try:
            posix.rename(b"/pool/" + token, mine + b"/" + token)
        except FileNotFoundError:
            return
        except StoreError:
            self._holders[token] = UNKNOWN
            return
        if self._holders[token] != UNKNOWN:
            assert self._holders[token] is None, f"{token!r} has two holders"
            self._holders[token] = mine
        held.append(token)

    def check(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        places = [b"/pool", *(b"/hold%d" % n for n in range(1, self._actors + 1))]
        places = [place for place in places if posix.exists(place)]
        found = {place: posix.listdir(place) for place in places}
        for token, holder in self._holders.items():
            where = [place for place, names in found.items() if token in names]
            assert len(where) == 1, f"{token!r} is in {where}"
            if holder not in (None, UNKNOWN):
                assert where == [holder]


class Winners:
    """See the module."""

    def __init__(self) -> None:
        self._winners: dict[bytes, list[int]] = {b"/race/%d" % n: [] for n in range(RACES)}
        self._doubts: dict[bytes, set[int]] = {name: set() for name in self._winners}
        self._actors = 0

    def prepare(self, node: Node) -> None:
        Posix(node.client.vfs).mkdir(b"/race")

    def act(self, node: Node, dice: random.Random, turns: int) -> None:
        posix = Posix(node.client.vfs)
        self._actors += 1
        me = self._actors
        source = b"/race/source%d" % me
        try:
            posix.open(source, os.O_CREAT | os.O_WRONLY).close()
        except StoreError:
            return
        verbs: list[Callable[[bytes], None]] = [
            posix.mkdir,
            lambda name: posix.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY).close(),
            lambda name: posix.link(source, name),
            lambda name: posix.symlink(b"%d" % me, name),
        ]
        for _ in range(turns):
            name = dice.choice(list(self._winners))
            try:
                self._doubts[name].add(me)
                dice.choice(verbs)(name)
                self._winners[name].append(me)
            except FileExistsError:
                pass
            except StoreError:
                continue
            self._doubts[name].discard(me)
            node.process.sleep(dice.random() * PAUSE_S)

    def check(self, node: Node) -> None:
        names = Posix(node.client.vfs).listdir(b"/race")
        for name, winners in self._winners.items():
            assert len(winners) <= 1, f"{name!r} was made by {winners}"
            if os.path.basename(name) in names:
                assert winners or self._doubts[name], f"{name!r} was made by nobody"
            else:
                assert not winners, f"{name!r} was made by {winners} and is gone"


class Loops:
    """See the module. Whether it is a tree still is judged with the whole volume."""

    def prepare(self, node: Node) -> None:
        posix = Posix(node.client.vfs)
        posix.mkdir(b"/loop")
        for number in range(DIRECTORIES):
            posix.mkdir(b"/loop/%d" % number)

    def act(self, node: Node, dice: random.Random, turns: int) -> None:
        posix = Posix(node.client.vfs)
        for _ in range(turns):
            try:
                self._turn(posix, dice)
            except (StoreError, FileNotFoundError):
                pass
            except OSError as error:
                usual = (errno.EINVAL, errno.ENOTEMPTY, errno.EEXIST)
                assert error.errno in usual, error
            node.process.sleep(dice.random() * PAUSE_S)

    def _turn(self, posix: Posix, dice: random.Random) -> None:
        old, new = self._descend(posix, dice), self._descend(posix, dice)
        verb = dice.random()
        if verb < 0.1:
            posix.rmdir(old)
        elif verb < 0.25:
            posix.mkdir(new + b"/%d" % dice.randrange(DIRECTORIES))
        elif verb < 0.35:
            posix.rename(old, new, flags=2)
        else:
            posix.rename(old, new + b"/" + os.path.basename(old))

    @staticmethod
    def _descend(posix: Posix, dice: random.Random) -> bytes:
        """Some directory below /loop, as of a moment ago."""
        path = b"/loop"
        for depth in range(6):
            names = posix.listdir(path)
            if not names or (depth and dice.random() < 0.4):
                break
            path += b"/" + dice.choice(names)
        return path

    def check(self, node: Node) -> None:
        """Nothing more than `Cluster.judge` does."""


def _conforms(one: Tokens, two: Winners, three: Loops) -> tuple[Load, Load, Load]:
    return one, two, three

"""P3: random lock calls of several clients on every engine, against a model of single bytes.

The model knows for each byte who holds it and how, and who came when. It has no ranges, no queue
that is rewritten, no hand-over: after every step it looks who could go, in order, until nobody can.
Now and then a client ends, or is ended by another.
"""

from __future__ import annotations

import errno
import random
from typing import NamedTuple

import pytest

from fsmeta.meta.locks import LockTicket, Range
from fsmeta.meta.meta import Meta
from fsmeta.ops.sessions.lock import LockOutcome
from fsmeta.schema.locks import LOCK_END, Kind
from fsmeta.types import ROOT_CALLER, ROOT_INO, Ino
from tests.fsmeta.engines import Engine

WIDTH = 6  # bytes of the file that anybody asks for; the last stands for all that follow
OWNERS = 2  # of a client
STEPS = 60
SEEDS = {"mem": 25, "sqlite": 8, "redis": 8, "cluster": 3, "tikv": 2}

Who = tuple[int, int]


class _Wish(NamedTuple):
    who: Who
    ticket: int
    write: bool
    begin: int
    end: int


class _Model:
    """Locks of one file of one kind."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.bytes: list[dict[Who, bool]] = [{} for _ in range(WIDTH)]
        self.line: list[_Wish] = []

    def bars(self, wish: _Wish, line: list[_Wish]) -> bool:
        """Whether something keeps `wish` from being had, with `line` before it."""
        for at in range(wish.begin, wish.end):
            for who, write in self.bytes[at].items():
                if who != wish.who and (write or wish.write):
                    return True
        if any(wish.who in each for each in self.bytes):
            return False
        return any(
            other.who != wish.who
            and (other.write or wish.write)
            and other.begin < wish.end
            and wish.begin < other.end
            for other in line
        )

    def give(self, wish: _Wish) -> None:
        for at in range(wish.begin, wish.end):
            self.bytes[at][wish.who] = wish.write

    def drop(self, who: Who, begin: int = 0, end: int = WIDTH) -> None:
        for at in range(begin, end):
            self.bytes[at].pop(who, None)

    def end(self, client: int) -> None:
        for who in {who for each in self.bytes for who in each if who[0] == client}:
            self.drop(who)
        self.line = [wish for wish in self.line if wish.who[0] != client]

    def advance(self) -> set[tuple[int, int]]:
        """Who has got what it waited for: clients and tickets."""
        over: set[tuple[int, int]] = set()
        at = 0
        while at < len(self.line):
            wish = self.line[at]
            if self.bars(wish, self.line[:at]):
                at += 1
                continue
            del self.line[at]
            if self.kind is Kind.FLOCK:
                self.drop(wish.who)
            self.give(wish)
            over.add((wish.who[0], wish.ticket))
            at = 0
        return over


class _World:
    """Clients, and what the model says of their locks."""

    def __init__(self, engine: Engine, kind: Kind, dice: random.Random) -> None:
        self.engine, self.kind, self.dice = engine, kind, dice
        self.model = _Model(kind)
        self.clients: dict[int, Meta] = {}
        self.waits: dict[int, set[int]] = {}
        self.over: set[tuple[int, int]] = set()
        self.tickets = 0
        for number in range(3):
            self.begin(number)
        name = b"file%d" % dice.getrandbits(60)
        self.ino: Ino = self.clients[0].create(ROOT_CALLER, ROOT_INO, name, 0o100644).ino

    def begin(self, number: int) -> None:
        self.clients[number] = self.engine.meta()
        self.waits[number] = set()

    def wish(self, number: int, ticket: int) -> _Wish:
        who = number, self.dice.randrange(OWNERS)
        begin = 0 if self.kind is Kind.FLOCK else self.dice.randrange(WIDTH - 1)
        end = WIDTH if self.kind is Kind.FLOCK else self.dice.randrange(begin + 1, WIDTH + 1)
        return _Wish(who, ticket, self.dice.random() < 0.5, begin, end)

    def ask(self, number: int, wait: bool) -> None:
        self.tickets += 1
        wish = self.wish(number, self.tickets if wait else 0)
        if any(wish.who == other.who for other in self.model.line):
            return  # it has but one thread
        want = Range(wish.write, wish.begin, LOCK_END if wish.end == WIDTH else wish.end)
        locks = self.clients[number].locks
        try:
            answer = locks.setlk(
                self.ino,
                self.kind,
                wish.who[1],
                want,
                ticket=LockTicket(wish.ticket),
                guess=number == 0,
            )
        except OSError as error:
            assert error.errno == errno.EDEADLK
            assert wait
            assert self.model.bars(wish, [])
            return
        had = {who: write for each in self.model.bytes for who, write in each.items()}
        if self.kind is Kind.FLOCK and had.get(wish.who, not wish.write) != wish.write:
            self.model.drop(wish.who)
        same = self.kind is Kind.FLOCK and had.get(wish.who) == wish.write
        held = wish.who in had
        line = self.model.line if wait and not held else []
        if same or not self.model.bars(wish, line):
            assert answer.outcome is LockOutcome.GRANTED, wish
            self.model.give(wish)
        elif wait:
            assert answer.outcome is LockOutcome.QUEUED, wish
            self.model.line.append(wish)
            self.waits[number].add(wish.ticket)
        else:
            assert answer.outcome is LockOutcome.REFUSED, wish

    def release(self, number: int) -> None:
        wish = self.wish(number, 0)
        end = LOCK_END if wish.end == WIDTH else wish.end
        self.clients[number].locks.unlock(self.ino, self.kind, wish.who[1], wish.begin, end)
        self.model.drop(wish.who, wish.begin, wish.end)

    def cancel(self, number: int) -> None:
        tickets = sorted(self.waits[number])
        if not tickets:
            return
        ticket = self.dice.choice(tickets)
        had = self.clients[number].locks.cancel(self.ino, self.kind, [ticket])
        assert (ticket in had) == ((number, ticket) in self.over)
        if not had:
            self.waits[number].discard(ticket)
            self.model.line = [wish for wish in self.model.line if wish.ticket != ticket]

    def end(self, number: int) -> None:
        session = self.clients[number].session
        assert session is not None
        other = self.clients[(number + 1) % 3]
        if self.dice.random() < 0.5:
            self.clients[number].sessions.close()
        else:
            other.sessions.end(session.id)
        self.model.end(number)
        self.begin(number)

    def compare(self) -> None:
        self.over |= self.model.advance()
        for number, meta in self.clients.items():
            meta.cache.drop([meta.locks.news_row()])
            got = meta.locks.granted(dict.fromkeys(self.waits[number], self.ino)).keys()
            assert got == {t for n, t in self.over if n == number and t in self.waits[number]}
        locks, queue = self.clients[0].locks.locks_of(self.ino, self.kind)
        found: list[dict[Who, bool]] = [{} for _ in range(WIDTH)]
        names = {int(meta.session.id): n for n, meta in self.clients.items() if meta.session}
        for lock in locks:
            for at in range(lock.begin, min(lock.end, WIDTH)):
                found[at][names[lock.owner.session], lock.owner.id] = lock.write
        assert found == self.model.bytes
        assert [wait.ticket for wait in queue] == [wish.ticket for wish in self.model.line]


@pytest.mark.parametrize("kind", list(Kind))
def test_locks_are_those_of_the_model(engine: Engine, kind: Kind) -> None:
    for seed in range(SEEDS[engine.name]):
        dice = random.Random(seed)
        world = _World(engine, kind, dice)
        steps: list[str] = []
        try:
            for _ in range(STEPS):
                number, verb = dice.randrange(3), dice.random()
                steps.append(f"{number} {verb:.2f}")
                if verb < 0.6:
                    world.ask(number, wait=verb < 0.35)
                elif verb < 0.88:
                    world.release(number)
                elif verb < 0.97:
                    world.cancel(number)
                else:
                    world.end(number)
                world.compare()
            for meta in world.clients.values():
                meta.sessions.close()
        except BaseException as error:
            error.add_note(f"seed {seed}, step {len(steps)}")
            raise

"""Q1 on TiKV: counters with room taken ahead, by seed: clients' transactions in any interleaving.

Plans, images and judgements are the engine's own; TiKV is a map of versions here, which lets a
transaction through unless a key that it writes or locks has changed since it began.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from fsmeta.errors import Conflict, LimitExceeded, NotEmpty
from fsmeta.schema import keys as schema
from fsmeta.store.contract import Commit, Key
from fsmeta.store.tikv.batch import Image, PartsWanted, Plan
from fsmeta.store.tikv.escrow_counters import (
    SHARE,
    UNLIMITED,
    Sides,
    bare,
    claim_of,
    folded,
    moved,
    moved_exactly,
    total,
    with_claim,
)
from fsmeta.store.tikv.keys import PARTS, counter_of, part_of
from fsmeta.store.writes import BESIDE, NO_LIMIT, Add, Delete, Put, Shift, Write, limit_field
from tests.fsmeta.engines import add, change

ROW = schema.ACCOUNTS
NAMES = (b"us", b"gs", b"d\0s")
CLIENTS, STEPS = 5, 400


class Versions:
    """What TiKV keeps: every value that a key has had, and since when."""

    def __init__(self) -> None:
        self.now = 0
        self._of: dict[Key, list[tuple[int, bytes | None]]] = {}

    def get(self, key: Key, moment: int) -> bytes | None:
        found = [value for since, value in self._of.get(key, ()) if since <= moment]
        return found[-1] if found else None

    def fields(self, counter: Key, moment: int) -> dict[bytes, bytes]:
        names = {name for row, name in self._of if row == ROW and counter_of(name) == counter[1]}
        values = {name: self.get((ROW, name), moment) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def value(self, name: bytes) -> int:
        return int(total(name, self.fields((ROW, name), self.now)) or 0)

    def changed_since(self, keys: Iterable[Key], moment: int) -> bool:
        return any(self._of[key][-1][0] > moment for key in keys if key in self._of)

    def write(self, changes: dict[Key, bytes | None]) -> None:
        self.now += 1
        for key, value in changes.items():
            self._of.setdefault(key, []).append((self.now, value))


class Pending:
    """A transaction that has read and been judged, and is about to commit."""

    def __init__(self, versions: Versions, commits: list[Commit], part: int) -> None:
        self.commits = commits
        self.begun = versions.now
        plan = Plan(commits, part, frozenset(), [(ROW, NAMES[0])] if part % 2 else [])
        self.image = Image(plan)
        for key in plan.keys:
            value = versions.get(key, self.begun)
            self.image.learn({} if value is None else {key: value})
        self._learn(versions, plan.counters)
        while True:
            try:
                self.refused = self.image.judge()
                break
            except PartsWanted as wanted:
                self._learn(versions, wanted.counters)

    def _learn(self, versions: Versions, counters: Iterable[Key]) -> None:
        for counter in counters:
            self.image.learn_counter(counter, versions.fields(counter, self.begun))

    def commit(self, versions: Versions) -> bool:
        changes = self.image.changes()
        if not changes:
            return True
        locks = set(self.image.locks())  # which others meet as they meet a change
        if versions.changed_since({*changes, *locks}, self.begun):
            return False
        versions.write({**{key: versions.get(key, versions.now) for key in locks}, **changes})
        return True


class World:
    """Clients, and what the counters and limits really are."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.versions = Versions()
        self.values = dict.fromkeys(NAMES, 0)
        self.limits: dict[bytes, int] = {}
        self.pending: dict[int, Pending] = {}
        self.unasked: list[tuple[int, bytes, int]] = []  # when what was added without asking
        self.passed = 0

    def _write(self) -> Write:
        name, chance = self.chance.choice(NAMES), self.chance.random()
        delta = self.chance.choice((-40, -7, -1, 1, 1, 2, 5, 30))
        if chance < 0.03:
            return Put(ROW, limit_field(name), b"%d" % self.chance.randrange(300))
        if chance < 0.04:
            return Delete(ROW, limit_field(name))
        if chance < 0.07:
            source = self.chance.choice([other for other in NAMES if other != name])
            return Shift(ROW, name, source, self.chance.choice((b"+", b"-")), b"<", "EDQUOT")
        if chance < 0.08:
            return Delete(ROW, name)
        if chance < 0.2:
            return add(ROW, name, delta)
        return Add(ROW, name, delta, BESIDE, "EDQUOT")

    def _commits(self) -> list[Commit]:
        commits = []
        for _ in range(self.chance.choice((1, 1, 1, 3))):
            checks = []
            if self.chance.random() < 0.05:
                name = self.chance.choice(NAMES)
                checks = [(ROW, name, b"%d" % self.values[name])]
            commits.append(change(self._write(), checks=checks))
        return commits

    def step(self) -> None:
        client = self.chance.randrange(CLIENTS)
        pending = self.pending.pop(client, None)
        if pending is None:
            part = self.chance.randrange(CLIENTS) if self.chance.random() < 0.2 else client
            self.pending[client] = Pending(self.versions, self._commits(), part)
            self._assert_refused_rightly(self.pending[client])
        elif self.chance.random() < 0.05:
            self._claim()  # killed before it could commit, and after it had claimed something
        elif pending.commit(self.versions):
            for commit, refused in zip(pending.commits, pending.refused, strict=True):
                assert refused is None or isinstance(refused, LimitExceeded | Conflict | NotEmpty)
                if refused is None:
                    self._apply(commit, pending.begun)
        self.audit()

    def _claim(self) -> None:
        """Claims are requests: whether anybody respects them must make no difference."""
        key = ROW, self.chance.choice(NAMES)
        base = self.versions.get(key, self.versions.now)
        if base is not None:
            name = b"%016x" % self.chance.randrange(1 << 64)
            self.versions.write({key: with_claim(base, name)})
            assert claim_of(self.versions.get(key, self.versions.now) or b"") == name

    def _assert_refused_rightly(self, pending: Pending) -> None:
        (write, *_), refused = pending.commits[0].writes, pending.refused[0]
        if isinstance(refused, LimitExceeded):
            assert isinstance(write, Add | Shift)
            name, delta = write.field, self._delta(write)
            assert delta > 0
            assert self.values[name] + delta > self.limits[name], "there was room"

    def _apply(self, commit: Commit, begun: int) -> None:
        """Serially, at the moment of the commit: limits are those of that moment."""
        self.passed += 1
        for row, name, value in commit.checks:
            assert row == ROW
            assert value == b"%d" % self.values[name]
        for write in commit.writes:
            if isinstance(write, Put):
                self.limits[counter_name(write)] = int(write.value)
            elif isinstance(write, Delete) and write.field in NAMES:
                self.values[write.field] = 0
            elif isinstance(write, Delete):
                self.limits.pop(counter_name(write), None)
            else:
                assert isinstance(write, Add | Shift)
                self._move(write, begun)

    def _delta(self, write: Add | Shift) -> int:
        if isinstance(write, Shift):
            return write.delta(self.values[write.source])
        return write.delta

    def _move(self, write: Add | Shift, begun: int) -> None:
        """What is added without asking while a commit is under way, may come behind it."""
        name, delta = write.field, self._delta(write)
        self.values[name] += delta
        if write.limit == NO_LIMIT:
            self.unasked.append((self.versions.now, name, delta))
        elif delta > 0 and name in self.limits:
            behind = sum(
                more for when, which, more in self.unasked if which == name and when > begun
            )
            value = self.values[name] - max(0, behind)
            assert value <= self.limits[name], f"{name!r} is past its limit"

    def audit(self) -> None:
        for name, value in self.values.items():
            assert self.versions.value(name) == value
            stored = self.versions.fields((ROW, name), self.versions.now)
            parts = [int(part) for field, part in stored.items() if field != name]
            assert all(part <= 0 for part in parts)
            assert name in stored or not parts


def counter_name(write: Write) -> bytes:
    return bytes(write.field[:-1])


@pytest.mark.parametrize("seed", range(30))
def test_q1_no_interleaving_passes_a_limit_or_loses_a_count(seed: int) -> None:
    world = World(seed)
    for _ in range(STEPS):
        world.step()
    assert world.passed > STEPS / 5


def _refusals(world: World, name: bytes, limit: int) -> int:
    """One client after the other adds 1 until it is refused; how many were let through."""
    let = 0
    while True:
        part = let % PARTS
        pending = Pending(world.versions, [change(Add(ROW, name, 1, BESIDE))], part)
        if pending.refused[0] is not None:
            return let
        assert pending.commit(world.versions)
        let += 1
        assert let <= limit


def test_q1_what_others_have_ahead_is_no_loss() -> None:
    """Every client takes some ahead and leaves it: the last one still gets all that is left."""
    world = World(0)
    world.versions.write({(ROW, limit_field(b"us")): b"1000"})
    assert _refusals(world, b"us", 1000) == 1000


@pytest.mark.parametrize("is_new", [False, True])
def test_q1_a_new_limit_meets_commits_under_way(is_new: bool) -> None:
    """They have looked for a limit and found none; what they spend was taken long ago."""
    versions = Versions()
    charge = change(Add(ROW, b"us", 5, BESIDE, "EDQUOT"))
    if not is_new:
        assert Pending(versions, [charge], 1).commit(versions)
    late = Pending(versions, [charge], 1)
    limit = change(Put(ROW, limit_field(b"us"), b"7"))
    assert Pending(versions, [limit], 2).commit(versions)
    assert not late.commit(versions)
    refused = Pending(versions, [charge], 1).refused[0]
    assert (refused is None) is is_new


def test_q1_what_is_shifted_meets_commits_under_way() -> None:
    """Whoever moves a directory takes along all that it counts, so a charge comes before or after
    him: that is why it need not hold on to the directories above (`Commit.glances`).
    """
    for is_new in (False, True):
        versions, name = Versions(), NAMES[2]
        charge = change(Add(ROW, name, 5, BESIDE, "EDQUOT"))
        move = change(Shift(ROW, b"us", name, b"+", b"<", "EDQUOT"))
        if not is_new:
            assert Pending(versions, [charge], 1).commit(versions)
        for first, second in ((charge, move), (move, charge)):
            late = Pending(versions, [second], 1)
            assert Pending(versions, [first], 1 if first is charge else 2).commit(versions)
            assert not late.commit(versions)


def test_q1_who_commits_lifts_the_claims_it_has_seen() -> None:
    """Those of the dead, too. One who does not write the base, writes it for that."""
    versions = Versions()
    charge = change(Add(ROW, b"us", 5, BESIDE, "EDQUOT"))
    move = change(Shift(ROW, b"gs", b"us", b"+", b"<", "EDQUOT"))
    assert Pending(versions, [charge], 1).commit(versions)
    for commit in (charge, move):
        base = versions.get((ROW, b"us"), versions.now)
        assert base is not None
        versions.write({(ROW, b"us"): with_claim(base, b"00000000000000ff")})
        pending = Pending(versions, [commit], 1)
        assert list(pending.image.claims()) == [b"00000000000000ff"]
        assert pending.commit(versions)
        assert versions.get((ROW, b"us"), versions.now) == base
    assert versions.value(b"us") == versions.value(b"gs") == 10


def test_a_claim_is_no_part_of_a_value() -> None:
    claimed = with_claim(b"-12", b"0123456789abcdef")
    assert claimed == b"-12 0123456789abcdef"  # docs/FORMAT.md
    assert with_claim(claimed, b"f" * 16) == b"-12 " + b"f" * 16
    assert (bare(claimed), claim_of(claimed)) == (b"-12", b"0123456789abcdef")
    assert total(b"us", {b"us": claimed}) == b"-12"
    assert total(b"us", {b"us": claimed, part_of(b"us", 1): b"-3"}) == b"-15"
    for odd in (b"12 ", b"12 xyz", b" 0123456789abcdef", b"12 0123456789abcdef "):
        assert (bare(odd), claim_of(odd)) == (odd, b"")
        assert total(b"us", {b"us": odd}) == odd


def test_q1_taking_ahead_is_seldom() -> None:
    """A counter that fills up by ones has its base written a few hundred times at most."""
    limit, sides, writes = 100_000, Sides(0, None), 0
    for _ in range(limit):
        after = moved(sides, 1, limit, limit)
        if after is None:
            after = moved_exactly(sides.base + (sides.own or 0), 1, limit)
        assert after is not None
        assert after.base <= limit
        writes += after.base != sides.base
        sides = after
    assert moved(sides, 1, limit, limit) is None
    assert moved_exactly(limit, 1, limit) is None
    assert writes < 400


def test_what_is_taken_ahead() -> None:
    assert moved(Sides(0, None), 1, 160, 160) == (1 + 159 // SHARE, -(159 // SHARE))
    assert moved(Sides(10, -9), 1, 160, 160) == (10, -8)
    assert moved(Sides(10, -9), 1, 5, 5) is None  # the limit has been lowered
    assert moved(Sides(10, -9), -1, 5, 5) == (10, -10)
    assert moved(Sides(10, -9), 20, None, 160) == (21 + 139 // SHARE, -(139 // SHARE))
    assert moved(Sides(10, 0), 1, None, None) == (11 + UNLIMITED, -UNLIMITED)
    assert moved_exactly(4, 1, 5) == (5, None)
    assert moved_exactly(-4, -1, 5) == (-5, None)


def test_one_field_for_each_counter() -> None:
    odd = b"u\0\0\0\0s"  # of user 0: zero bytes in a name make no part
    records = [
        (b"Q", odd, b"100"),
        (b"Q", part_of(odd, 0), b"-30"),
        (b"Q", part_of(odd, 63), b"-5"),
        (b"Q", odd + b"<", b"7"),
        (b"i2", b"x\0\1", b"no counter"),
    ]
    assert list(folded(records)) == [
        (b"Q", odd, b"65"),
        (b"Q", odd + b"<", b"7"),
        (b"i2", b"x\0\1", b"no counter"),
    ]
    assert [counter_of(field) for _, field, _ in records[:3]] == [odd] * 3
    assert total(odd, {odd: b"?", part_of(odd, 1): b"1"}) == b"?"
    assert total(odd, {}) is None

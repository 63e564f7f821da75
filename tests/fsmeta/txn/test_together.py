"""W2: verbs that are published in one commit leave what they leave one by one, on every engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fsmeta.admin import quota_admin
from fsmeta.admin.quota_admin import QuotaLimits
from fsmeta.ops.names import rename
from fsmeta.ops.names.create import NewNode
from fsmeta.ops.names.rename import DentryLocation
from fsmeta.rules.quota import user_node
from fsmeta.schema import inode, keys
from fsmeta.store.contract import Store
from fsmeta.store.writes import CannotCompose, Merge, Parts, compose, effect, merge
from fsmeta.txn.batch import BatchTxn
from fsmeta.txn.txn import Txn
from fsmeta.types import ROOT_INO, Caller, Ino, SetAttr, Slice, SliceId
from fsmeta.writeback import replay as publish
from fsmeta.writeback.entries.intents import CreateIntent, LinkIntent, RenameIntent, intent_of
from fsmeta.writeback.entries.log_entry import Guard, LogEntry, VerbRules
from tests.conftest import assert_clean
from tests.fsmeta.engines import Engine, open_engine

JOURNAL = 7
DOMAIN = 1
CALLER = Caller(1000, 1000, checked=True)
TOP = Ino(5000)
INOS = 12_000
NAMES = (b"a", b"b", b"c", b"d", b"e")
BYTES = 5000
TABLES = (
    keys.USAGE,
    keys.ACCOUNTS,
    keys.SHARED_SLICES,
    keys.DEAD_SLICES,
    keys.ORPHANS,
    keys.TRASH,
)
KINDS = (
    *("create", "create", "create", "write", "write", "write", "mkdir", "unlink", "rmdir"),
    *("rename", "rename", "exchange", "link", "chmod", "truncate", "chown"),
    *("setxattr", "removexattr"),
)
TURNS = {"mem": 6, "sqlite": 3, "redis": 3, "cluster": 2, "tikv": 1}


def made(sequence: int, name: str, *args: object, guards: Sequence[Guard] = ()) -> LogEntry:
    entry = LogEntry(name, CALLER, 10**18 + sequence * 10**9, intent_of(name, args))
    entry.sequence, entry.domains, entry.guards = sequence, frozenset((DOMAIN,)), tuple(guards)
    return entry


class Journal:
    """Entries as programs make them, some of which do not fit."""

    def __init__(self, dice: random.Random, turn: int) -> None:
        self._dice = dice
        self._inos: list[Ino] = []
        self._top = Ino(TOP + turn * 1000)
        self._dirs = [self._top]
        self._slices = TOP + turn * 1000
        self._names: list[DentryLocation] = []
        self.entries = [made(1, "create", ROOT_INO, b"%d" % turn, NewNode(self._top, 0o40777))]

    def add(self, fits: Callable[[LogEntry], bool]) -> LogEntry:
        """One more; where it does not fit, as a rule another one is taken."""
        while True:
            name, args = self._any()
            entry = made(len(self.entries) + 1, name, *args)
            if (fitting := fits(entry)) or self._dice.random() < 0.1:
                break
        self.entries.append(entry)
        intent = entry.intent
        if isinstance(intent, CreateIntent) and fitting:
            (self._dirs if intent.makes_dir else self._inos).append(intent.node.ino)
        if fitting and isinstance(intent, CreateIntent | LinkIntent):
            self._names.append(DentryLocation(intent.parent, intent.name))
        if fitting and isinstance(intent, RenameIntent):
            self._names.append(intent.new)
        return entry

    def _new(self) -> DentryLocation:
        """A name that is free, as a rule."""
        name = b"%d" % len(self.entries) if self._dice.random() < 0.9 else self._dice.choice(NAMES)
        return DentryLocation(self._dice.choice(self._dirs[-4:]), name)

    def _old(self, keep: bool = False) -> DentryLocation:
        """A name that is there, as a rule."""
        names, at = self._names, self._dice.randrange(len(self._names))
        return names[at] if keep else names.pop(at)

    def _create(self, mode: int) -> tuple[str, tuple[Any, ...]]:
        ino = Ino(self._top + len(self.entries))
        return "create", (*self._new(), NewNode(ino, mode))

    def _any(self) -> tuple[str, tuple[Any, ...]]:
        dice = self._dice
        kind = dice.choice(KINDS)
        if kind == "create" or not self._inos or len(self._names) < 3:
            return self._create(0o100666)
        if kind == "mkdir":
            return self._create(0o40777)
        ino = dice.choice(self._inos[-5:])
        if kind == "write":
            self._slices += 1
            pos = dice.choice((0, 0, 3000))
            piece = Slice(pos, SliceId(self._slices), BYTES, 0, BYTES)
            return "write", (ino, ((0, piece),), pos + BYTES, 10**18, None)
        if kind in ("unlink", "rmdir"):
            return kind, tuple(self._old())
        if kind == "exchange":
            return "rename", (self._old(keep=True), self._old(keep=True), rename.EXCHANGE)
        if kind == "rename":
            old = self._old()
            return "rename", (old, self._old(keep=True) if dice.random() < 0.3 else self._new(), 0)
        if kind == "link":
            return "link", (ino, *self._new())
        if kind in ("setxattr", "removexattr"):
            value = (b"v" * dice.randrange(1, 30), 0, False) if kind == "setxattr" else ()
            return kind, (ino, b"user.x", *value)
        wants = {"chmod": SetAttr(mode=0o600), "truncate": SetAttr(size=dice.choice((0, 100)))}
        return "setattr", (ino, wants.get(kind, SetAttr(gid=dice.choice((1000, 1001)))))


class Volume:
    """Publishes journals, some entries at a time."""

    def __init__(self, engine: Engine) -> None:
        self.meta = engine.meta()
        self.run = self.meta.transactor
        self.journal = 0
        self.refused: list[tuple[int, int | None]] = []
        self.shared = 0  # entries that were published with others
        while self.meta.new_ino() < INOS or self.meta.new_slice_id() < INOS:
            pass  # numbers that entries may use
        quota_admin.change_settings(self.meta, lambda now: now._replace(trash_days=1))
        quota_admin.set_quota(self.meta, user_node(1000), QuotaLimits(space=1 << 40))

    def publish(self, entries: Sequence[LogEntry]) -> int:
        """Publish the first, and what goes with it; how many that were."""
        verb = partial(
            publish.publish_run,
            together=lambda txn: BatchTxn(txn, self.run.store, self.run.cache),
            journal=self.journal,
            entries=entries,
            lasts=[False] * len(entries),
            charging=lambda: VerbRules.of(self.meta.format),
            most_at=publish.attempts(len(entries)),
        )
        try:
            done = len(self.run.run(verb))
            self.shared += done if done > 1 else 0
            return done
        except OSError as error:
            if len(entries) > 1:
                return self.publish(entries[:1])
            self.refused.append((entries[0].sequence, error.errno))
            leave = partial(publish.leave_out, journal=self.journal, entry=entries[0])
            self.run.run(leave)
            return 1

    def fits(self, entry: LogEntry) -> bool:
        """Whether an entry would be published."""

        def verb(txn: Txn) -> None:
            publish.publish(txn, self.journal, entry, lambda: VerbRules.of(self.meta.format))
            txn.writes.clear()

        try:
            self.run.run(verb)
        except OSError:
            return False
        return True

    def publish_all(self, entries: Sequence[LogEntry], most: Callable[[], int]) -> None:
        at = 0
        while at < len(entries):
            at += self.publish(entries[at : at + most()])


def dump(store: Store) -> dict[tuple[bytes, bytes], bytes]:
    """All that is stored, but for sessions and what a volume is born with."""
    with store.everything() as records:
        return {
            (row, field): value
            for row, field, value in records
            if row[:1] in (b"i", b"d", b"j") or row in TABLES
            if row != keys.inode_row(ROOT_INO) and value != b"0"
        }


def test_w2_together_is_as_one_by_one(engine: Engine, tmp_path: Path) -> None:
    """Names, bytes, links, the trash, usage, marks: and the same entries are refused."""
    reference = open_engine("mem", tmp_path, str)
    reference.format()
    alone, many = Volume(reference), Volume(engine)
    dice = random.Random(11)
    for turn in range(TURNS[engine.name]):
        journal = Journal(dice, turn)
        alone.journal = many.journal = turn
        alone.publish(journal.entries)
        for _ in range(150):
            alone.publish([journal.add(alone.fits)])
        many.publish_all(journal.entries, lambda: dice.choice((1, 5, 50, 200)))
        assert many.refused == alone.refused
        assert dump(engine.first) == dump(reference.first)
        assert many.shared > (turn + 1) * len(journal.entries) / 2, "few went together"
    assert_clean(reference.first)
    reference.close()


def test_w2_published_by_two_it_is_published_once(engine: Engine) -> None:
    """Another client that has taken up the journal finds what is done, or the first one does."""
    journal = Journal(random.Random(3), 0)
    for _ in range(40):
        journal.add(lambda entry: entry.name in ("create", "write"))
    one, other = Volume(engine), Volume(engine)
    assert one.publish(journal.entries[:20]) > 1
    before = dump(engine.first)
    assert other.publish(journal.entries[:1]) == 1
    assert dump(engine.first) == before
    other.publish_all(journal.entries, lambda: 41)
    after = dump(engine.first)
    one.publish_all(journal.entries, lambda: 41)
    assert dump(engine.first) == after


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_w2_a_segment_s_files_are_one_request(engine: Engine) -> None:
    """Created and written, in a directory that the publisher knows."""
    volume = Volume(engine)
    entries = [made(1, "create", ROOT_INO, b"top", NewNode(TOP, 0o40777))]
    for number in range(1, 41):
        entries.append(
            made(2 * number, "create", TOP, b"%d" % number, NewNode(Ino(TOP + number), 0o100666))
        )
        piece = Slice(0, SliceId(TOP + number), BYTES, 0, BYTES)
        args = (Ino(TOP + number), ((0, piece),), BYTES, 10**18, None)
        entries.append(made(2 * number + 1, "write", *args))
    volume.publish_all(entries[:3], lambda: 1)
    before = volume.meta.store.round_trips
    assert volume.publish(entries[3:]) == 78
    assert volume.meta.store.round_trips - before == 1


def test_w2_merges_one_after_the_other() -> None:
    """Into one record, as the schema's verbs make them: as two commits, in one."""
    record = bytes(range(64))
    plain: list[Parts] = [(48, b"abcdefgh"), (52, b"xy"), (50, b"123456789012")]
    several: list[Parts] = [
        inode.touch_parts(5),
        inode.touch_parts(7, 1),
        inode.touch_parts(8, -1),
        inode.ctime_parts(6),
        inode.nlink_parts(2),
        *plain,
    ]
    for first in several:
        for second in several:
            for third in several:
                writes = [Merge(b"i", b"v", parts) for parts in (first, second, third)]
                one = compose(compose(writes[0], writes[1]), writes[2])
                assert effect(one, record) == merge(merge(merge(record, first), second), third)
    with pytest.raises(CannotCompose):
        compose(Merge(b"i", b"v", (0, 1)), Merge(b"i", b"v", (2, b"abc")))

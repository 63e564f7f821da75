"""Backups of the metadata in the object store (M5): made when due, let go by age, restored."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from fsclient.background import backup
from fsclient.background.backup import Backups, BackupSource, backups, chosen, kept
from fsclient.upkeep.verify_backups import verify_backups
from fsdata.format.block_v1 import decode
from fsdata.format.encryption import Sealer
from fsdata.objects.contract import Buffer, ObjectStore
from fsdata.objects.mem import MemObjects
from fsdata.objects.shards import Sharded, hashed
from fsmeta.admin import dump as dumps
from fsmeta.errors import ConfigError, ObjectDamaged, Unavailable
from fsmeta.meta.meta import Meta
from fsmeta.runtime import SystemRuntime
from fsmeta.types import ROOT_CALLER, ROOT_INO
from tests.conftest import LogWatch, assert_clean
from tests.fsmeta.engines import Engine, dump, open_engine
from tests.fsmeta.work import random_work

HOUR = 3600
DAY = 24 * HOUR
NOW = 1_800_000_000


class Clock(SystemRuntime):
    """Time that moves when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_s = 0.0
        self.wrong_s = 0.0
        self.monotonic = lambda: self.passed_s
        self.now_ns = lambda: int((NOW + self.passed_s + self.wrong_s) * 1e9)


def _job(
    meta: Meta, objects: ObjectStore, clock: Clock, every_s: float, sealer: Sealer | None = None
) -> Backups:
    """What makes backups for a client whose metadata store has the test's clock."""
    meta.now_ns = clock.now_ns  # type: ignore[method-assign]
    return Backups(meta, objects, clock, every_s, sealer)


class Objects(MemObjects):
    """A store that can refuse to take a part."""

    refuses = ""

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        if self.refuses and key.endswith(self.refuses):
            raise Unavailable("simulated: not accepted")
        super().put(key, pieces)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = open_engine("mem", tmp_path, str)
    made.format()
    yield made
    assert_clean(made.first)
    made.close()


@pytest.fixture
def leader(engine: Engine) -> Meta:
    """A client that leads, and a volume with something in it."""
    meta = engine.meta()
    assert meta.deletion.take_lead()
    random_work(meta, random.Random(1), 60)
    return meta


def _restored(objects: ObjectStore, tmp_path: Path, at: str = "latest") -> dict[bytes, object]:
    made = open_engine("mem", tmp_path, str)
    try:
        dumps.load(made.first, BackupSource(objects, chosen(backups(objects), at)))
        assert_clean(made.first)
        rows = dump(made.first)
    finally:
        made.close()
    return {row: fields for row, fields in rows.items() if row != b"C"}


def _stored(engine: Engine) -> dict[bytes, object]:
    left_out = (b"C", b"S", b"G")
    rows = dump(engine.first).items()
    return {row: fields for row, fields in rows if row not in left_out and row[:1] != b"s"}


def test_a_backup_an_hour_and_no_more(engine: Engine, leader: Meta, tmp_path: Path) -> None:
    clock = Clock()
    objects = Objects(clock)
    job = _job(leader, objects, clock, HOUR)
    for _ in range(10 * 60):
        clock.passed_s += 60
        job.turn()
    there = backups(objects)
    assert [each.complete for each in there] == [True] * 10
    assert job.made == 10
    assert _restored(objects, tmp_path) == _stored(engine)
    later = _job(leader, objects, clock, HOUR)  # another leader knows when the last one was
    clock.passed_s += 30 * 60
    later.turn()
    clock.passed_s += 30 * 60
    later.turn()
    assert later.made == 1


def test_in_shards_under_hashed_keys(
    engine: Engine, leader: Meta, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "PART_BYTES", 150)
    clock = Clock()
    objects = Sharded([hashed(MemObjects(clock)) for _ in range(3)])
    _job(leader, objects, clock, 0).turn()
    assert _restored(objects, tmp_path) == _stored(engine)


def test_of_an_encrypted_volume(
    leader: Meta, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its names are nobody's to read either; the key comes wrapped with the backup."""
    monkeypatch.setattr(backup, "PART_BYTES", 150)
    clock = Clock()
    objects = Objects(clock)
    sealer = Sealer(clock, bytes(32))
    leader.format = leader.format.with_encryption({"cipher": "c", "wrap": "w", "key": "wrapped"})
    _job(leader, objects, clock, 0, sealer).turn()
    made = chosen(backups(objects), "latest")
    for key in made.keys[:-1]:
        with pytest.raises(ObjectDamaged):
            decode(objects.get(key))
    asked: list[tuple[str, dict[str, str]]] = []

    def unseal(uuid: str, wrapped: dict[str, str]) -> Sealer:
        asked.append((uuid, wrapped))
        return sealer

    loaded = open_engine("mem", tmp_path, str)
    dumps.load(loaded.first, BackupSource(objects, made, unseal))
    assert_clean(loaded.first)
    loaded.close()
    assert asked == [(leader.format.uuid, leader.format.encryption)]
    other = Sealer(clock, bytes(31) + b"1")
    with pytest.raises(ObjectDamaged):
        BackupSource(objects, made, lambda *_: other).read(1)


def test_only_who_leads_makes_one(engine: Engine, leader: Meta) -> None:
    clock = Clock()
    objects = Objects(clock)
    other = _job(engine.meta(), objects, clock, HOUR)
    clock.passed_s += 2 * HOUR
    other.turn()
    assert backups(objects) == []
    _job(leader, objects, clock, 0).turn()
    assert len(backups(objects)) == 1


def test_earlier_states_can_be_chosen(engine: Engine, leader: Meta, tmp_path: Path) -> None:
    clock = Clock()
    objects = Objects(clock)
    job = _job(leader, objects, clock, HOUR)
    states = []
    for seed in range(3):
        random_work(leader, random.Random(10 + seed), 20)
        clock.passed_s += HOUR + 1
        job.turn()
        states.append(_stored(engine))
    names = [each.name for each in backups(objects)]
    assert len(names) == len({str(state) for state in states}) == 3
    for name, state in zip(names, states, strict=True):
        assert _restored(objects, tmp_path, name) == state
    with pytest.raises(ConfigError, match="the oldest backup is"):
        chosen(backups(objects), "20010101T000000Z")
    with pytest.raises(ConfigError, match="write it like"):
        chosen(backups(objects), "yesterday")


@pytest.mark.parametrize("part", ["000000", "000002", "end"])
def test_one_that_failed_counts_for_nothing(
    part: str,
    leader: Meta,
    tmp_path: Path,
    log_watch: LogWatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backup, "PART_BYTES", 150)
    log_watch.expect("WARNING fsclient.background.backup: the backup of the metadata failed")
    clock = Clock()
    objects = Objects(clock)
    job = _job(leader, objects, clock, HOUR)
    objects.refuses = part
    clock.passed_s += HOUR
    job.turn()
    assert (job.made, job.failed) == (0, 1)
    with pytest.raises(ConfigError, match="no backup"):
        chosen(backups(objects), "latest")
    assert backups(objects) == []
    objects.refuses = ""
    clock.passed_s += backup.RETRY_S
    job.turn()
    assert (job.made, job.failed) == (1, 1)
    assert len(backups(objects)[0].keys) > 3
    _restored(objects, tmp_path)


def test_a_lost_part_is_named(
    leader: Meta, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup, "PART_BYTES", 150)
    clock = Clock()
    objects = Objects(clock)
    _job(leader, objects, clock, 0).turn()
    key = backups(objects)[0].keys[1]
    objects.delete(key)
    with pytest.raises(ConfigError, match=f"lacks {key}"):
        _restored(objects, tmp_path)


def test_what_is_kept() -> None:
    hourly = range(NOW - 400 * DAY, NOW, HOUR)
    stay = kept(hourly, NOW)
    ages = sorted((NOW - at) / DAY for at in stay)
    assert sum(age <= 2 for age in ages) == 48
    assert 11 <= sum(2 < age <= 14 for age in ages) <= 13
    assert 6 <= sum(14 < age <= 60 for age in ages) <= 8
    assert 11 <= sum(age > 60 for age in ages) <= 13
    assert kept([NOW - 900 * DAY], NOW) == {NOW - 900 * DAY}
    assert kept([], NOW) == set()


def test_what_is_kept_does_not_depend_on_when_one_looks() -> None:
    """Letting go every hour leaves what letting go once at the end would, within a slot."""
    stay: set[int] = set()
    for at in range(NOW - 100 * DAY, NOW, HOUR):
        stay = kept({*stay, at}, at)
    ages = [(NOW - at) / DAY for at in stay]
    assert 48 <= sum(age <= 2 for age in ages) <= 49
    assert 11 <= sum(2 < age <= 14 for age in ages) <= 14
    assert 6 <= sum(14 < age <= 60 for age in ages) <= 9
    assert 1 <= sum(age > 60 for age in ages) <= 3


def test_old_ones_go(leader: Meta) -> None:
    clock = Clock()
    objects = Objects(clock)
    job = _job(leader, objects, clock, DAY / 4)
    for _ in range(4 * 30):
        clock.passed_s += DAY / 4 + 1
        job.turn()
    there = backups(objects)
    assert 8 + 11 <= len(there) <= 9 + 14 + 3
    assert all(each.complete for each in there)


def test_r1_fsck_names_backups_that_are_not_whole_and_removes_them(leader: Meta) -> None:
    objects = MemObjects(SystemRuntime())
    made = [backup.make_backup(leader, objects, NOW + DAY * n, n + 1) for n in range(5)]
    sound, unfinished, short, garbage, killed = made
    objects.delete(f"{unfinished.prefix}/end")
    objects.delete(f"{killed.prefix}/end")
    objects.delete(f"{short.prefix}/000000")
    objects.put(f"{garbage.prefix}/end", [b"nonsense"])
    found = verify_backups(objects, remove=False)
    assert found.unfinished == 2
    assert [line.split(" ")[2:4] for line in found.problems] == [
        [short.name, "lacks"],
        [garbage.name, "has"],
    ]
    assert len(backups(objects)) == 5
    assert len(verify_backups(objects, remove=True).removed) == 4
    assert [each.name for each in backups(objects)] == [sound.name]
    assert verify_backups(objects, remove=True) == ([], 0, [])


@pytest.mark.parametrize("new_leader", [False, True])
@pytest.mark.parametrize("wrong_s", [30 * DAY, -30 * DAY, 2 * HOUR, -2 * HOUR])
def test_m5_an_hour_of_a_wrong_clock(
    engine: Engine,
    leader: Meta,
    tmp_path: Path,
    log_watch: LogWatch,
    wrong_s: float,
    new_leader: bool,
) -> None:
    """No gap, nothing of the last two days goes, and the newest is the newest."""
    log_watch.expect("the clock was set|lies .* in the future")
    clock = Clock()
    objects = Objects(clock)
    job = _job(leader, objects, clock, HOUR)
    seen: dict[str, float] = {}  # when each was made, by a clock that is right
    for minute in range(120 * 60):
        if minute in (70 * 60, 71 * 60):
            clock.wrong_s = wrong_s - clock.wrong_s
            if new_leader:
                job = _job(leader, objects, clock, HOUR)
        clock.passed_s += 60
        made = job.made
        job.turn()
        if job.made > made:
            (fresh,) = (each.prefix for each in backups(objects) if each.prefix not in seen)
            seen[fresh] = clock.passed_s
    times = sorted(seen.values())
    # a leader that is new may wait for as long as the time between two says
    longest = 2 * HOUR + 120 if new_leader else HOUR + 60
    assert max(b - a for a, b in pairwise(times)) <= longest
    there = {each.prefix for each in backups(objects)}
    assert {name for name, at in seen.items() if clock.passed_s - at < 2 * DAY} <= there
    leader.setxattr(ROOT_CALLER, ROOT_INO, b"user.last", b"1")
    clock.passed_s += HOUR
    job.turn()
    assert _restored(objects, tmp_path) == _stored(engine)


def test_m5_one_that_is_being_made_is_not_let_go(leader: Meta) -> None:
    """By a client that was slow, or whose clock is wrong; one that does not grow any more goes."""
    clock = Clock()
    objects = Objects(clock)
    job = _job(leader, objects, clock, HOUR)
    prefix = f"meta/{backup._text_of(NOW - 30 * DAY)}-7-3"
    for number in range(12):
        objects.put(f"{prefix}/{number:06d}", [b"part"])
        clock.passed_s += HOUR
        job.turn()
    assert sum(not each.complete for each in backups(objects)) == 1
    for _ in range(8):
        clock.passed_s += HOUR
        job.turn()
    assert all(each.complete for each in backups(objects))

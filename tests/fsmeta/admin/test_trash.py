"""T1: what is deleted goes to the trash and expires, on every engine."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from functools import partial

import pytest

from fsclient.background.steady_clock import BELIEVE_S
from fsclient.background.trash_expiry import LOOK_EVERY_S, TrashExpiry
from fsmeta.admin import quota_admin
from fsmeta.admin.trash_expiry import FORGET_S, expire, hours
from fsmeta.check.check import check
from fsmeta.meta.meta import Meta
from fsmeta.ops.names.rename import EXCHANGE, NOREPLACE, DentryLocation
from fsmeta.schema.trash import (
    HOUR_NS,
    TRASH_INO,
    Origin,
    entry_name,
    hour_at,
    hour_name,
    hour_of_name,
    is_cut,
    origin_of,
)
from fsmeta.types import NO_PARENT, ROOT_INO, Ino
from tests.conftest import LogWatch
from tests.fsmeta.engines import RUNTIME, Engine
from tests.fsmeta.trash_world import ROOT, USER, Clocks, all_in_trash, small_file, trashing_client
from tests.support.outcome import errno_of


def test_names_of_hours() -> None:
    assert hour_name(hour_at(HOUR_NS)) == b"1970-01-01-01"
    assert hour_at(0) == hour_at(-HOUR_NS) == hour_at(HOUR_NS), "the first hour would be .trash"
    hour = hour_at(1_795_289_143 * 10**9)
    assert hour_name(hour) == b"2026-11-21-19"
    assert hour_of_name(b"2026-11-21-19") == hour
    for wrong in (b"2026-11-21", b"2026-11-21-25", b"2026-1-1-1", b"", b"\xff", b"1960-01-01-00"):
        assert hour_of_name(wrong) is None


def test_names_in_the_trash() -> None:
    for name in (b"a", b"a-b", b"-", b"n" * 240):
        assert origin_of(entry_name(Origin(Ino(1), Ino(22), name))) == (1, 22, name)
    long = Origin(Ino(1), Ino(22), b"n" * 255)
    assert is_cut(long)
    assert len(entry_name(long)) == 255
    for wrong in (b"x", b"1-x-y", b"1-2", b"1-2-", b"--a"):
        assert origin_of(wrong) is None


def test_what_is_deleted_goes_to_the_trash(engine: Engine) -> None:
    """Files and directories unlinked, and what a rename replaces; usage stays."""
    meta = trashing_client(engine)
    one, two, over = small_file(meta, b"one"), small_file(meta, b"two"), small_file(meta, b"over")
    folder = meta.create(ROOT, ROOT_INO, b"dir", 0o40755).ino
    link = meta.symlink(ROOT, ROOT_INO, b"link", b"to").ino
    before = meta.statfs()
    assert meta.unlink(ROOT, ROOT_INO, b"one").nlink == 1
    meta.rmdir(ROOT, ROOT_INO, b"dir")
    meta.unlink(ROOT, ROOT_INO, b"link")
    meta.rename(ROOT, DentryLocation(ROOT_INO, b"two"), DentryLocation(ROOT_INO, b"over"))
    assert meta.statfs() == before
    hour = hour_at(RUNTIME.now_ns())
    wanted = [(one, b"one"), (over, b"over"), (folder, b"dir"), (link, b"link")]
    found = all_in_trash(meta)
    assert {name for _, name in found} == {b"1-%d-%b" % pair for pair in wanted}
    assert hour - 1 <= found[0][0] <= hour
    assert meta.lookup(ROOT, ROOT_INO, b"over").ino == two
    assert meta.deletion.orphans(10) == []
    assert meta.lookup(ROOT, hour, b"1-%d-one" % one).size == 5000
    assert (
        errno_of(partial(meta.create, ROOT, folder, b"in a removed one", 0o100644)) == errno.ENOENT
    )
    assert check(meta.store).problems == []


def test_only_the_last_name_counts(engine: Engine) -> None:
    meta = trashing_client(engine)
    ino = small_file(meta, b"one")
    folder = meta.create(ROOT, ROOT_INO, b"dir", 0o40755).ino
    meta.link(ROOT, ino, folder, b"two")
    meta.unlink(ROOT, ROOT_INO, b"one")
    assert all_in_trash(meta) == []
    meta.unlink(ROOT, folder, b"two")
    assert [name for _, name in all_in_trash(meta)] == [b"%d-%d-two" % (folder, ino)]
    assert meta.getattr(ROOT, ino).nlink == 1
    assert check(meta.store).problems == []


def test_deleting_in_the_trash_really_deletes(engine: Engine) -> None:
    meta = trashing_client(engine)
    before = meta.statfs()
    small_file(meta, b"one")
    meta.create(ROOT, ROOT_INO, b"dir", 0o40755)
    meta.unlink(ROOT, ROOT_INO, b"one")
    meta.rmdir(ROOT, ROOT_INO, b"dir")
    for hour, name in all_in_trash(meta):
        verb = meta.rmdir if name.endswith(b"dir") else meta.unlink
        assert errno_of(partial(verb, USER, hour, name)) == errno.EACCES
        verb(ROOT, hour, name)
    assert all_in_trash(meta) == []
    assert meta.statfs() == before
    assert len(meta.deletion.orphans(10)) == 2


def test_the_trash_is_no_place_to_put_things(engine: Engine) -> None:
    meta = trashing_client(engine)
    ino = small_file(meta, b"one")
    small_file(meta, b"two")
    meta.unlink(ROOT, ROOT_INO, b"one")
    hour, name = all_in_trash(meta)[0]
    there, here = DentryLocation(hour, name), DentryLocation(ROOT_INO, b"two")
    assert errno_of(partial(meta.rename, ROOT, here, DentryLocation(hour, b"x"))) == errno.EPERM
    assert errno_of(partial(meta.rename, ROOT, there, here, EXCHANGE)) == errno.EPERM
    assert errno_of(partial(meta.rename, ROOT, there, here, NOREPLACE)) == errno.EEXIST
    assert errno_of(partial(meta.link, ROOT, ino, ROOT_INO, b"three")) == errno.EPERM
    meta.rename(ROOT, there, DentryLocation(ROOT_INO, b"back"))
    assert meta.getattr(ROOT, ino).parent == ROOT_INO


def test_it_expires_and_its_space_comes_back(engine: Engine) -> None:
    meta = trashing_client(engine)
    before = meta.statfs()
    for number in range(250):
        meta.create(ROOT, ROOT_INO, b"%d" % number, 0o100644)
        meta.unlink(ROOT, ROOT_INO, b"%d" % number)
    for hour in hours(meta):
        while expire(meta, hour):
            pass
    assert all_in_trash(meta) == []
    assert meta.statfs() == before
    assert len(meta.deletion.orphans(1000)) == 250
    meta.create(ROOT, ROOT_INO, b"next", 0o100644)


def test_clients_that_meet_in_a_fresh_hour_do_not_conflict(engine: Engine) -> None:
    """Each lists it the first time."""
    one, two = trashing_client(engine), trashing_client(engine)
    for meta in (one, two):
        for number in range(3):
            name = b"%d-%d" % (id(meta), number)
            meta.create(ROOT, ROOT_INO, name, 0o100644)
            meta.unlink(ROOT, ROOT_INO, name)
    assert len(all_in_trash(one)) == 6
    assert one.transactor.counters.conflicts == two.transactor.counters.conflicts == 0


def test_a_clock_that_is_behind_loses_nothing_in_the_trash(engine: Engine) -> None:
    """What its client deletes goes where others have emptied the trash long ago, and expires."""
    clocks, late = Clocks(), Clocks(behind_ns=48 * HOUR_NS)
    quota_admin.change_settings(engine.meta(), lambda now: now._replace(trash_days=1))
    store = engine.open()
    leader, client = Meta(store, clocks), Meta(engine.open(), late)
    clocks.pass_for(leader)
    keeper = TrashExpiry(leader, clocks, lambda: False)

    def delete(name: bytes) -> None:
        client.create(ROOT, ROOT_INO, name, 0o100644)
        client.unlink(ROOT, ROOT_INO, name)
        assert len(all_in_trash(leader)) == 1

    def later(seconds: float) -> None:
        clocks.passed_s += seconds
        late.passed_s += seconds
        keeper.turn()
        assert check(store).problems == []

    delete(b"noted")
    later(LOOK_EVERY_S)
    assert all_in_trash(leader) == []
    assert len(hours(leader)) == 1
    delete(b"right after it, so it is not noted")
    later(FORGET_S)
    assert all_in_trash(leader) == []
    delete(b"noted again")
    later(LOOK_EVERY_S)
    assert all_in_trash(leader) == []
    later(FORGET_S)
    assert hours(leader) == {}
    delete(b"noted, for it is long ago")
    later(LOOK_EVERY_S)
    assert keeper.expired == 4


def test_all_clients_ask_one_clock(engine: Engine) -> None:
    """The store's, where there is a server; the test's own is up to half an hour ahead."""
    assert abs(engine.first.now_ns() - time.time_ns()) < HOUR_NS


def _old(meta: Meta, name: bytes) -> None:
    """Something that was deleted half a day ago."""
    now_ns = meta._now_ns
    meta._now_ns = lambda: now_ns() - 12 * HOUR_NS
    meta.create(ROOT, ROOT_INO, name, 0o100644)
    meta.unlink(ROOT, ROOT_INO, name)
    meta._now_ns = now_ns


def test_a_leader_whose_clock_is_days_ahead_empties_nothing(engine: Engine) -> None:
    """The clock of its host is not asked."""
    _old(trashing_client(engine), b"f")
    leader = Meta(engine.open(), Clocks(behind_ns=-72 * HOUR_NS))
    leader.sessions.open({"host": "test"})
    leader.format = leader.format._replace(trash_days=1)
    keeper = TrashExpiry(leader, Clocks(behind_ns=-72 * HOUR_NS), lambda: False)
    keeper.turn()
    assert keeper.expired == 0
    assert len(all_in_trash(leader)) == 1


@pytest.mark.parametrize("days", [3, -3])
def test_a_store_whose_clock_leaps_empties_nothing_for_a_day(
    engine: Engine, log_watch: LogWatch, days: int
) -> None:
    """For an hour it is wrong; if it stays so it is believed, for it may have been wrong before."""
    log_watch.expect("the clock was set")
    clocks = Clocks()
    leader = trashing_client(engine)
    _old(leader, b"f")
    wrong_ns = 0
    leader.now_ns = lambda: (  # type: ignore[method-assign]
        RUNTIME.now_ns() + int(clocks.passed_s * 1e9) + wrong_ns
    )
    keeper = TrashExpiry(leader, clocks, lambda: False)
    keeper.turn()
    for hours_on, wrong_days in ((1, days), (2, days), (3, 0)):
        wrong_ns = wrong_days * 24 * HOUR_NS
        clocks.passed_s = hours_on * 3600
        keeper.turn()
        assert keeper.expired == 0
    wrong_ns = days * 24 * HOUR_NS
    clocks.passed_s += LOOK_EVERY_S
    keeper.turn()
    clocks.passed_s += BELIEVE_S + LOOK_EVERY_S
    keeper.turn()
    assert keeper.expired == (1 if days > 0 else 0)


@pytest.mark.parametrize("engine", ["redis"], indirect=True)
def test_deleting_stays_one_round_trip(engine: Engine) -> None:
    meta = trashing_client(engine)
    for number in range(3):
        small_file(meta, b"f%d" % number)
        meta.create(ROOT, ROOT_INO, b"d%d" % number, 0o40755)

    def cost(verb: Callable[..., object], *args: object) -> int:
        before = meta.store.round_trips
        verb(ROOT, *args)
        return meta.store.round_trips - before

    assert [cost(meta.unlink, ROOT_INO, b"f0"), cost(meta.rmdir, ROOT_INO, b"d0")] == [1, 1]
    assert cost(meta.rename, DentryLocation(ROOT_INO, b"f1"), DentryLocation(ROOT_INO, b"f2")) == 1
    assert cost(meta.rename, DentryLocation(ROOT_INO, b"d1"), DentryLocation(ROOT_INO, b"d2")) == 1


# --- restoring -----------------------------------------------------------------------------------


def test_hours_are_numbers(engine: Engine) -> None:
    """The directories of the trash have no rows, and look like directories of root's."""
    meta = trashing_client(engine)
    attr = meta.getattr(ROOT, TRASH_INO)
    assert (attr.mode, attr.uid, attr.parent) == (0o40700, 0, ROOT_INO)
    hour = hour_at(5 * HOUR_NS)
    assert meta.getattr(ROOT, hour).parent == TRASH_INO
    assert meta.getattr(ROOT, hour).mtime_ns == 5 * HOUR_NS
    assert NO_PARENT < ROOT_INO < TRASH_INO < hour

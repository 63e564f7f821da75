"""Q1, F3: settings change under running clients: editions, fences, and who has not heard yet."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable

import pytest

from fsmeta.admin import quota_admin
from fsmeta.admin.trash_expiry import expire, hours
from fsmeta.errors import Corrupt, Fenced
from fsmeta.meta.meta import Meta
from fsmeta.rules import settings as volume
from fsmeta.rules.settings import ARMED, COUNTING, ON, VolumeFormat
from fsmeta.runtime import SystemRuntime
from fsmeta.schema import keys
from fsmeta.schema.trash import TRASH_INO
from fsmeta.txn.txn import Txn
from fsmeta.types import ROOT_CALLER, ROOT_INO
from tests.fsmeta.engines import PATIENT_S, Engine


def limit(meta: Meta, inodes: int) -> VolumeFormat:
    return quota_admin.change_settings(meta, lambda now: now._replace(inodes=inodes))


def create(meta: Meta, name: bytes) -> None:
    meta.create(ROOT_CALLER, ROOT_INO, name, 0o100644)


def fence_of(meta: Meta) -> bytes | None:
    assert meta.session is not None
    return meta.store.read([(keys.session_row(meta.session.id), b"a")])[0]


def test_a_new_limit_holds_for_every_client_at_once(engine: Engine) -> None:
    admin, first, second = engine.meta(), engine.meta(), engine.meta()
    create(first, b"a")
    limit(admin, 3)
    create(second, b"b")
    for meta in (first, second):
        with pytest.raises(OSError, match="full") as caught:
            create(meta, b"c")
        assert caught.value.errno == errno.ENOSPC
    assert second.statfs().inodes_limit == 3
    limit(admin, 0)
    create(first, b"c")
    assert first.format.inodes == 0


@pytest.mark.parametrize("days", [(0, 1), (1, 0)])
def test_f3_days_of_trash_hold_for_who_has_not_heard(engine: Engine, days: tuple[int, int]) -> None:
    """T1: what is deleted after the change goes where the new setting says, whoever deletes."""
    admin, client = engine.meta(), engine.meta()
    quota_admin.change_settings(admin, lambda now: now._replace(trash_days=days[0]))
    create(client, b"a")
    quota_admin.change_settings(admin, lambda now: now._replace(trash_days=days[1]))
    left = client.unlink(ROOT_CALLER, ROOT_INO, b"a")
    assert (left.parent >= TRASH_INO) == bool(days[1])
    assert bool(hours(engine.meta())) == bool(days[1])
    for hour in hours(client):
        expire(client, hour)


def test_who_only_looks_hears_of_it_with_the_next_beat(engine: Engine) -> None:
    admin, idle = engine.meta(), engine.meta()
    limit(admin, 7)
    assert idle.format.inodes == 0
    assert idle.statfs().inodes_limit == 7  # which is asked for with what is used
    idle.refresh_settings()
    assert idle.format.inodes == 7
    before = idle.store.round_trips
    idle.refresh_settings()
    assert idle.store.round_trips - before <= 2  # on TiKV a timestamp comes first


def test_who_has_not_heard_can_leave(engine: Engine) -> None:
    """Its last commit is made under old settings, and has to follow the new ones."""
    admin, leaver = engine.meta(), engine.meta()
    assert leaver.session is not None
    sid = leaver.session.id
    limit(admin, 7)
    leaver.sessions.close()  # it did so for half a minute, in vain
    assert sid not in [each.id for each in admin.sessions.all()]
    assert leaver.session is None


def test_sessions_begin_with_the_settings_of_the_day(engine: Engine) -> None:
    admin = engine.meta()
    for inodes in (5, 6):
        settings = limit(admin, inodes)
        late = engine.meta()
        assert late.format.inodes == inodes
        assert fence_of(late) == settings.edition
    assert limit(admin, 6) == settings  # nothing to do, and nobody is bothered
    assert fence_of(admin) == settings.edition


def test_an_ended_session_is_not_brought_back(engine: Engine) -> None:
    admin, dead, alive = engine.meta(), engine.meta(), engine.meta()
    assert dead.session is not None
    admin.sessions.end(dead.session.id)
    limit(admin, 9)
    assert fence_of(dead) is None
    with pytest.raises(Fenced):
        create(dead, b"x")
    create(alive, b"y")


def test_publishing_goes_on_where_it_was_broken_off(engine: Engine) -> None:
    """Who was killed between the change and its news leaves it to the next."""
    admin, other = engine.meta(), engine.meta()
    settings = volume.pack_format(admin.format._replace(inodes=4, changes=1))
    admin.transactor.run(lambda txn: txn.put(keys.FORMAT, keys.FORMAT_FIELD, settings))
    assert fence_of(other) == b"1"
    create(other, b"a")  # under the old settings still
    quota_admin.publish(admin)
    assert fence_of(other) == fence_of(admin) == b"2"
    create(other, b"b")
    assert other.format.inodes == 4


@pytest.mark.parametrize("state", [ARMED, COUNTING])
def test_a_count_goes_on_where_it_was_broken_off(engine: Engine, state: str) -> None:
    admin, other = engine.meta(), engine.meta()
    create(other, b"a")
    broken = admin.format._replace(accounting=state, epoch=3, changes=1)
    admin.transactor.run(
        lambda txn: txn.put(keys.FORMAT, keys.FORMAT_FIELD, volume.pack_format(broken))
    )
    create(other, b"b")
    late = engine.meta()
    create(late, b"c")
    quota_admin.start(admin)
    assert admin.transactor.view(volume.load_format).accounting == ON
    create(other, b"d")
    assert quota_admin.get_quota(admin, b"u\0\0\0\0").used.inodes == 5


def test_many_threads_meet_new_settings(engine: Engine) -> None:
    admin, busy = engine.meta(), engine.meta()
    made: list[bytes] = []

    def work(number: int) -> None:
        for n in range(10):
            name = b"%d.%d" % (number, n)
            create(busy, name)
            made.append(name)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for inodes in (1000, 2000, 3000):
        limit(admin, inodes)
    for thread in threads:
        thread.join()
    assert len(made) == 40
    create(busy, b"last")
    assert busy.format.inodes == 3000


class _RestlessRuntime(SystemRuntime):
    """Something happens in each pause."""

    meanwhile: Callable[[], object] = bool

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds / 100)
        self.meanwhile()


def test_settings_that_change_in_every_pause_starve_no_verb(engine: Engine) -> None:
    """The new settings are read after the pause before a retry; before it they would be old."""
    admin, runtime = engine.meta(), _RestlessRuntime()
    meta = Meta(engine.open(), runtime, PATIENT_S)
    meta.sessions.open({"host": "test"})
    limits = itertools.count(10)
    attempts = 0

    def change_settings() -> None:
        limit(admin, next(limits))

    def verb(txn: Txn) -> None:
        nonlocal attempts
        attempts += 1
        if attempts < 6:
            change_settings()
        runtime.meanwhile = change_settings
        txn.delete(keys.ACCOUNTS, b"probe")

    meta.transactor.run(verb)
    assert attempts == 6


@pytest.mark.parametrize("word", ["", "..", "../../etc", "a/b"])
def test_words_that_lead_elsewhere(word: str) -> None:
    """Caches and journals have directories that are named by the volume."""
    sound = VolumeFormat("vol", "u-u", "file", "/b", 1 << 22, "lz4", 0, 0)
    for damaged in (sound._replace(uuid=word), sound._replace(name=word)):
        with pytest.raises(Corrupt):
            volume.unpack_format(volume.pack_format(damaged))

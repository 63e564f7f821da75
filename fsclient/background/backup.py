"""Backups of the metadata in the volume's own object store: made, listed, read, let go.

    meta/<time>-<session>-<number>/<part>   a dump (`fsmeta.admin.dump`) in parts, as usual objects
    meta/<time>-<session>-<number>/end      JSON: how many parts; without it they count for nothing

Clocks may be wrong by days, in both directions. So the number tells which is the newest: it is
above that of every earlier backup; the first ones had none. The leader's monotonic clock tells when
the next one is due. Old ones go by age, but not by age alone (`kept`, LET_GO_MAX). The time is a
label for users.

Those of an encrypted volume are encrypted with its key, which is in `end` as it is in the settings:
wrapped.

Called by `Background`, whose leading client makes them, and by `slicefs restore-meta`.
Threading: one thread at a time.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from fsclient.background.steady_clock import SteadyClock
from fsdata.format.block_v1 import decode, encode
from fsdata.format.block_v2 import Cipher
from fsdata.objects.contract import ObjectStore
from fsmeta.admin.dump import dump
from fsmeta.errors import ConfigError, ObjectMissing, StoreError
from fsmeta.meta.meta import Meta
from fsmeta.rules.settings import VolumeFormat
from fsmeta.runtime import Event, Runtime
from fsmeta.types import SliceId

if TYPE_CHECKING:
    from fsdata.format.encryption import Sealer

log = logging.getLogger(__name__)

PREFIX: Final = "meta"
PART_BYTES: Final = 4 << 20
LOOK_EVERY_S: Final = 60.0
RETRY_S: Final = 600.0  # after one that failed
END: Final = "end"
_NAME: Final = re.compile(r"meta/(\d{8}T\d{6}Z)-[0-9a-f]+(?:-(\d+))?/(\d{6}|end)")
LET_GO_MAX: Final = 2  # for each one that is made: more than gather, and few where a clock is wrong
ABANDONED_S: Final = 6 * 3600.0  # one that has not grown for so long never will be complete
AHEAD_S: Final = 3600.0  # a backup that lies so far in the future is worth a warning
_TIME: Final = "%Y%m%dT%H%M%SZ"
_DAY_S: Final = 86_400
_WEEK_S: Final = 7 * _DAY_S
_MONTH_S: Final = 30 * _DAY_S


class Backup(NamedTuple):
    """One backup in the object store."""

    number: int  # in the order in which they were made; 0: from before there were numbers
    time_s: int  # when it was begun, Unix time, by a clock that may have been wrong
    prefix: str
    keys: list[str]
    complete: bool

    @property
    def name(self) -> str:
        """When it was begun, as users write it."""
        return _text_of(self.time_s)


def kept(times_s: Iterable[int], now_s: float) -> set[int]:
    """Which of the backups made at these times stay: all of two days, then one a day for two weeks,
    one a week for two months, one a month after that; the newest whatever its age."""
    stay: set[int] = set()
    slots: set[tuple[int, int]] = set()
    for at in sorted(times_s, reverse=True):  # the newest of each slot
        age = now_s - at
        if age <= 2 * _DAY_S:
            stay.add(at)
            continue
        unit = _DAY_S if age <= 2 * _WEEK_S else _WEEK_S if age <= 2 * _MONTH_S else _MONTH_S
        if (unit, at // unit) not in slots or not stay:
            slots.add((unit, at // unit))
            stay.add(at)
    return stay


def backups(objects: ObjectStore) -> list[Backup]:
    """What is there, the oldest first."""
    found: dict[str, Backup] = {}
    for info in objects.list(f"{PREFIX}/"):
        match = _NAME.fullmatch(info.key)
        if match is None:
            continue
        prefix = info.key.rpartition("/")[0]
        number = int(match[2] or 0)
        before = found.get(prefix) or Backup(number, _time_of(match[1]), prefix, [], False)
        found[prefix] = before._replace(
            keys=[*before.keys, info.key], complete=before.complete or match[3] == END
        )
    return sorted(found.values())


def _text_of(time_s: int) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime(_TIME)


def _time_of(text: str) -> int:
    return int(datetime.strptime(text, _TIME).replace(tzinfo=UTC).timestamp())


def _place(time_s: int) -> SliceId:
    """What a backup's parts are sealed as: a slice that no volume has."""
    return SliceId(1 << 63 | time_s)


class _Parts:
    """A sink that makes an object of every PART_BYTES."""

    def __init__(
        self, objects: ObjectStore, prefix: str, time_s: int, sealer: Sealer | None
    ) -> None:
        self._objects = objects
        self._prefix = prefix
        self._place = _place(time_s)
        self._sealer = sealer
        self._buffer = bytearray()
        self.keys: list[str] = []

    def write(self, data: bytes) -> None:
        """More of the dump."""
        self._buffer += data
        while len(self._buffer) >= PART_BYTES:
            self._put(bytes(self._buffer[:PART_BYTES]))
            del self._buffer[:PART_BYTES]

    def end(self, settings: VolumeFormat) -> None:
        """There is no more: from now on the backup counts."""
        if self._buffer:
            self._put(bytes(self._buffer))
        self._objects.sync(self.keys)
        end = f"{self._prefix}/{END}"
        about: dict[str, object] = {"parts": len(self.keys)}
        if self._sealer is not None:
            about |= {"uuid": settings.uuid, "encryption": settings.encryption}
        self._objects.put(end, encode([json.dumps(about).encode()]))
        self._objects.sync([end])

    def _put(self, part: bytes) -> None:
        number = len(self.keys)
        key = f"{self._prefix}/{number:06d}"
        lock = None if self._sealer is None else self._sealer.fresh(self._place, number)
        self._objects.put(key, encode([part], lock=lock))
        self.keys.append(key)


class BackupSource:
    """A backup as `fsmeta.admin.dump.load` reads it. Raises: ConfigError where it is not whole."""

    def __init__(
        self,
        objects: ObjectStore,
        backup: Backup,
        unseal: Callable[[str, dict[str, str]], Sealer | None] | None = None,
    ) -> None:
        """`unseal` is told uuid and wrapped key of an encrypted volume."""
        self._objects = objects
        self._prefix = backup.prefix
        self._place = _place(backup.time_s)
        self._sealer: Sealer | None = None
        try:
            about = json.loads(self._get(END))
            self._parts = int(about["parts"])
            sealed = about.get("encryption")
            if sealed is not None and unseal is not None:
                self._sealer = unseal(about["uuid"], sealed)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"the backup {backup.name} is damaged: {error}") from error
        self._next = 0
        self._buffer = b""

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end."""
        if not self._buffer and self._next < self._parts:
            sealer, number = self._sealer, self._next
            opener = None if sealer is None else partial(sealer.cipher, self._place, number)
            self._buffer = self._get(f"{number:06d}", opener)
            self._next += 1
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def _get(self, name: str, opener: Callable[[bytes], Cipher] | None = None) -> bytes:
        key = f"{self._prefix}/{name}"
        try:
            return bytes(decode(self._objects.get(key), opener))
        except ObjectMissing as error:
            raise ConfigError(f"the backup lacks {key}: choose another with --at") from error


def make_backup(
    meta: Meta, objects: ObjectStore, now_s: float, number: int, sealer: Sealer | None = None
) -> Backup:
    """Dump the metadata as it is now. Raises: StoreError, OSError, ConfigError."""
    assert meta.session is not None
    prefix = f"{PREFIX}/{_text_of(int(now_s))}-{meta.session.id:x}-{number}"
    parts = _Parts(objects, prefix, int(now_s), sealer)
    try:
        dump(meta.store, parts)
        parts.end(meta.format)
    except BaseException:
        with suppress(OSError, StoreError):  # else the next tidying does it in two days
            _remove(objects, parts.keys)
        raise
    return Backup(number, int(now_s), prefix, [*parts.keys, f"{prefix}/{END}"], True)


def _remove(objects: ObjectStore, keys: list[str]) -> None:
    for key in sorted(keys, reverse=True):  # `end` first: half a backup counts for nothing
        objects.delete(key)


class Backups:
    """Makes a backup whenever the last one is old, if we lead."""

    def __init__(
        self,
        meta: Meta,
        objects: ObjectStore,
        runtime: Runtime,
        every_s: float,
        sealer: Sealer | None = None,
    ) -> None:
        self._meta = meta
        self._sealer = sealer
        self._objects = objects
        self._runtime = runtime
        self._every_s = every_s
        self._clock = SteadyClock(meta.now_ns, runtime.monotonic)
        self._due = runtime.monotonic() + every_s
        self._ours = 0, 0.0  # the number of the last one that we have made, and when
        self._unfinished: dict[str, tuple[int, float]] = {}  # how many parts, and since when
        self.made = 0
        self.failed = 0

    def run(self, stop: Event) -> None:
        """The life of the backup thread."""
        while not stop.wait(min(LOOK_EVERY_S, self._every_s)):
            self.turn()

    def turn(self) -> None:
        """Make a backup if one is due, and let old ones go."""
        if self._runtime.monotonic() < self._due:
            return
        self._due = self._runtime.monotonic() + min(RETRY_S, self._every_s)
        try:
            leader, session = self._meta.deletion.leader(), self._meta.session
            if leader is None or session is None or leader.id != session.id:
                return
            there = backups(self._objects)
            left_s = self._left_s(there)
            if left_s <= 0:
                number = 1 + max((each.number for each in there), default=0)
                now_s = self._meta.now_ns() / 1e9
                there.append(make_backup(self._meta, self._objects, now_s, number, self._sealer))
                self.made += 1
                self._ours = number, self._runtime.monotonic()
                left_s = self._every_s
                self._let_go(there, self._clock.now_ns() / 1e9)
            self._due = self._runtime.monotonic() + max(1.0, left_s)
        except (StoreError, OSError, ConfigError) as error:
            self.failed += 1
            log.warning("the backup of the metadata failed, it is tried again later: %s", error)

    def _left_s(self, there: list[Backup]) -> float:
        """How long the next one may wait. An age that can't be is none: then it is made now."""
        last = max((each for each in there if each.complete), default=None)
        if last is None:
            return 0.0
        number, made = self._ours
        if number and last.number == number:
            return self._every_s - (self._runtime.monotonic() - made)
        age_s = self._meta.now_ns() / 1e9 - last.time_s
        if age_s < -AHEAD_S:
            log.warning(
                "the last backup of the metadata, %s, lies %.1f h in the future: a clock is wrong,"
                " or was; another one is made",
                last.name,
                -age_s / 3600,
            )
        return self._every_s - age_s if age_s >= 0 else 0.0

    def _let_go(self, there: list[Backup], now_s: float) -> None:
        """Few at a time, and never those of the last two days' worth, whatever clocks say."""
        complete = sorted(each for each in there if each.complete)
        stay = kept((each.time_s for each in complete), now_s)
        recent = 1 + int(2 * _DAY_S / max(1.0, self._every_s))
        old = [each for each in complete[:-recent] if each.time_s not in stay]
        for each in [*old, *self._abandoned(there)][:LET_GO_MAX]:
            _remove(self._objects, each.keys)

    def _abandoned(self, there: list[Backup]) -> list[Backup]:
        """Those that were never completed, and have not grown for long while we looked."""
        now, before = self._runtime.monotonic(), self._unfinished
        self._unfinished = {}
        for each in there:
            if not each.complete:
                parts, since = before.get(each.prefix, (len(each.keys), now))
                grown = parts != len(each.keys)
                self._unfinished[each.prefix] = len(each.keys), now if grown else since
        since_of = self._unfinished
        return [
            each
            for each in there
            if each.prefix in since_of and now - since_of[each.prefix][1] > ABANDONED_S
        ]


def chosen(there: list[Backup], at: str) -> Backup:
    """The backup that `at` means: `latest`, or the last one begun until that time.

    Raises: ConfigError.
    """
    complete = sorted(each for each in there if each.complete)
    if not complete:
        raise ConfigError("there is no backup of the metadata in this object store")
    if at == "latest":
        return complete[-1]
    try:
        limit = _time_of(at)
    except ValueError as error:
        raise ConfigError(f"--at {at}: write it like {complete[-1].name}, or `latest`") from error
    before = [each for each in complete if each.time_s <= limit]
    if not before:
        raise ConfigError(f"--at {at}: the oldest backup is {complete[0].name}")
    return before[-1]

"""An object store in a namespace of a Ceph pool, through librados.

A read is one operation: no stat comes before it. Calls block in C without the interpreter's lock,
and its own timeouts end them. What timed out may still be done later, which is harmless: an object
is written once, and what was deleted is never written again.

librados has threads of its own, which no fork survives: connect in the process that will use it.
Threading: any method from any thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from errno import EDQUOT, ENOENT, ENOSPC, ESHUTDOWN
from itertools import islice
from typing import Any, Final, NamedTuple, NoReturn

from fsdata.objects.contract import Buffer, ObjectInfo, ObjectStore, Range, fill
from fsdata.objects.rados.binding import load_rados
from fsdata.objects.rados.listing import names
from fsmeta.errors import ConfigError, ObjectMissing, Unavailable
from fsmeta.runtime import Runtime

READ_BYTES: Final = (4 << 20) + (64 << 10)  # a block of full size with its head, in one operation
PUT_BYTES_MAX: Final = 64 << 20  # OSDs refuse writes above 90 MiB (osd_max_write_size)
STATS_AT_ONCE: Final = 64  # of a listing, which has names only
DELETES_AT_ONCE: Final = 64
_STEM: Final = "client."


class RadosSettings(NamedTuple):
    """A namespace of a pool, and how to reach it."""

    pool: str
    namespace: str
    user: str = "client.admin"
    conf: str = "/etc/ceph/ceph.conf"
    keyring: str = ""  # empty: where the configuration says
    operation_s: int = 15
    connect_s: int = 10


class RadosObjects:
    """The objects of one namespace. Raises: ConfigError, Unavailable where no monitor answers."""

    def __init__(self, runtime: Runtime, settings: RadosSettings) -> None:
        self._runtime = runtime
        self._settings = settings
        self._rados = load_rados()
        self._place = f"pool {settings.pool}"
        self._lock = runtime.lock()
        self._closed = False  # guarded by _lock
        self._cluster = _connect(self._rados, settings, runtime)
        try:
            self._io = self._cluster.open_ioctx(settings.pool)
            self._io.set_namespace(settings.namespace)
            # A full pool says so, instead of holding writes until they time out, and lets delete.
            self._io.set_osdmap_full_try()
        except self._rados.Error as error:
            self._cluster.shutdown()
            if isinstance(error, self._rados.ObjectNotFound):
                raise ConfigError(
                    f"there is no pool {settings.pool!r}: ceph osd pool create {settings.pool}"
                ) from error
            raise Unavailable(f"{self._place}: {error}") from error

    def _fail(self, error: Any, key: str) -> NoReturn:
        """Raise what a caller of a store should see of librados' `error`."""
        number = getattr(error, "errno", None)
        if number == ENOENT:
            raise ObjectMissing(key) from error
        if number in (ENOSPC, EDQUOT):
            raise OSError(number, f"{self._place} is full", key) from error
        why = str(error)
        if number == ESHUTDOWN:
            why = "this client was blocklisted: mount again"
        raise Unavailable(f"{self._place}: {key}: {why}") from error

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        data = b"".join(pieces)
        if len(data) > PUT_BYTES_MAX:
            raise ValueError(f"object {key}: {len(data)} bytes are too many for one operation")
        self._runtime.will_wait()
        try:
            self._io.write_full(key, data)
        except self._rados.Error as error:
            self._fail(error, key)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        if end is not None and end > begin:
            return self._read(key, begin, end - begin)
        if end is not None:  # to Ceph, no bytes mean all bytes
            if self.head(key) is None:
                raise ObjectMissing(key)
            return b""
        parts = [self._read(key, begin, READ_BYTES)]
        while len(parts[-1]) == READ_BYTES:  # larger than blocks are
            parts.append(self._read(key, begin + sum(map(len, parts)), READ_BYTES))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read(self, key: str, begin: int, size: int) -> bytes:
        """At most `size` bytes, in one operation. Raises: as `get`."""
        self._runtime.will_wait()
        try:
            data: bytes = self._io.read(key, size, begin)
        except self._rados.Error as error:
            self._fail(error, key)
        return data

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        """An operation each, under way at the same time: the binding has none of several reads."""
        *others, last = ranges
        self._runtime.will_wait()
        under_way = [self._begin_read(key, *each) for each in others]
        data = self.get(key, *last)
        return [*(self._end_read(key, each) for each in under_way), data]

    def _begin_read(self, key: str, begin: int, end: int) -> tuple[Any, list[bytes]]:
        """A read under way, and what will have its bytes. Raises: as `get`."""
        assert begin < end, "to Ceph, no bytes mean all bytes"
        got: list[bytes] = []

        def told(_: Any, data: bytes | None) -> None:
            got.append(data or b"")

        try:
            return self._io.aio_read(key, end - begin, begin, told), got
        except self._rados.Error as error:
            self._fail(error, key)

    def _end_read(self, key: str, under_way: tuple[Any, list[bytes]]) -> bytes:
        """What it brings. Raises: as `get`."""
        completion, got = under_way
        completion.wait_for_complete_and_cb()
        code = completion.get_return_value()
        if code < 0:
            self._fail(OSError(-code, os.strerror(-code)), key)
        return got[0]

    def get_into(self, key: str, pieces: Sequence[memoryview]) -> int:
        return fill(pieces, self._read(key, 0, sum(map(len, pieces))))

    def delete(self, *keys: str) -> None:
        """An operation each, many under way at the same time."""
        self._runtime.will_wait()
        for begin in range(0, len(keys), DELETES_AT_ONCE):
            part = keys[begin : begin + DELETES_AT_ONCE]
            for key, completion in [(key, self._begin_removal(key)) for key in part]:
                completion.wait_for_complete()
                code = completion.get_return_value()
                if code < 0 and code != -ENOENT:
                    self._fail(OSError(-code, os.strerror(-code)), key)

    def _begin_removal(self, key: str) -> Any:
        try:
            return self._io.aio_remove(key)
        except self._rados.Error as error:
            self._fail(error, key)

    def head(self, key: str) -> ObjectInfo | None:
        self._runtime.will_wait()
        try:
            size, when = self._io.stat(key)
        except self._rados.ObjectNotFound:
            return None
        except self._rados.Error as error:
            self._fail(error, key)
        return ObjectInfo(key, size, _mtime_ns(when))

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Ceph lists by hash: names are sorted here, at a hundred bytes of memory each."""
        self._runtime.will_wait()
        found = self._settings
        options = _options(found)
        everything = names(_user(found), found.conf, options, found.pool, found.namespace)
        wanted = (key for key in everything if key.startswith(prefix) and key > after)
        keys = iter(sorted(wanted))
        while batch := tuple(islice(keys, STATS_AT_ONCE)):
            yield from self._stat(batch)

    def _stat(self, keys: Sequence[str]) -> Iterator[ObjectInfo]:
        """What is known of objects, asked for at once; those that have gone are left out."""
        found: dict[str, ObjectInfo] = {}

        def note(key: str) -> Callable[[Any, int | None, Any], None]:
            def told(_: Any, size: int | None, when: Any) -> None:
                if size is not None:
                    found[key] = ObjectInfo(key, size, _mtime_ns(when))

            return told

        self._runtime.will_wait()
        try:
            asked = [(key, self._io.aio_stat(key, note(key))) for key in keys]
        except self._rados.Error as error:
            self._fail(error, keys[0])
        for key, completion in asked:
            completion.wait_for_complete_and_cb()
            code = completion.get_return_value()
            if code < 0 and -code != ENOENT:
                raise Unavailable(f"{self._place}: {key}: stat failed with errno {-code}")
        for key in keys:
            if key in found:
                yield found[key]

    def sync(self, keys: Iterable[str]) -> None:
        """A put that was answered is on the disks of all replicas."""

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._io.close()
            self._cluster.shutdown()


def _user(settings: RadosSettings) -> str:
    """The whole name: people leave out its first word, as the `ceph` command lets them."""
    return settings.user if settings.user.startswith(_STEM) else _STEM + settings.user


def _options(settings: RadosSettings) -> dict[str, str]:
    """What is set after the configuration file was read."""
    options = {
        "client_mount_timeout": str(settings.connect_s),
        "rados_osd_op_timeout": str(settings.operation_s),
        "rados_mon_op_timeout": str(settings.operation_s),
        # what librados has to say comes as errors; standard error is the mount's log
        "log_to_stderr": "false",
        "err_to_stderr": "false",
    }
    if settings.keyring:
        options["keyring"] = settings.keyring
    return options


def _connect(rados: Any, settings: RadosSettings, runtime: Runtime) -> Any:
    """A connection to the cluster. Raises: ConfigError, Unavailable."""
    conf, user = settings.conf, _user(settings)
    runtime.will_wait()
    try:
        cluster = rados.Rados(conffile=conf, name=user, conf=_options(settings))
    except rados.Error as error:
        raise ConfigError(
            f"can't use {conf}: {error}: name one with --store-option conf=FILE"
        ) from error
    try:
        cluster.connect()
    except rados.Error as error:
        cluster.shutdown()
        if isinstance(error, (rados.PermissionDeniedError, rados.PermissionError)):
            raise ConfigError(
                f"Ceph at {conf} does not know {user}, or not with this keyring: {error}"
            ) from error
        if isinstance(error, rados.ObjectNotFound):
            raise ConfigError(
                f"no keyring for {user}: name one with --store-option keyring=FILE"
            ) from error
        raise Unavailable(f"Ceph at {conf}: {error}") from error
    return cluster


def _mtime_ns(when: Any) -> int:
    """The binding's local time, which has whole seconds."""
    return int(datetime(*when[:6]).timestamp()) * 10**9


_CONFORMS: Callable[[Runtime, RadosSettings], ObjectStore] = RadosObjects

"""The object store of a volume: opened, tested, claimed, and put together with its wrappers.

Called by the commands and by `client`. Adapters are imported when a volume needs them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from fsclient.volume.object_options import SHARD, rados_settings, s3_settings
from fsdata.objects.contract import (
    CHECK_KEY,
    NeverReached,
    ObjectStore,
    Unreached,
    check_usable,
)
from fsdata.objects.file import FileObjects
from fsdata.objects.mem import MemObjects
from fsdata.objects.rate_limit import Adaptive, Limited
from fsdata.objects.shards import Sharded, hashed, hashed_key, number_of
from fsdata.objects.wrappers import Backoff, Metered, Prefixed, Retrying
from fsmeta.errors import Ambiguous, ConfigError, ObjectMissing, StoreError
from fsmeta.rules.settings import VolumeFormat
from fsmeta.runtime import Event, Runtime

if TYPE_CHECKING:
    from fsdata.objects.s3.credentials import Keys
    from fsdata.objects.s3.http import Timeouts
    from fsdata.objects.s3.s3 import S3Objects

OWNER_KEY: Final = "volume"  # the object that says whose objects these are: the volume's uuid
TIMEOUT_S: Final = 120.0  # how long a request is repeated: a store that restarts is waited for
_OPENING: Final = Backoff(total_s=5.0)  # commands say that a store is away, instead of waiting
_OPENING_SILENT_S: Final = 5.0  # without a word, of 36 bytes asked for; mostly it takes 10 ms
_CHECK_BITS: Final = 64  # of the name of a test object
REMOTE_ENV: Final = "SLICEFS_NO_LOCAL_STORES"  # set: settings of volumes name no file of this host
_LOCAL: Final = ("file", "mem")
_HARMLESS: Final = frozenset({"timeout"})  # options with which a store works as without

_MEMORY: Final[dict[str, MemObjects]] = {}  # by bucket: what format and mount of one process share


class Pacing(NamedTuple):
    """What a mount may ask of its store."""

    timeout_s: float = TIMEOUT_S
    upload_bytes_s: int = 0  # 0: no limit
    download_bytes_s: int = 0


class Stack(NamedTuple):
    """A store with its wrappers, and those of them that have numbers to tell."""

    store: ObjectStore
    metered: Metered
    retrying: Retrying
    adaptive: Adaptive | None
    leaving: Event  # once set, no request is repeated and none waits for bandwidth

    def throttled(self) -> int:
        """How often the store has said that it is asked too much."""
        return 0 if self.adaptive is None else self.adaptive.window().throttled

    def numbers(self) -> dict[str, float]:
        """What `.stats` says of the object store."""
        verbs = self.metered.snapshot()
        out: dict[str, float] = {f"object_{name}_total": value for name, value in verbs.items()}
        out["object_repeats_total"] = self.retrying.repeats()
        if self.adaptive is not None:
            window = self.adaptive.window()
            out["object_throttled_total"] = window.throttled
            out["object_window"] = window.size
            out["object_requests_now"] = window.busy
        return out


def stacked(
    raw: ObjectStore,
    storage: str,
    runtime: Runtime,
    pacing: Pacing | None = None,
    meter: Callable[[Runtime, ObjectStore], Metered] = Metered,
) -> Stack:
    """`raw` with what a client puts around it; `meter` makes what counts and times requests."""
    pacing = pacing or Pacing()
    leaving = runtime.event()
    adaptive = None
    if storage == "s3":
        adaptive = Adaptive(runtime, raw, patience_s=pacing.timeout_s, leaving=leaving)
    backoff = Backoff(total_s=pacing.timeout_s)
    retrying = Retrying(runtime, adaptive or raw, backoff, leaving)
    metered = meter(runtime, retrying)
    store: ObjectStore = metered
    if pacing.upload_bytes_s or pacing.download_bytes_s:
        limits = pacing.upload_bytes_s, pacing.download_bytes_s
        store = Limited(runtime, metered, *limits, leaving)
    return Stack(store, metered, retrying, adaptive, leaving)


def data_directory(settings: VolumeFormat) -> str | None:
    """Where a volume keeps its objects as files; None where it does not."""
    return os.path.join(settings.bucket, settings.name) if settings.storage == "file" else None


def directories(settings: VolumeFormat) -> list[str]:
    """Every directory in which a volume keeps objects as files."""
    root = data_directory(settings)
    return [] if root is None else [_numbered(root, n) for n in range(max(1, settings.shards))]


def disk_room(settings: VolumeFormat) -> Callable[[], float]:
    """What tells how many bytes more a volume can put into its directories.

    It tells `inf` where the file system does not say, or is away: then writing finds out.
    """
    roots = directories(settings)

    def room() -> float:
        parts: dict[int, list[float]] = {}  # free bytes, once for each directory of a device
        try:
            for root in roots:
                found = os.statvfs(root)
                free = found.f_bavail * found.f_frsize if found.f_blocks else inf
                parts.setdefault(os.stat(root).st_dev, []).append(free)
        except OSError:
            return inf
        return min(min(each) * len(roots) / len(each) for each in parts.values())

    return room


def _numbered(bucket: str, number: int) -> str:
    return bucket.replace(SHARD, str(number))


def place_of(settings: VolumeFormat) -> str:
    """Where a volume's objects are, in one phrase."""
    if settings.storage == "rados":
        found = rados_settings(settings, settings.options or {})
        return f"namespace {found.namespace} of pool {found.pool}"
    if settings.storage == "s3":
        return f"{settings.bucket}/{settings.name}/"
    return data_directory(settings) or settings.bucket


def stored_key(settings: VolumeFormat, key: str) -> str:
    """The key that an object has in the store itself, in which bucket where there are several."""
    if not settings.shards and not settings.hash_prefix:
        return key
    inner = hashed_key(key) if settings.hash_prefix else key
    if not settings.shards:
        return inner
    place = _numbered(place_of(settings), number_of(key, settings.shards))
    return f"{place.rstrip('/')}/{inner}"


class _Opener:
    """Opens the parts of a volume's store, which share one set of keys."""

    def __init__(
        self, settings: VolumeFormat, runtime: Runtime, overrides: Mapping[str, str] | None
    ) -> None:
        self._settings = settings
        self._runtime = runtime
        self._options = {**(settings.options or {}), **(overrides or {})}
        self._keys: Keys | None = None
        self._buckets: list[S3Objects] = []
        self._timeouts: Timeouts | None = None  # of these; None: as the options have it
        self._makers: Mapping[str, Callable[[int], ObjectStore]] = {
            "mem": self._memory,
            "file": self._directory,
            "s3": self._bucket,
            "rados": self._namespace,
        }
        require_remote(settings)
        if settings.storage not in self._makers:
            raise ConfigError(
                f"this slicefs does not know storage {settings.storage!r}: upgrade slicefs"
            )

    def count(self) -> int:
        """How many parts there are."""
        return max(1, self._settings.shards)

    def open(self, number: int) -> ObjectStore:
        """The objects of one part. Raises: ConfigError, Unavailable."""
        return self._makers[self._settings.storage](number)

    def _memory(self, _: int) -> ObjectStore:
        return _MEMORY.setdefault(self._settings.bucket, MemObjects(self._runtime))

    def _directory(self, number: int) -> ObjectStore:
        return FileObjects(self._runtime, directories(self._settings)[number])

    def _namespace(self, _: int) -> ObjectStore:
        from fsdata.objects.rados.rados import RadosObjects

        return RadosObjects(self._runtime, rados_settings(self._settings, self._options))

    def _bucket(self, number: int) -> ObjectStore:
        return Prefixed(self.bucket(number), f"{self._settings.name}/")

    def bucket(self, number: int) -> S3Objects:
        """All of a bucket, of which the volume has a part."""
        from fsdata.objects.s3.credentials import Keys
        from fsdata.objects.s3.s3 import S3Objects

        bucket = _numbered(self._settings.bucket, number)
        found = s3_settings(bucket, self._options)
        if self._keys is None:
            self._keys = Keys(self._runtime, found.account)
        made = S3Objects(self._runtime, found, self._keys)
        made.set_timeouts(self._timeouts)
        self._buckets.append(made)
        return made

    @contextmanager
    def impatient(self) -> Iterator[None]:
        """While few requests are made, a store that hangs is given up soon, with a remedy.

        Stores that are opened meanwhile, too; not where the user has set `timeout`.
        """
        if self._settings.storage == "s3" and "timeout" not in self._options:
            from fsdata.objects.s3.http import Timeouts

            self._timeouts = Timeouts(silent_s=_OPENING_SILENT_S, whole_s=2 * _OPENING_SILENT_S)
        for each in self._buckets:
            each.set_timeouts(self._timeouts)
        try:
            yield
        except Unreached as error:
            raise NeverReached(
                f"{error}: check the address, and whether the store runs and can be reached from "
                "here; --store-option timeout=SECONDS lets an answer take longer"
            ) from error
        finally:
            self._timeouts = None
            for each in self._buckets:
                each.set_timeouts(None)


def open_objects(
    settings: VolumeFormat, runtime: Runtime, overrides: Mapping[str, str] | None = None
) -> ObjectStore:
    """The volume's object store, without wrappers; `overrides` are this client's own options.

    Raises: ConfigError, Unavailable.
    """
    require_remote(settings)
    for root in directories(settings):
        if not os.path.isdir(root):
            raise ConfigError(
                f"the data directory {root} is not there: mount its disk, or restore it"
            )
    opener = _Opener(settings, runtime, overrides)
    with ExitStack() as undo:
        parts: list[ObjectStore] = []
        for number in range(opener.count()):
            parts.append(opener.open(number))
            undo.callback(parts[-1].close)
        with opener.impatient():
            _require_owner(Retrying(runtime, parts[0], _OPENING), settings)
        undo.pop_all()
    return _whole(settings, parts)


def require_remote(settings: VolumeFormat) -> None:
    """Raises: ConfigError where the data are on this host, and the environment forbids that."""
    if os.environ.get(REMOTE_ENV) and settings.storage in _LOCAL:
        raise ConfigError(
            f"the storage of the volume is {settings.storage}, and {REMOTE_ENV} is set: use a "
            "store that all hosts reach"
        )


def _whole(settings: VolumeFormat, parts: Sequence[ObjectStore]) -> ObjectStore:
    """The parts as one store, keyed as the volume was formatted."""
    keyed = [hashed(part) for part in parts] if settings.hash_prefix else parts
    return keyed[0] if len(keyed) == 1 else Sharded(keyed)


def released(
    settings: VolumeFormat, runtime: Runtime, overrides: Mapping[str, str] | None = None
) -> None:
    """Remove the marks by which `claimed` made a store the volume's, and its empty directories.

    Raises: ConfigError, Unavailable.
    """
    if not all(os.path.isdir(root) for root in directories(settings)):
        return
    opener = _Opener(settings, runtime, overrides)
    for number in range(opener.count()):
        part = opener.open(number)
        try:
            retrying = Retrying(runtime, part, _OPENING)
            retrying.delete(CHECK_KEY, OWNER_KEY)
        finally:
            part.close()
    for root in directories(settings):
        for path, _, _ in os.walk(root, topdown=False):
            with suppress(OSError):  # something else is in it
                os.rmdir(path)


def _require_owner(objects: ObjectStore, settings: VolumeFormat) -> None:
    """Raises: ConfigError where the objects are another volume's: their names would be mixed up.

    A caller that does not know yet which volume it is passes an empty `uuid`.
    """
    if settings.storage == "mem" or not settings.uuid:
        return
    try:
        owner = objects.get(OWNER_KEY).decode(errors="replace").strip()
    except ObjectMissing:
        return  # restored without it, or made by a program
    if owner != settings.uuid:
        root = data_directory(settings)
        where = f"the data directory {root}" if root else place_of(settings)
        remedy = "mount the right disk there" if root else "check the bucket and its address"
        raise ConfigError(f"{where} belongs to volume {owner}, not to {settings.uuid}: {remedy}")


@contextmanager
def claimed(settings: VolumeFormat, runtime: Runtime) -> Iterator[None]:
    """Test the store of a new volume and mark it as this volume's.

    Buckets that are not there are made. If the body fails, what was made is removed.
    Raises: ConfigError, Unavailable.
    """
    opener = _Opener(settings, runtime, None)
    with ExitStack() as closing, ExitStack() as undo:
        with opener.impatient():
            for number in range(opener.count()):
                _claim(opener, number, settings, closing, undo)
        try:
            yield
        except Ambiguous:
            undo.pop_all()  # there may be a volume now
            raise
        undo.pop_all()


def _claim(
    opener: _Opener, number: int, settings: VolumeFormat, closing: ExitStack, undo: ExitStack
) -> None:
    """Test a part of a new volume's store, and mark it."""
    if settings.storage == "s3":
        _make_bucket(opener.bucket(number), closing, undo)
    part = opener.open(number)
    closing.callback(part.close)
    if settings.storage != "mem":
        require_empty(part, settings)
    undo.callback(quietly, partial(part.delete, CHECK_KEY))
    try:
        check_usable(part)
    except ConfigError as error:
        raise ConfigError(f"{place_of(settings)}: {error}") from error
    if settings.storage != "mem":
        undo.callback(quietly, partial(part.delete, OWNER_KEY))
        part.put(OWNER_KEY, (settings.uuid.encode(),))
        part.sync((OWNER_KEY,))


def _make_bucket(bucket: S3Objects, closing: ExitStack, undo: ExitStack) -> None:
    """Make a bucket if it is not there."""
    closing.callback(bucket.close)
    if not bucket.has_bucket():
        bucket.make_bucket()
        undo.callback(quietly, bucket.remove_bucket)


def require_empty(objects: ObjectStore, settings: VolumeFormat) -> None:
    """Raises: ConfigError where there are objects."""
    if next(objects.list(""), None) is not None:
        raise ConfigError(
            f"{place_of(settings)} holds data of another volume: "
            "choose another --bucket or another name"
        )


def require_room(settings: VolumeFormat, runtime: Runtime) -> None:
    """Whether a volume could be made, found out without writing. Raises: ConfigError, Unavailable.

    Directories are left to the caller: opening one makes it.
    """
    if settings.storage not in ("s3", "rados"):
        return
    opener = _Opener(settings, runtime, None)
    with opener.impatient():
        for number in range(opener.count()):
            _require_room(opener, number, settings)


def _require_room(opener: _Opener, number: int, settings: VolumeFormat) -> None:
    if settings.storage == "s3":
        bucket = opener.bucket(number)
        there = bucket.has_bucket()
        bucket.close()
        if not there:
            return
    part = opener.open(number)
    try:
        require_empty(part, settings)
    finally:
        part.close()


def quietly(remove: Callable[[], None]) -> None:
    """Undo what may never have been done."""
    try:
        remove()
    except (OSError, StoreError):
        pass  # it was never made, or the store is away; format says what went wrong first


def require_usable(settings: VolumeFormat, runtime: Runtime, overrides: Mapping[str, str]) -> None:
    """What `format` has tested, for a client that has options of its own.

    Raises: ConfigError, Unavailable.
    """
    if not overrides.keys() - _HARMLESS:
        return
    opener = _Opener(settings, runtime, overrides)
    key = f"{CHECK_KEY}-{runtime.random_bits(_CHECK_BITS):x}"
    for number in range(opener.count()):
        part = opener.open(number)
        try:
            with opener.impatient():
                check_usable(Retrying(runtime, part, _OPENING), key)
        finally:
            part.close()


def require_writable(settings: VolumeFormat) -> None:
    """Raises: ConfigError where every write of a mount would fail."""
    for root in directories(settings):
        if not os.access(root, os.W_OK | os.X_OK):
            raise ConfigError(
                f"you may not write to the data directory {root}: mount it with -o ro"
            )

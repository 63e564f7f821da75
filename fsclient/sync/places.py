"""SRC and DST of `slicefs sync`: what users write, made sure of and opened.

A place is a path, `file:///PATH`, `s3://BUCKET/PREFIX`, `http(s)://HOST/BUCKET/PREFIX` or a volume,
`META-URL#PATH` or `slicefs://VOLUME/PATH`. As with rsync, `SRC/` means what is in a directory
and `SRC` the directory itself, which gets its name in DST.

Refused are places inside one another, and the objects of a SliceFS volume as DST. Threading: one
thread.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from fsclient.sync.bucket import Bucket, BucketPlace
from fsclient.sync.items import ItemRefused, SyncSide, names_of
from fsclient.sync.local import LocalPlace
from fsclient.sync.volumes import (
    VolumeSpot,
    open_source,
    open_target,
    parse_volume,
    require_apart,
)
from fsclient.volume.object_options import parse_bucket, s3_settings
from fsclient.volume.object_stores import OWNER_KEY, Pacing, stacked
from fsdata.objects.contract import ObjectStore
from fsdata.objects.s3.s3 import PAGE_KEYS, S3Objects
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.errors import ConfigError
from fsmeta.runtime import Runtime

_REMOTE: Final = re.compile(r"(s3|https?)://")
_OTHERS_REMOTE: Final = re.compile(r"[^/]+:")  # of rclone, scp and rsync: NAME:PATH
_UUID: Final = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\s*")
_UUID_BYTES_MAX: Final = 64
_AT_ONCE: Final = 16  # requests for marks
_BESIDE_MAX: Final = 200  # prefixes below DST that are asked whether they are a volume's
_LAST: Final = "\U0010ffff"  # behind all keys of a prefix


class SyncTarget(NamedTuple):
    """One side, taken apart. `path`: of a directory, or a prefix; `slash`: its contents."""

    text: str
    bucket: str  # "" of a local one
    path: str
    slash: bool
    volume: VolumeSpot | None = None


class Pair(NamedTuple):
    """Both sides, open."""

    source: SyncSide
    target: SyncSide


def parse(text: str) -> SyncTarget:
    """Raises: ConfigError."""
    if not text:
        raise ConfigError("a place is empty: name a directory or s3://BUCKET/PREFIX")
    if text.startswith("file://"):
        path = text.removeprefix("file://")
        if not path.startswith("/"):
            raise ConfigError(f"{text}: write file:///PATH with an absolute path")
        return SyncTarget(text, "", path, path.endswith("/"))
    found = _REMOTE.match(text)
    if found is None:
        if "://" in text:
            volume = parse_volume(text)
            if volume is None:
                raise ConfigError(
                    f"{text}: use a path, file:///PATH, s3://, http(s)://HOST/BUCKET, or a volume: "
                    "META-URL#PATH"
                )
            slash = text.endswith(("/", "#")) or not volume.path
            return SyncTarget(volume.shown, "", volume.path, slash, volume)
        if _OTHERS_REMOTE.match(text) and not os.path.lexists(text):
            raise ConfigError(
                f"{text}: a place on another host or in a store is s3://BUCKET/PREFIX, "
                f"http(s)://HOST/BUCKET, or a volume, META-URL#PATH; for a directory write ./{text}"
            )
        return SyncTarget(text, "", text, text.endswith("/"))
    parts = text[found.end() :].split("/")
    count = 1 if found[1] == "s3" else 2
    bucket = found[0] + "/".join(parts[:count])
    parse_bucket("s3", bucket, 0)
    prefix = "/".join(parts[count:])
    return SyncTarget(text, bucket, prefix.lstrip("/"), prefix.endswith("/") or not prefix)


class Opener:
    """Opens both sides with one set of options of the store."""

    def __init__(
        self, options: Mapping[str, str], runtime: Runtime, timeout_s: float, links: bool = False
    ) -> None:
        """`links`: in buckets objects stand for symlinks."""
        self._links = links
        self._links_as_files = False
        self._options = options
        self._runtime = runtime
        self._timeout_s = timeout_s

    def open(
        self, source: SyncTarget, target: SyncTarget, dry_run: bool, delete: bool = False
    ) -> Pair:
        """Raises: ConfigError, OSError, StoreError, before anything is changed."""
        self._links_as_files = self._links and bool(source.bucket) != bool(target.bucket)
        if source.bucket:
            theirs, name, whole = self._bucket_source(source)
        elif source.volume is not None:
            theirs, name, whole = open_source(source.volume, source.slash, self._links_as_files)
        else:
            theirs, name, whole = self._local_source(source)
        try:
            if delete and not whole:
                raise ConfigError("--delete is for directories: leave it out for one file")
            ours = self._target(source, target, name, whole, dry_run)
        except BaseException:
            theirs.close()
            raise
        return Pair(theirs, ours)

    def _objects(self, bucket: str) -> Bucket:
        place = parse_bucket("s3", bucket, 0)
        settings = s3_settings(place.bucket, {**place.options, **self._options})
        raw = S3Objects(self._runtime, settings)
        return Bucket(raw, stacked(raw, "s3", self._runtime, Pacing(self._timeout_s)))

    # --- the source ------------------------------------------------------------------------------

    def _local_source(self, spot: SyncTarget) -> tuple[SyncSide, str, bool]:
        """The place, the name that it gets in DST ("": none), whether that is a directory."""
        path = spot.path.rstrip("/") or "/"
        if not os.path.lexists(path):
            raise ConfigError(f"{spot.text} does not exist: nothing was changed")
        if os.path.isdir(path):
            name = "" if spot.slash else os.path.basename(os.path.realpath(path))
            place = LocalPlace(path, self._runtime, links_as_files=self._links_as_files)
            return place, name, True
        if spot.slash:
            raise ConfigError(f"{spot.text} is no directory: leave out the slash at its end")
        above, name = os.path.split(path)
        as_files = self._links_as_files
        return LocalPlace(above or ".", self._runtime, False, name, as_files), name, False

    def _bucket_source(self, spot: SyncTarget) -> tuple[SyncSide, str, bool]:
        bucket = self._objects(spot.bucket)
        objects = bucket.stack.store
        try:
            if not spot.slash and objects.head(spot.path) is not None:
                above, slash, name = spot.path.rpartition("/")
                return BucketPlace(bucket, above + slash, self._runtime, name), name, False
            prefix = spot.path if spot.slash else spot.path + "/"
            if prefix and next(objects.list(prefix), None) is None:
                raise ConfigError(f"{spot.text}: there are no objects: nothing was changed")
        except BaseException:
            objects.close()
            raise
        name = "" if spot.slash else spot.path.rpartition("/")[2]
        return BucketPlace(bucket, prefix, self._runtime), name, True

    # --- the target ------------------------------------------------------------------------------

    def _target(
        self, source: SyncTarget, target: SyncTarget, name: str, whole: bool, dry_run: bool
    ) -> SyncSide:
        if name:
            try:
                names_of(name)
            except ItemRefused as error:
                raise ConfigError(f"{source.text}: {error}") from error
        if target.bucket:
            return self._bucket_target(source, target, name, whole)
        if target.volume is not None:
            if whole and source.volume is not None:
                require_apart(source.volume, target.volume, name)
            as_files = self._links_as_files
            made = open_target(target.volume, target.slash, name, whole, dry_run, as_files)
            return _Nothing() if made is None else made
        path = target.path.rstrip("/") or "/"
        if whole and name:
            path = os.path.join(path, name)
        if not whole and not target.slash and not os.path.isdir(path):
            raise ConfigError(f"{target.text} is no directory: make it, or write {target.text}/")
        if whole and not source.bucket and source.volume is None:
            _require_apart(source.path.rstrip("/") or "/", path)
        if os.path.lexists(path) and not os.path.isdir(path):
            raise ConfigError(f"{path} is no directory: name another destination")
        _require_no_volume(path)
        if dry_run and not os.path.isdir(path):
            return _Nothing()
        only = "" if whole else name
        return LocalPlace(path, self._runtime, True, only, self._links_as_files)

    def _bucket_target(
        self, source: SyncTarget, target: SyncTarget, name: str, whole: bool
    ) -> SyncSide:
        prefix = target.path.rstrip("/")
        prefix = "/".join(filter(None, (prefix, name if whole else "")))
        prefix += "/" if prefix else ""
        if source.bucket == target.bucket:
            theirs = source.path.rstrip("/") + "/" if source.path.rstrip("/") else ""
            if theirs.startswith(prefix) or prefix.startswith(theirs):
                raise ConfigError(f"{source.text} and {target.text} are inside one another")
        bucket = self._objects(target.bucket)
        objects = bucket.stack.store
        try:
            owned = _find_owner(objects, prefix, self._runtime)
            if owned is not None:
                raise ConfigError(
                    f"{target.text} holds the objects of a SliceFS volume ({owned}): mount it and "
                    "copy to the mount, or choose another prefix"
                )
        except BaseException:
            objects.close()
            raise
        return BucketPlace(bucket, prefix, self._runtime, "" if whole else name)


class _Nothing(LocalPlace):
    """A directory that a dry run does not make."""

    def __init__(self) -> None:
        self._fd = os.open("/", os.O_PATH | os.O_CLOEXEC)

    def list(self) -> Iterator:  # type: ignore[type-arg]
        return iter(())


def _owners(objects: ObjectStore, prefix: str) -> Iterator[str]:
    """Keys under which a volume at, above or right below `prefix` would have its mark."""
    words = prefix.rstrip("/").split("/") if prefix else []
    for count in range(len(words) + 1):
        yield "/".join((*words[:count], OWNER_KEY))
    listing, seen, last, same = objects.list(prefix), 0, "", 0
    while seen < _BESIDE_MAX and (info := next(listing, None)) is not None:
        word, slash, _ = info.key[len(prefix) :].partition("/")
        if not slash or word != last:
            seen, last, same = seen + 1, word if slash else "", 0
            if slash:
                yield f"{prefix}{word}/{OWNER_KEY}"
            continue
        same += 1
        if same == PAGE_KEYS:  # a request past all of the prefix costs less than its pages
            listing = objects.list(prefix, f"{prefix}{word}/{_LAST}")


def _find_owner(objects: ObjectStore, prefix: str, runtime: Runtime) -> str | None:
    """The mark of a volume at, above or right below `prefix`; many are looked for at a time."""
    pool = WorkerPool(runtime, "owner", _AT_ONCE)
    found: list[str] = []

    def look(key: str) -> None:
        if _is_owner(objects, key):
            found.append(key)

    try:
        pool.run_all([partial(look, key) for key in _owners(objects, prefix)])
    finally:
        pool.close()
    return min(found, default=None)


def _is_owner(objects: ObjectStore, key: str) -> bool:
    info = objects.head(key)
    if info is None or info.size > _UUID_BYTES_MAX:
        return False
    return _UUID.fullmatch(objects.get(key)) is not None


def _require_apart(source: str, target: str) -> None:
    """Raises: ConfigError where one directory is inside the other, by whatever name."""
    first, second = os.path.realpath(source), os.path.realpath(target)
    if _identity(first) in _above(second) or _identity(second) in _above(first):
        raise ConfigError(
            f"{source} and {target} are inside one another: choose a destination outside SRC"
        )


def _identity(path: str) -> tuple[int, int] | None:
    with suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    return -1, hash(path)  # not there yet: like no other


def _above(path: str) -> set[tuple[int, int] | None]:
    """A directory and those above it."""
    found = {_identity(path)}
    while path != "/":
        path = os.path.dirname(path)
        found.add(_identity(path))
    return found


def _require_no_volume(path: str) -> None:
    """Raises: ConfigError where a volume keeps its objects at, above or right below `path`."""
    real = os.path.realpath(path)
    places = [real]
    while places[-1] != "/":
        places.append(os.path.dirname(places[-1]))
    with suppress(OSError), os.scandir(real) as entries:
        places += [each.path for each in entries if each.is_dir(follow_symlinks=False)]
    for place in places:
        with suppress(OSError):
            if not os.path.isdir(os.path.join(place, ".tmp")):
                continue
            with open(os.path.join(place, OWNER_KEY), "rb") as file:
                if _UUID.fullmatch(file.read(_UUID_BYTES_MAX)):
                    raise ConfigError(
                        f"{place} holds the objects of a SliceFS volume: mount it and copy to the "
                        "mount, or choose another destination"
                    )

"""Destroying a volume: its metadata, and those objects of its place that are certainly its own.

`slicefs destroy` calls it, and so can scripts. What is refused, and what is left alone:
- the name or the uuid differs, or the object store is marked as another volume's;
- clients have the volume mounted, unless `force`; those are refused by the store from then on;
- the metadata is a copy, so the original may still need the objects. A copy is metadata that was
  loaded, or that does not know of slices that are in the store. `sole` says that it is no copy;
- keys that SliceFS does not write stay where they are, and are counted.

A copy of the database files without `load`, made after the last write, cannot be told from the
original: docs/OPERATING.md says so.

The order is: metadata except the settings, objects, marks, settings. A run that was interrupted is
repeated with the same arguments. Threading: the caller's thread, and those that delete objects.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

from fsclient.volume.metadata_url import naming, open_store, sqlite_file
from fsclient.volume.object_options import parse_options
from fsclient.volume.object_stores import (
    OWNER_KEY,
    directories,
    open_objects,
    place_of,
    released,
    stacked,
)
from fsdata.format.object_keys import parse_key
from fsdata.objects.contract import CHECK_KEY, ObjectStore
from fsdata.resources.worker_pool import WorkerPool
from fsmeta.admin import erase
from fsmeta.errors import ConfigError, StoreError
from fsmeta.meta.meta import Meta
from fsmeta.rules.settings import VolumeFormat
from fsmeta.runtime import Runtime
from fsmeta.store.contract import Store
from fsmeta.store.url import shown_url

THREADS: Final = 8
_AT_ONCE: Final = 1000  # keys of one DeleteObjects
_BACKUP: Final = re.compile(r"meta/\d{8}T\d{6}Z-[0-9a-f]+(?:-\d+)?/(?:\d{6}|end)")
_MARKS: Final = (OWNER_KEY, CHECK_KEY)


class DestroyPlan(NamedTuple):
    """What is to be destroyed, and what is allowed."""

    meta: str  # URL
    name: str
    uuid: str = ""  # if given, it must be the volume's
    force: bool = False  # although clients have it mounted
    keep_objects: bool = False
    sole: bool = False  # this metadata is no copy of a volume that lives on
    store_options: tuple[str, ...] = ()
    threads: int = THREADS
    dry_run: bool = False
    meta_wait_s: float = 5.0


class Destroyed(NamedTuple):
    """What is gone, or, after a dry run, would be."""

    volume: str
    uuid: str
    place: str
    rows: int
    objects: int
    bytes: int
    kept: int  # objects in the place that SliceFS did not write


Progress = Callable[[str], object]


class _Objects(NamedTuple):
    """What a listing has found."""

    objects: int = 0
    bytes: int = 0
    kept: int = 0


def destroy(order: DestroyPlan, runtime: Runtime, progress: Progress = lambda _: None) -> Destroyed:
    """Destroy a volume. Raises: ConfigError where it is refused, before anything is changed."""
    with closing(open_store(order.meta, runtime)) as store:
        with naming(order.meta):
            settings = erase.settings_of(store)
        _require_named(order, settings)
        if not order.force:
            _require_unused(order, store, runtime)
        rows, found = 0, _Objects()
        objects = None if order.keep_objects else _opened(order, settings, runtime)
        try:
            if objects is not None and not order.sole:
                _require_original(store, objects, settings, progress)
            if not order.dry_run:
                rows = erase.erase(store, lambda n: progress(f"{n} records deleted"))
            if objects is not None:
                found = _delete_all(order, objects, runtime, progress)
        finally:
            if objects is not None:
                objects.close()
        if not order.dry_run:
            if objects is not None:
                released(settings, runtime, parse_options(settings.storage, order.store_options))
            erase.erase_settings(store)
    if not order.dry_run:
        _remove_file(order.meta)
    place = place_of(settings)
    return Destroyed(settings.name, settings.uuid, place, rows, *found)


def _require_named(order: DestroyPlan, settings: VolumeFormat) -> None:
    """Raises: ConfigError where another volume is meant."""
    shown = shown_url(order.meta)
    if settings.name != order.name:
        raise ConfigError(
            f"the volume in {shown} is named {settings.name!r}, not {order.name!r}: correct the "
            "name or the URL"
        )
    if order.uuid and order.uuid != settings.uuid:
        raise ConfigError(
            f"the volume in {shown} has uuid {settings.uuid}, not {order.uuid}: correct the uuid "
            "or the URL"
        )


def _require_unused(order: DestroyPlan, store: Store, runtime: Runtime) -> None:
    """Raises: ConfigError where clients have a session."""
    sessions = Meta(store, runtime, order.meta_wait_s).sessions.all()
    if sessions:
        info = sessions[0].info
        where = info.get("mountpoint") or info.get("does") or "a client"
        raise ConfigError(
            f"{len(sessions)} clients have the volume in use, one on {info.get('host')} ({where}): "
            f"unmount them (`slicefs status {shown_url(order.meta)}` lists them), or add --force"
        )


def _opened(order: DestroyPlan, settings: VolumeFormat, runtime: Runtime) -> ObjectStore | None:
    """The object store; None where an earlier run has removed its directories already.

    Raises: ConfigError where it belongs to another volume.
    """
    roots = directories(settings)
    if roots and not any(map(os.path.isdir, roots)):
        if not os.path.isdir(settings.bucket.partition("%d")[0].rpartition("/")[0] or "/"):
            raise ConfigError(
                f"the data directory {roots[0]} is not there: mount its disk, or add --keep-objects"
            )
        return None
    raw = open_objects(settings, runtime, parse_options(settings.storage, order.store_options))
    return stacked(raw, settings.storage, runtime).store


def _require_original(
    store: Store,
    objects: ObjectStore,
    settings: VolumeFormat,
    progress: Progress,
) -> None:
    """Raises: ConfigError where this metadata may be a copy of a volume that lives on."""
    place = place_of(settings)
    remedy = (
        f"add --keep-objects to destroy the copy only, or --sole if no other volume uses {place}"
    )
    if erase.is_loaded(store):
        raise ConfigError(
            f"this metadata was loaded from a dump or a backup, and the volume it was made of may "
            f"still use the objects in {place}: {remedy}"
        )
    bound = erase.next_slice(store)
    for number, info in enumerate(objects.list("")):
        block = parse_key(info.key)
        if block is not None and block.slice_id >= bound:
            raise ConfigError(
                f"{place} has objects that this metadata does not know ({info.key}), so the "
                f"metadata is an old copy of a volume that lives on: {remedy}"
            )
        if number % _AT_ONCE == 0:
            progress(f"{number} objects looked at")


def is_own_key(key: str) -> bool:
    """Whether SliceFS writes objects under such a key."""
    return key in _MARKS or parse_key(key) is not None or _BACKUP.fullmatch(key) is not None


def _delete_all(
    order: DestroyPlan, objects: ObjectStore, runtime: Runtime, progress: Progress
) -> _Objects:
    """Delete the objects that are ours, but for the marks. Raises: StoreError."""
    found = _Objects()
    pool = WorkerPool(runtime, "destroy", order.threads)

    def own() -> Iterator[str]:
        nonlocal found
        for info in objects.list(""):
            if info.key in _MARKS:
                continue
            if is_own_key(info.key):
                found = _Objects(found.objects + 1, found.bytes + info.size, found.kept)
                yield info.key
            else:
                found = found._replace(kept=found.kept + 1)

    keys = own()
    try:
        while batch := list(islice(keys, order.threads * _AT_ONCE)):
            if not order.dry_run:
                pool.run_all([partial(objects.delete, *part) for part in _parts(batch)])
            progress(f"{found.objects} objects deleted")
    except StoreError as error:
        raise ConfigError(
            f"the object store failed ({error}); run the same command again to go on"
        ) from error
    finally:
        pool.close()
    return found


def _parts(keys: Sequence[str]) -> list[Sequence[str]]:
    return [keys[begin : begin + _AT_ONCE] for begin in range(0, len(keys), _AT_ONCE)]


def _remove_file(meta: str) -> None:
    """Remove the file of an embedded volume."""
    file = sqlite_file(meta)
    if file is not None:
        for end in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(file + end)

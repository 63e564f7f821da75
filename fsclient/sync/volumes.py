"""A volume that is not mounted as a side of a sync: what the library provides for that, and how to
find it. The library is ranked above this package, so it is found by an entry point
(`slicefs.places`), as its commands are. Threading: one thread.
"""

from __future__ import annotations

import posixpath
from importlib.metadata import entry_points
from typing import Protocol

from fsclient.sync.items import SyncSide
from fsmeta.errors import ConfigError
from fsmeta.store.url import shown_url

_GROUP = "slicefs.places"


class OpenVolume(Protocol):
    """A volume that is open; its last place closes it."""

    def is_dir(self, path: str) -> bool | None:
        """None where there is nothing."""

    def place(self, path: str, create: bool, only: str, links_as_files: bool) -> SyncSide:
        """The tree at `path`, or the one file `only` there."""

    def close(self) -> None:
        """End the client."""


class SyncVolumes(Protocol):
    """What knows the names of volumes."""

    def split(self, url: str) -> tuple[str, str] | None:
        """Metadata URL and path of a volume's URL; None for another URL. Raises: ConfigError."""

    def open(self, meta: str) -> OpenVolume:
        """Raises: ConfigError, StoreError."""


class VolumeSpot:
    """One side, taken apart."""

    def __init__(self, meta: str, path: str) -> None:
        self.meta = meta
        self.path = posixpath.normpath(f"/{path}").strip("/")
        self.shown = f"{shown_url(meta)}#{self.path}"

    def open(self) -> OpenVolume:
        """Raises: ConfigError, StoreError."""
        volumes = find_volumes()
        assert volumes is not None, "it has split the URL"
        return volumes.open(self.meta)


def find_volumes() -> SyncVolumes | None:
    """None where the library is not installed."""
    for found in entry_points(group=_GROUP, name="volume"):
        made: SyncVolumes = found.load()()
        return made
    return None


def parse_volume(text: str) -> VolumeSpot | None:
    """The volume that a URL names; None for another URL. Raises: ConfigError."""
    volumes = find_volumes()
    split = None if volumes is None else volumes.split(text)
    return None if split is None else VolumeSpot(*split)


def open_source(spot: VolumeSpot, slash: bool, links_as_files: bool) -> tuple[SyncSide, str, bool]:
    """The place, the name that it gets in DST ("": none), whether that is a directory.

    Raises: ConfigError, StoreError.
    """
    volume = spot.open()
    try:
        is_dir = volume.is_dir(spot.path)
        above, name = posixpath.split(spot.path)
        if is_dir:
            return volume.place(spot.path, False, "", links_as_files), "" if slash else name, True
        if is_dir is None:
            raise ConfigError(f"{spot.shown} does not exist: nothing was changed")
        if slash:
            raise ConfigError(f"{spot.shown} is no directory: leave out the slash at its end")
        return volume.place(above, False, name, links_as_files), name, False
    except BaseException:
        volume.close()
        raise


def open_target(
    spot: VolumeSpot, slash: bool, name: str, whole: bool, dry_run: bool, links_as_files: bool
) -> SyncSide | None:
    """DST; `name` is what SRC gets there. None where a dry run does not make it.

    Raises: ConfigError, StoreError.
    """
    volume = spot.open()
    try:
        path = posixpath.join(spot.path, name) if whole and name else spot.path
        is_dir = volume.is_dir(path)
        if not whole and not slash and not is_dir:
            raise ConfigError(f"{spot.shown} is no directory: make it, or write {spot.shown}/")
        if is_dir is False:
            raise ConfigError(f"{spot.shown} is no directory: name another destination")
        if dry_run and is_dir is None:
            volume.close()
            return None
        return volume.place(path, True, "" if whole else name, links_as_files)
    except BaseException:
        volume.close()
        raise


def require_apart(source: VolumeSpot, target: VolumeSpot, name: str) -> None:
    """Raises: ConfigError where one tree of a volume is inside the other one."""
    if source.meta != target.meta:
        return
    theirs = f"{source.path}/".lstrip("/")
    ours = posixpath.join(target.path, name).strip("/") + "/"
    ours = ours.lstrip("/")
    if theirs.startswith(ours) or ours.startswith(theirs):
        raise ConfigError(f"{source.shown} and {target.shown} are inside one another")

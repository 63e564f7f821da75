"""The disk cache in users' words: `--cache-dir`, `--cache-size` and what goes with them.

Called by the mount command, which wants to know early what is wrong, and by `client`. What is wrong
in the words is a ConfigError of one line. A disk that does not work is none: the mount goes on, and
the cache takes the disk in when it is back.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from glob import glob, has_magic
from typing import Final, NamedTuple

from fsclient.volume.flock_scope import locks_may_be_unseen
from fsclient.volume.units import format_size, parse_size
from fsdata.disk_cache.cache import WRITERS, CachePolicy, DiskCache
from fsdata.disk_cache.directory.disk import Disk
from fsdata.disk_cache.directory.eviction import EVICTIONS, OPEN_MAX, DiskLimits
from fsdata.disk_cache.directory.file_io import CacheFiles, OsFiles
from fsdata.disk_cache.directory.member import SHARED_ROUND_S
from fsdata.objects.contract import ObjectStore
from fsdata.resources.memory_budget import MemoryBudget
from fsdata.resources.private_paths import make_private, require_private
from fsmeta.errors import ConfigError
from fsmeta.rules.settings import VolumeFormat
from fsmeta.runtime import Runtime
from fsmeta.user_namespace import has_system_paths

log = logging.getLogger(__name__)

NONE: Final = "none"
AUTO: Final = "auto"
SIZE: Final = "100GiB"  # as users of JuiceFS know it
SIZE_BYTES_MIN: Final = 16 << 20  # of a directory: four blocks
_UNLIMITED: Final = 1 << 20  # `ulimit -n` where there is none
_LOCAL: Final = ("file", "mem")  # stores that are as near as any disk
_MISUSED: Final = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EEXIST)


class CacheOptions(NamedTuple):
    """What a mount was told."""

    directories: str = NONE  # DIR[:DIR…], `none` or `auto`
    size: str = SIZE  # SIZE, or DIR=SIZE[:DIR=SIZE…]
    free_ratio: float = 0.1
    eviction: str = EVICTIONS[1]
    writers: int = WRITERS
    writes: bool = False
    partial_only: bool = False
    expire_s: float = 0.0
    prefetch: int = 0  # blocks at a time that are fetched because a range of them was


class _Wanted(NamedTuple):
    """A directory and what the cache may take there."""

    path: str
    capacity_bytes: int


def check_cache(options: CacheOptions, mountpoint: str) -> None:
    """Raises: ConfigError where the words are wrong, or the mount would hide its own cache."""
    wanted = _parse(options)
    if not 0 <= options.free_ratio < 1:
        raise ConfigError("--free-space-ratio: a share from 0 to below 1, as in 0.1")
    above = mountpoint
    for each in wanted:
        if os.path.commonpath((above, os.path.realpath(each.path))) == above:
            raise ConfigError(f"--cache-dir {each.path}: it is in the mount point: name another")


def open_cache(
    runtime: Runtime,
    settings: VolumeFormat,
    options: CacheOptions,
    objects: ObjectStore,
    budget: MemoryBudget,
    files: CacheFiles | None = None,
) -> DiskCache | None:
    """The cache of a mount before its store `objects`; None where it has none.

    Raises: ConfigError.
    """
    if options.directories == AUTO and settings.storage in _LOCAL:
        return None
    wanted, files = _parse(options), files or OsFiles()
    if options.directories == AUTO and not _make_default(wanted[0].path):
        return None
    if not wanted:
        return None
    ratio, eviction, expire_s = options.free_ratio, options.eviction, options.expire_s
    kept = min(OPEN_MAX, _may_be_open() // len(wanted))
    disks = [
        Disk(
            runtime,
            files,
            each.path,
            settings.uuid,
            DiskLimits(each.capacity_bytes, ratio, eviction, expire_s, kept),
        )
        for each in wanted
    ]
    troubles = [_prepare(disk, isinstance(files, OsFiles)) for disk in disks]
    _require_different(disks)
    policy = CachePolicy(options.writes, options.partial_only)
    cache = DiskCache(runtime, objects, disks, budget, policy, options.writers)
    for member, trouble in zip(cache.members, troubles, strict=True):
        if trouble:
            member.health.lost(trouble)
        elif fstype := locks_may_be_unseen(member.disk.place.root):
            log.warning(
                "cache disk %s is on %s: where other hosts use it, too, no mount knows at once how "
                "much is there, and --cache-size may be exceeded: name a disk of this host",
                member.disk.place.root,
                fstype,
            )
            member.recount_s = SHARED_ROUND_S
    return cache


def _may_be_open() -> int:
    """Files that all disks may keep open: half of `ulimit -n`; connections need the rest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (_UNLIMITED if soft == resource.RLIM_INFINITY else soft) // 2


def _prepare(disk: Disk, of_this_machine: bool) -> str:
    """What is wrong with a disk, in a word. Raises: ConfigError where it is the user's doing."""
    try:
        if of_this_machine:
            _require_private(disk)
        disk.place.prepare()
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in _MISUSED:
            raise ConfigError(
                f"--cache-dir {disk.place.root}: {why}: "
                "name a directory that this user can make or write to"
            ) from error
        return why
    return ""


def _require_private(disk: Disk) -> None:
    """Copies in a place where other users may write are theirs, not ours.

    Raises: ConfigError, OSError.
    """
    place = disk.place
    for path in (place.root, place.base, f"{place.base}/tmp"):
        with suppress(FileExistsError):  # another client may begin at the same time
            os.mkdir(path, 0o700)
        require_private(path, f"--cache-dir {place.root}")


def _require_different(disks: Sequence[Disk]) -> None:
    """Raises: ConfigError where two directories are one disk."""
    seen: dict[bytes, str] = {}
    for disk in disks:
        if disk.place.id and disk.place.id in seen:
            raise ConfigError(
                f"--cache-dir: {seen[disk.place.id]} and {disk.place.root} are the same: "
                f"name it once, or remove the disk-id of a copy"
            )
        seen[disk.place.id] = disk.place.root


def named_directories(options: CacheOptions) -> list[str]:
    """The directories that the user chose for the cache. Raises: ConfigError."""
    return [] if options.directories == AUTO else [each.path for each in _parse(options)]


def cache_directories(options: CacheOptions) -> list[str]:
    """All that the cache may use. Raises: ConfigError."""
    return [each.path for each in _parse(options)]


def default_directory() -> str:
    """Where `auto` keeps the cache."""
    return "/var/cache/slicefs" if has_system_paths() else os.path.expanduser("~/.slicefs/cache")


def _make_default(path: str) -> bool:
    """Whether the directory of `auto` can be used: the user did not ask for it, so a failure is no
    error."""
    try:
        make_private(path)
        usable = os.access(path, os.R_OK | os.W_OK | os.X_OK)
    except OSError as error:
        log.info("no disk cache in %s: %s", path, error.strerror)
        return False
    return usable


def _parse(options: CacheOptions) -> list[_Wanted]:
    """Directories and what each may take. Raises: ConfigError."""
    if options.directories == NONE:
        return []
    paths = [default_directory()] if options.directories == AUTO else _paths(options.directories)
    total, named = _sizes(options.size)
    for path in named:
        if path not in paths:
            raise ConfigError(f"--cache-size {path}=…: --cache-dir does not name it")
    rest = [path for path in paths if path not in named]
    if rest and not total and not named:
        raise ConfigError("--cache-size 0: write --cache-dir none to keep no copies")
    if rest and not total:
        raise ConfigError(f"--cache-size: it does not say how much {rest[0]} may take")
    sizes = named | {path: total // len(rest) for path in rest}
    for path, size in sizes.items():
        if size < SIZE_BYTES_MIN:
            raise ConfigError(
                f"--cache-size: {format_size(size)} for {path}: at least "
                f"{format_size(SIZE_BYTES_MIN)} a directory; write a unit, as in 100GiB"
            )
    return [_Wanted(path, sizes[path]) for path in paths]


def _paths(words: str) -> list[str]:
    """`DIR[:DIR…]`, with shell patterns. Raises: ConfigError."""
    found: list[str] = []
    for word in words.split(":"):
        if not word:
            raise ConfigError(f"--cache-dir {words!r}: an empty name: write DIR[:DIR…]")
        if word in (NONE, AUTO):
            raise ConfigError(f"--cache-dir {words}: {word} stands alone; a directory is ./{word}")
        path = os.path.abspath(os.path.expanduser(word))
        matches = sorted(filter(os.path.isdir, glob(path))) if has_magic(path) else [path]
        if not matches:
            raise ConfigError(f"--cache-dir {word}: no directory is named like that")
        found += matches
    real = [os.path.realpath(path) for path in found]
    for at, path in enumerate(real):
        if path in real[:at]:
            raise ConfigError(f"--cache-dir {found[at]}: name it once")
    return found


def _sizes(words: str) -> tuple[int, dict[str, int]]:
    """The size for all directories together that have none of their own, and theirs.

    Raises: ConfigError.
    """
    total, named = 0, {}
    for word in words.split(":"):
        path, equals, size = word.rpartition("=")
        try:
            found = parse_size(size)
        except ConfigError as error:
            raise ConfigError(f"--cache-size: {error}") from error
        if equals:
            named[os.path.abspath(os.path.expanduser(path))] = found
        elif total:
            raise ConfigError(f"--cache-size {words!r}: SIZE, or DIR=SIZE[:DIR=SIZE…]")
        else:
            total = found
    return total, named

"""The options of `slicefs mount` for write-back."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import click

from fsclient.cli.options.options import SecondsType, complete_directories, size
from fsclient.volume.cache_options import CacheOptions, cache_directories, named_directories
from fsclient.writeback.writeback import DRAIN_S, StagingRequest, WriteBackOptions
from fsdata.staging.staged_objects import STAGING_BYTES_MIN
from fsmeta.errors import ConfigError
from fsmeta.user_namespace import has_system_paths

_Command = TypeVar("_Command", bound=Callable[..., Any])
DEPTH_MAX: Final = 16

# by what `-o name=value` calls them
WORDS: Final = {
    "writeback": "writeback",
    "staging-dir": "staging_dir",
    "staging-size": "staging_size",
    "fsync": "fsync",
    "order-domain": "order_domain",
    "drain-timeout": "drain_timeout",
    "direct-writes": "direct_writes",
}

_OPTIONS: Final = (
    click.option(
        "--writeback",
        is_flag=True,
        help="Closes and renames return when a local disk has them; other clients see them in "
        "order.",
    ),
    click.option(
        "--staging-dir",
        default=None,
        metavar="DIR",
        shell_complete=complete_directories,
        help="Where write-back keeps its journal; by default `staging` in the first --cache-dir "
        "that is named, else /var/lib/slicefs/staging (users: ~/.slicefs/staging).",
    ),
    click.option(
        "--staging-size",
        type=size,
        default=None,
        show_default="10GiB",
        help="Limit of the bytes on that disk; writers wait when it is reached.",
    ),
    click.option(
        "--fsync",
        type=click.Choice(("journal", "store")),
        default=None,
        show_default="journal",
        help="With write-back, when fsync(2) returns: journalled on the local disk, or in the "
        "store and visible to other clients.",
    ),
    click.option(
        "--order-domain",
        type=click.IntRange(1, DEPTH_MAX),
        default=None,
        show_default="1",
        metavar="DEPTH",
        help="Level below the root whose directories are each published in their own order.",
    ),
    click.option(
        "--drain-timeout",
        type=SecondsType(0, 86400),
        default=None,
        show_default=f"{DRAIN_S:g}",
        help="Seconds that unmounting waits for what is not published.",
    ),
    click.option(
        "--direct-writes",
        is_flag=True,
        help="Files that are made or emptied and written bypass the kernel's page cache: for "
        "checkpoints, which no program reads soon.",
    ),
)


def writeback_options(command: _Command) -> _Command:
    """Let a command take these options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def parse_writeback(
    settings: Mapping[str, Any], cache: CacheOptions, mountpoint: str
) -> StagingRequest:
    """Raises: ConfigError."""
    beside = [os.path.join(path, "staging") for path in named_directories(cache)]
    if not settings["writeback"]:
        for word, name in WORDS.items():
            if settings[name] is not None and settings[name] is not False:
                raise ConfigError(f"--{word} is for --writeback: add it, or leave this out")
        return StagingRequest(others=(*beside, default_staging()))
    options = _with_defaults(settings)
    if options.limit_bytes < STAGING_BYTES_MIN:
        raise ConfigError(f"--staging-size: at least {STAGING_BYTES_MIN >> 20}MiB")
    asked = [os.path.abspath(settings["staging_dir"])] if settings["staging_dir"] else []
    directory, *others = dict.fromkeys([*asked, *beside, default_staging()])
    above = mountpoint
    if os.path.commonpath((above, os.path.realpath(directory))) == above:
        raise ConfigError(f"--staging-dir {directory}: it is in the mount point: name another")
    if asked:
        _require_apart(directory, cache_directories(cache))
    return StagingRequest(directory, options, tuple(others))


def _with_defaults(settings: Mapping[str, Any]) -> WriteBackOptions:
    """What was said, and the rest as usual."""
    named = {
        "limit_bytes": settings["staging_size"],
        "fsync_waits": None if settings["fsync"] is None else settings["fsync"] == "store",
        "domain_depth": settings["order_domain"],
        "drain_s": settings["drain_timeout"],
        "direct_writes": settings["direct_writes"],
    }
    return WriteBackOptions(**{name: value for name, value in named.items() if value is not None})


def _require_apart(directory: str, caches: Sequence[str]) -> None:
    """Raises: ConfigError where emptying a cache would empty the journal.

    `staging` in a cache directory is where the journal is by default, so it may be named.
    """
    ours = os.path.realpath(directory)
    for path in caches:
        cache = os.path.realpath(path)
        if ours == os.path.join(cache, "staging"):
            continue
        if os.path.commonpath((ours, cache)) in (ours, cache):
            raise ConfigError(
                f"--staging-dir {directory}: it overlaps --cache-dir {path}: "
                "emptying the cache would empty the journal: name another"
            )


def default_staging() -> str:
    """Where journals are unless told otherwise."""
    if has_system_paths():
        return "/var/lib/slicefs/staging"
    return os.path.join(os.path.expanduser("~"), ".slicefs", "staging")

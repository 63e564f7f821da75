"""The options of the disk cache, for `slicefs mount`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

from fsclient.cli.options.options import SecondsType, complete_directories
from fsclient.volume.cache_options import AUTO, SIZE, CacheOptions, check_cache
from fsdata.blocks.promote import PREFETCH_MAX
from fsdata.disk_cache.cache import WRITERS
from fsdata.disk_cache.directory.eviction import EVICTIONS

F = TypeVar("F", bound=Callable[..., Any])

# options that `-o name=value` can give as well, by parameter
CACHE_WORDS: Final = {
    "cache-dir": "cache_dir",
    "cache-size": "cache_size",
    "free-space-ratio": "free_space_ratio",
    "cache-eviction": "cache_eviction",
    "cache-writers": "cache_writers",
    "cache-writes": "cache_writes",
    "cache-partial-only": "cache_partial_only",
    "cache-expire": "cache_expire",
    "prefetch": "prefetch",
}
_DEFAULTS: Final = CacheOptions()
_OPTIONS: Final = (
    click.option(
        "--cache-dir",
        multiple=True,
        show_default=AUTO,
        metavar="DIR[:DIR…]",
        shell_complete=complete_directories,
        help="Directories on local disks for copies of data, also as patterns; none: no disk "
        "cache; auto: /var/cache/slicefs (users: ~/.slicefs/cache), and none where the volume's "
        "data is in a directory.",
    ),
    click.option(
        "--cache-size",
        default=SIZE,
        show_default=True,
        metavar="SIZE",
        help="Size of all cache directories together, or DIR=SIZE[:DIR=SIZE…].",
    ),
    click.option(
        "--free-space-ratio",
        type=float,
        default=_DEFAULTS.free_ratio,
        show_default=True,
        help="Share of each cache disk, space and inodes, that stays free.",
    ),
    click.option(
        "--cache-eviction",
        type=click.Choice(EVICTIONS),
        default=_DEFAULTS.eviction,
        show_default=True,
        help="Which copies are evicted when a cache directory is full.",
    ),
    click.option(
        "--cache-expire",
        type=SecondsType(0, 10**9),
        default=0.0,
        help="Seconds after which unread copies are removed; 0: never.",
    ),
    click.option(
        "--cache-writers",
        type=click.IntRange(1, 64),
        default=WRITERS,
        show_default=True,
        help="Threads that write to each cache directory.",
    ),
    click.option("--cache-writes", is_flag=True, help="Keep copies of what is uploaded, too."),
    click.option(
        "--cache-partial-only", is_flag=True, help="Keep small blocks and small reads only."
    ),
    click.option(
        "--prefetch",
        type=click.IntRange(0, PREFETCH_MAX),
        default=_DEFAULTS.prefetch,
        show_default=True,
        help="Blocks at a time that are fetched whole, in the background, because a part of them "
        "was read at random; 0: none.",
    ),
)


def cache_options(command: F) -> F:
    """Add the options of the disk cache to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def cache_request(settings: Mapping[str, Any], mountpoint: str) -> CacheOptions:
    """What the options say. Raises: ConfigError."""
    directories = settings["cache_dir"]
    found = CacheOptions(
        ":".join(directories) if directories else AUTO,
        settings["cache_size"],
        settings["free_space_ratio"],
        settings["cache_eviction"],
        settings["cache_writers"],
        settings["cache_writes"],
        settings["cache_partial_only"],
        settings["cache_expire"],
        settings["prefetch"],
    )
    check_cache(found, mountpoint)
    return found

"""`slicefs info`: where the data of one file or directory is."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, Final

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import complete_files
from fsclient.cli.options.progress import ProgressLine
from fsclient.cli.options.tell import tell
from fsclient.control.info_xattr import ask
from fsclient.control.warmup_client import caches, look, share, where
from fsclient.trees.summary import Summary, summarize
from fsclient.volume.units import format_size
from fsmeta.errors import ConfigError
from fsmeta.runtime import SystemRuntime
from fsmeta.types import SliceKind

LINES_MAX: Final = 100  # of chunks and slices, unless --all
_NO_SLICES: Final = {SliceKind.HOLE.value: "hole", SliceKind.RESERVED.value: "reserved"}


@click.command(
    epilog=examples("slicefs info /mnt/vol/model.pt", "slicefs info -r --json /mnt/vol/dataset")
)
@click.argument("path", type=click.Path(), shell_complete=complete_files)
@click.option("-r", "--recursive", is_flag=True, help="Count what is below PATH, too.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--all", "every", is_flag=True, help=f"Show all slices, not only the first {LINES_MAX}."
)
def info(path: str, recursive: bool, as_json: bool, every: bool) -> int:
    """Show inode, parents, ACLs, flags, chunks and slices of PATH on a SliceFS mount."""
    if not path:  # an unset variable, most likely
        raise ConfigError("the path is empty: name a file or directory")
    pages = _pages(path)
    first = next(pages)
    cached = _cached(path, first["size"])
    below = _below(path) if recursive else None
    if as_json:
        shown: dict[str, Any] = {**_whole(first, pages), "cached": cached}
        if below is not None:
            shown["below"] = below.plain()
        tell(shown, path=path)
        return 1 if below is not None and below.failed else 0
    _print(path, first)
    if below is not None:
        click.echo(f"files       {below.top.files}")
        click.echo(f"directories {below.top.directories}")
        click.echo(f"length      {below.top.bytes} ({format_size(below.top.bytes)})")
        click.echo(f"space       {below.top.space} ({format_size(below.top.space)})")
        for each in below.failures:
            click.echo(f"slicefs: {each.path}: {each.why}", err=True)
    if cached is not None:
        click.echo(f"cached      {_words(cached)}")
    _print_chunks(chain((first,), pages), path, None if every else LINES_MAX)
    return 1 if below is not None and below.failed else 0


def _below(path: str) -> Summary:
    """What is below a directory. Raises: OSError."""
    runtime = SystemRuntime()
    line = ProgressLine(runtime)
    try:
        return summarize(path, runtime, progress=lambda files: line.show(f"{files} files"))
    finally:
        line.clear()


def _pages(path: str) -> Iterator[dict[str, Any]]:
    """What the mount says. Raises: ConfigError."""
    try:
        yield from ask(path)
    except OSError as error:
        raise ConfigError(f"{path} {_why(error)}") from error


def _whole(first: dict[str, Any], others: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """All pages as one."""
    chunks: dict[int, list[Any]] = {}
    for page in chain((first,), others):
        for chunk in page["chunks"]:
            chunks.setdefault(chunk["index"], []).extend(chunk["slices"])
    listed = [{"index": index, "slices": slices} for index, slices in chunks.items()]
    return {**{name: first[name] for name in first if name != "next"}, "chunks": listed}


def _cached(path: str, size: int) -> dict[str, Any] | None:
    """How much of a file's data is in which cache; None of anything else."""
    if not os.path.isfile(path):
        return None
    try:
        roots = caches(path)["disks"]
        counts, disks = look(path, size)
    except (ConfigError, OSError):  # an older mount, or the file is not ours to read
        return None
    return {
        **where(counts),
        "disks": {roots[number]: count for number, count in sorted(disks.items())},
    }


def _words(cached: dict[str, Any]) -> str:
    """The same in a line."""
    places = {"memory": cached["memory"], **cached["disks"]}
    shown = ", ".join(f"{name} {format_size(count)}" for name, count in places.items() if count)
    return share(cached["cached"], cached["data"]) + (f": {shown}" if shown else "")


def _print(path: str, found: dict[str, Any]) -> None:
    click.echo(f"path        {path}")
    click.echo(f"inode       {found['ino']}")
    click.echo(f"parent      {found['parent'] or 'several (hard links)'}")
    click.echo(f"size        {found['size']} ({format_size(found['size'])})")
    click.echo(f"allocated   {format_size(found['space'])}")
    for name, key in (("flags", "flags"), ("acl", "acl"), ("default acl", "default_acl")):
        if found.get(key):  # a mount of an older version does not say
            click.echo(f"{name:<12}{found[key]}")


def _print_chunks(pages: Iterable[dict[str, Any]], path: str, most: int | None) -> None:
    """A line for each chunk and slice; after `most` of them a line that says there are more."""
    lines = _lines(pages)
    for line in islice(lines, most):
        click.echo(line)
    if next(lines, None) is not None:
        click.echo(f"… more: `slicefs info --all {path}` lists them")


def _lines(pages: Iterable[dict[str, Any]]) -> Iterator[str]:
    before = None
    for page in pages:
        for chunk in page["chunks"]:
            if chunk["index"] != before:
                before = chunk["index"]
                yield f"chunk {before}"
            for each in chunk["slices"]:
                end = each["pos"] + each["length"]
                what = _NO_SLICES.get(each["kind"]) or f"slice {each['id']} at {each['off']}"
                yield f"  {each['pos']:>9}..{end:<9} {what}"


def _why(error: OSError) -> str:
    """What is the matter with a path that does not answer."""
    match error.errno:
        case errno.ENOENT:
            return "does not exist"
        case errno.ENOTCONN | errno.ECONNABORTED:
            return "is on a mount whose client has died: `slicefs umount` it and mount again"
        case errno.ENODATA | errno.EOPNOTSUPP:
            return "is not a file or directory of a SliceFS mount"
        case _:
            return f"can't be asked: {error.strerror}"

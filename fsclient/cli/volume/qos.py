"""`slicefs qos set|get|list|delete`: how much users, groups and directories may do in a second."""

from __future__ import annotations

from typing import Any, Final

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import rate, requests
from fsclient.cli.options.tell import tell
from fsclient.cli.volume.nodes import Target, node_of, opened, print_table, target_options
from fsclient.volume.quota_names import described, titles
from fsclient.volume.units import format_size
from fsmeta.admin import rate_limits
from fsmeta.admin.rate_limits import RateLimitChange
from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.rules.rate_limits import VOLUME, RateLimits

_HEAD: Final = ("LIMIT OF", "READ/S", "WRITE/S", "OPS/S")


@click.group(
    "qos",
    epilog=examples(
        "slicefs qos set redis://localhost/1 --uid ann --read 200MiB --write 100MiB",
        "slicefs qos list redis://localhost/1",
    ),
)
def qos() -> None:
    """Limit how much users, groups, directories and the volume do in a second.

    A limit is for all mounts together. Running mounts keep to a new limit within five seconds, and
    divide it: one that needs less than its part leaves the rest to the others. `--path /` is the
    whole volume. What the kernel has in its caches makes no request and is not limited.
    """


@qos.command(
    "set",
    epilog=examples(
        "slicefs qos set redis://localhost/1 --path /scratch --write 500MiB",
        "slicefs qos set redis://localhost/1 --gid interns --ops 2000",
        "slicefs qos set redis://localhost/1 --path / --read 2GiB",
    ),
)
@target_options
@click.option("--read", type=rate, metavar="SIZE", help="Bytes a second to read; 0: no limit.")
@click.option("--write", type=rate, metavar="SIZE", help="Bytes a second to write; 0: no limit.")
@click.option(
    "--ops",
    type=requests,
    metavar="N",
    help="Requests a second; a create is about five, an open one or none; 0: no limit.",
)
def set_(
    meta: str,
    target: Target,
    read: int | None,
    write: int | None,
    ops: int | None,
    as_json_: bool,
) -> None:
    """Limit a user, a group or a directory of the volume in META.

    SIZE is bytes a second, as 100MiB. A group is the effective group of a process, not one of its
    other groups. A limit that is not named stays as it is.
    """
    if read is None and write is None and ops is None:
        raise click.UsageError("name a limit: --read SIZE, --write SIZE or --ops N")
    with opened(meta) as volume:
        node = node_of(volume, target, VOLUME)
        limits = rate_limits.set_limits(volume, node, RateLimitChange(read, write, ops))
        _print_one(volume, node, limits, meta if as_json_ else None)


@qos.command(
    "get",
    epilog=examples(
        "slicefs qos get redis://localhost/1 --uid ann",
        "slicefs qos get redis://localhost/1 --path / --json",
    ),
)
@target_options
def get(meta: str, target: Target, as_json_: bool) -> None:
    """Show the limits of a user, a group or a directory."""
    with opened(meta) as volume:
        node = node_of(volume, target, VOLUME)
        limits = rate_limits.get_limits(volume, node)
        _print_one(volume, node, limits, meta if as_json_ else None)


@qos.command(
    "list",
    epilog=examples(
        "slicefs qos list redis://localhost/1", "slicefs qos list --json redis://localhost/1"
    ),
)
@click.argument("meta")
@click.option("--json", "as_json_", is_flag=True, help="Print JSON.")
def list_(meta: str, as_json_: bool) -> None:
    """Show every limit of the volume in META."""
    with opened(meta) as volume:
        _print(volume, rate_limits.all_limits(volume), meta if as_json_ else None)


@qos.command(
    "delete",
    epilog=examples(
        "slicefs qos delete redis://localhost/1 --uid ann",
        "slicefs qos delete redis://localhost/1 --path /scratch",
    ),
)
@target_options
def delete(meta: str, target: Target, as_json_: bool) -> None:
    """Remove all limits of a user, a group or a directory."""
    with opened(meta) as volume:
        node = _removed_dir(volume, target) or node_of(volume, target, VOLUME)
        name = _titles(volume, [node])[node]
        if not rate_limits.delete_limits(volume, node):
            raise ConfigError(f"{name} has no limit: see `slicefs qos list`")
        if as_json_:
            tell({"deleted": name}, meta=meta)
        else:
            click.echo(f"{name} has no limit any more")


def _removed_dir(meta: Meta, target: Target) -> bytes | None:
    """A directory that is not there any more, named as `list` does."""
    names = _titles(meta, list(rate_limits.all_limits(meta)))
    found = [node for node, name in names.items() if name == target.path]
    return found[0] if len(found) == 1 else None


def _print_one(meta: Meta, node: bytes, limits: RateLimits, url: str | None) -> None:
    """As JSON where `url` says of what."""
    if url is None:
        _print(meta, {node: limits}, None)
    else:
        tell(_as_json(node, limits, _titles(meta, [node])[node]), meta=url)


def _print(meta: Meta, found: dict[bytes, RateLimits], url: str | None) -> None:
    names = _titles(meta, list(found))
    nodes = sorted(found, key=lambda node: names[node])
    if url is not None:
        tell({"limits": [_as_json(node, found[node], names[node]) for node in nodes]}, meta=url)
        return
    print_table([_HEAD, *(_row(names[node], found[node]) for node in nodes)])


def _titles(meta: Meta, nodes: list[bytes]) -> dict[bytes, str]:
    return {**titles(meta, [node for node in nodes if node != VOLUME]), VOLUME: "/"}


def _as_json(node: bytes, limits: RateLimits, title: str) -> dict[str, Any]:
    what = {"type": "volume", "path": "/"} if node == VOLUME else described(node, title)
    return {**what, **limits._asdict()}


def _row(name: str, limits: RateLimits) -> tuple[str, ...]:
    read, write, ops = limits
    return (
        name,
        format_size(read) if read else "-",
        format_size(write) if write else "-",
        str(ops) if ops else "-",
    )

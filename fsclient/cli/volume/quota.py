"""`slicefs quota set|get|list|delete|check`: limits of directories, users and groups."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import capacity_size
from fsclient.cli.options.progress import ProgressLine, bar
from fsclient.cli.options.tell import tell
from fsclient.cli.volume.nodes import Target, node_of, opened, print_table, target_options
from fsclient.volume.quota_names import as_json, fullness, titles
from fsclient.volume.units import SIZE_MAX, format_size
from fsmeta.admin import quota_admin, quota_check
from fsmeta.admin.quota_admin import Quota, QuotaLimits
from fsmeta.errors import ConfigError
from fsmeta.meta.meta import Meta
from fsmeta.rules.settings import ON
from fsmeta.runtime import SystemRuntime

FOUND: Final = 3  # the exit code where a counter is wrong
_HEAD: Final = ("QUOTA OF", "SPACE", "OF", "%", "INODES", "OF", "%")


@click.group(
    "quota",
    epilog=examples(
        "slicefs quota set redis://localhost/1 --path /home/ann --capacity 1TiB",
        "slicefs quota list redis://localhost/1",
    ),
)
def quota_() -> None:
    """Limit what directories, users and groups may take up.

    A limit applies to every mount at once. The first quota of a volume takes a while, because the
    command counts everything in it; an interrupted count continues where it was.
    """


@quota_.command(
    "set",
    epilog=examples(
        "slicefs quota set redis://localhost/1 --path /home/ann --capacity 1TiB --inodes 1000000",
        "slicefs quota set redis://localhost/1 --gid research --capacity 100TiB",
    ),
)
@target_options
@click.option(
    "--capacity",
    type=capacity_size,
    metavar="SIZE",
    help="Bytes that files may take up; 0: no limit.",
)
@click.option(
    "--inodes", type=click.IntRange(0, SIZE_MAX), help="Files and directories; 0: no limit."
)
def set_(
    meta: str, target: Target, capacity: int | None, inodes: int | None, as_json_: bool
) -> None:
    """Limit a directory, a user or a group of the volume in META.

    A limit that is not named stays as it is. A limit below the present use stops all growth.
    """
    if capacity is None and inodes is None:
        raise click.UsageError("name a limit: --capacity SIZE, --inodes N or both")
    with opened(meta) as volume:
        node = node_of(volume, target)
        with _progress(volume, "counting") as show:
            found = quota_admin.set_quota(volume, node, QuotaLimits(capacity, inodes), show)
        _print_one(volume, found, meta if as_json_ else None)


@quota_.command(
    "get",
    epilog=examples(
        "slicefs quota get redis://localhost/1 --path /home/ann",
        "slicefs quota get redis://localhost/1 --uid ann --json",
    ),
)
@target_options
def get(meta: str, target: Target, as_json_: bool) -> None:
    """Show what a directory, a user or a group takes up, and its limits."""
    with opened(meta) as volume:
        node = node_of(volume, target)
        if volume.format.accounting != ON:
            raise ConfigError("the volume has no quotas yet, so nothing is counted: set one first")
        _print_one(volume, quota_admin.get_quota(volume, node), meta if as_json_ else None)


@quota_.command(
    "list",
    epilog=examples(
        "slicefs quota list redis://localhost/1", "slicefs quota list --json redis://localhost/1"
    ),
)
@click.argument("meta")
@click.option("--json", "as_json_", is_flag=True, help="Print JSON.")
def list_(meta: str, as_json_: bool) -> None:
    """Show every quota of the volume in META."""
    with opened(meta) as volume:
        found = list(quota_admin.list_quotas(volume))
        _print(volume, found, meta if as_json_ else None)


@quota_.command(
    "delete",
    epilog=examples(
        "slicefs quota delete redis://localhost/1 --path /home/ann",
        "slicefs quota delete redis://localhost/1 --gid research",
    ),
)
@target_options
def delete(meta: str, target: Target, as_json_: bool) -> None:
    """Remove a quota. Removing the last one turns accounting off."""
    with opened(meta) as volume:
        node = node_of(volume, target)
        name = titles(volume, [node])[node]
        if not quota_admin.delete_quota(volume, node):
            raise ConfigError(f"{name} has no quota: see `slicefs quota list`")
        if as_json_:
            tell({"deleted": name}, meta=meta)
        else:
            click.echo(f"{name} has no quota any more")


@quota_.command(
    "check",
    epilog=examples(
        "slicefs quota check redis://localhost/1",
        "slicefs quota check --repair redis://localhost/1",
    ),
)
@click.argument("meta")
@click.option("--repair", is_flag=True, help="Count everything again, also under running mounts.")
@click.option("--json", "as_json_", is_flag=True, help="Print JSON.")
def check(meta: str, repair: bool, as_json_: bool) -> int:
    """Compare what quotas say is used with what there is. Exit code 0: equal, 3: not.

    A quota whose use changes during the check is not judged. While --repair counts, limits apply
    to what is counted so far.
    """
    with opened(meta) as volume:
        if volume.format.accounting != ON and not repair:
            if not quota_admin.has_limits(volume):
                raise ConfigError("the volume has no quotas: there is nothing to check")
            raise ConfigError("a count was interrupted: end it with `slicefs quota check --repair`")
        if repair:
            if not quota_admin.has_limits(volume):
                raise ConfigError("the volume has no quotas: there is nothing to repair")
            with _progress(volume, "counting") as show:
                quota_admin.recount(volume, show)
        with _progress(volume, "checking") as show:
            judged = quota_check.find_differences(volume, show)
        names = titles(volume, [each.quota.node for each in judged])
        _print_judged(meta, judged, names, as_json_)
        return FOUND if any(each.is_wrong for each in judged) else 0


def _print_judged(
    meta: str, judged: list[quota_check.Judged], names: dict[bytes, str], plain: bool
) -> None:
    wrong = [each for each in judged if each.is_wrong]
    moved = [each for each in judged if each.counted is None]
    if plain:
        report = [
            {
                **as_json(each.quota, names[each.quota.node]),
                "space_counted": each.counted and each.counted.space,
                "inodes_counted": each.counted and each.counted.inodes,
                "state": "wrong" if each.is_wrong else "in use" if each in moved else "right",
            }
            for each in judged
        ]
        tell({"quotas": report}, meta=meta)
        return
    for each in wrong:
        assert each.counted is not None
        click.echo(
            f"problem: {names[each.quota.node]}: says {each.quota.used.space} bytes and "
            f"{each.quota.used.inodes} inodes, there are {each.counted.space} and "
            f"{each.counted.inodes}; repair it with --repair",
            file=sys.stderr,
        )
    if moved:
        click.echo(f"{len(moved)} are in use and were not judged")
    click.echo(f"{len(judged)} quotas, {len(wrong)} wrong")


# --- what they share -----------------------------------------------------------------------------


@contextmanager
def _progress(meta: Meta, word: str) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal."""
    total = max(1, meta.statfs().inodes_used)
    line = ProgressLine(SystemRuntime())
    try:
        yield lambda done: line.show(f"{word} {bar(min(done, total), total)}")
    finally:
        line.clear()


def _print_one(meta: Meta, found: Quota, url: str | None) -> None:
    """As JSON where `url` says of what."""
    if url is not None:
        tell(as_json(found, titles(meta, [found.node])[found.node]), meta=url)
    else:
        _print(meta, [found], None)


def _print(meta: Meta, found: list[Quota], url: str | None) -> None:
    """A table, the fullest first; as JSON where `url` says of what."""
    names = titles(meta, [each.node for each in found])
    found.sort(key=lambda each: (-fullness(each), names[each.node]))
    if url is not None:
        tell({"quotas": [as_json(each, names[each.node]) for each in found]}, meta=url)
        return
    print_table([_HEAD, *(_row(each, names[each.node]) for each in found)])


def _row(each: Quota, name: str) -> tuple[str, ...]:
    space, inodes = each.limit
    return (
        name,
        format_size(each.used.space),
        format_size(space) if space else "-",
        f"{100 * each.used.space / space:.0f}" if space else "-",
        str(each.used.inodes),
        str(inodes) if inodes else "-",
        f"{100 * each.used.inodes / inodes:.0f}" if inodes else "-",
    )

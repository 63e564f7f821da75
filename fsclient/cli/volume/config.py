"""`slicefs config`: show a volume's settings, and change what can be changed."""

from __future__ import annotations

from typing import Any, Final

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.options import COUNT, META_WAIT_S, capacity_size, size
from fsclient.cli.options.tell import tell
from fsclient.volume.metadata_url import naming, open_store
from fsclient.volume.units import format_size
from fsmeta.admin import quota_admin
from fsmeta.meta.meta import Meta
from fsmeta.rules.settings import TRASH_DAYS_MAX, VolumeFormat
from fsmeta.runtime import SystemRuntime

_INNER: Final = ("changes", "epoch", "accounting")  # of interest to --json at most


@click.command(
    epilog=examples(
        "slicefs config redis://localhost/1",
        "slicefs config --capacity 10TiB --trash-days 7 redis://localhost/1",
    )
)
@click.argument("meta")
@click.option(
    "--capacity", type=capacity_size, metavar="SIZE", help="Limit of the volume's data; 0: none."
)
@click.option("--inodes", type=COUNT, help="Limit of files and directories; 0: none.")
@click.option(
    "--trash-days",
    type=click.IntRange(0, TRASH_DAYS_MAX),
    help="How long what is deleted can be restored; 0: not at all.",
)
@click.option(
    "--frame-size",
    type=size,
    help="What is fetched and verified by itself of what is written from now on: 4KiB to 64KiB.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def config(
    meta: str,
    capacity: int | None,
    inodes: int | None,
    trash_days: int | None,
    frame_size: int | None,
    as_json: bool,
) -> None:
    """Show the settings of the volume in META, after changing those that are named.

    Running mounts follow at once. A limit may be below the present use: then nothing can grow.
    Fewer days of trash delete what has been there for longer. Before frames become smaller than
    64KiB, upgrade all clients to a version that knows --frame-size.
    """
    wanted = {"capacity": capacity, "inodes": inodes, "trash_days": trash_days}
    wanted = {name: value for name, value in wanted.items() if value is not None}

    def change(settings: VolumeFormat) -> VolumeFormat:
        changed = VolumeFormat(**{**settings._asdict(), **wanted})
        return changed if frame_size is None else changed.with_frames(frame_size)

    runtime = SystemRuntime()
    store = open_store(meta, runtime)
    try:
        with naming(meta):
            opened = Meta(store, runtime, META_WAIT_S)
            settings = opened.format
            if wanted or frame_size is not None:
                settings = quota_admin.change_settings(opened, change)
    finally:
        store.close()
    shown = settings.shown()
    if as_json:
        tell(shown, meta=meta)
        return
    shown["capacity"] = format_size(settings.capacity) if settings.capacity else "no limit"
    shown["frame_bytes"] = format_size(settings.frame_bytes)
    shown["inodes"] = settings.inodes or "no limit"
    shown["hash_prefix"] = "yes" if settings.hash_prefix else "no"
    for name, value in shown.items():
        if name not in _INNER:
            _print(name, value)


def _print(name: str, value: Any) -> None:
    """A line of the table; settings that are not set have none."""
    if isinstance(value, dict):
        value = ", ".join(f"{each}={text}" for each, text in value.items())
    if value not in (None, ""):
        click.echo(f"{name:<12}{value}")

"""`slicefs version`: versions of SliceFS, of what it uses and of the volume format."""

from __future__ import annotations

from typing import Any

import click

from fsclient.cli.options.examples import examples
from fsclient.cli.options.tell import tell
from fsclient.upkeep.doctor import versions
from fsmeta.schema.keys import METADATA_VERSION


@click.command(epilog=examples("slicefs version", "slicefs version --json"))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def version(as_json: bool) -> None:
    """Show the version of SliceFS, the latest volume format it knows, and what it uses."""
    found: dict[str, Any] = {**versions(), "metadata_version": METADATA_VERSION}
    if as_json:
        tell(found)
        return
    for name, value in found.items():
        click.echo(f"{name:<18}{value or 'not installed'}")

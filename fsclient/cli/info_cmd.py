"""`slicefs info`: where the data of one file or directory is."""

from __future__ import annotations

import json
import os

import click

from fsclient.sizes import format_size
from fsclient.vfs import INFO_XATTR
from fsmeta.errors import ConfigError


@click.command()
@click.argument("path", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(path: str, as_json: bool) -> None:
    """Show inode, parents, chunks and slices of PATH on a SliceFS mount."""
    try:
        raw = os.getxattr(path, INFO_XATTR)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except OSError as error:
        raise ConfigError(
            f"{path} is not a file or directory of a SliceFS mount: {error.strerror}"
        ) from error
    if as_json:
        click.echo(raw.decode())
        return
    found = json.loads(raw)
    click.echo(f"path        {path}")
    click.echo(f"inode       {found['ino']}")
    click.echo(f"parent      {found['parent'] or 'several (hard links)'}")
    click.echo(f"size        {found['size']} ({format_size(found['size'])})")
    click.echo(f"allocated   {format_size(found['space'])}")
    for chunk in found["chunks"]:
        click.echo(f"chunk {chunk['index']}")
        for each in chunk["slices"]:
            end = each["pos"] + each["length"]
            click.echo(f"  {each['pos']:>9}..{end:<9} slice {each['id']} at {each['off']}")

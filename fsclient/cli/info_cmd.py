"""`slicefs info`: where the data of one file or directory is."""

from __future__ import annotations

import errno
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
    except OSError as error:
        raise ConfigError(f"{path} {_why(error)}") from error
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
